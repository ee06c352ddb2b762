"""The stacks of ranks, folded into groups that are in the same place, as text and as JSON. Pure.

They come from a launch, so anything that infini-run does not send is dropped, and every text is made printable.
"""

from __future__ import annotations

from infini_run.control.client import dicts_in
from infini_run.errors import counted, printable
from infini_run.report.hang_groups import describe_group, fold
from infini_run.report.hang_snapshot import HangSnapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

_LINES = 20  # of the stacks of one rank


def render_json(answer: Mapping[str, Any]) -> str:
    """Return the answer of a launch as JSON."""
    import json

    return json.dumps({"stacks": answer.get("stacks", []), "problems": answer.get("problems", [])}, indent=1)


def render_text(answer: Mapping[str, Any]) -> str:
    """Return a paragraph for each group of ranks: who they are, where, and the stacks of the first of them."""
    stacks = {stack["rank"]: stack for stack in dicts_in(answer.get("stacks")) if type(stack.get("rank")) is int}
    lines = []
    for members in fold(_snapshot(stack) for stack in stacks.values()):
        group, first = describe_group(members), stacks[members[0].rank]
        pid = f", pid {members[0].pid}" if len(members) == 1 else ""
        lines += [f"{group.who}{pid}: {group.place}", *_stack_lines(first)]
    problems = answer.get("problems")
    lines += [f"no stacks of {problem}" for problem in (problems if type(problems) is list else ())]
    return "\n".join(printable(line) for line in lines) or "no rank runs"


def _snapshot(stack: Mapping[str, Any]) -> HangSnapshot:
    """Return as much of the snapshot as the groups need."""
    pid, number = stack.get("pid"), stack.get("program_rank")
    return HangSnapshot(
        rank=stack["rank"],
        pid=pid if type(pid) is int else 0,
        host=_text(stack.get("host")),
        time_s=0.0,
        frames=tuple(_texts(stack.get("frames"))),
        wait=_text(stack.get("wait")),
        state=_text(stack.get("state")),
        program=_text(stack.get("program")),
        program_rank=number if type(number) is int else 0,
    )


def _stack_lines(stack: Mapping[str, Any]) -> Iterator[str]:
    if stack.get("status"):
        yield f"  status: {stack['status']}"
    found = [line for text in _texts(stack.get("python")) for line in _threads(text)]
    if not found:
        found = [_process_line(process) for process in dicts_in(stack.get("processes"))]
    yield from (f"  {line}" for line in found[:_LINES])
    if found[_LINES:]:
        yield f"  ... {counted(len(found) - _LINES, 'more line')}: --stacks=json has them"
    if stack.get("python_note"):
        yield f"  no Python stack: {stack['python_note']}"


def _process_line(process: Mapping[str, Any]) -> str:
    threads = dicts_in(process.get("threads"))
    first = threads[0] if threads else {}
    where = first.get("wchan") or first.get("syscall") or f"state {process.get('state')}"
    kind = f" ({first['waits_for']})" if first.get("waits_for") else ""
    return f"{process.get('name')} ({process.get('pid')}) in {where}{kind}"


def _threads(text: str) -> list[str]:
    """Return py-spy's lines from the first thread on. A command line of several lines may precede them."""
    lines = [line for line in text.splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if line.startswith("Thread ")), 0)
    return lines[first:]


def _texts(value: Any) -> list[str]:
    return [each for each in value if type(each) is str] if type(value) is list else []


def _text(value: Any) -> str:
    return value if type(value) is str else ""
