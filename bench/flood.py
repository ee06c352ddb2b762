"""(k) Flood: strangers that only connect to the link of a running job of two nodes, a manual launch.

How late the head hears its nodes, beyond the beat that it asks for three times in --node_timeout, and how many jobs
are lost. The head is the real command, with a record of when it heard whom (heard.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from struct import iter_unpack

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from gate import Gate
from many import free_port
from sample import CommandFailed, finish, start

HERE = Path(__file__).parent
FLOODERS = 3
NODE_TIMEOUT_S = 2.0
BEAT_S = NODE_TIMEOUT_S / 3
RANKS = 2  # of each node
JOBS, LONG_S, SHORT_S = 10, 20.0, 2.0
WHOLE_JOBS, WHOLE_S = 20, 30.0
QUICK_JOBS, QUICK_LONG_S, QUICK_SHORT_S = 5, 5.0, 1.0


@dataclass(kw_only=True)
class Job:
    """One job: how late its nodes were heard, in s, and why it was lost, if it was."""

    late_s: float = 0.0
    dialled: int = 0
    why: list[str] = field(default_factory=list)


@contextmanager
def flood(bed: Bed, port: int, job: Job) -> Iterator[None]:
    """Strangers, until it ends."""
    words = [bed.python, "-IS", str(HERE / "flooder.py"), str(port)]
    those = [subprocess.Popen(words, env=bed.env, stdout=subprocess.PIPE) for _ in range(FLOODERS)]
    try:
        for one in those:
            if one.stdout is None or one.stdout.readline() != b"up\n":
                raise CommandFailed("a flooder found nobody who listens")
        yield
    finally:
        for one in those:
            one.send_signal(signal.SIGTERM)
        job.dialled = sum(int(one.communicate()[0] or 0) for one in those)


@contextmanager
def no_flood() -> Iterator[None]:
    yield


def lateness(record: bytes, begin_s: float, end_s: float) -> float:
    """The longest time between two words of one node within the window, less a beat's."""
    last: dict[int, float] = {}
    late_s = 0.0
    for index, at_s in iter_unpack("<id", record):
        if index in last and begin_s < at_s and last[index] < end_s:
            late_s = max(late_s, min(at_s, end_s) - max(last[index], begin_s) - BEAT_S)
        last[index] = at_s
    return max([late_s, *(end_s - max(at_s, begin_s) - BEAT_S for at_s in last.values())])


def run_job(bed: Bed, directory: Path, flood_s: float, is_flooded: bool = True) -> Job:
    port, job, record = free_port(), Job(), directory / "heard"
    record.unlink(missing_ok=True)
    env = {**bed.env, "INFINI_RUN_TOKEN": os.urandom(16).hex()}
    with Gate(directory) as gate:
        ranks = [bed.program("rank"), "meet", str(gate.up_path), str(gate.go_path)]
        shape = ["--nnodes=2", f"--nproc_per_node={RANKS}", f"--rdzv_endpoint=127.0.0.1:{port}"]
        flags = [*shape, f"--link_port={port + 1}", f"--node_timeout={NODE_TIMEOUT_S:g}"]
        head = [bed.python, "-I", str(HERE / "heard.py"), str(record), *flags, "--node_rank=0", *ranks]
        other = [bed.infini_run, *flags, "--node_rank=1", *ranks]
        said = [directory / f"said{node}" for node in range(2)]
        pids = [start(argv, env, {2: said[node]}) for node, argv in enumerate((head, other))]
        try:
            gate.wait_up(2 * RANKS)
            with flood(bed, port + 1, job) if is_flooded else no_flood():
                begin_s = time.monotonic()
                time.sleep(flood_s)
                end_s = time.monotonic()
        finally:
            gate.go()
            for node, pid in enumerate(pids):
                if (code := ended(pid)) != 0:
                    words = " ".join(said[node].read_text(errors="replace").split())
                    job.why.append(f"node {node} ended with {code}: {words[-200:]}")
    job.late_s = lateness(record.read_bytes(), begin_s, end_s)
    return job


def ended(pid: int) -> int | str:
    try:
        return finish(pid)
    except CommandFailed:
        return "nothing, and had to be ended"


def measure(bed: Bed) -> Figure:
    jobs, long_s, short_s = JOBS, LONG_S, SHORT_S
    if bed.quick:
        jobs, long_s, short_s = QUICK_JOBS, QUICK_LONG_S, QUICK_SHORT_S
    elif bed.whole:
        jobs, long_s, short_s = WHOLE_JOBS, WHOLE_S, WHOLE_S
    lengths = [long_s, *[short_s] * (jobs - 1)]
    with scratch() as directory:
        quiet = run_job(bed, directory, short_s, is_flooded=False)
        done = [run_job(bed, directory, length) for length in lengths]
    late_s = max(job.late_s for job in done)
    lost = [job for job in done if job.why]
    rows = [
        Row(
            figure=f"flood, {long_s:.0f} s: a heartbeat is late by",
            value=late_s * 1000,
            unit="ms",
            ratio=late_s / NODE_TIMEOUT_S,
            against="--node_timeout",
            bar="flood",
        ),
        Row(figure=f"flood: jobs lost of {jobs}", value=len(lost), unit="jobs", bar="lost"),
        Row(
            figure="- without a flood a heartbeat is late by",
            value=quiet.late_s * 1000,
            unit="ms",
            ratio=quiet.late_s / NODE_TIMEOUT_S,
            against="--node_timeout",
        ),
        Row(figure="- connections of a flood", value=sum(job.dialled for job in done) / sum(lengths), unit="/s"),
    ]
    remarks = [f"flood: {why}" for job in (quiet, *lost) for why in job.why]
    samples = {"late_s": [job.late_s for job in done], "dialled": [job.dialled for job in done], "lengths_s": lengths}
    return Figure(name="flood", rows=rows, samples=samples, remarks=remarks)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
