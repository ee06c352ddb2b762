"""(l) --list while 200 launches run on this machine, against `python -c pass`, in turns.

Each launch is a command with one rank. A launch answers in a turn of its own loop, so all of them share the CPUs with
--list.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from gate import Gate
from launchers import infini_run
from sample import Case, finish, interleave, raw, read_output, start, time_command

LAUNCHES = 200
ROUNDS = 20
PYTHON = "python -c pass"


@contextmanager
def running(bed: Bed, directory: Path) -> Iterator[None]:
    """200 launches whose ranks are up."""
    pids: list[int] = []
    with Gate(directory) as gate:
        argv = infini_run(bed).argv(1, [bed.program("rank"), "idle", str(gate.up_path)])
        try:
            pids += (start(argv, bed.env) for _ in range(LAUNCHES))
            gate.wait_up(LAUNCHES)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            for pid in pids:
                finish(pid)


def measure(bed: Bed) -> Figure:
    listing = [bed.infini_run, "--list"]
    with scratch() as directory:
        none = len(read_output(listing, bed.env, directory / "list").splitlines())
        with running(bed, directory):
            rows = read_output(listing, bed.env, directory / "list").splitlines()
            commands = {PYTHON: [bed.python, "-c", "pass"], "--list": listing}
            cases = [
                Case(name=name, measure=partial(time_command, argv, bed.env), rounds=bed.rounds(ROUNDS))
                for name, argv in commands.items()
            ]
            interleave(cases)
    python, listed = (case.median / 1e6 for case in cases)
    return Figure(
        name="listing",
        rows=[
            Row(
                figure=f"--list of {LAUNCHES} launches",
                value=listed,
                unit="ms",
                ratio=listed / python,
                against=PYTHON,
            ),
            Row(figure=f"- less {PYTHON}", value=listed - python, unit="ms", bar="listed"),
        ],
        samples=raw(cases),
        remarks=[f"{len(rows)} lines were printed; {none} before the launches began"],
    )


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
