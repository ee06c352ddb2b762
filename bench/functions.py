"""(h) Functions on ranks: Launcher.run and Pool.run beside torchrunx, torch.multiprocessing.spawn and loky.

    python bench/functions.py --python=VENV/bin/python     (with torch, torchrunx, loky and infini-run in it)

Every sample is one run() of a trivial function in a fresh process; systems take turns, ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

from bars import Figure, Row, print_figure

TRIAL = str(Path(__file__).with_name("function_trial.py"))
COUNTS = (1, 4, 8)
LIMIT_S = 300.0
PEERS = ("torchrunx", "spawn", "loky")


class Trials:
    """Samples by name, in one table. A system that fails is told of and left out."""

    def __init__(self, python: str) -> None:
        self._python = python
        self.samples: dict[str, list[float]] = {}
        self.peaks: dict[str, float] = {}
        self.remarks: list[str] = []

    def take(self, what: str, system: str, n: int) -> None:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        words = [self._python, TRIAL, what, system, str(n)]
        name = f"{what} {system} {n}"
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environ, check=True)
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            stderr = getattr(error, "stderr", "") or ""
            self.remarks.append(f"{name}: {type(error).__name__} {str(stderr)[-200:]!r}")
            return
        self.samples.setdefault(name, []).extend(answer["samples"])
        if "peak" in answer:
            self.peaks[name] = max(self.peaks.get(name, 0.0), answer["peak"])

    def median(self, what: str, system: str, n: int) -> float:
        return median(self.samples.get(f"{what} {system} {n}", [float("nan")]))


def measure(python: str, rounds: int) -> Figure:
    trials = Trials(python)
    for _ in range(rounds):
        for n in COUNTS:
            for system in ("infini-run", *PEERS):
                trials.take("torch", system, n)
        for system in ("infini-run", "loky"):
            for _ in range(3):
                trials.take("plain", system, 4)
        trials.take("large", "infini-run", 1)
    trials.take("large", "torchrunx", 1)
    for n in (1, 8):
        trials.take("warm", "infini-run", n)
    trials.take("failure", "infini-run", 4)
    return Figure(name="functions", rows=_rows(trials), samples=trials.samples, remarks=trials.remarks)


def _rows(trials: Trials) -> list[Row]:
    rows = []
    for n in COUNTS:
        ours = trials.median("torch", "infini-run", n)
        for peer in PEERS:
            bar = {"torchrunx": f"functions_torchrunx_{min(n, 4)}", "spawn": "functions_spawn"}.get(peer)
            theirs = trials.median("torch", peer, n)
            rows.append(
                Row(
                    figure=f"f that needs torch, cold, {n}",
                    value=ours,
                    unit="s",
                    ratio=theirs / ours,
                    against=f"faster than {peer}",
                    bar=None if n == 4 and peer == "torchrunx" else bar,
                )
            )
    for n in (1, 8):
        value = 1000 * trials.median("warm", "infini-run", n)
        rows.append(Row(figure=f"the same in a warm pool, {n}", value=value, unit="ms", bar=f"functions_warm_{n}"))
    ours, theirs = trials.median("plain", "infini-run", 4), trials.median("plain", "loky", 4)
    rows.append(
        Row(
            figure="f that needs no torch, cold, 4",
            value=1000 * ours,
            unit="ms",
            ratio=ours / theirs,
            against="loky",
            bar="functions_loky",
        )
    )
    value = 1000 * trials.median("failure", "infini-run", 4)
    rows.append(Row(figure="one rank raises, to the caller", value=value, unit="ms", bar="functions_failure"))
    value, theirs = trials.median("large", "infini-run", 1), trials.median("large", "torchrunx", 1)
    rows.append(
        Row(
            figure="a 200 MB result",
            value=value,
            unit="s",
            ratio=theirs / value,
            against="faster than torchrunx",
            bar="functions_large",
        )
    )
    peak = trials.peaks.get("large infini-run 1", float("nan"))
    rows.append(Row(figure="the caller's peak, of its size", value=peak, unit="x", bar="functions_peak"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="a Python with torch, torchrunx, loky and infini-run")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print_figure(measure(args.python, args.rounds))


if __name__ == "__main__":
    main()
