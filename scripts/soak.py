"""Launches of one rank, one after the other, in one process; what grows is told. Called by `make soak`.

SOAK=N launches (100,000). Memory, descriptors, threads and children are compared from the end of a warm-up on, in
which the interpreter and the allocator take what they keep.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import infini_run as ir

COUNT = int(os.environ.get("SOAK", "100000"))
WARM_UP = max(500, COUNT // 10)
MOST_KIB = 1024  # the allocator's own movement; a leak of 16 bytes a launch is more, over 100,000


def look() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {
        "rss_kib": int(status.partition("VmRSS:")[2].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children.split()),
    }


def launch(number: int) -> None:
    """In turn with its stdio as ours, through pipes, failing, restarted, and stopped before its end."""
    how = number % 5
    if how < 2:
        ir.run(["true"], console="none" if how else "inherit")
    elif how == 2:
        report = ir.run(["sh", "-c", "echo last words >&2; exit 3"], console="none", check=False)
        assert report.exit_code == 3, report
    elif how == 3:
        report = ir.run(["false"], max_restarts=2, restart_delay=0, check=False)
        assert (report.exit_code, report.restarts) == (1, 2), report
    else:
        with ir.ProcessLauncher(["sleep", "1000"]) as launcher:
            launcher.launch()


def main() -> int:
    began, first = time.monotonic(), None
    for number in range(1, COUNT + 1):
        launch(number)
        if number == min(WARM_UP, COUNT):
            first = look()
        if number % max(1, COUNT // 10) == 0:
            said = " ".join(f"{name}={value}" for name, value in look().items())
            print(f"soak: {number} launches, {time.monotonic() - began:.0f} s: {said}", flush=True)
    last = look()
    grown = {name: last[name] - first[name] for name in last}
    ok = grown["rss_kib"] <= MOST_KIB and all(grown[name] <= 0 for name in ("descriptors", "threads", "children"))
    print(
        f"soak: {COUNT} launches, grown since the warm-up of {min(WARM_UP, COUNT)}: {grown}: {'ok' if ok else 'LEAK'}"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
