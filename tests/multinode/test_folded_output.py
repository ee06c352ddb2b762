"""--console=fold at a head: lines of many agents, each with a label that is checked."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from infini_run.multinode.head.folded_output import FoldedOutput
from infini_run.multinode.link import protocol


def folded(world_size=8, **given_):
    written = []
    options = {"colored": False, "has_time": False, **given_}
    return written, FoldedOutput(world_size, world_size, write=lambda *what: written.append(what), **options)


def test_lines_of_all_agents_are_one_line():
    written, output = folded(4)
    output.add(protocol.OUT, b"[host1:0] same\n[host1:1] same\n", range(2))
    assert written == []
    output.add(protocol.OUT, b"[host2:2] same\n[host2:3] same\n", range(2, 4))
    assert written == [(protocol.OUT, b"[ranks 0-3] same\n")]


def test_line_of_one_rank_keeps_its_host():
    written, output = folded()
    output.add(protocol.ERR, b"[host1:0 err] alone\n", range(2))
    assert written == []
    assert output.due_s < float("inf")
    output.flush()
    assert written == [(protocol.ERR, b"[host1:0 err] alone\n")]
    assert output.due_s == float("inf")


def test_lines_without_label_of_agents_ranks_pass_behind_what_is_held():
    written, output = folded(has_time=True)
    output.add(protocol.OUT, b"[host1:0] held\n", range(2))
    foreign = b"[host2:7] of another agent\ninfini-run: host1: ours\n[host1:0 +] rest of a long line\n"
    output.add(protocol.OUT, foreign + b"[host1:99999999999] x\n", range(2))
    [(kind, lines)] = written
    assert kind == protocol.OUT
    assert re.sub(rb"^\S+Z ", b"", lines) == b"[host1:0] held\n" + foreign + b"[host1:99999999999] x\n"


@given(st.lists(st.tuples(st.sampled_from([protocol.OUT, protocol.ERR]), st.binary(max_size=60)), max_size=30))
def test_any_bytes_of_agent_come_out_whole(frames):
    written, output = folded(2)
    for kind, data in frames:
        output.add(kind, data, range(2))
    output.flush()
    for kind in (protocol.OUT, protocol.ERR):
        want = b"".join(data for of, data in frames if of == kind)
        assert b"".join(data for of, data in written if of == kind) == want
