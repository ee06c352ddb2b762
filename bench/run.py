"""All figures, one table, one JSON file: `python bench/run.py [--quick | --whole] [--torch-venv DIR]`.

Compiles the C programs and installs infini-run into a fresh venv, both under bench/results/. Nothing is
installed for the peers: they are used where they are on PATH (torchrun also from --torch-venv).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import channel
import core
import crew
import ddp
import engines
import first_line
import flood
import hang
import idle
import jobs
import jobs_pbs
import launch
import link
import listing
import many
import membership
import memory
import output
import teardown
from bars import Figure, Row, format_table
from bed import Bed, add_bed_flags, child_env, make_bed
from provision import RESULTS, make_venv
from sample import CommandFailed

FIGURES = {
    "launch": launch.measure,
    "core": core.measure,
    "teardown": teardown.measure,
    "output": output.measure,
    "memory": memory.measure,
    "idle": idle.measure,
    "first_line": first_line.measure,
    "hang": hang.measure,
    "listing": listing.measure,
    "ddp": ddp.measure,
    "many": many.measure,
    "membership": membership.measure,
    "engines": engines.measure,
    "channel": channel.measure,
    "jobs": jobs.measure,
    "jobs_pbs": jobs_pbs.measure,
    "crew": crew.measure,
    "flood": flood.measure,
    "link": link.measure,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_bed_flags(parser, venv_required=False)
    parser.add_argument("--only", help=f"some of the figures: {','.join(FIGURES)}")
    args = parser.parse_args()
    args.only = args.only.split(",") if args.only else list(FIGURES)
    unknown = [name for name in args.only if name not in FIGURES]
    if unknown:
        parser.error(f"no such figure: {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    return args


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }


def measure_all(bed: Bed, names: list[str]) -> tuple[list[Figure], dict[str, str]]:
    """One figure after the other; one that breaks does not take the rest with it."""
    figures, broken = [], {}
    for name in names:
        begin = time.monotonic()
        try:
            figures.append(FIGURES[name](bed))
        except CommandFailed as error:
            broken[name] = str(error)
        print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return figures, broken


def write_json(at: Path, about: dict[str, Any], figures: list[Figure], broken: dict[str, str]) -> None:
    record = {
        "machine": about,
        "rows": [row.record() for figure in figures for row in figure.rows],
        "remarks": [remark for figure in figures for remark in figure.remarks],
        "broken": broken,
        "samples": {figure.name: figure.samples for figure in figures},
    }
    at.write_text(json.dumps(record, indent=1) + "\n")


def print_report(about: dict[str, Any], figures: list[Figure], broken: dict[str, str]) -> None:
    rows: list[Row] = [row for figure in figures for row in figure.rows]
    print(format_table(rows))
    print()
    print("{cpu}, {cores} cores, Linux {kernel}, Python {python}, {date}".format(**about))
    for figure in figures:
        for remark in figure.remarks:
            print(f"- {remark}")
    for name, why in broken.items():
        print(f"- {name} could not be measured: {' '.join(why.split())}")


def stop_in_order(*_: object) -> None:
    """At SIGTERM: what was set up is taken down, or a bed's daemons would stay."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, stop_in_order)
    RESULTS.mkdir(exist_ok=True)
    about = machine()
    venv = args.venv or make_venv(RESULTS / "venv", child_env(os.environ))
    figures, broken = measure_all(make_bed(args, venv), args.only)
    print_report(about, figures, broken)
    write_json(RESULTS / "bench.json", about, figures, broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
