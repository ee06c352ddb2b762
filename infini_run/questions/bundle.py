"""A folder with what a bug report needs of a running launch."""

from __future__ import annotations

import json
import os
import platform
import sys

from infini_run.control.client import NODES_S, ask, dicts_in
from infini_run.errors import InfiniRunError, UsageError, printable
from infini_run.node.masking import masked_command
from infini_run.questions.running import describe_launch
from infini_run.questions.stacks import render_text
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from infini_run.control.launches import FoundLaunch


def write_bundle(launch: FoundLaunch, folder: str) -> tuple[str, int]:
    """Write what a launch says of itself to a new folder.

    Args:
        launch: The launch.
        folder: The folder. Only this user can read it.

    Returns:
        The answer for stdout, and the exit code: 1 if something is missing.

    Raises:
        UsageError: The folder exists, or cannot be made.
    """
    try:
        os.mkdir(folder, 0o700)
    except OSError as error:
        raise UsageError(f"--bundle={folder}: cannot make it: {error.strerror}; use a new folder") from None
    found = describe_launch(launch).to_json()
    about = {**found, "program": masked_command(found["program"] or "")}
    about |= {"infini_run": VERSION, "python": platform.python_version(), "system": platform.platform()}
    problems: list[str] = []
    names = [_write(folder, "launch.json", _as_json(about))]
    for name, text in _files(launch, problems):
        names.append(_write(folder, name, text))
    for problem in problems:
        print(f"infini-run: --bundle: {problem}", file=sys.stderr, flush=True)
    text = (
        f"{launch.launch_id}: wrote {', '.join(names)} to {printable(folder)}\n"
        "read them before you send them: only variables and the command line are masked"
    )
    return text, 1 if problems else 0


def _files(launch: FoundLaunch, problems: list[str]) -> Iterator[tuple[str, str]]:
    """Ask the launch, and yield the name and the text of each file."""
    answer = _ask(launch, "report", problems)
    nodes = dicts_in(answer.get("nodes"))
    if "report" in answer:
        yield "report.json", _as_json(answer["report"])
    for node in nodes:
        name = f"_node_{int(node['node'])}" if "report" in answer and type(node.get("node")) is int else ""
        yield f"report{name}.json", _as_json(node.get("report"))
        yield f"environment{name}.json", _as_json(node.get("environment"))
    trace = _ask(launch, "trace", problems).get("trace")
    if trace is not None:
        yield "trace.json", _as_json(trace)
    stacks = _ask(launch, "stacks", problems, ranks=None)
    if stacks:
        yield "stacks.txt", render_text(stacks) + "\n"


def _ask(launch: FoundLaunch, question: str, problems: list[str], **fields: object) -> dict[str, Any]:
    """Return the answer; empty, and a problem more, if there is none."""
    try:
        answer = ask(launch, question, limit_s=NODES_S, **fields)
    except InfiniRunError as error:
        problems.append(f"no {question}: {error}")
        return {}
    lacking = answer.get("problems")
    problems += [printable(f"no {question} of {each}") for each in (lacking if type(lacking) is list else ())]
    return answer


def _as_json(content: object) -> str:
    return json.dumps(content, indent=1) + "\n"


def _write(folder: str, name: str, text: str) -> str:
    """Write a file, and return its name. Raises InfiniRunError."""
    path = os.path.join(folder, name)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise InfiniRunError(f"--bundle: cannot write {printable(path)}: {error.strerror}") from None
    return name
