"""Raises KeyboardInterrupt at the n-th line of a launch, for every n, and looks for children that are left.

Arguments: `start` walks through the start; `end` through the end of a rank that fails, `restart` through that and its
restart, with so many steps. Says how many lines there are, or at which one a rank was left.
"""

import os
import sys

import infini_run


class Interrupt:
    """A trace function: counts lines of the package and interrupts the given one."""

    def __init__(self, at):
        self.at = at
        self.count = 0
        self.where = ""

    def __call__(self, frame, event, argument):
        if f"{os.sep}infini_run{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


WHAT, STEPS = sys.argv[1], int(sys.argv[2])
SCRIPT = {
    "start": "exec sleep 600",
    "end": "exit 3",
    "restart": "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exec sleep 600; exit 3",
}
RESTARTS = {"max_restarts": 1, "restart_delay": 0} if WHAT == "restart" else {}


def follow(launcher):
    """Until the last rank that is to start has done so, or all have ended."""
    kinds = []
    while "ended" not in kinds and (WHAT == "end" or kinds.count("started") < 4):
        kinds += [event.kind for event in launcher.events()]


def attempt(at):
    interrupt = Interrupt(at)
    try:
        with infini_run.ProcessLauncher(
            ["sh", "-c", SCRIPT[WHAT]], nproc_per_node=2, grace=0, **RESTARTS
        ) as launcher:
            if WHAT != "start":
                launcher.launch()
            sys.settrace(interrupt)
            try:
                launcher.launch() if WHAT == "start" else follow(launcher)
            finally:
                sys.settrace(None)
    except KeyboardInterrupt:
        assert at > 0
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return interrupt
    sys.exit(f"a rank was left by an interrupt at {interrupt.where}")


attempt(0)  # what is imported once
total = attempt(0).count
for number in range(1, total + 1, max(1, total // STEPS)):
    attempt(number)
print(f"{total} lines")
