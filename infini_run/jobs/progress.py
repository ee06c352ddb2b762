"""What a command that waits prints as a job changes: `submit --wait` each state, `logs` why there is nothing to read.

The one rule: each change prints one line, on stderr; stdout has the answer alone.
"""

from __future__ import annotations

import _signal as signal
import os
import sys

from infini_run.errors import InfiniRunError, printable
from infini_run.jobs.lines import print_answer, print_text, write_line
from infini_run.jobs.schedulers.slurm_output import is_never_met
from infini_run.jobs.tables import scheduler_lines, sentence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from infini_run.jobs.job import Job
    from infini_run.jobs.status.job_status import Status


def wait(job: Job) -> int:
    """Wait for the end of a job, and print its states: on a terminal in one line that changes, else a line for each.

    Returns:
        The exit code of the job; 1 if it is LOST.

    Raises:
        InfiniRunError: It waits for another job with a different end, so it never begins.
    """
    from infini_run.jobs.job import is_hopeless

    is_live = sys.stderr.isatty()
    _name_job_at_stop(job.name, b"\n" if is_live else b"")
    shown = ""

    def changed(status: Status) -> None:
        nonlocal shown
        text = f"{status.name}  {status.headline}" + (f"  ({status.query_error})" if status.query_error else "")
        if is_hopeless(status):
            text += f": {status.advice or status.reason}"
        if status.state == "QUEUED" and is_never_met(status.reason):
            print_text("\r\033[K" if is_live else "", end="")
            why = f"({status.reason}): its dependency cannot be met"
            raise InfiniRunError(f"job {job.name} cannot start {why}; run infini-job cancel {job.name}")
        if text == shown or (status.is_final and is_live):
            return
        shown = text
        print_text(f"\r\033[K{printable(text)}" if is_live else printable(text), end="" if is_live else "\n")

    status = job.wait(changed=changed)
    if is_live:
        print_text("\r\033[K", end="")
    print_answer(
        "\n".join((printable(sentence(status)), *(f"  {printable(each)}" for each in scheduler_lines(status))))
    )
    return 1 if status.exit_code is None else status.exit_code


def _name_job_at_stop(name: str, before: bytes) -> None:
    """Print the name of the job at a Ctrl-C, which ends the wait, and not the job. Then let the signal act."""

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(2, before)
        write_line(
            f"job {name} keeps running; run infini-job logs -f {name} to follow it, or infini-job cancel {name} "
            "to stop it"
        )
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # else the parent ignores it for its children
            signal.signal(number, stop)


class SilenceReporter:
    """The printer of the reasons why a job, or a task, has nothing to show in its log; each reason once."""

    def __init__(self, tasks: Sequence[int], print_line: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._print_line = print_line
        self._shown = ""
        self._lost: set[str] = set()

    def explain(self, status: Status) -> None:
        """Print why there is nothing to read, each reason once.

        Args:
            status: The latest, of the job or the array.
        """
        for one in status.tasks or (status,):
            is_chosen = not self._tasks or one.task in self._tasks
            if one.state == "LOST" and is_chosen and one.name not in self._lost:
                self._lost.add(one.name)
                self._print_line(f"{one.name} is LOST: {one.reason}")
        text = ""
        has_begun = bool(status.tasks) and status.attempt >= 0  # of an array some task always waits
        if status.state == "QUEUED" and not status.is_final and not has_begun:
            text = f"{status.name} is waiting in the queue"
            text += f": {status.reason}" if status.reason else ""
            text += f" ({status.hold}: {status.advice})" if status.advice else ""
        elif status.state == "SUSPENDED":
            text = f"{status.name} is suspended by {status.scheduler}"
        if text and text != self._shown:
            self._print_line(text)
        self._shown = text
