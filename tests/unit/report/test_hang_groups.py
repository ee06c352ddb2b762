"""Snapshots of ranks, folded: whom the others wait for, and when nobody is named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infini_run.record import replace
from infini_run.report.hang_groups import analyze_hang, collective, ranks_text
from infini_run.report.hang_snapshot import HangSnapshot

TORCH = ("all_reduce (torch/distributed/distributed_c10d.py:2501)", "wrapper (torch/distributed/c10d_logger.py:81)")
REDUCE = (*TORCH, "step (train.py:41)", "<module> (train.py:60)")
GATHER = ("all_gather (torch/distributed/distributed_c10d.py:3000)", "step (train.py:43)")
LOAD = ("read (data.py:88)", "load_batch (data.py:12)")


def shot(rank, frames=REDUCE, **more):
    known = {"kind": "hung", "why": "no output for 9.0 s", "is_sure": True, "state": "S", "cpu": 0.0}
    host = f"host{rank // 4 + 1}"
    return HangSnapshot(rank=rank, pid=100 + rank, host=host, time_s=1.0, frames=frames, **known | more)


def sentence(*shots):
    return analyze_hang(shots).headline


def test_group_outside_of_the_collective_is_named_with_its_place():
    hang = analyze_hang([shot(rank, LOAD if rank == 2 else REDUCE) for rank in range(8)])
    assert hang.headline == "no output for 9.0 s: 7 of 8 ranks wait for rank 2"
    assert hang.lines() == [
        "  rank 2 on host1           read (data.py:88)         0% CPU",
        "  ranks 0-1,3-7 on 2 hosts  all_reduce (train.py:41)  0% CPU",
    ]


def test_several_places_outside_of_the_collective_are_all_named():
    shots = [shot(0, LOAD), shot(1, ("other (x.py:1)",)), *(shot(rank) for rank in range(2, 8))]
    assert sentence(*shots) == "no output for 9.0 s: 6 of 8 ranks wait for ranks 0-1"


def test_few_ranks_in_another_collective_are_named():
    assert sentence(shot(0, GATHER), shot(1), shot(2)).endswith(": 2 of 3 ranks wait for rank 0")


def test_nobody_is_named_where_no_group_is_odd():
    nobody = "no output for 9.0 s: 4 ranks are in 2 places, and none is the odd one out"
    assert sentence(shot(0, GATHER), shot(1, GATHER), shot(2), shot(3)) == nobody
    assert sentence(shot(0), *(shot(rank, LOAD) for rank in (1, 2, 3))) == nobody, "most of them load: they are slow"
    assert sentence(shot(0), shot(1), shot(2)) == "no output for 9.0 s: all 3 ranks wait in all_reduce (train.py:41)"


def test_nobody_is_named_before_two_looks_agree():
    shots = [shot(rank, LOAD if rank == 2 else REDUCE) for rank in range(8)]
    assert not analyze_hang([*shots[:-1], replace(shots[-1], is_sure=False)]).waited_for


def test_rank_that_hangs_alone_is_no_group():
    alone = analyze_hang([shot(0, LOAD), *(shot(rank, ("work (train.py:1)",), kind="") for rank in (1, 2))])
    assert (alone.headline, alone.only) == ("", 0)
    assert analyze_hang([shot(0)]).only == 0
    assert analyze_hang([shot(0, kind="late")]) is None
    assert analyze_hang([]) is None


def test_rank_that_spins_is_named_though_it_does_not_hang():
    shots = [shot(0, ("spin (train.py)",), kind="", why="", cpu=1.0), shot(1), shot(2)]
    hang = analyze_hang(shots)
    assert (hang.waited_for, hang.stopped_for, hang.waiting) == ((0,), (0,), 2)
    assert hang.lines()[0].endswith("100% CPU")


def test_rank_that_has_exited_is_named_and_no_failure():
    hang = analyze_hang([shot(0, (), kind="", why="exited with code 0, 9.0 s before", state="X"), shot(1), shot(2)])
    assert (hang.waited_for, hang.stopped_for) == ((0,), ())


def test_suspended_rank_is_named_inside_of_the_collective():
    hang = analyze_hang([shot(0, state="T"), shot(1), shot(2)])
    assert hang.waited_for == (0,)
    assert "all_reduce (train.py:41), suspended by a signal" in hang.lines()[0]


def test_programs_without_python_are_folded_by_what_the_kernel_says():
    peers = [shot(rank, (), wait="a.out unix_stream_data_wait") for rank in range(3)]
    assert sentence(shot(3, (), wait="a.out hrtimer_nanosleep"), *peers).endswith("3 of 4 ranks wait for rank 3")
    files = [shot(rank, (), wait="cat locks_lock_inode_wait") for rank in range(3)]
    assert "none is the odd one out" in sentence(shot(3, (), wait="a.out skb_wait"), *files)


def test_line_inside_of_a_collective_does_not_matter():
    spins = [
        shot(rank, (f"all_reduce (train.py{line})", "step (train.py:9)")) for rank, line in enumerate(["", ":3"])
    ]
    assert len(analyze_hang(spins).groups) == 1


def test_hang_that_a_stop_cut_short_does_not_count_after_another():
    whole = [shot(rank, LOAD if rank == 1 else REDUCE, finding=1) for rank in range(4)]
    cut = [shot(rank, (), finding=2, is_sure=False) for rank in range(4)]
    assert analyze_hang([*whole, *cut]).waited_for == (1,)


def test_last_hang_of_each_host_counts():
    old = [shot(rank, LOAD if rank == 1 else REDUCE, finding=1) for rank in range(4)]
    assert analyze_hang([*old, *(shot(rank, finding=2) for rank in range(4))]).waited_for == ()


def test_functions_of_the_same_name_elsewhere_are_no_collective():
    assert collective(("recv (multiprocessing/connection.py:250)", "next (data.py:1)")) == -1
    assert collective(("recv (torch/distributed/distributed_c10d.py:1)", "step (train.py:1)")) == 0
    assert collective(("wait (threading.py:3)", "barrier (mine.py:1)", "<module> (mine.py:2)")) == 1


def test_many_groups_take_few_lines():
    shots = [shot(rank, (f"f{rank} (a.py:1)",)) for rank in range(100)]
    lines = analyze_hang(shots).lines()
    assert len(lines) == 6
    assert lines[-1] == "  and 95 more groups, of 95 ranks"


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40))
def test_ranks_are_ranges(ranks):
    text = ranks_text(sorted(ranks)).split(" ")[1]
    shown = set()
    for part in text.removesuffix(",...").split(","):
        first, _, last = part.partition("-")
        shown |= set(range(int(first), int(last or first) + 1))
    assert shown == ranks or (text.endswith(",...") and shown < ranks)


PLACES = st.sampled_from([REDUCE, GATHER, LOAD, ("spin (x.py)",), ()])


@given(st.lists(st.tuples(PLACES, st.sampled_from("STDR"), st.booleans()), min_size=1, max_size=12))
def test_ranks_that_wait_are_more_than_those_that_are_named(ranks):
    hang = analyze_hang([shot(at, *place[:1], state=place[1], is_sure=place[2]) for at, place in enumerate(ranks)])
    assert len(hang.waited_for) <= hang.waiting
    assert len(hang.lines()) <= 6
    assert not hang.waited_for or all(sure for _, _, sure in ranks)
