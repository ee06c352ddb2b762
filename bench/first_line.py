"""(i) What the user waits for: from the command to the first line of a script that imports torch, and from a rank's
failure to that line again, both cold and with --preload.

The time is that of the last rank's first line. Torch is that of --torch-venv; without one, the script imports a
module of the standard library in its place, so that the rows say what infini-run adds.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from sample import Case, interleave, raw
from warm import LIVES_S, SCRIPT, command_of
from warm import measure as run_once

RANKS = 4
ROUNDS = 2  # no bar: what the user waits for
STAND_IN = "asyncio"
FIRST_LIVES_S = {"cold": 1.0, "warm": LIVES_S}  # of the first attempt


def rows_of(module: str, done: dict[str, Case]) -> list[Row]:
    rows = []
    for name, what in (
        ("wall_s", f"command to first lines, {RANKS} ranks import {module}"),
        ("restart_s", f"a rank fails: first lines again, {RANKS} ranks import {module}"),
    ):
        cold, warm = (median(sample[name] for sample in done[way].samples) for way in FIRST_LIVES_S)
        rows += [
            Row(figure=what, value=cold, unit="s"),
            Row(figure="- with --preload", value=warm, unit="s", ratio=warm / cold, against="cold"),
        ]
    return rows


def measure(bed: Bed) -> Figure:
    torch = bed.torch_venv / "bin" / "python" if bed.torch_venv else None
    module, python = ("torch", str(torch)) if torch else (STAND_IN, bed.python)
    with scratch() as directory:
        cases = []
        for way, lives_s in FIRST_LIVES_S.items():
            script = directory / f"{way}.py"
            script.write_text(SCRIPT.format(module=module, lives_s=lives_s))
            command = command_of(way, script, RANKS, python, module, bed.infini_run)
            once = partial(run_once, command, RANKS, bed.env)
            cases.append(Case(name=way, measure=once, rounds=bed.rounds(ROUNDS)))
        done = interleave(cases)
    remarks = () if torch else (f"no --torch-venv: {STAND_IN} in place of torch",)
    return Figure(name="first_line", rows=rows_of(module, done), samples=raw(cases), remarks=remarks)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
