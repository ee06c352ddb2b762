"""The stacks of ranks, as text and as JSON. Pure.

They come from a launch, which is of this user or asked by root: every text is made printable.
"""

from __future__ import annotations

from infini_run.errors import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

_FRAMES = 20  # lines of the Python stack of one rank


def render_json(answer: Mapping[str, Any]) -> str:
    """Return the answer of a launch as JSON."""
    import json

    return json.dumps({"stacks": answer.get("stacks", []), "problems": answer.get("problems", [])}, indent=1)


def render_text(answer: Mapping[str, Any]) -> str:
    """Return a paragraph for each rank: its Python stack, or the system call that it waits in."""
    lines = [line for stack in _dicts(answer.get("stacks")) for line in _rank_lines(stack)]
    problems = answer.get("problems")
    lines += [f"no stacks of {problem}" for problem in (problems if type(problems) is list else ())]
    return "\n".join(printable(line) for line in lines) or "no rank runs"


def _rank_lines(stack: Mapping[str, Any]) -> Iterator[str]:
    status = f", {stack['status']}" if stack.get("status") else ""
    yield f"rank {stack.get('rank')} on {stack.get('host')}, pid {stack.get('pid')}{status}"
    python = [text for text in stack.get("python") or () if type(text) is str]
    if python:
        frames = [line for text in python for line in _threads(text)]
        yield from (f"  {line}" for line in frames[:_FRAMES])
        if frames[_FRAMES:]:
            yield f"  ... {len(frames) - _FRAMES} lines more: --stacks=json has them"
        return
    for process in _dicts(stack.get("processes")):
        threads = _dicts(process.get("threads"))
        first = threads[0] if threads else {}
        where = first.get("wchan") or first.get("syscall") or f"state {process.get('state')}"
        yield f"  {process.get('name')} ({process.get('pid')}) in {where}"
    if stack.get("python_note"):
        yield f"  no Python stack: {stack['python_note']}"


def _threads(text: str) -> list[str]:
    """The lines of py-spy from the first thread on; a command line of several lines comes before it."""
    lines = [line for line in text.splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if line.startswith("Thread ")), 0)
    return lines[first:]


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if type(each) is dict] if type(value) is list else []
