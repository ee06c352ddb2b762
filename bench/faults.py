"""The same faults under infini-run, tini, dumb-init, catatonit and torchrun, where each can run them.

    python bench/faults.py [--torch-venv DIR] [--only WORD] [--quick]

One table is printed, fault by launcher: `right`, or what went wrong. Ranks do not ask for mercy: they are a C
program (fault.c), and every trial has a PID namespace of its own (trial.py). Grace is told to be 1 s where a
launcher can be told. Launchers of one process get one rank where the others get eight.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bed import Bed, add_bed_flags, child_env, make_bed, scratch
from launchers import Launcher, failure_of, find_torchrun, infini_run
from provision import RESULTS, make_venv
from run import machine, stop_in_order
from sample import CommandFailed
from shell import Shell
from trial import LIMIT_S, Ended, Trial, comes_true

RIGHT = "right"
LONG_S = 40.0  # for what is told a grace, and takes its own
SLOW_S = 20.0
SETTLE_S = 1.0
LOST_S = 10.0
RANKS = 8
OVER_GRACE_MS = 50


def is_slow(launcher: Launcher) -> bool:
    """It needs seconds to start and to end."""
    return launcher.name == "torchrun"


@dataclass
class Lab:
    bed: Bed
    directory: Path
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def trial(self, launcher: Launcher, n: int, words: str, *options: str, **kwargs: Any) -> Trial:
        n, limit_s = min(n, launcher.most), SLOW_S if is_slow(launcher) else LIMIT_S
        return Trial(self.bed, launcher, n, words, self.directory, options=options, limit_s=limit_s, **kwargs)

    def trials(self, launcher: Launcher, full: int) -> int:
        return max(3, full // (10 if is_slow(launcher) else 1) // (10 if self.bed.quick else 1))


Fault = Callable[[Lab, Launcher], str]
FAULTS: dict[str, tuple[Fault, Callable[[Launcher], bool]]] = {}


def everybody(_launcher: Launcher) -> bool:
    return True


def of_many(launcher: Launcher) -> bool:
    return launcher.most > 1


def fault(name: str, who: Callable[[Launcher], bool] = everybody) -> Callable[[Fault], Fault]:
    def add(function: Fault) -> Fault:
        FAULTS[name] = function, who
        return function

    return add


# ---- verdicts


def hangs(limit_s: float) -> str:
    return f"hangs (killed after {limit_s:.0f} s)"


def verdict(trial: Trial, code: int) -> str:
    """It ended, in time, with that exit code, and left nothing."""
    ended = trial.end(trial.limit_s)
    if ended is None:
        return hangs(trial.limit_s)
    wrong = [] if ended.code == code else [f"exit {ended.code} instead of {code}"]
    return ", ".join(wrong + left(trial)) or RIGHT


def left(trial: Trial) -> list[str]:
    """What is there still, after a moment for what is dying."""
    if comes_true(lambda: not trial.alive(), SETTLE_S) is not None:
        return []
    counts = {"ranks": len(trial.alive("fault")), "grandchildren": len(trial.alive("left"))}
    return [f"{count} of {trial.n} {what} left" for what, count in counts.items() if count] or ["launcher left"]


def stop_verdict(trial: Trial) -> str:
    trial.gate.wait_up(trial.n)
    trial.signal(signal.SIGTERM)
    return verdict(trial, 143)


# ---- at the start


@fault("SIGCHLD ignored at entry")
def sigchld_ignored(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, 1, "up exit=7", "-i", str(int(signal.SIGCHLD))) as trial:
        return verdict(trial, failure_code(launcher, 7))


@fault("stdin closed at entry")
def stdin_closed(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, 1, "up exit=7", "-0") as trial:
        return verdict(trial, failure_code(launcher, 7))


@fault("nohup: an ignored HUP stays ignored")
def nohup(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, 1, "up go exit=0", "-i", str(int(signal.SIGHUP))) as trial:
        trial.gate.wait_up(1)
        status = Path(f"/proc/{trial.worker()}/status").read_text()
        ignored = int(re.findall(r"SigIgn:\t(\w+)", status)[0], 16) & 1 << signal.SIGHUP - 1
        trial.signal(signal.SIGHUP)
        time.sleep(0.2)  # to be passed on, or to be obeyed
        trial.gate.go()
        ended = verdict(trial, 0)
        return ended if ignored or ended != RIGHT else "the rank does not ignore it"


def lost_terms(lab: Lab, launcher: Launcher, window_us: float) -> str:
    """A trial that does not end at once is left alone while others run: it is lost if it never ends."""
    trials, lost, leaves = lab.trials(launcher, 200), 0, 0
    with ExitStack() as stack:
        late: list[Trial] = []
        for _ in range(trials):
            after = str(int(lab.chance.uniform(0, window_us)))
            trial = stack.enter_context(lab.trial(launcher, RANKS, "wait", "-k", after))
            if trial.end(LOST_S if is_slow(launcher) else 0.2) is None:
                late.append(trial)
            else:
                leaves += bool(left(trial))
                trial.close()
        for trial in late:
            ended = trial.end(0.1 if is_slow(launcher) else LOST_S / len(late))
            lost += ended is None
            leaves += ended is not None and bool(left(trial))
    wrong = [f"{lost} of {trials} lost"] if lost else []
    wrong += [f"ranks left in {leaves} of {trials}"] if leaves else []
    return ", ".join(wrong) or RIGHT


@fault("TERM in the first 3 ms (200 times)")
def term_early(lab: Lab, launcher: Launcher) -> str:
    return lost_terms(lab, launcher, 3000)


@fault("TERM at any moment of its own start (200 times)")
def term_while_starting(lab: Lab, launcher: Launcher) -> str:
    stamp = lab.directory / "stamp"
    took_us = []
    for _ in range(3):
        with lab.trial(launcher, RANKS, f"@0 stamp={stamp} @* up wait") as trial:
            trial.gate.wait_up(trial.n)
            took_us.append((int(stamp.read_text()) - trial.started_ns()) / 1e3)
    return lost_terms(lab, launcher, median(took_us))


@fault("TERM while 8 ranks are being created (10 times)", of_many)
def term_while_spawning(lab: Lab, launcher: Launcher) -> str:
    verdicts = []
    for _ in range(10):
        with lab.trial(launcher, RANKS, "up wait") as trial:
            trial.gate.wait_up(1)
            trial.signal(signal.SIGTERM)
            verdicts.append(verdict(trial, 143))
    return tally(verdicts)


def tally(verdicts: list[str]) -> str:
    wrong = [v for v in verdicts if v != RIGHT]
    return f"{max(set(wrong), key=wrong.count)} (wrong in {len(wrong)} of {len(verdicts)})" if wrong else RIGHT


# ---- failures


def failure_code(launcher: Launcher, code: int) -> int:
    """torchrun's own is 1 for every failure: it says so, and passes the rank's on in a message."""
    return 1 if launcher.name == "torchrun" else code


def blamed(launcher: Launcher, trial: Trial, ended: Ended) -> str:
    """Who the launcher says was first; ranks exit with their own number."""
    if launcher.name != "torchrun":
        return str(ended.code)
    found = re.search(r"Root Cause.*?rank\s*: (\d+)", trial.err(), re.DOTALL)
    return found[1] if found else "nobody"


@fault("two ranks fail 20 ms apart: who was first (5 times)", of_many)
def first_cause(lab: Lab, launcher: Launcher) -> str:
    verdicts = []
    for _ in range(5):
        with lab.trial(launcher, RANKS, "@5 up go exit=5 @2 up go sleep=20 exit=2 @* up wait") as trial:
            trial.gate.wait_up(RANKS)
            trial.gate.go()
            ended = trial.end(LONG_S)
            who = blamed(launcher, trial, ended) if ended else "nobody"
            verdicts.append(RIGHT if who == "5" else f"{who} instead of 5")
    return tally(verdicts)


@fault("63 ranks ignore TERM when one fails: our exit, over the grace", of_many)
def deaf_others(lab: Lab, launcher: Launcher) -> str:
    late_ms, wrong = [], []
    for _ in range(lab.trials(launcher, 5)):
        stamp = lab.directory / "stamp"
        with lab.trial(launcher, 64, f"@63 up go stamp={stamp} exit=3 @* ignore up wait") as trial:
            trial.gate.wait_up(64)
            trial.gate.go()
            ended = trial.end(LONG_S)
            if ended is None:
                return hangs(LONG_S)
            late_ms.append((ended.at_ns - int(stamp.read_text())) / 1e6 - 1000)
            wrong += left(trial)
    middle_ms = median(late_ms)
    wrong += [] if middle_ms <= OVER_GRACE_MS else ["late"]
    return f"{', '.join(wrong) or RIGHT} (+{middle_ms:.0f} ms)"


# ---- stopping


@fault("a rank ignores TERM")
def deaf_rank(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, 1, "ignore up wait") as trial:
        return stop_verdict(trial)


@fault("a rank is stopped (SIGSTOP) when TERM comes")
def stopped_rank(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, 1, "up wait") as trial:
        trial.gate.wait_up(1)
        pid = trial.worker()
        os.kill(pid, signal.SIGSTOP)
        comes_true(lambda: any(p.state == "T" for p in trial.alive("fault")), LIMIT_S)
        trial.signal(signal.SIGTERM)
        return verdict(trial, 143)


@fault("grace is as told (1 s)", of_many)
def grace(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, 1, "ignore up wait") as trial:
        trial.gate.wait_up(1)
        begin_ns = trial.signal(signal.SIGTERM)
        ended = trial.end(LONG_S)
        if ended is None:
            return hangs(LONG_S)
        took_s = (ended.at_ns - begin_ns) / 1e9
        return f"{RIGHT if 0.99 < took_s < 2 else 'wrong'} ({took_s:.2f} s)"


@fault("SEGV is sent to the launcher")
def segv(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, RANKS, "up wait") as trial:
        trial.gate.wait_up(trial.n)
        trial.signal(signal.SIGSEGV)
        return verdict(trial, 139)


@fault("the launcher is SIGKILLed: what lives 1 s later")
def killed_launcher(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, RANKS, "daemon up wait") as trial:
        trial.gate.wait_up(trial.n)
        trial.signal(signal.SIGKILL)
        took_s = comes_true(lambda: not trial.alive(), 1.0)
        return ", ".join(left(trial)) if took_s is None else f"{RIGHT} ({1000 * took_s:.0f} ms)"


# ---- what ranks leave


@fault("a setsid'ed grandchild is left after success")
def stray_after_success(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, RANKS, "daemon up exit=0") as trial:
        return verdict(trial, 0)


@fault("the same after a failure")
def stray_after_failure(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, RANKS, "daemon up go @0 exit=3 @* wait") as trial:
        trial.gate.wait_up(trial.n)
        trial.gate.go()
        return verdict(trial, failure_code(launcher, 3))


@fault("the same after TERM")
def stray_after_term(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, RANKS, "daemon up wait") as trial:
        return stop_verdict(trial)


@fault("a grandchild holds the stdout pipe: its reader")
def held_pipe(lab: Lab, launcher: Launcher) -> str:
    path = lab.directory / "pipe"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with lab.trial(launcher, 1, "daemon up exit=0", "-o", str(path)) as trial:
            if trial.end(trial.limit_s) is None:
                return hangs(trial.limit_s)
            is_over = comes_true(lambda: read_some(reader) == b"", LIMIT_S)
            return "waits (5 s and on)" if is_over is None else RIGHT
    finally:
        os.close(reader)


def read_some(fd: int) -> bytes | None:
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None


@fault("as process 1: 40 orphans end")
def orphans(lab: Lab, launcher: Launcher) -> str:
    with lab.trial(launcher, 1, "orphans=40 up wait", is_process_1=True) as trial:
        trial.gate.wait_up(1)
        reaped = comes_true(lambda: trial.zombies() == 0, SETTLE_S)
        return RIGHT if reaped is not None else f"{trial.zombies()} of 40 zombies"


# ---- at a terminal


@fault("Ctrl-Z, and fg again")
def suspended(lab: Lab, launcher: Launcher) -> str:
    with Shell() as shell, lab.trial(launcher, 1, "up go exit=0", "-t", **shell.place()) as trial:
        shell.see_prompt(LIMIT_S)
        shell.type(shlex.join(trial.argv) + "\n")
        trial.gate.wait_up(1)
        shell.type("\x1a")
        if not shell.see_prompt(LIMIT_S):
            return "the shell hangs"
        if not any(p.state == "T" for p in trial.alive("fault")):
            return "the rank runs on"
        shell.type("fg\n")
        trial.gate.go()
        return RIGHT if shell.see_prompt(LIMIT_S) else "does not go on"


@fault("started in the background")
def in_background(lab: Lab, launcher: Launcher) -> str:
    with Shell() as shell, lab.trial(launcher, 1, "up wait", "-t", **shell.place()) as trial:
        shell.see_prompt(LIMIT_S)
        before = shell.foreground
        shell.type(shlex.join(trial.argv) + " &\n")
        trial.gate.wait_up(1)
        return RIGHT if shell.foreground == before else "steals the terminal"


# ---- all of them


def find_launchers(bed: Bed) -> tuple[list[Launcher], list[str]]:
    """Those that are here, and a remark for each that is not. Signals to groups, where one can choose: as we do."""
    found, remarks = [infini_run(bed, "--grace=1")], []
    for name, flags in {"tini": ["-s", "-g"], "dumb-init": [], "catatonit": ["-g"]}.items():
        path = shutil.which(name)
        if path:
            words = [path, *flags, "--"]
            found.append(Launcher(name=name, argv=lambda _n, command, words=words: [*words, *command], most=1))
        else:
            remarks.append(f"{name} is not installed")
    torchrun = find_torchrun(bed, "--shutdown-timeout=1") if bed.torch_venv else None
    failure = failure_of(bed, torchrun) if torchrun else "give --torch-venv"
    if torchrun and not failure:
        found.append(torchrun)
    else:
        remarks.append(f"torchrun left out: {failure}")
    return found, remarks


def judge(lab: Lab, name: str, launcher: Launcher) -> str:
    function, can_run = FAULTS[name]
    if not can_run(launcher):
        return "n/a"
    try:
        return function(lab, launcher)
    except CommandFailed as error:
        return f"broken: {' '.join(str(error).split())[:60]}"


def format_verdicts(rows: dict[str, dict[str, str]], names: list[str]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    cells = [["fault", *names], *[[name, *(row[n] for n in names)] for name, row in rows.items()]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names) + 1)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_bed_flags(parser, venv_required=False)
    parser.add_argument("--only", default="", help="the faults with this word in their names")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, stop_in_order)
    RESULTS.mkdir(exist_ok=True)
    about = machine()
    bed = make_bed(args, args.venv or make_venv(RESULTS / "venv", child_env(os.environ)))
    launchers, remarks = find_launchers(bed)
    rows: dict[str, dict[str, str]] = {}
    with scratch() as directory:
        lab = Lab(bed, directory)
        for name in [name for name in FAULTS if args.only in name]:
            begin = time.monotonic()
            rows[name] = {launcher.name: judge(lab, name, launcher) for launcher in launchers}
            print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    print(format_verdicts(rows, [launcher.name for launcher in launchers]))
    print()
    print("{cpu}, {cores} cores, Linux {kernel}, Python {python}, {date}".format(**about))
    for remark in remarks:
        print(f"- {remark}")
    record = {"machine": about, "rows": rows, "remarks": remarks}
    (RESULTS / "faults.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["infini-run"].startswith((RIGHT, "n/a")) for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
