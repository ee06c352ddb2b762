"""An exception on its way up: described in the worker, made again beside the caller.

It comes back as itself, with the worker's traceback as a note, and `rank` and `host` as attributes; one that cannot
be pickled, or not be made again, as a RemoteError with the same words.
"""

from __future__ import annotations

import time

from infini_run.crews.messages import Body, Failed
from infini_run.crews.payload import dump, load
from infini_run.errors import RemoteError

TYPE_CHECKING = False


def describe(error: BaseException, task: int) -> Failed:
    """In the worker. Whatever its exception class does wrong, there is always something to send."""
    time_s = time.time()
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    try:
        text = str(error)
    except Exception as unsayable:  # its own __str__ raises
        text = f"({type(unsayable).__name__} in its __str__)"
    return Failed(task=task, kind=kind, text=text, trace=_trace(error), time_s=time_s, body=_body(error))


def _trace(error: BaseException) -> str:
    """As Python prints it, without the frames of ours that lead to the user's function."""
    from traceback import TracebackException

    trace = error.__traceback__
    while trace is not None and "/infini_run/crews/" in trace.tb_frame.f_code.co_filename and trace.tb_next:
        trace = trace.tb_next
    try:
        return "".join(TracebackException(type(error), error, trace).format())
    except Exception as broken:  # what it looks at may raise as well (bpo-43605)
        return f"no traceback: {type(broken).__name__} while it was made\n"


def _body(error: BaseException) -> Body:
    try:
        body = dump(error, "the exception", in_worker=True)
        made = load(body)  # many classes cannot be made again from what pickle keeps of them: seen only here
    except Exception:  # whatever its __reduce__ and __init__ raise: the words are enough
        return Body()
    return body if type(made) is type(error) else Body()


def rebuild(failed: Failed, rank: int, host: str) -> BaseException:
    """Beside the caller: what to raise."""
    error: BaseException | None = None
    if failed.body:
        try:
            made = load(failed.body)
        except Exception:  # its module is not here, say
            made = None
        error = made if isinstance(made, BaseException) else None
    if error is None:
        return in_words(failed, rank, host)
    _mark(error, failed, rank, host)
    return error


def in_words(failed: Failed, rank: int, host: str) -> RemoteError:
    """The same, where nothing of the user's may be unpickled."""
    error = RemoteError(f"{failed.kind}: {failed.text}", kind=failed.kind, trace=failed.trace)
    _mark(error, failed, rank, host)
    return error


def _mark(error: BaseException, failed: Failed, rank: int, host: str) -> None:
    """add_note (PEP 678) is of 3.11; what it does is this."""
    note = f"on rank {rank}, {host}:\n{failed.trace.rstrip()}"
    try:
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
        error.rank, error.host = rank, host  # type: ignore[attr-defined]
        if not isinstance(error, RemoteError):
            error.__cause__ = RemoteError(f"{failed.kind}: {failed.text}", failed.kind, failed.trace, rank, host)
    except Exception:  # a class that forbids it: it is raised all the same
        return
