"""The command of a question to running launches: its answer, and its exit code."""

from __future__ import annotations

from infini_run.control.client import NODES_S, ask, dicts_in
from infini_run.control.launches import find_launches, own_launches, remove_lost
from infini_run.errors import InfiniRunError, printable
from infini_run.questions.choice import choose_launch
from infini_run.questions.listing import render_json, render_text
from infini_run.questions.outer_pids import outer_pids, with_outer_pids
from infini_run.system.stdio import fill_stdio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.control.launches import FoundLaunch
    from infini_run.options.questions import Question


def ask_running(question: Question, environ: Mapping[str, str]) -> tuple[str, int]:
    """Answer a question of the command line.

    Args:
        question: The question.
        environ: The environment.

    Returns:
        The answer for stdout, and the exit code. Empty: what is shown while it changes has been shown.

    Raises:
        UsageError, InfiniRunError: It cannot be answered.
    """
    fill_stdio()  # else a socket to a launch would be stdout
    everything = find_launches(environ)
    found = own_launches(everything)
    if question.name == "list":
        text = render_json(found) if question.form == "json" else render_text(found)
        remove_lost(everything)
        return text, 0
    launch = choose_launch(found, question.origin, question.launch)
    if question.name == "top":
        from infini_run.questions.top_view import show_ranks

        return show_ranks(launch, environ, question.origin)
    if question.name == "follow":
        return "", _print_lines(question, launch, environ)
    if question.name == "bundle":
        from infini_run.questions.bundle import write_bundle

        return write_bundle(launch, question.folder)
    return {"stacks": _stacks, "stop": _stop, "send": _send}[question.name](question, launch), 0


def _print_lines(question: Question, launch: FoundLaunch, environ: Mapping[str, str]) -> int:
    import signal

    from infini_run.questions.following import print_lines

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is an end of this command
    try:
        return print_lines(launch, question.ranks, question.tail, environ)
    except BrokenPipeError:  # and so is that of a pager
        return 0


def _stacks(question: Question, launch: FoundLaunch) -> str:
    from infini_run.questions.stacks import render_json as stacks_json
    from infini_run.questions.stacks import render_text as stacks_text

    ranks = None if question.ranks is None else list(question.ranks)
    answer = ask(launch, "stacks", limit_s=NODES_S, ranks=ranks)
    if "problems" not in answer and (pids := outer_pids(launch.pid)):
        answer["stacks"] = [with_outer_pids(stack, pids) for stack in dicts_in(answer.get("stacks"))]
    return stacks_json(answer) if question.form == "json" else stacks_text(answer)


def _stop(question: Question, launch: FoundLaunch) -> str:
    return _text_of(launch, ask(launch, "stop"))


def _send(question: Question, launch: FoundLaunch) -> str:
    ranks = None if question.ranks is None else list(question.ranks)
    return _text_of(launch, ask(launch, "send", signal=question.signal, ranks=ranks))


def _text_of(launch: FoundLaunch, answer: dict[str, object]) -> str:
    text = answer.get("text")
    if type(text) is not str:
        raise InfiniRunError(f"{launch.launch_id}: its answer is not what infini-run sends")
    return f"{launch.launch_id}: {printable(text)}"
