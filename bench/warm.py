"""Start and restart of ranks that import torch: cold and with --preload, in turns.

    python bench/warm.py [--python=PYTHON] [--nproc=8] [--rounds=3] [--module=torch]

Wall: from the launcher's start to the last rank's first line. CPU: of the whole launch. Restart: from a failure
12 s after the fork (sooner, the next attempt would start cold) to the last first line of the next attempt, with
--restart_delay=0. PSS: of the launcher and all its processes, at the first lines.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time
import {module}
print("up", os.environ["TORCHELASTIC_RESTART_COUNT"], time.time(), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep({lives_s} if os.environ["RANK"] == "0" else 1000)
    print("failed", 0, time.time(), flush=True)
    sys.exit(1)
sys.stdin.read() if os.environ["RANK"] == "0" else None
"""
LIVES_S = 12


def descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        try:
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
        except OSError:
            continue
    return found


def pss_mib(pid: int) -> float:
    total = 0
    for each in descendants(pid):
        try:
            total += int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{each}/smaps_rollup").read_text(), re.M)[1])
        except OSError:
            continue
    return total / 1024


def measure(script: Path, nproc: int, python: str, flags: list[str]) -> dict[str, float]:
    words = [f"--nproc_per_node={nproc}", "--standalone", "--max_restarts=1", "--restart_delay=0", "--console=lines"]
    command = [str(Path(sys.executable).parent / "infini-run"), *words, *flags, python, "-u", str(script)]
    begun_s, before = time.time(), os.times()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    first, again, failed_s, cpu_s, pss = [], [], 0.0, 0.0, 0.0
    for line in process.stdout:
        kind, count, at = line.split()
        if kind == "failed":
            failed_s = float(at)
        elif count == "0":
            first.append(float(at))
            if len(first) == nproc:
                pss, cpu_s = pss_mib(process.pid), sum(map(cpu_of, descendants(process.pid)))
        else:
            again.append(float(at))
            if len(again) == nproc:
                process.stdin.close()
    assert process.wait() == 0, before
    return {"wall_s": max(first) - begun_s, "cpu_s": cpu_s, "restart_s": max(again) - failed_s, "pss_mib": pss}


def cpu_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--module", default="torch")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT.format(module=asked.module, lives_s=LIVES_S))
        ways = {"cold": [], "warm": [f"--preload={asked.module}"]}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(asked.rounds):
            for way, flags in ways.items():
                found[way].append(measure(script, asked.nproc, asked.python, flags))
                print(way, {name: round(value, 2) for name, value in found[way][-1].items()}, flush=True)
    print(f"{'median':12}{'cold':>10}{'warm':>10}{'ratio':>10}")
    for name in found["cold"][0]:
        cold, warm = (statistics.median(one[name] for one in found[way]) for way in ("cold", "warm"))
        print(f"{name:12}{cold:10.2f}{warm:10.2f}{warm / cold:10.3f}")


if __name__ == "__main__":
    main()
