"""What a command that waits prints as a job changes: `submit --wait` each state, `logs` why there is nothing to read.

The one rule: a line is printed once for each change, on stderr; stdout has the answer alone.
"""

from __future__ import annotations

import sys

from infini_run.errors import printable
from infini_run.jobs.tables import scheduler_lines, sentence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infini_run.jobs.job import Job
    from infini_run.jobs.status import Status


def wait(job: Job) -> int:
    """Wait for the end of a job, and print its states: on a terminal in one line that changes, else a line for each.

    Returns:
        The exit code of the job.
    """
    from infini_run.jobs.job import is_hopeless

    is_live = sys.stderr.isatty()
    shown = ""

    def changed(status: Status) -> None:
        nonlocal shown
        text = f"{status.name}  {status.headline}" + (f"  ({status.query_error})" if status.query_error else "")
        if is_hopeless(status):
            text += f": {status.advice or status.reason}"
        if text == shown or (status.is_final and is_live):
            return
        shown = text
        print(f"\r\033[K{printable(text)}" if is_live else printable(text), file=sys.stderr, flush=True,
              end="" if is_live else "\n")  # fmt: skip

    status = job.wait(changed=changed)
    if is_live:
        print("\r\033[K", end="", file=sys.stderr)
    print(printable(sentence(status)), flush=True)
    for text in scheduler_lines(status):
        print(f"  {printable(text)}", flush=True)
    return status.exit_code


class SilenceReporter:
    """Prints why a job, or a task, whose log is read has nothing to show; each reason once."""

    def __init__(self, tasks: Sequence[int], print_line: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._print_line = print_line
        self._shown = ""
        self._lost: set[str] = set()

    def explain(self, status: Status) -> None:
        """Print why nothing is to be read, each reason once.

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
            text = f"{status.name} waits in the queue"
            text += f": {status.reason}" if status.reason else ""
            text += f" ({status.hold}: {status.advice})" if status.advice else ""
        elif status.state == "SUSPENDED":
            text = f"{status.name} is suspended by {status.scheduler}"
        if text and text != self._shown:
            self._print_line(text)
        self._shown = text
