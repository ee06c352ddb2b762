"""(g) The same PyTorch training, examples/ddp.py, under torchrun and under infini-run, with --torch-venv's torch.

Time from the command to rank 0's first training step, the launcher's peak memory meanwhile, what is told of a
rank that fails, and whether the first of two that fail is named. The bars are about what torchrun costs beside
the training: importing torch in the launcher is measured in the same run.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from gate import Gate
from idle import children
from provision import ROOT
from sample import STDERR_PATH, Case, CommandFailed, expect, finish, interleave, raw, start, time_command

EXAMPLE = str(ROOT / "examples" / "ddp.py")
COUNTS = (2, 4)
ROUNDS = 5
LIMIT_S = 180.0
TRIALS = 50
TORCHRUN_TRIALS = 10
APART_MS = 5
GUARD = "irun-guard"
IMPORT = "import torch.distributed.run"
FAILS = "import os, signal\nif os.environ['RANK'] == '1':\n    raise RuntimeError('loss is nan')\nsignal.pause()"


@dataclass(kw_only=True)
class Starter:
    """A launcher of the example. `memory_kib`: its peaks so far."""

    name: str
    words: Sequence[str]
    program: Sequence[str]
    quiet: Sequence[str]  # output to files only
    named: str  # how its report names the first rank
    memory_kib: list[int] = field(default_factory=list)

    def argv(self, n: int, *more: str) -> list[str]:
        return [*self.words, "--standalone", f"--nproc_per_node={n}", *more]


def own_session() -> list[str]:
    """torchrun's ranks have sessions of their own, and where other work is done at the same time the kernel gives
    every session its share of the CPUs (sched(7), autogroup): ours get the same, at the price of one more process."""
    setsid = shutil.which("setsid")
    return [setsid, "--wait"] if setsid else []


def starters(bed: Bed) -> tuple[Starter, Starter]:
    assert bed.torch_venv
    python = str(bed.torch_venv / "bin" / "python")
    ours = Starter(
        name="infini-run",
        words=[bed.infini_run],
        program=[*own_session(), python, "-u", EXAMPLE],
        quiet=["--console=none"],
        named=r"rank (\d+) on",
    )
    theirs = Starter(
        name="torchrun",
        words=[str(bed.torch_venv / "bin" / "torchrun")],
        program=[EXAMPLE],
        quiet=["--redirects=3"],
        named=r"Root Cause.*?rank\s*: (\d+)",
    )
    return ours, theirs


def environment(bed: Bed) -> dict[str, str]:
    return {**bed.env, "OMP_NUM_THREADS": "1"}


# ---- the first step


def peak_kib(pid: int) -> int:
    """Of the launcher, with its guard where it has one; its ranks are not it."""
    guards = [child for child in children(pid) if Path(os.readlink(f"/proc/{child}/exe")).name == GUARD]
    total = 0
    for one in (pid, *guards):
        status = Path(f"/proc/{one}/status").read_text()
        total += int(status.partition("VmHWM:")[2].split()[0])
    return total


def time_first_step(bed: Bed, starter: Starter, n: int) -> int:
    """ns from the command to the first step; the training then goes on to its end."""
    argv = starter.argv(n, *starter.program)
    reading, writing = os.pipe()
    begin = time.monotonic_ns()
    pid = start(argv, environment(bed), {1: writing})
    os.close(writing)
    said = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while b"first step done" not in said:
            chunk = pipe.read(4096)
            if not chunk:
                break
            said += chunk
        took = time.monotonic_ns() - begin
        if chunk:
            starter.memory_kib.append(peak_kib(pid))
        while pipe.read(65536):
            pass
    expect(argv, finish(pid, LIMIT_S))
    return took


def step_cases(bed: Bed, both: Sequence[Starter]) -> list[Case]:
    assert bed.torch_venv
    python = str(bed.torch_venv / "bin" / "python")
    rounds = bed.rounds(ROUNDS)
    cases = [
        Case(name=f"{starter.name} N={n}", measure=partial(time_first_step, bed, starter, n), rounds=rounds)
        for n in COUNTS
        for starter in both
    ]
    for code in ("pass", IMPORT):
        run = partial(time_command, [python, "-c", code], bed.env)
        cases.append(Case(name=code, measure=run, rounds=rounds))
    return cases


def step_rows(done: dict[str, Case]) -> list[Row]:
    importing_s = (done[IMPORT].median - done["pass"].median) / 1e9
    rows = [Row(figure=IMPORT, value=importing_s, unit="s")]
    for n in COUNTS:
        ours_s, theirs_s = (done[f"{name} N={n}"].median / 1e9 for name in ("infini-run", "torchrun"))
        saved_s = theirs_s - ours_s
        rows += [
            Row(figure=f"first training step N={n}", value=ours_s, unit="s"),
            Row(
                figure=f"- torchrun first training step N={n}",
                value=theirs_s,
                unit="s",
                ratio=theirs_s / ours_s,
                against="infini-run",
            ),
            Row(
                figure=f"first training step N={n}: sooner by",
                value=saved_s,
                unit="s",
                ratio=saved_s / importing_s,
                against="that import",
                bar="sooner",
            ),
        ]
    return rows


def memory_rows(ours: Starter, theirs: Starter) -> list[Row]:
    own_kib, their_kib = median(ours.memory_kib), median(theirs.memory_kib)
    return [
        Row(figure="memory of the launcher of a training", value=own_kib / 1024, unit="MiB"),
        Row(
            figure="- memory of torchrun",
            value=their_kib / 1024,
            unit="MiB",
            ratio=their_kib / own_kib,
            against="infini-run",
            bar="lighter",
        ),
    ]


# ---- failures


def report_of(bed: Bed, argv: Sequence[str]) -> str:
    """What a launcher writes on stderr about a launch that fails."""
    code = finish(start(argv, environment(bed)), LIMIT_S)
    if code == 0:
        raise CommandFailed(f"{' '.join(argv)}\nhas not failed")
    return STDERR_PATH.read_text(errors="replace")


def report_row(bed: Bed, starter: Starter, directory: Path) -> Row:
    program = [bed.python, "-c", FAILS]
    flags = [*starter.quiet, f"--log_dir={directory}"]
    if starter.name == "torchrun":
        flags.append("--no_python")
    lines = len(report_of(bed, starter.argv(4, *flags, *program)).splitlines())
    if starter.name == "torchrun":
        return Row(figure="- torchrun's report of a failing rank", value=lines, unit="lines")
    return Row(figure="report of a failing rank", value=lines, unit="lines", bar="report")


def names_the_first(bed: Bed, starter: Starter, directory: Path) -> bool | None:
    """Rank 3 fails, rank 0 a moment later: is rank 3 named? None where they did not fail that far apart."""
    stamps = directory / "3.stamp", directory / "0.stamp"
    with Gate(directory) as gate:
        fault = [bed.program("fault"), str(gate.up_path), str(gate.go_path)]
        words = ["@3", "up", "go", f"stamp={stamps[0]}", "exit=3"]
        words += ["@0", "up", "go", f"sleep={APART_MS}", f"stamp={stamps[1]}", "exit=1", "@*", "up", "wait"]
        more = ["--no_python"] if starter.name == "torchrun" else []
        argv = starter.argv(4, *more, *fault, *words)
        pid = start(argv, environment(bed))
        try:
            gate.wait_up(4)
        finally:
            gate.go()
            finish(pid, LIMIT_S)
    named = re.search(starter.named, STDERR_PATH.read_text(errors="replace"), re.DOTALL)
    first_ns, second_ns = (int(stamp.read_text()) if stamp.exists() else 0 for stamp in stamps)
    for stamp in stamps:
        stamp.unlink(missing_ok=True)
    if first_ns == 0 or (second_ns and second_ns - first_ns < APART_MS * 1e6 / 2):
        return None
    return named is not None and named[1] == "3"


def first_row(bed: Bed, starter: Starter, directory: Path, trials: int) -> Row:
    verdicts: list[bool] = []
    while len(verdicts) < trials:
        verdict = names_the_first(bed, starter, directory)
        verdicts += [] if verdict is None else [verdict]
    is_peer = starter.name == "torchrun"
    return Row(
        figure=("- torchrun: " if is_peer else "") + f"the first of two named, {APART_MS} ms apart",
        value=sum(verdicts),
        unit=f"of {trials}",
        ratio=sum(verdicts) / trials,
        against="right",
        bar=None if is_peer else "named",
    )


def measure(bed: Bed) -> Figure:
    if bed.torch_venv is None:
        return Figure(name="ddp", rows=[], samples={}, remarks=["ddp left out: no --torch-venv"])
    ours, theirs = starters(bed)
    cases = step_cases(bed, (ours, theirs))
    rows = [*step_rows(interleave(cases)), *memory_rows(ours, theirs)]
    with scratch() as directory:
        rows += [report_row(bed, starter, directory) for starter in (ours, theirs)]
        rows.append(first_row(bed, ours, directory, TRIALS))
        rows.append(first_row(bed, theirs, directory, bed.rounds(TORCHRUN_TRIALS)))
    samples = {**raw(cases), "memory": {starter.name: starter.memory_kib for starter in (ours, theirs)}}
    return Figure(name="ddp", rows=rows, samples=samples)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
