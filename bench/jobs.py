"""(h) Jobs: from `infini-job submit` to the first rank's first line, 2 nodes × 4 ranks on an idle Slurm, beside a
hand-written script of sbatch and srun; and how long after a rank has failed the ranks of all nodes are gone.

On the bed of the tests (tests/support/beds/slurm.sh). Ranks say that they are there by a FIFO, so nobody has to look.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from engines import free_ports, started
from sample import Case, CommandFailed, expect, finish, interleave, raw, start

ROUNDS = 12
LIMIT_S = 120.0
BY_HAND = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4 --output={folder}/by-hand.out
exec srun sh -c 'echo up > {bell}'
"""


class Bell:
    """A FIFO that ranks write a line to."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def hear(self, lines: int, *, is_last: bool = False) -> int:
        """When the first of so many lines came, or the last, in ns; all have come then."""
        heard, first_ns = 0, 0
        while heard < lines:
            if not select.select([self.fd], [], [], LIMIT_S)[0]:
                raise CommandFailed(f"{heard} of {lines} ranks have said that they are there")
            heard += os.read(self.fd, 4096).count(b"\n")
            first_ns = first_ns or time.monotonic_ns()
        return time.monotonic_ns() if is_last else first_ns


def settle(env: Mapping[str, str]) -> None:
    """Nothing is in the queue, and every node is idle: a job that was before costs the next one nothing."""
    end_s = time.monotonic() + LIMIT_S
    ask = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
    while subprocess.run(ask, env=env, capture_output=True, text=True, check=True).stdout != "4\n":
        if time.monotonic() > end_s:
            raise CommandFailed("Slurm's nodes do not become idle")
        time.sleep(0.05)


def time_first_line(argv: list[str], env: Mapping[str, str], bell: Bell) -> int:
    settle(env)
    begin_ns = time.monotonic_ns()
    pid = start(argv, env)
    first_ns = bell.hear(8)
    expect(argv, finish(pid))
    return first_ns - begin_ns


def time_end(argv: list[str], env: Mapping[str, str], bell: Bell, pipe: Path) -> int:
    """Every rank holds the pipe open for writing: its end is theirs, on all nodes."""
    settle(env)
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        expect(argv, finish(start(argv, env)))
        bell.hear(8)
        begin_ns = time.monotonic_ns()
        (pipe.parent / "go").write_text("on\n")
        while os.read(fd, 1) if select.select([fd], [], [], LIMIT_S)[0] else _late():
            pass
        return time.monotonic_ns() - begin_ns
    finally:
        os.close(fd)


def _late() -> bytes:
    raise CommandFailed("ranks live on after the first has failed")


@contextmanager
def slurm(bed: Bed, folder: Path) -> Iterator[dict[str, str]]:
    env = {**bed.env, "SLURM_TB_PORT": str(free_ports(5)), "SLURM_CONF": str(folder / "slurm.conf")}
    with started("slurm.sh", folder, env):
        yield env


def measure(bed: Bed) -> Figure:
    job = [str(bed.venv / "bin" / "infini-job"), "submit", "--scheduler=slurm", "--slots=8", "--slots_per_node=4"]
    with scratch() as folder, slurm(bed, folder / "slurm") as env:
        bell, pipe = Bell(folder / "bell"), folder / "pipe"
        os.mkfifo(pipe)
        os.mkfifo(folder / "go")
        by_hand = folder / "by-hand.sh"
        by_hand.write_text(BY_HAND.format(folder=folder, bell=folder / "bell"))
        ours = [*job, f"--dir={folder}/jobs", "--", "sh", "-c", f"echo up > {folder}/bell"]
        theirs = [shutil.which("sbatch") or "sbatch", str(by_hand)]
        fails = (
            f"exec 9>{pipe}; echo up > {folder}/bell; [ $RANK = 5 ] || exec sleep 1000; read w < {folder}/go; exit 7"
        )
        rounds = bed.rounds(ROUNDS)
        cases = [
            Case(name="submit", measure=partial(time_first_line, ours, env, bell), rounds=rounds),
            Case(name="manual", measure=partial(time_first_line, theirs, env, bell), rounds=rounds),
            Case(
                name="failure",
                measure=partial(time_end, [*ours[:-1], fails], env, bell, pipe),
                rounds=max(3, rounds // 2),
            ),
        ]
        done = interleave(cases)
        settle(env)
        os.close(bell.fd)
    submit, hand, failure = (done[name].median / 1e6 for name in ("submit", "manual", "failure"))
    against = "manual sbatch + srun"
    rows = [
        Row(figure="submit to first line", value=submit, unit="ms", ratio=submit / hand, against=against, bar="job"),
        Row(figure=f"- {against}", value=hand, unit="ms"),
        Row(figure="a rank fails: all gone", value=failure, unit="ms", bar="job_dead"),
    ]
    return Figure(name="jobs", rows=rows, samples=raw(cases))


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
