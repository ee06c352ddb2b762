"""An exception on its way up: described in the worker, made again beside the caller.

It comes back as itself, with the worker's traceback as a note, and `rank` and `host` as attributes; one that cannot
be pickled, or not be made again, as a RemoteError with the same words.
"""

from __future__ import annotations

import time

from infini_run.crews.capture import capture_exception
from infini_run.crews.protocol import Body, Failed, dump
from infini_run.errors import RemoteError

TYPE_CHECKING = False


def from_exception(error: BaseException, task: int) -> Failed:
    """In the worker. Whatever its exception class does wrong, there is always something to send."""
    time_s = time.time()
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    text, unsayable = capture_exception(str, error)
    if text is None:
        text = f"({type(unsayable).__name__} in its __str__)"
    return Failed(task=task, kind=kind, text=text, trace=_trace(error), time_s=time_s, body=_body(error))


def _trace(error: BaseException) -> str:
    """As Python prints it, without the frames of ours that lead to the user's function."""
    from traceback import TracebackException

    trace = error.__traceback__
    while trace is not None and "/infini_run/crews/" in trace.tb_frame.f_code.co_filename and trace.tb_next:
        trace = trace.tb_next
    text, broken = capture_exception(lambda: "".join(TracebackException(type(error), error, trace).format()))
    return f"no traceback: {type(broken).__name__} while it was made\n" if text is None else text


def _body(error: BaseException) -> Body:
    """Many classes cannot be made again from what pickle keeps of them: that is seen only here. Then the words are
    enough."""
    body, _ = capture_exception(lambda: dump(error, "exception", by_reference=True))
    if body is None:
        return Body()
    made, _ = capture_exception(body.load)
    return body if type(made) is type(error) else Body()


def to_exception(failed: Failed, rank: int, host: str) -> BaseException:
    """Beside the caller: what to raise."""
    made, _ = capture_exception(failed.body.load) if failed.body else (None, None)
    if not isinstance(made, BaseException):  # its module is not here, say
        return to_remote_error(failed, rank, host)
    capture_exception(_mark, made, failed, rank, host)
    return made


def to_remote_error(failed: Failed, rank: int, host: str) -> RemoteError:
    """The same, where nothing of the user's may be unpickled."""
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
