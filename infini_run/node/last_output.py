"""What ranks said: their last STATUS=, the message in an error file, the last lines of stderr; what to do about it.

Read before the group closes; any bytes give a text or none.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.core.group import Group
    from infini_run.node.outcome import Outcome
    from infini_run.plan.model import Plan, Worker

_LAST_LINES = 20  # kept in the report; its text shows fewer


def record_last_output(outcome: Outcome, group: Group, workers: Sequence[Worker]) -> None:
    """Record in the outcome what goes with the group: every STATUS=, and the last output of the first failure.

    Args:
        outcome: Of the launch.
        group: Its processes, not closed yet.
        workers: The workers, in the order of their indices in the group.
    """
    record_statuses(outcome, group, workers)
    for index, worker in enumerate(workers):
        if worker.rank == outcome.first:
            outcome.set_last_output(*last_output(group, index, worker))


def record_statuses(outcome: Outcome, group: Group, workers: Sequence[Worker]) -> None:
    """Record the last STATUS= of each rank that sent one.

    Args:
        outcome: Of the launch.
        group: Its processes, not closed yet.
        workers: The workers, in the order of their indices in the group.
    """
    found = {worker.rank: group.status(index).decode("utf-8", "replace") for index, worker in enumerate(workers)}
    outcome.record_statuses({rank: text for rank, text in found.items() if text})


def record_advice(outcome: Outcome, plan: Plan, environ: Mapping[str, str]) -> None:
    """Record advice on the first failure, if infini-run chose its Python: that may lack what the user's has.

    Args:
        outcome: Of the launch, with the last output of that rank.
        plan: Its plan.
        environ: The environment of the ranks.
    """
    first = outcome.first_failure()
    argv = next((worker.argv for worker in plan.workers if first and worker.rank == first.rank), ())
    named = [program.options.program[0] for program in plan.programs]
    if first is None or first.code != 1 or argv[1:2] != ("-u",) or argv[0] in named:
        return
    from infini_run.node.python_advice import advise

    outcome.set_advice(advise(first, argv, environ))


def last_output(group: Group, index: int, worker: Worker) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return what a worker wrote last.

    Args:
        group: The processes, not closed yet.
        index: The worker's index in the group.
        worker: The worker.

    Returns:
        The message in its error file (empty: none), and its last 20 lines of stderr as choose_lines takes them. Also
        the lines of its Python stack, if it runs a Python function and crashed or was stopped because it hung.
    """
    from infini_run.report.error_file import read_error_file, take_stack

    text = group.tail(index).decode("utf-8", "replace")
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    message = read_error_file(worker.error_file) if worker.error_file else ""
    stack = take_stack(worker.error_file) if worker.error_file else ()
    last = tuple(line for line in lines if line)
    if len(last) > _LAST_LINES:
        from infini_run.report.last_lines import choose_lines

        last = choose_lines(last, _LAST_LINES)
    return message, last, stack
