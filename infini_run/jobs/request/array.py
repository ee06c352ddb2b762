"""Arrays of tasks: the notation of sbatch's --array, and the names of one task at infini-job and at schedulers. Pure.

The one rule: a task of the array NAME is NAME.K, whatever its scheduler calls it: Slurm 12_K, PBS 12[K].server.
"""

from __future__ import annotations

from infini_run.record import record
from infini_run.value_types import number

MOST = 1000  # the last index that Slurm takes by default (MaxArraySize: 1001)
_FORMS = "0-9, 1,3,7, 0-20:5, or 0-9%3 (at most three at a time)"


@record
class Array:
    """The indices of its tasks, each once, in their order. at_once: how many may run at a time; 0: any number."""

    tasks: tuple[int, ...]
    at_once: int = 0

    @property
    def range(self) -> str:
        """`first-last:step`, as PBS has them; "": it is no such range, or has one task."""
        steps = {after - before for before, after in zip(self.tasks, self.tasks[1:], strict=False)}
        step = steps.pop() if len(steps) == 1 else 0
        return f"{self.tasks[0]}-{self.tasks[-1]}" + (f":{step}" if step > 1 else "") if step else ""


def parse(text: str) -> Array:
    """Read a list of indices.

    Args:
        text: `0-9`, `1,3,7` or `0-20:5`, each with `%M` if at most M tasks may run at a time.

    Raises:
        ValueError: It is no such list; the text names the first thing that is wrong, in one sentence.
    """
    indices, percent, most = text.partition("%")
    if not indices:
        raise ValueError(f"missing index; use {_FORMS}")
    tasks = {index for item in indices.split(",") for index in _range(item)}
    at_once = _number(most, "%M") if percent else 0
    if percent and not at_once:
        raise ValueError("%0 would run no task; use %1 or more")
    return Array(tasks=tuple(sorted(tasks)), at_once=at_once)


def _range(item: str) -> range:
    span, colon, step = item.partition(":")
    first, dash, last = span.partition("-")
    if not item:
        raise ValueError(f"missing index beside a comma; use {_FORMS}")
    if colon and not dash:
        raise ValueError(f"{item!a} has a step but no range; use 0-20:5")
    start = _number(first, "an index")
    end = _number(last, "an index") if dash else start
    width = _number(step, "a step") if colon else 1
    if end < start:
        raise ValueError(f"range {span} ends before it starts")
    if not width:
        raise ValueError(f"the step of {item} is 0; use 1 or more")
    return range(start, end + 1, width)


def _number(text: str, what: str) -> int:
    """Read a number. what: the part of the list, with its article. Raises ValueError if it is no number, or too
    large."""
    value = number(text)
    if value is None or value < 0:
        fault = f"{text!a} is not {what}" if text else f"missing {what.split()[-1]}"
        raise ValueError(f"{fault}; use {_FORMS}")
    if value > MOST:
        raise ValueError(f"expected {what} of at most {MOST}, not {value}")
    return value


def notation(text: str) -> str:
    """Check a list of indices, and return it as it is. Raises ValueError, as `parse`."""
    parse(text)
    return text


def indices(text: str) -> tuple[int, ...]:
    """Read the indices of tasks: as `parse`, without `%M`. Raises ValueError."""
    if "%" in text:
        raise ValueError("%M is only for --array; use 4, 0,3-5, or 0-20:5")
    return parse(text).tasks


def split(name: str) -> tuple[str, int]:
    """Return NAME and K of `NAME.K`; of any other name itself and -1."""
    base, _, index = name.rpartition(".")
    return (base, int(index)) if base and index.isdecimal() and f"{int(index[:5])}" == index else (name, -1)


def own_name(queue_name: str) -> str:
    """Return infini-job's name of the job, or the task, from the name at its scheduler (`JobRequest.queue_name`)."""
    base, index = split(queue_name)
    name = base.rpartition(".")[2]
    return f"{name}.{index}" if index >= 0 else name


def task_id(whole: str, index: int) -> str:
    """Return the scheduler's id of a task of the array `whole`; "": it does not follow from that."""
    if "[]" in whole:
        return whole.replace("[]", f"[{index}]")
    return f"{whole}_{index}" if whole.isdecimal() else ""


def whole_id(id_: str) -> str:
    """Return the scheduler's id of the array that this is a task of; of any other id itself."""
    head, bracket, rest = id_.partition("[")
    if bracket:
        return f"{head}[]{rest.partition(']')[2]}"
    head, _, index = id_.partition("_")
    return head if head.isdecimal() and index.isdecimal() else id_


def members(name: str, id_: str) -> list[tuple[str, str]]:
    """Return which jobs an answer is about.

    Slurm answers for several tasks at once as long as they wait (`12_[0-9:3%2]`).

    Args:
        name: Of the job, in the scheduler.
        id_: The scheduler's.

    Returns:
        Pairs of infini-job's name and its id: of a job; of a task and its array; of several tasks.

    Raises:
        ValueError: The list of tasks is not readable.
    """
    head, _, rest = id_.partition("_")
    if head.isdecimal() and rest:  # Slurm
        indices = parse(rest.strip("[]")).tasks
        return [*((f"{name}.{index}", f"{head}_{index}") for index in indices), (name, head)]
    index = id_.partition("[")[2].partition("]")[0]
    return [(f"{name}.{index}" if index.isdecimal() else name, id_)]
