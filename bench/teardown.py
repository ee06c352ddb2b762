"""(c) Teardown: from the instant a rank fails to the launcher's exit, with all other ranks dying of TERM.

The failing rank writes the time right before it exits; half of the others are a C program in pause(), half
are /bin/sleep. All ranks are up before one fails. With --snapshots the others are Python, which py-spy reads if it is
installed beside infini-run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from gate import Gate
from launchers import Launcher, find_peers, infini_run
from sample import Case, CommandFailed, failures, finish, interleave, last_stderr, raw, start

ROUNDS = {8: 20, 64: 20, 256: 10}
FAIL_CODE = 3
PYTHON_RANK = """
import os, sys, time
last, up, go, stamp = sys.argv[1:]
gate = os.open(go, os.O_RDONLY)
os.write(os.open(up, os.O_WRONLY), b"u")
if os.environ["RANK"] != last:
    os.close(gate)
    time.sleep(1000)
os.read(gate, 1)
with open(stamp, "w") as file:
    file.write(str(time.monotonic_ns()))
os._exit(3)
"""


def time_teardown(bed: Bed, launcher: Launcher, n: int, directory: Path, program: Sequence[str] = ()) -> int:
    """Runs one job whose last rank fails, and returns the ns from its exit to the launcher's."""
    stamp = directory / "stamp"
    stamp.unlink(missing_ok=True)
    with Gate(directory) as gate:
        words = program or (bed.program("rank"), "fail")
        command = [*words, str(n - 1), str(gate.up_path), str(gate.go_path), str(stamp)]
        pid = start(launcher.argv(n, command), {**bed.env, **launcher.env})
        try:
            gate.wait_up(n)
        finally:
            gate.go()
            code = finish(pid)
        end = time.monotonic_ns()
    if code <= 0 or not stamp.exists():
        raise CommandFailed(f"{launcher.name}: exit code {code}; stderr:\n{last_stderr()}")
    if launcher.name == "infini-run" and code != FAIL_CODE:
        raise CommandFailed(f"infini-run: exit code {code}, not that of the rank that failed ({FAIL_CODE})")
    return end - int(stamp.read_text())


def case_of(bed: Bed, launcher: Launcher, n: int, directory: Path) -> Case:
    return Case(
        name=f"{launcher.name} N={n}",
        measure=partial(time_teardown, bed, launcher, n, directory),
        rounds=max(2, int(bed.rounds(ROUNDS[n]) * launcher.weight)),
        may_fail=launcher.name != "infini-run",
    )


def rows_at(done: dict[str, Case], launchers: list[Launcher], n: int) -> list[Row]:
    ours = done[f"infini-run N={n}"].median / 1e6
    rows = [Row(figure=f"teardown N={n}", value=ours, unit="ms", bar="teardown" if n == 64 else None)]
    for launcher in launchers[1:]:
        case = done.get(f"{launcher.name} N={n}")
        if case:
            ms = case.median / 1e6
            figure = f"- {launcher.name} teardown N={n}"
            rows.append(Row(figure=figure, value=ms, unit="ms", ratio=ms / ours, against="infini-run"))
    return rows


def snapshot_cases(bed: Bed, n: int, directory: Path) -> list[Case]:
    program = (bed.python, "-IS", "-c", PYTHON_RANK)
    return [
        Case(
            name=f"--snapshots={when} N={n}",
            measure=partial(time_teardown, bed, infini_run(bed, f"--snapshots={when}"), n, directory, program),
            rounds=bed.rounds(6),
        )
        for when in ("hang", "failure")
    ]


def snapshot_rows(done: dict[str, Case], n: int) -> list[Row]:
    usual, seen = (done[f"--snapshots={when} N={n}"].median / 1e6 for when in ("hang", "failure"))
    figure = f"teardown N={n} of Pythons"
    return [
        Row(figure=figure, value=usual, unit="ms"),
        Row(
            figure=f"- --snapshots=failure N={n}, later by",
            value=seen - usual,
            unit="ms",
            ratio=seen / usual,
            against=figure,
            bar="snapshots",
        ),
    ]


def measure(bed: Bed) -> Figure:
    launchers = [infini_run(bed), *(peer for peer in find_peers(bed)[0] if peer.stops_most)]
    with scratch() as directory:
        cases = [
            case_of(bed, launcher, n, directory) for n in ROUNDS for launcher in launchers if n <= launcher.stops_most
        ]
        cases += snapshot_cases(bed, 64, directory)
        done = interleave(cases)
    rows = [row for n in ROUNDS for row in rows_at(done, launchers, n)]
    rows += snapshot_rows(done, 64)
    return Figure(name="teardown", rows=rows, samples=raw(cases), remarks=failures(cases))


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
