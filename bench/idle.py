"""(f) Idle: what the launcher does while 8 ranks sleep. It should be nothing at all.

Once as it is by default, once with --console=lines into a pipe, and once with what finds hangs and slow ranks. Two
windows: one counts context switches (a wakeup is one) from /proc, one counts system calls with strace. They are apart
because strace itself wakes what it watches. Every process between us and the ranks counts as the launcher.

--hang_timeout looks at each rank that writes nothing, once in that time. Of such a look, at ranks that compute,
there are the system calls, and the instructions (valgrind, which knows no pidfd): those of a launcher that looks
longer, less those of one that looks for a short time, so without the imports for the first look.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from gate import Gate
from launchers import Launcher, find_peer, infini_run
from sample import CommandFailed, finish, last_stderr, start

RANKS = 8
SETTLE_S = 1.0
WINDOW_S = 5.0
QUICK_WINDOW_S = 2.0
ATTACH_S = 0.2
HANG_S = 0.5
WATCHED = ("--progress_timeout=1h", "--report=/dev/shm/infini-bench-report.json")
RANK_PROGRAMS = ("rank", "sleep", "coreutils", "busybox")


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def launcher_pids(pid: int) -> list[int]:
    """The process itself and all below it that are not ranks (a guard, an agent)."""
    pids = [pid]
    for child in children(pid):
        if Path(os.readlink(f"/proc/{child}/exe")).name not in RANK_PROGRAMS:
            pids += launcher_pids(child)
    return pids


def switches(pids: list[int]) -> int:
    """Context switches so far of all threads, voluntary (it slept again) or not."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            lines = (task / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return total


def count_switches(pids: list[int], window_s: float) -> int:
    before = switches(pids)
    time.sleep(window_s)
    return switches(pids) - before


def count_calls(bed: Bed, pids: list[int], window_s: float, log: Path) -> int:
    """System calls in a window, less those that the tracer itself causes: it interrupts what it attaches to, and a
    wait for signals is then begun anew (signal(7))."""
    return max(0, traced_calls(bed, pids, window_s, log) - traced_calls(bed, pids, ATTACH_S, log))


def traced_calls(bed: Bed, pids: list[int], window_s: float, log: Path) -> int:
    """System calls under strace. A call that lasts the whole window is none: it ends in `<detached ...>`, or, where
    another process's line came between, in `<unfinished ...>`; one that came back after that has a second line."""
    strace = shutil.which("strace")
    if strace is None:
        raise CommandFailed("strace is not installed")
    targets = [word for pid in pids for word in ("-p", str(pid))]
    tracer = start([strace, "-f", "-qq", "-o", str(log), *targets], bed.env)
    time.sleep(window_s)
    os.kill(tracer, signal.SIGINT)
    finish(tracer)
    lines = log.read_text().splitlines()
    return sum(not line.endswith(("<detached ...>", "<unfinished ...>")) for line in lines)


@contextmanager
def idle_job(
    bed: Bed,
    launcher: Launcher,
    directory: Path,
    fds: Mapping[int, int | Path] | None = None,
    how: str = "idle",
) -> Iterator[list[int]]:
    """A launcher whose ranks all sleep, or do as rank.c has it; gives its pids."""
    with Gate(directory) as gate:
        argv = launcher.argv(RANKS, [bed.program("rank"), how, str(gate.up_path)])
        pid = start(argv, {**bed.env, **launcher.env}, fds)
        try:
            gate.wait_up(RANKS)
            time.sleep(SETTLE_S)
            yield launcher_pids(pid)
        finally:
            os.kill(pid, signal.SIGTERM)
            finish(pid)


def count_idle(
    bed: Bed, launcher: Launcher, window_s: float, fds: Mapping[int, int | Path] | None = None
) -> dict[str, int]:
    counts = {}
    with scratch() as directory, idle_job(bed, launcher, directory, fds) as pids:
        counts["context switches"] = count_switches(pids, window_s)
        if shutil.which("strace"):
            counts["system calls"] = count_calls(bed, pids, window_s, directory / "strace.log")
    return counts


def count_idle_lines(bed: Bed, window_s: float) -> dict[str, int]:
    """What ranks print goes through the launcher into a pipe."""
    reading, writing = os.pipe()
    try:
        return count_idle(bed, infini_run(bed, "--console=lines"), window_s, {1: writing, 2: writing})
    finally:
        os.close(reading)
        os.close(writing)


def watching(bed: Bed) -> Launcher:
    return infini_run(bed, f"--hang_timeout={HANG_S}", "--console=inherit")


def count_looks(bed: Bed, window_s: float) -> dict[str, float]:
    """What one look at one rank costs."""
    looks = RANKS * window_s / HANG_S
    costs = {}
    with scratch() as directory:
        if shutil.which("strace"):
            with idle_job(bed, watching(bed), directory, how="work") as pids:
                costs["system calls"] = count_calls(bed, pids, window_s, directory / "strace.log") / looks
        if shutil.which("valgrind"):
            counts = [count_instructions(bed, window_s * times, directory) for times in (1, 2)]
            costs["instructions"] = (counts[1] - counts[0]) / looks
    return costs


def count_instructions(bed: Bed, window_s: float, directory: Path) -> int:
    """Of a whole launcher whose ranks compute for that long."""
    counts = directory / "counts"
    tool = [str(shutil.which("valgrind")), "-q", "--tool=cachegrind", "--cache-sim=no"]
    tool += [f"--cachegrind-out-file={counts}", bed.python, "-m", "infini_run"]
    launcher = watching(bed)
    under = Launcher(
        name="valgrind",
        argv=lambda n, command: [*tool, *launcher.argv(n, command)[1:]],
        env={"INFINI_RUN_DEBUG": "fork,nopidfd,nocgroup"},
    )
    with idle_job(bed, under, directory, how="work"):
        time.sleep(window_s)
    found = re.search(r"^summary: (\d+)$", counts.read_text(errors="replace"), re.MULTILINE)
    if found is None:
        raise CommandFailed(f"valgrind has counted nothing; stderr:\n{last_stderr()}")
    return int(found[1])


def measure(bed: Bed) -> Figure:
    window_s = QUICK_WINDOW_S if bed.quick else WINDOW_S
    unit = f"in {window_s:.0f} s"
    samples = {
        "idle": count_idle(bed, infini_run(bed), window_s),
        "idle, lines into a pipe,": count_idle_lines(bed, window_s),
        "idle, --progress_timeout --report,": count_idle(bed, infini_run(bed, *WATCHED), window_s),
    }
    rows = [
        Row(figure=f"{name} {what}", value=count, unit=unit, bar="idle")
        for name, counts in samples.items()
        for what, count in counts.items()
    ]
    costs = count_looks(bed, window_s)
    rows += [
        Row(figure=f"- --hang_timeout: {what} of a look at one rank", value=round(cost, 1), unit="")
        for what, cost in costs.items()
    ]
    remarks = [] if "system calls" in samples["idle"] else ["strace is not installed: no system calls counted"]
    torchrun = find_peer(bed, "torchrun")
    if torchrun:
        samples["torchrun"] = counts = count_idle(bed, torchrun, window_s)
        rows += [Row(figure=f"- torchrun idle {what}", value=count, unit=unit) for what, count in counts.items()]
    return Figure(name="idle", rows=rows, samples={**samples, "a look": costs}, remarks=remarks)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
