"""Snapshots of ranks, folded: whom the others wait for, and when nobody is named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infini_run.record import replace
from infini_run.report.exit import Exit
from infini_run.report.hang_groups import analyze_hang, collective, hang_text, ranks_text, still_hung, with_exited
from infini_run.report.hang_snapshot import HangSnapshot, main_frames, other_threads

TORCH = ("all_reduce (torch/distributed/distributed_c10d.py:2501)", "wrapper (torch/distributed/c10d_logger.py:81)")
REDUCE = (*TORCH, "step (train.py:41)", "<module> (train.py:60)")
GATHER = ("all_gather (torch/distributed/distributed_c10d.py:3000)", "step (train.py:43)")
LOAD = ("read (data.py:88)", "load_batch (data.py:12)")


def shot(rank, frames=REDUCE, **more):
    known = {"kind": "hung", "why": "no output for 9.0 s", "is_sure": True, "state": "S", "cpu": 0.0, "time_s": 1.0}
    host = f"host{rank // 4 + 1}"
    return HangSnapshot(rank=rank, pid=100 + rank, host=host, frames=frames, **known | more)


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


def test_path_of_all_stacks_is_as_the_user_gave_it_though_nobody_is_named():
    shots = [shot(rank, file=f"/home/me/logs/hang_{rank}.txt") for rank in range(2)]
    assert hang_text(shots, {rank: f"logs/rank_{rank}.log" for rank in range(2)})[1][-1] == (
        "  all stacks: logs/hang_*.txt"
    )


def test_path_of_stacks_begins_with_the_folder_of_the_rank_that_is_waited_for():
    shots = [shot(rank, LOAD if rank == 3 else REDUCE, file=f"/n{rank // 2}/hang_{rank}.txt") for rank in range(4)]
    assert hang_text(shots, {})[1][-1] == "  all stacks: /n1/hang_*.txt, /n0/hang_*.txt"


def test_frames_are_those_of_the_one_thread_that_the_main_thread_joins():
    main = 'Thread 8 (idle): "MainThread"\n    Thread.join (threading.py:1119)\n    <module> (train.py:9)\n'
    other = 'Thread 9 (idle): "Thread-1 (work)"\n    load (data.py:4)\n    Thread.run (threading.py:982)\n'
    assert main_frames(main + other) == ["load (data.py:4)", "Thread.run (threading.py:982)"]
    assert main_frames(main + other * 2)[-1] == "<module> (train.py:9)", "which of the two it waits for is unknown"
    several = main + other + other.replace("Thread 9", "Thread 10")
    assert other_threads(several) == dict.fromkeys(("9", "10"), ("load (data.py:4)", "Thread.run (threading.py:982)"))
    assert other_threads(main + other) == other_threads(several.replace("Thread.join", "Condition.wait")) == {}
    assert main_frames(main.replace("Thread.join", "Condition.wait") + other)[-1] == "<module> (train.py:9)"


def test_nobody_is_named_before_two_looks_agree():
    shots = [shot(rank, LOAD if rank == 2 else REDUCE) for rank in range(8)]
    assert not analyze_hang([*shots[:-1], replace(shots[-1], is_sure=False)]).waited_for


def test_rank_that_hangs_alone_is_no_group():
    alone = analyze_hang([shot(0, LOAD), *(shot(rank, ("work (train.py:1)",), kind="") for rank in (1, 2))])
    assert (alone.headline, alone.only) == ("", 0)
    assert analyze_hang([shot(0)]).only == 0
    same = [shot(0, LOAD), shot(1, LOAD, kind="")]  # the other's silence is not long enough yet
    assert sentence(*same) == "no output for 9.0 s: all 2 ranks wait in read (data.py:88)"
    beside = [*same, shot(2)]
    assert sentence(*beside).endswith(": 3 ranks are in 2 places, and none is the odd one out")
    assert analyze_hang([shot(0, kind="late")]) is None
    assert analyze_hang([]) is None


def beside(rank, *frames, **more):
    """A rank whose main thread waits for one of two: one reports that it lives, and the other is in these frames."""
    return shot(rank, ("<module> (train.py:9)",), beside=("beat (train.py:2)", *frames), **more)


def test_rank_is_named_whose_threads_are_in_no_collective_as_those_of_the_others():
    shots = [beside(rank, *(LOAD if rank == 2 else REDUCE)) for rank in range(4)]
    hang = analyze_hang(shots)
    assert hang.headline.endswith(": 3 of 4 ranks wait for rank 2")
    assert "  <module> (train.py:9), in read (data.py:88)  " in hang.lines()[0]
    assert "  <module> (train.py:9), in all_reduce (train.py:41)  " in hang.lines()[1]
    assert analyze_hang([*shots[:2], shot(2, LOAD), shots[3]]).waited_for == (2,), "its other thread has ended"
    alone = [replace(each, kind="hung" if each.rank == 2 else "") for each in shots]
    assert analyze_hang(alone).waited_for == (2,)


def test_nobody_is_named_where_threads_differ_and_none_is_in_a_collective():
    shots = [beside(rank, LOAD[rank == 2]) for rank in range(4)]
    hang = analyze_hang(shots)
    assert hang.headline.endswith(": 4 ranks are in 2 places, and none is the odd one out")
    assert "  <module> (train.py:9), in load_batch (data.py:12)  " in hang.lines()[0]
    alone = [replace(each, kind="hung" if each.rank == 2 else "") for each in shots]
    assert analyze_hang(alone).only is None, "its place is that of the others"
    assert analyze_hang([beside(rank, *REDUCE) for rank in range(4)]).waited_for == ()


def test_rank_that_spins_is_named_though_it_does_not_hang():
    shots = [shot(0, ("spin (train.py)",), kind="", why="", cpu=1.0), shot(1), shot(2)]
    hang = analyze_hang(shots)
    assert (hang.waited_for, hang.stopped_for, hang.waiting) == ((0,), (0,), 2)
    assert hang.lines()[0].endswith("100% CPU")


def test_sentence_tells_whose_silence_it_is_if_the_rank_that_is_waited_for_lives():
    writes = shot(0, LOAD, kind="", why="", output_s=0.9)
    silent = [shot(rank, time_s=10.0, output_s=1.0) for rank in (1, 2)]
    hang = analyze_hang([*silent, replace(writes, time_s=10.0, output_s=9.9)])
    assert hang.headline == "no output for 9.0 s by ranks 1-2: 2 of 3 ranks wait for rank 0, which wrote 100 ms ago"
    assert hang.lines()[0].endswith("0% CPU, output 100 ms ago")
    hang = analyze_hang([*silent, replace(writes, time_s=10.0, output_s=3.0)])
    assert hang.headline == "no output for 9.0 s: 2 of 3 ranks wait for rank 0", "it fell silent with the others"
    ticks = analyze_hang([*silent, replace(writes, time_s=10.0, output_s=None, cpu=0.02)])
    assert ticks.headline == "no output for 9.0 s: 2 of 3 ranks wait for rank 0", "a tick is no work"


def test_sentence_names_who_sent_the_trigger():
    shots = [shot(1, why="it sent WATCHDOG=trigger"), shot(0, kind="", why=""), shot(2, LOAD, kind="", why="")]
    assert sentence(*shots) == "rank 1 sent WATCHDOG=trigger: 2 of 3 ranks wait for rank 2"


def test_rank_that_exits_during_the_looks_is_seen_as_exited():
    left = Exit(rank=2, local_rank=2, host="host1", pid=102, code=0, start_s=-9.0, end_s=0.5)
    seen = with_exited([shot(0), shot(1), shot(2, ()), shot(3)], [left])
    assert [snapshot.why for snapshot in seen if snapshot.rank == 2] == ["exited with code 0, 500 ms before"]
    hang = analyze_hang(seen)
    assert hang.headline == "no output for 9.0 s: 3 of 4 ranks wait for rank 2"
    assert with_exited([shot(2, ())], [left]) == (shot(2, ()),), "it alone had hung"
    assert with_exited([shot(0), shot(2)], [replace(left, end_s=1.5)]) == (shot(0), shot(2)), "after the looks"


def test_failed_ranks_are_apart_from_those_that_exited_with_zero():
    ends = {0: {"code": 0}, 1: {"code": 3}, 2: {"signal": 11}, 3: {"code": 1, "stopped": True}}
    left = [Exit(rank=rank, local_rank=rank, host="host1", end_s=0.5, **how) for rank, how in ends.items()]
    hang = analyze_hang(with_exited([shot(rank) for rank in range(3, 9)], left))
    assert (hang.waited_for, hang.stopped_for, hang.waiting) == ((0, 1, 2), (), 6)
    assert hang.lines() == [
        "  rank 0 on host1       exited with code 0, 500 ms before",
        "  rank 1 on host1       failed (exit code 3), 500 ms before",
        "  rank 2 on host1       failed (killed by SIGSEGV), 500 ms before",
        "  ranks 3-8 on 3 hosts  all_reduce (train.py:41)                   0% CPU",
    ]


def test_rank_that_has_exited_is_named_and_no_failure():
    hang = analyze_hang([shot(0, (), kind="", why="exited with code 0, 9.0 s before", state="X"), shot(1), shot(2)])
    assert (hang.waited_for, hang.stopped_for) == ((0,), ())


def test_suspended_rank_is_named_inside_of_the_collective():
    hang = analyze_hang([shot(0, state="T"), shot(1), shot(2)])
    assert hang.waited_for == (0,)
    assert "all_reduce (train.py:41), suspended by a signal" in hang.lines()[0]


def test_programs_without_python_are_folded_by_what_the_kernel_says():
    peers = [shot(rank, (), wait="a.out wait_woken (socket)") for rank in range(3)]
    guess = "3 of 4 ranks seem to wait for rank 3"
    assert sentence(shot(3, (), wait="a.out hrtimer_nanosleep"), *peers).endswith(guess)
    files = [shot(rank, (), wait="cat locks_lock_inode_wait") for rank in range(3)]
    assert "none is the odd one out" in sentence(shot(3, (), wait="a.out skb_wait (socket)"), *files)


def test_name_of_a_program_is_no_wait():
    peers = [shot(rank, (), wait="tcp_server hrtimer_nanosleep") for rank in range(3)]
    assert "none is the odd one out" in sentence(shot(3, (), wait="a.out do_wait"), *peers)


def test_kernel_names_ranks_if_no_python_stack_was_read():
    note = "py-spy is not installed; pip install py-spy"
    shots = [shot(rank, (), wait="wait_woken (socket)", python_note=note) for rank in range(3)]
    shots.append(shot(3, (), wait="hrtimer_nanosleep", python_note=note))
    hang = analyze_hang(shots)
    assert hang.headline == "no output for 9.0 s: 3 of 4 ranks seem to wait for rank 3"
    assert hang_text(shots, {})[1][-1] == f"  no Python stack: {note}"


def test_nobody_is_named_if_some_python_stacks_are_missing():
    shots = [shot(rank) for rank in range(3)]
    shots.append(shot(3, (), wait="hrtimer_nanosleep", python_note="py-spy took longer than 10 s"))
    assert not analyze_hang(shots).waited_for
    assert hang_text(shots, {})[1][-1] == "  no Python stack of rank 3: py-spy took longer than 10 s"


def silent(rank, **more):
    return shot(rank, (), wait="hrtimer_nanosleep", time_s=100.0, **{"output_s": 80.0, "idle_s": 70.0} | more)


def test_rank_that_still_writes_does_not_hang_with_those_in_its_place():
    alone = analyze_hang([silent(0), silent(1, kind="", output_s=99.5)])
    assert (alone.headline, alone.only) == ("", 0)
    hang = analyze_hang([silent(0), silent(1), silent(2, kind="", output_s=99.5)])
    assert hang.headline == "no output for 9.0 s: 2 of 3 ranks wait in hrtimer_nanosleep"
    assert hang.lines() == [
        "  rank 2 on host1     hrtimer_nanosleep  0% CPU, output 500 ms ago",
        "  ranks 0-1 on host1  hrtimer_nanosleep  0% CPU",
    ]


def test_ranks_that_are_silent_since_they_were_reported_still_hang():
    before = [silent(rank, why="no output and no CPU used for 20.0 s") for rank in range(4)]
    now = [replace(each, kind="", why="", time_s=130.0) for each in before]
    moved = [replace(now[1], wait="elsewhere"), replace(now[2], output_s=120.0), replace(now[3], idle_s=None)]
    found = still_hung([now[0], *moved, replace(now[0], rank=4)], before)
    assert [each.kind for each in found] == ["hung", "", "", "", ""]
    assert found[0].why == "no output and no CPU used for 50.0 s"


def test_rank_whose_silence_is_almost_as_long_hangs_with_the_others():
    assert "all 2 ranks wait in" in sentence(silent(0), silent(1, kind="", output_s=82.0))


def test_rank_that_uses_cpu_in_one_place_lives_unless_python_says_where_it_is():
    assert analyze_hang([silent(0), silent(1, kind="", cpu=0.5)]).only == 0
    spins = [shot(rank, LOAD, kind="hung" if rank else "", cpu=0.0 if rank else 1.0) for rank in range(3)]
    assert "all 3 ranks wait in read (data.py:88)" in sentence(*spins)


def test_place_of_idle_rank_that_moves_is_unknown():
    shots = [shot(rank, (), wait="") for rank in range(3)]
    assert sentence(*shots).endswith("all 3 ranks wait in an unknown place")
    assert (
        analyze_hang([*shots, shot(3, (), wait="x")]).lines()[1].startswith("  ranks 0-2 on host1  an unknown place")
    )
    busy = [shot(rank, (), wait="", cpu=0.5) for rank in range(3)]
    assert sentence(*busy).endswith("all 3 ranks use CPU")
    assert "  running  " in analyze_hang([*busy, shot(3, (), wait="x")]).lines()[1]


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
