"""Raises KeyboardInterrupt at the n-th line of a launch, for every n, and looks for children that are left.

Says how many lines it walked, or at which one a rank was left.
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


def attempt(at):
    interrupt = Interrupt(at)
    try:
        with infini_run.ProcessLauncher(["sleep", "600"], nproc_per_node=2, grace=0) as launcher:
            sys.settrace(interrupt)
            try:
                launcher.launch()
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
for number in range(1, total + 1):
    attempt(number)
print(f"{total} lines")
