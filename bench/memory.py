"""(e) Peak memory of the launcher with N idle ranks, and while it moves output, against `python -c pass`.

peak.c starts the command and reports the largest process in it: ranks are small C programs, so that is the
launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from gate import Gate
from launchers import Launcher, find_peers, infini_run
from sample import Case, expect, failures, finish, interleave, raw, start

COUNTS = (1, 8, 64)
PREFIX_RANKS = 8
PREFIX_LINES = 200_000
PEER_COUNT = 8
ROUNDS = 5
PEAK_FD = 9
PYTHON = "python -c pass"


def start_peak(bed: Bed, argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, int]:
    """Starts a command under peak.c; returns its pid and the pipe that the answer comes from."""
    reading, writing = os.pipe()
    pid = start([bed.program("peak"), str(PEAK_FD), *argv], env, {PEAK_FD: writing})
    os.close(writing)
    return pid, reading


def finish_peak(argv: Sequence[str], pid: int, pipe: int) -> int:
    """Waits for it; returns KiB."""
    with os.fdopen(pipe) as answer:
        kib = answer.read()
    expect(argv, finish(pid))
    return int(kib)


def peak_of_command(bed: Bed, argv: Sequence[str]) -> int:
    return finish_peak(argv, *start_peak(bed, argv, bed.env))


def peak_with_idle_ranks(bed: Bed, launcher: Launcher, n: int, directory: Path) -> int:
    """All ranks are up together before the first of them leaves."""
    with Gate(directory) as gate:
        argv = launcher.argv(n, [bed.program("rank"), "meet", str(gate.up_path), str(gate.go_path)])
        pid, pipe = start_peak(bed, argv, {**bed.env, **launcher.env})
        try:
            gate.wait_up(n)
        finally:
            gate.go()
            kib = finish_peak(argv, pid, pipe)
    return kib


def own_cases(bed: Bed, directory: Path) -> list[Case]:
    ours, rounds = infini_run(bed), bed.rounds(ROUNDS)
    writer = [bed.program("lines"), "write", str(PREFIX_LINES)]
    prefixed = infini_run(bed, "--console=prefix").argv(PREFIX_RANKS, writer)
    runs = {PYTHON: partial(peak_of_command, bed, [bed.python, "-c", "pass"])}
    for n in COUNTS:
        runs[f"N={n} idle"] = partial(peak_with_idle_ranks, bed, ours, n, directory)
    runs[f"N={PREFIX_RANKS} --console=prefix"] = partial(peak_of_command, bed, prefixed)
    return [Case(name=name, measure=run, rounds=rounds) for name, run in runs.items()]


def peer_cases(bed: Bed, directory: Path) -> list[Case]:
    return [
        Case(
            name=f"{peer.name} N={PEER_COUNT} idle",
            measure=partial(peak_with_idle_ranks, bed, peer, PEER_COUNT, directory),
            rounds=2,
            may_fail=True,
        )
        for peer in find_peers(bed)[0]
        if peer.ranked
    ]


def row_of(name: str, kib: float, python_kib: float) -> Row:
    return Row(figure=name, value=kib / 1024, unit="MiB", ratio=kib / python_kib, against=PYTHON)


def measure(bed: Bed) -> Figure:
    with scratch() as directory:
        own, peers = own_cases(bed, directory), peer_cases(bed, directory)
        done = interleave([*own, *peers])
    python_kib = done[PYTHON].median
    rows = [Row(figure=f"memory {PYTHON}", value=python_kib / 1024, unit="MiB")]
    for case in own[1:]:
        kib = case.median
        figure = f"memory {case.name}"
        rows.append(
            Row(
                figure=figure,
                value=kib / 1024,
                unit="MiB",
                ratio=kib / python_kib,
                against=PYTHON,
                bar="memory",
            )
        )
    rows += [row_of(f"- memory {case.name}", case.median, python_kib) for case in peers if case.samples]
    remarks = failures(peers)
    return Figure(name="memory", rows=rows, samples=raw([*own, *peers]), remarks=remarks)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
