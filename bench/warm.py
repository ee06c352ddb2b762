"""Start and restart of ranks that import torch: torchrun, cold, and with --preload, in turns.

    python bench/warm.py [--python=PYTHON] [--nproc=8] [--rounds=3] [--module=torch] [--no-torchrun]
    python bench/warm.py --files [--python=PYTHON] [--nproc=8] [--module=torch]

Wall: from the launcher's start to the last rank's first line. CPU: of the whole launch. Restart: from a failure
12 s after the fork (sooner, the next attempt would start cold) to the last first line of the next attempt, with
--restart_delay=0. PSS: of the launcher and all its processes, at the first lines.

--files counts the calls that open or look at files (strace -f -c): of one Python that imports the module, and of a
launch of nproc ranks, cold and warm.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from sample import CommandFailed

SCRIPT = """
import os, sys, time
import {module}
os.write(1, f"up {{os.environ['TORCHELASTIC_RESTART_COUNT']}} {{time.time()}}\\n".encode())  # whole lines
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep({lives_s} if os.environ["RANK"] == "0" else 1000)
    os.write(1, f"failed 0 {{time.time()}}\\n".encode())
    sys.exit(1)
sys.stdin.read() if os.environ["RANK"] == "0" else None
"""
LIVES_S = 12
LIMIT_S = 300.0  # then it hangs


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


LAUNCH = str(Path(sys.executable).parent / "infini-run")
FILE_CALLS = ("open", "openat", "stat", "lstat", "newfstatat", "statx", "access", "faccessat2", "readlink")


def command_of(way: str, script: Path, nproc: int, python: str, module: str, launch: str = LAUNCH) -> list[str]:
    words = [f"--nproc_per_node={nproc}", "--standalone", "--max_restarts=1"]
    if way == "torchrun":
        return [python, "-m", "torch.distributed.run", *words, str(script)]
    flags = [f"--preload={module}"] if way == "warm" else []
    return [launch, *words, "--restart_delay=0", "--console=lines", *flags, python, "-u", str(script)]


def measure(command: list[str], nproc: int, env: Mapping[str, str] | None = None) -> dict[str, float]:
    begun_s = time.time()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    limit = threading.Timer(LIMIT_S, process.terminate)
    limit.start()
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
    code = process.wait()
    limit.cancel()
    if code or len(first) < nproc or len(again) < nproc:
        raise CommandFailed(f"{' '.join(command)}\nexit code {code}, after {len(first)} and {len(again)} first lines")
    return {"wall_s": max(first) - begun_s, "cpu_s": cpu_s, "restart_s": max(again) - failed_s, "pss_mib": pss}


def count_file_calls(command: list[str]) -> int:
    """Of a command and all its processes, by strace -f -c."""
    with tempfile.NamedTemporaryFile("r") as table:
        trace = f"trace={','.join(FILE_CALLS)}"
        subprocess.run(["strace", "-f", "-c", "-o", table.name, "-e", trace, *command], check=True, stdout=2)
        rows = [line.split() for line in table.read().splitlines()]
    return sum(int(row[3]) for row in rows if row and row[-1] in FILE_CALLS)


def compare_files(nproc: int, python: str, module: str) -> None:
    program = [python, "-c", f"import {module}"]
    one = count_file_calls(program)
    print(f"one process {one}")
    for way, flags in {"cold": [], "warm": [f"--preload={module}"]}.items():
        calls = count_file_calls([LAUNCH, f"--nproc_per_node={nproc}", "--standalone", *flags, *program])
        print(f"{way:12}{calls:10}{calls / one:10.2f} of one process")


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
    parser.add_argument("--torchrun", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--files", action="store_true")
    asked = parser.parse_args()
    if asked.files:
        compare_files(asked.nproc, asked.python, asked.module)
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ("torchrun", "cold", "warm")[not asked.torchrun :]}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT.format(module=asked.module, lives_s=LIVES_S))
        for _ in range(asked.rounds):
            for way, results in found.items():
                results.append(measure(command_of(way, script, asked.nproc, asked.python, asked.module), asked.nproc))
                print(way, {name: round(value, 2) for name, value in results[-1].items()}, flush=True)
    print(f"{'median':12}{''.join(f'{way:>10}' for way in found)}{'warm/cold':>12}")
    for name in found["cold"][0]:
        row = {way: statistics.median(one[name] for one in results) for way, results in found.items()}
        print(f"{name:12}{''.join(f'{value:10.2f}' for value in row.values())}{row['warm'] / row['cold']:12.3f}")


if __name__ == "__main__":
    main()
