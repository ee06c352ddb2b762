"""An exception on its way up: described in the worker, made again beside the caller.

It comes back as itself, with the worker's traceback as a note, and `rank` and `host` as attributes; one that cannot
be pickled, or not be made again with the same text, as a RemoteError with that text.
"""

from __future__ import annotations

import re
import time

from infini_run.crews.capture import capture_exception, capture_foreign
from infini_run.crews.protocol import Body, Failed, dump
from infini_run.errors import RemoteError
from infini_run.record import replace

TYPE_CHECKING = False

_ADDRESS = "0x[0-9a-f]+"  # in the repr of an object, which is another one when it is made again
_FRAME = r'^(?P<margin>[ |]*)File "(?P<file>.+)", line (?P<line>\d+), in '


def from_exception(error: BaseException, task: int) -> Failed:
    """In the worker. Whatever its exception class does wrong, there is always something to send."""
    time_s = time.time()
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    text, unsayable = capture_exception(str, error)
    if text is None:
        text = f"({type(unsayable).__name__} in its __str__)"
    return Failed(task=task, kind=kind, text=text, trace=_trace(error), time_s=time_s, body=_body(error, text))


def _trace(error: BaseException) -> str:
    """As Python prints it, without the frames of ours that lead to the user's function."""
    from traceback import TracebackException

    trace = error.__traceback__
    while trace is not None and "/infini_run/crews/" in trace.tb_frame.f_code.co_filename and trace.tb_next:
        trace = trace.tb_next
    text, broken = capture_exception(lambda: "".join(TracebackException(type(error), error, trace).format()))
    return f"no traceback: {type(broken).__name__} while it was made\n" if text is None else text


def _body(error: BaseException, text: str) -> Body:
    """Many classes cannot be made again from what pickle keeps of them, or with another text (an __init__ that adds
    to its arguments adds twice): that is seen only here. Then the text is enough."""
    body, _ = capture_exception(lambda: dump(error, "exception", by_reference=True))
    if body is None:
        return Body()
    made, _ = capture_exception(body.load)
    if type(made) is not type(error):
        return Body()
    again, _ = capture_exception(str, made)
    return body if again is not None and re.sub(_ADDRESS, "", again) == re.sub(_ADDRESS, "", text) else Body()


def to_exception(failed: Failed, rank: int, host: str) -> BaseException:
    """Beside the caller: what to raise."""
    made, _ = capture_foreign(failed.body.load) if failed.body else (None, None)
    if not isinstance(made, BaseException):  # its module is not here, say
        return to_remote_error(failed, rank, host)
    capture_foreign(_mark, made, with_source_lines(failed), rank, host)
    return made


def to_remote_error(failed: Failed, rank: int, host: str) -> RemoteError:
    """The same, where nothing of the user's may be unpickled."""
    failed = with_source_lines(failed)
    error = RemoteError(f"{failed.kind}: {failed.text}", kind=failed.kind, trace=failed.trace)
    _mark(error, failed, rank, host)
    return error


def _mark(error: BaseException, failed: Failed, rank: int, host: str) -> None:
    """add_note (PEP 678) is of 3.11; what it does is this. A class may forbid any of it."""
    note = f"on rank {rank}, {host}:\n{failed.trace.rstrip()}"
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
    error.rank, error.host = rank, host  # type: ignore[attr-defined]
    if not isinstance(error, RemoteError):
        error.__cause__ = RemoteError(f"{failed.kind}: {failed.text}", failed.kind, failed.trace, rank, host)


def with_source_lines(failed: Failed) -> Failed:
    """The same, with the source lines that only this process has: those of a notebook's cells and of a console, which
    no file holds. A worker prints frames of such code without them."""
    import linecache

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
