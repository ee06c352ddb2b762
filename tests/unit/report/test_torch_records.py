"""What torch's records say of a hang: gaps, culprits, and records that came from another process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infini_run.record import replace
from infini_run.report.hang_groups import analyze_hang
from infini_run.report.hang_snapshot import HangSnapshot
from infini_run.report.torch_records import CollectiveRecord, culprits, decode_records, find_gaps, pending_text


def record(number, *, pending=True, group="0", members=(0, 1, 2), names=("nccl:all_reduce", "nccl:all_gather")):
    return CollectiveRecord(
        group=group, about="default_pg", members=members, number=number, is_pending=pending, names=names
    )


def shot(rank, *records, **more):
    given = {"kind": "hung", "why": "no output", "is_sure": True, "frames": ("step (train.py:1)",), "state": "S"}
    return HangSnapshot(rank=rank, pid=1, host="a", time_s=0.0, records=records, **given | more)


BEHIND = record(7, pending=False)
SKIPS = (shot(0, record(8)), shot(1, record(8)), shot(2, BEHIND))


def test_rank_that_did_not_enter_is_the_culprit():
    (gap,) = find_gaps(SKIPS)
    assert (gap.missing, gap.waiting, gap.is_whole) == ((2,), (0, 1), True)
    assert (gap.text, gap.last) == ("NCCL all_gather #8", 7)
    assert culprits(SKIPS) == ((2,), 2)
    assert analyze_hang(SKIPS).headline == "no output: 2 of 3 ranks wait for rank 2"


def test_nobody_is_named_without_the_record_of_a_member():
    assert culprits((*SKIPS[:2], shot(2))) == ((), 0)
    assert culprits((SKIPS[0], shot(1), SKIPS[2])) == ((), 0)
    without_members = [shot(n, replace(each.records[0], members=())) for n, each in enumerate(SKIPS)]
    assert culprits(without_members) == ((2,), 2)
    assert culprits((*without_members, shot(3))) == ((), 0), "it may be a member"


def test_nobody_is_named_if_the_looks_do_not_agree_or_a_host_is_silent():
    assert analyze_hang([*SKIPS[:2], replace(SKIPS[2], is_sure=False)]).waited_for == ()
    assert analyze_hang(SKIPS, ["b"]).waited_for == ()


def test_nobody_is_named_if_all_have_entered_or_nothing_is_pending():
    assert find_gaps(shot(rank, record(8)) for rank in range(3)) == []
    assert find_gaps([shot(0, record(8, pending=False)), shot(1, record(8, pending=False)), shot(2, BEHIND)]) == []


def test_nobody_is_named_if_each_waits_for_another():
    other = {"group": "1", "members": (1, 2)}
    ranks = (
        shot(0, record(8)),
        shot(1, record(8), record(3, pending=False, **other)),
        shot(2, BEHIND, record(4, **other)),
    )
    assert culprits(ranks) == ((), 0)


def test_name_of_what_comes_next_is_that_of_a_rank_that_is_ahead():
    far = record(9, names=("nccl:all_gather", "nccl:_reduce_scatter_base"))
    (gap,) = find_gaps((shot(0, far), shot(1, far), shot(2, BEHIND)))
    assert gap.text == "NCCL all_gather #8"
    (gap,) = find_gaps((shot(0, record(99)), shot(1, record(99)), shot(2, BEHIND)))
    assert gap.text == "#8", "its name was overwritten"


def test_group_of_ranks_has_the_collective_that_all_are_in():
    assert pending_text(SKIPS[:2]) == "NCCL all_gather #8"
    assert pending_text(SKIPS) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text("01a", max_size=2), inner, max_size=3),
)


@given(JSON)
def test_what_does_not_fit_is_dropped(content):
    for content_of_rank in (content, {"0": content}, {"0": [content]}, {"0": [["0", "", content, 1, True, []]]}):
        records = decode_records(content_of_rank)
        assert all(type(each) is CollectiveRecord for groups in records.values() for each in groups)


def test_record_of_a_rank_is_read():
    group = ["0", "default_pg", [0, 1, 2], 8, True, ["nccl:all_reduce", "nccl:all_gather"]]
    assert decode_records({"4": [group], "x": [group], "5": [group[:5]]}) == {4: (record(8),)}
