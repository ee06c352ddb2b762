"""(a) Launch: whole commands, `infini-run --nproc_per_node=N /bin/true`, from spawn to exit.

Beside it in the same rounds: `python -c pass` of the same venv (what any Python command costs), the bare
clone loop of floor.c (what the kernel costs), and every other launcher that is installed. Output is to /dev/null,
errors to a file, whose lines the launcher carries where there are several ranks; a row of its own has both in a pipe.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args
from launchers import TRUE, Launcher, find_peers, floor, infini_run
from sample import Case, failures, interleave, raw, time_command

ROUNDS = {1: 40, 8: 20, 64: 20, 256: 10, 1024: 9}
PYTHON = "python -c pass"
PIPED = 64
LINES = f"N={PIPED} --console=lines into a pipe"
INHERIT = f"N={PIPED} --console=inherit to /dev/null"


def case_name(launcher: str, n: int) -> str:
    return f"{launcher} N={n}"


def case_of(bed: Bed, launcher: Launcher, n: int, may_fail: bool) -> Case:
    rounds = max(2, int(bed.rounds(ROUNDS[n]) * launcher.weight))
    measure = partial(time_command, launcher.argv(n, [TRUE]), {**bed.env, **launcher.env})
    return Case(name=case_name(launcher.name, n), measure=measure, rounds=rounds, may_fail=may_fail)


def all_cases(bed: Bed, peers: list[Launcher]) -> list[Case]:
    python = partial(time_command, [bed.python, "-c", "pass"], bed.env)
    cases = [Case(name=PYTHON, measure=python, rounds=bed.rounds(ROUNDS[1]))]
    for n in ROUNDS:
        cases += [case_of(bed, ours, n, may_fail=False) for ours in (infini_run(bed), floor(bed))]
        cases += [case_of(bed, peer, n, may_fail=True) for peer in peers if n <= peer.most]
    return cases + console_cases(bed)


def time_into_pipe(launcher: Launcher, n: int, bed: Bed) -> int:
    """What ranks print goes through the launcher; they print nothing, so nobody has to read."""
    reading, writing = os.pipe()
    try:
        return time_command(launcher.argv(n, [TRUE]), bed.env, {1: writing, 2: writing})
    finally:
        os.close(reading)
        os.close(writing)


def console_cases(bed: Bed) -> list[Case]:
    """Lines that are carried, beside ranks that write for themselves."""
    n, null = PIPED, Path("/dev/null")
    lines, inherit = (infini_run(bed, f"--console={name}") for name in ("lines", "inherit"))
    into_null = partial(time_command, inherit.argv(n, [TRUE]), bed.env, {1: null, 2: null})
    rounds = bed.rounds(ROUNDS[n])
    return [
        Case(name=LINES, measure=partial(time_into_pipe, lines, n, bed), rounds=rounds),
        Case(name=INHERIT, measure=into_null, rounds=rounds),
    ]


def console_rows(done: dict[str, Case]) -> list[Row]:
    lines, inherit = (done[name].median / 1e6 for name in (LINES, INHERIT))
    return [
        Row(figure=f"launch {LINES}", value=lines, unit="ms", ratio=lines / inherit, against="inherit"),
        Row(figure=f"- {INHERIT}", value=inherit, unit="ms"),
    ]


def own_row(done: dict[str, Case], n: int) -> Row:
    ms = done[case_name("infini-run", n)].median / 1e6
    if n == 1:
        python = done[PYTHON].median / 1e6
        return Row(figure="launch N=1", value=ms, unit="ms", ratio=ms / python, against=PYTHON, bar="startup")
    bar = "launch64" if n == 64 else None
    floor_ms = done[case_name("floor", n)].median / 1e6
    return Row(figure=f"launch N={n}", value=ms, unit="ms", ratio=ms / floor_ms, against="floor command", bar=bar)


def other_row(done: dict[str, Case], launcher: str, n: int) -> Row:
    ms, ours = (done[case_name(name, n)].median / 1e6 for name in (launcher, "infini-run"))
    bar = "torchrun" if (launcher, n) == ("torchrun", 64) else None
    return Row(figure=f"- {launcher} N={n}", value=ms, unit="ms", ratio=ms / ours, against="infini-run", bar=bar)


def growth_rows(done: dict[str, Case]) -> list[Row]:
    """Per process at 1024 against 64: of the whole command, and of what every further process adds."""
    few, many = 64, 1024
    one, at_few, at_many = (done[case_name("infini-run", n)].median / 1e3 for n in (1, few, many))
    whole = at_many / many
    added, added_few = (at_many - one) / (many - 1), (at_few - one) / (few - 1)
    against = f"that at {few}"
    return [
        Row(
            figure=f"per process, N={many}",
            value=whole,
            unit="µs",
            ratio=whole / (at_few / few),
            against=against,
            bar="growth",
        ),
        Row(
            figure=f"per added process, N={many}",
            value=added,
            unit="µs",
            ratio=added / added_few,
            against=against,
            bar="growth",
        ),
    ]


def measure(bed: Bed) -> Figure:
    peers, remarks = find_peers(bed)
    cases = all_cases(bed, peers)
    done = interleave(cases)
    rows = [Row(figure=PYTHON, value=done[PYTHON].median / 1e6, unit="ms")]
    for n in ROUNDS:
        rows.append(own_row(done, n))
        others = ["floor", *(peer.name for peer in peers)]
        rows += [other_row(done, name, n) for name in others if case_name(name, n) in done]
    rows += console_rows(done) + growth_rows(done)
    return Figure(name="launch", rows=rows, samples=raw(cases), remarks=[*remarks, *failures(cases)])


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
