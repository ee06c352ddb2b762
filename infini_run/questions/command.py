"""The command of a question to running launches: what it prints, and its exit code."""

from __future__ import annotations

from infini_run.control.client import ask
from infini_run.control.launches import find_launches, own_launches
from infini_run.errors import printable
from infini_run.questions.choice import choose_launch
from infini_run.questions.listing import render_json, render_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.control.launches import FoundLaunch
    from infini_run.options.questions import Question


STACKS_S = 20.0  # longer than a head waits for its nodes


def ask_running(question: Question, environ: Mapping[str, str]) -> int:
    """Answer a question of the command line, and return the exit code.

    Args:
        question: The question.
        environ: The environment.

    Raises:
        UsageError, InfiniRunError: It cannot be answered.
    """
    found = own_launches(find_launches(environ))
    if question.name == "list":
        return _list(question, found)
    launch = choose_launch(found, question.origin, question.launch)
    return {"stacks": _stacks, "stop": _stop, "send": _send}[question.name](question, launch)


def _list(question: Question, found: list[FoundLaunch]) -> int:
    print(render_json(found) if question.form == "json" else render_text(found), flush=True)
    return 0


def _stacks(question: Question, launch: FoundLaunch) -> int:
    from infini_run.questions.stacks import render_json as stacks_json
    from infini_run.questions.stacks import render_text as stacks_text

    ranks = None if question.ranks is None else list(question.ranks)
    answer = ask(launch, "stacks", limit_s=STACKS_S, ranks=ranks)
    print(stacks_json(answer) if question.form == "json" else stacks_text(answer), flush=True)
    return 0


def _stop(question: Question, launch: FoundLaunch) -> int:
    return _print_answer(launch, ask(launch, "stop"))


def _send(question: Question, launch: FoundLaunch) -> int:
    ranks = None if question.ranks is None else list(question.ranks)
    return _print_answer(launch, ask(launch, "send", signal=question.signal, ranks=ranks))


def _print_answer(launch: FoundLaunch, answer: dict[str, object]) -> int:
    print(f"{launch.launch_id}: {printable(str(answer.get('text', '')))}", flush=True)
    return 0
