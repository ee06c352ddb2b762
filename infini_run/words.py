"""What ranks said: their last STATUS=, the message in an error file, the last lines of stderr.

Read before the group is closed; any bytes give a text or none.
"""

from __future__ import annotations

from infini_run.error_file import read_error_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from infini_run.group import Group
    from infini_run.plan import Worker

_LAST_LINES = 20  # kept in the report; its text shows fewer


def last_words(group: Group, index: int, worker: Worker) -> tuple[str, tuple[str, ...]]:
    """The message in a worker's error file, its last lines of stderr."""
    text = group.tail(index).decode("utf-8", "replace")
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    message = read_error_file(worker.error_file) if worker.error_file else ""
    return message, tuple(line for line in lines if line)[-_LAST_LINES:]


def statuses(group: Group, workers: Iterable[Worker]) -> dict[int, str]:
    """The last STATUS= of each rank that told one."""
    found = {worker.rank: group.status(index).decode("utf-8", "replace") for index, worker in enumerate(workers)}
    return {rank: text for rank, text in found.items() if text}
