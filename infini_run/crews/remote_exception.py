"""An exception on its way up: described in the worker, made again beside the caller.

It comes back as itself, with the worker's traceback as a note and a RemoteError as its cause. It has `rank` and
`host` as attributes, unless it has attributes of these names itself. One that does not pickle, or comes back with
another text, is a RemoteError with its text, and a note has the reason.
"""

from __future__ import annotations

import sys
import time

from infini_run.crews.capture import capture_exception, capture_foreign
from infini_run.crews.protocol import Body, TaskFailed, dump
from infini_run.errors import RemoteError
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ADDRESS = "0x[0-9a-f]+"  # in the repr of an object, which is another one when it is made again
_PASS_ALL = "pass all arguments of its __init__ to super().__init__"
_FRAME = r'^(?P<margin>[ |]*)File "(?P<file>.+)", line (?P<line>\d+), in '


def from_exception(error: BaseException, task: int) -> TaskFailed:
    """Return the message of an exception, in the worker. Whatever its class does wrong, there is always something to
    send."""
    time_s = time.time()
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    text, unsayable = capture_exception(str, error)
    if text is None:
        text = f"({type(unsayable).__name__} in its __str__)"
    capture_exception(_drop_place, error)
    body, why = _body(error)
    return TaskFailed(task=task, kind=kind, text=text, trace=_trace(error), time_s=time_s, body=body, why=why)


def _drop_place(error: BaseException) -> None:
    """Remove the rank's place from the error of a launch within this worker: it gets this worker's."""
    cause = error.__cause__
    for name in ("rank", "host"):
        if isinstance(cause, RemoteError) and vars(error).get(name) == getattr(cause, name):
            delattr(error, name)


def _trace(error: BaseException) -> str:
    """Return the traceback as Python prints it, without this package's frames that lead to the user's function."""
    from traceback import TracebackException

    trace = error.__traceback__
    while trace is not None and "/infini_run/crews/" in trace.tb_frame.f_code.co_filename and trace.tb_next:
        trace = trace.tb_next
    text, broken = capture_exception(lambda: "".join(TracebackException(type(error), error, trace).format()))
    return f"no traceback: {type(broken).__name__} while it was made\n" if text is None else text


def _body(error: BaseException) -> tuple[Body, str]:
    """Return the pickled exception; or nothing, and why. Many classes do not come back from what pickle keeps of
    them, or come back with another text. An __init__ that adds to its arguments adds twice. Only a trial here shows
    that. Then the text is enough. The same holds for each exception of a group."""
    body, fault = capture_exception(lambda: dump(error, "exception", by_reference=True))
    if body is None:
        return Body(), f"it does not pickle: {_cause_text(fault)}"
    made, fault = capture_exception(body.load)
    if not isinstance(made, BaseException):
        return Body(), f"it does not unpickle: {_cause_text(fault)}; {_PASS_ALL}"
    before, _ = capture_exception(lambda: list(_descriptions(error)))
    again, _ = capture_exception(lambda: list(_descriptions(made)))
    if again is not None and again == before:
        return body, ""
    return (
        Body(),
        f"its type or text changes on the way; {_PASS_ALL}",
    )


def _cause_text(fault: BaseException | None) -> str:
    """Return the type and the text of what a class raised, as far as it has any."""
    text, _ = capture_exception(str, fault)
    return type(fault).__name__ + (f": {text}" if text else "")


def _descriptions(error: BaseException) -> Iterator[tuple[type, str]]:
    """Return the type and the text of an exception, then those of the exceptions that it groups."""
    import re

    yield type(error), re.sub(_ADDRESS, "", str(error))
    parts = getattr(error, "exceptions", ())
    for part in parts if isinstance(parts, tuple) else ():
        if isinstance(part, BaseException):
            yield from _descriptions(part)


def to_exception(failed: TaskFailed, rank: int, host: str) -> BaseException:
    """Return what to raise beside the caller."""
    made, fault = capture_foreign(failed.body.load) if failed.body else (None, None)
    if not isinstance(made, BaseException):  # its module is not here, say
        if failed.body:
            failed = replace(failed, why=f"it does not unpickle here: {_cause_text(fault)}")
        return to_remote_error(failed, rank, host)
    capture_foreign(_mark, made, with_source_lines(failed), rank, host)
    return made


def unreadable_result(cause: BaseException, rank: int, host: str) -> RemoteError:
    """Return the error of a result whose unpickling here raised `cause`."""
    kind = type(cause).__name__
    text = f"the result of rank {rank} on {host} cannot be unpickled here: {kind}: {cause}"
    error = RemoteError(text, kind=kind, rank=rank, host=host)
    error.__cause__ = cause
    return error


def to_remote_error(failed: TaskFailed, rank: int, host: str) -> RemoteError:
    """Return the RemoteError of a failure, where the user's objects must stay pickled."""
    failed = with_source_lines(failed)
    error = RemoteError(f"{failed.kind}: {failed.text}", kind=failed.kind, trace=failed.trace)
    _mark(error, failed, rank, host)
    if failed.why:
        add_notes(error, [f"not raised as {failed.kind}: {failed.why}"])
    return error


def _mark(error: BaseException, failed: TaskFailed, rank: int, host: str) -> None:
    """Mark an exception with its place. A class may forbid any of it, and may have a `rank` or a `host` of another
    meaning."""
    for name, value in (("rank", rank), ("host", host)):
        if isinstance(error, RemoteError) or not hasattr(error, name):
            capture_foreign(setattr, error, name, value)
    if not isinstance(error, RemoteError):
        error.__cause__ = RemoteError(f"{failed.kind}: {failed.text}", failed.kind, failed.trace, rank, host)
        if "IPython" in sys.modules:  # this package's frames that raise it again say nothing
            from infini_run.notebook_traceback import render_shown

            capture_foreign(setattr, error, "_render_traceback_", render_shown)
    add_notes(error, [f"on rank {rank}, {host}:\n{failed.trace.rstrip()}"])


def add_notes(error: BaseException, notes: Sequence[str]) -> None:
    """Add notes as BaseException.add_note does (PEP 678). Python 3.10 has no such method, and prints no notes. There
    they are also the text of an exception at the end of the chain."""
    kept = [*getattr(error, "__notes__", []), *notes]
    error.__notes__ = kept  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        return
    while error.__cause__ is not None and not isinstance(error.__cause__, _Notes):
        error = error.__cause__
    error.__cause__ = _Notes("\n".join(["", *kept]))


class _Notes(Exception):
    """What Python 3.10 prints of an exception's notes."""


def with_source_lines(failed: TaskFailed) -> TaskFailed:
    """Return the traceback with the source lines that only this process has: those of a notebook's cells and of a
    console, which no file holds. A worker prints frames of such code without them."""
    import linecache
    import re

    lines: list[str] = []
    bare = failed.trace.split("\n")
    for line, following in zip(bare, [*bare[1:], ""], strict=True):
        lines.append(line)
        frame = re.match(_FRAME, line)
        if frame is None or following.startswith(frame["margin"] + "  "):
            continue
        source = linecache.getline(frame["file"], int(frame["line"])).strip()
        lines += [f"{frame['margin']}  {source}"] if source else []
    return replace(failed, trace="\n".join(lines))
