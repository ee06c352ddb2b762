"""Nodes whose clocks differ: how far apart they are, and one report by one clock."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time

import pytest

from infini_run.errors import LinkError
from infini_run.multinode.link.clock_offset import ClockOffset, OwnAbsence, clock_answer, clock_question
from infini_run.multinode.link.protocol import Decoder
from infini_run.report.hang_snapshot import HangSnapshot
from infini_run.report.report import Report
from tests.multinode.test_many_ssh import bed, many, no_agent_left  # noqa: F401
from tests.support.paths import C

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them


@pytest.fixture(scope="session")
def late(tmp_path_factory):
    made = tmp_path_factory.mktemp("late") / "late.so"
    source = C / "late.c"
    words = [os.environ.get("CC", "cc"), "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(made), str(source)]
    if subprocess.run(words, check=False).returncode:
        pytest.skip("there is no C compiler here")
    return made


def test_a_report_of_nodes_whose_clocks_differ_is_by_the_heads_clock(many, late, tmp_path):  # noqa: F811
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ $(uname -n) = host2 ] && export LATE=5000 LD_PRELOAD={late}\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    report = tmp_path / "report"
    before_s = time.time()
    command = many(f"--remote_python={python}", f"--report={report}", "true", nproc=1, hosts="host[1-2]")
    assert command.wait() == 0, command.err
    content = json.loads(report.read_text())
    times = [at for rank in content["ranks"] for at in (rank["start"], rank["end"])] + [
        content["start"],
        content["end"],
    ]
    first, second = content["clocks"]
    bound_s = max(first["bound"], second["bound"])
    assert before_s - bound_s <= min(times) <= max(times) <= time.time() + bound_s
    assert bound_s < 5
    assert (first["host"], second["host"]) == ("host1", "host2")
    assert abs(first["offset"]) <= first["bound"]
    assert abs(second["offset"] - 5000) <= second["bound"]


def test_what_is_surer_is_kept():
    gap = ClockOffset()
    assert not gap.is_known
    gap.add(5.0, 7.0, 0.5, 0.0)
    gap.add(5.2, 7.2, 0.1, 1.0)
    assert (gap.offset_s, gap.monotonic_s, gap.bound_s) == (5.2, 7.2, 0.1)
    gap.add(5.1, 7.1, 0.4, 2.0)  # no surer
    assert gap.offset_s == 5.2
    gap.add(5.25, 7.25, 0.11, 102.0)  # that was long ago
    assert gap.offset_s == 5.25
    gap.add(9.0, 7.2, 1.0, 103.0)  # it was set meanwhile
    assert (gap.offset_s, gap.bound_s) == (9.0, 1.0)


def test_last_signs_of_a_rank_are_by_the_heads_clock():
    gap = ClockOffset()
    gap.add(5000.0, 7.0, 0.5, 0.0)
    signs = {"output_s": 6010.0, "idle_s": 6009.0, "progress": 7, "progress_s": 6008.0}
    look = HangSnapshot(rank=0, pid=1, host="b", time_s=6012.0, kind="hung", later_s=2.0, **signs)
    times = {"start_s": 6000.0, "end_s": 6013.0}
    report = Report(launch_id="ir-1", run_id="job", host="b", world_size=1, exits=(), snapshots=(look,), **times)
    (ours,) = gap.to_our_time(report).snapshots
    assert (ours.time_s, ours.output_s, ours.idle_s, ours.progress_s) == (1012.0, 1010.0, 1009.0, 1008.0)
    assert ours.signs() == "last signs, 2.0 s later: output 2.0 s ago, CPU 3.0 s ago, PROGRESS=7 4.0 s ago"


def test_what_is_read_late_happened_at_the_latest_when_the_nodes_clock_says():
    gap = ClockOffset()
    now_s = time.monotonic()
    assert now_s - 2.0 <= gap.latest_s(0, 2 * 10**9) <= time.monotonic() - 2.0  # its clock is not known
    gap.add(0.0, 1000.0, 0.25, now_s)
    assert gap.latest_s(round((now_s + 1000.0 - 60.0) * 1e9), 0) == pytest.approx(now_s - 59.75, abs=1e-6)
    assert gap.latest_s(round((now_s + 1000.0 + 60.0) * 1e9), 0) <= time.monotonic()


def test_between_clocks_that_are_the_same_there_is_nothing():
    gap = ClockOffset()
    before_s = time.monotonic()
    question = clock_question()
    after_s = time.monotonic()
    (frame,) = Decoder().feed(clock_answer(question[5:]))
    assert before_s <= gap.add_answer(frame[1]) <= after_s
    assert abs(gap.offset_s) <= gap.bound_s + 1e-6
    assert abs(gap.monotonic_s) <= gap.bound_s + 1e-6


def test_an_answer_to_what_is_still_to_be_asked_says_nothing():
    gap = ClockOffset()
    later_ns = time.monotonic_ns() + 3600 * 10**9
    (frame,) = Decoder().feed(clock_answer(struct.pack(">q", later_ns)))
    assert gap.add_answer(frame[1]) == -math.inf
    assert not gap.is_known


@pytest.mark.parametrize("size", [1, 7, 9, 23, 25])
def test_a_heartbeat_of_another_length_is_refused(size):
    with pytest.raises(LinkError, match="another length"):
        clock_answer(b"x" * size)
    with pytest.raises(LinkError, match="another length"):
        ClockOffset().add_answer(b"x" * size)


def test_an_absence_counts_from_the_last_heartbeat():
    """A busy machine sends one late, and then this process is suspended: no wait was too long, but both together."""
    absence = OwnAbsence(60.0)
    absence.on_heartbeat()
    assert not absence.is_recent(3600.0)
    absence.heartbeat_s -= 61.0
    absence.note(1.0)  # the wait itself was short
    assert absence.is_recent(1.0)
    began_s, away_s = absence.since_s, absence.away_s
    assert away_s >= 61.0
    absence.on_heartbeat()
    assert absence.is_recent(3600.0)
    assert (absence.since_s, absence.away_s >= away_s) == (began_s, True)


def test_a_suspension_with_a_substitute_is_no_absence():
    absence = OwnAbsence(60.0)
    absence.heartbeat_s -= 61.0
    absence.excuse()
    assert not absence.is_recent(3600.0)


def test_a_machine_that_slept_under_a_substitute_is_an_absence():
    absence = OwnAbsence(60.0)
    last_s = absence._last_s
    absence._last_s = (last_s[0], last_s[1] - 61.0)  # CLOCK_MONOTONIC stood still for 61 s
    absence.excuse()
    assert absence.is_recent(3600.0)
