"""The user's objects on their way: pickled where they are made, unpickled where they are used, bytes in between.

In a worker plain pickle comes first, which costs nothing to import; what it cannot do (a lambda, a class of __main__)
cloudpickle can. In a supervisor cloudpickle always: a function of its __main__ must travel by value, there is no such
module in the worker.
"""

from __future__ import annotations

import _pickle
from importlib import import_module

from infini_run.channel.endpoint import LIMIT
from infini_run.crews.capture import capture_exception
from infini_run.crews.protocol import Body
from infini_run.errors import MessageTooLong, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.channel.serializer import Buffer

_PROTOCOL = 5  # with buffers of their own, for what is large
_HEAD = 1 << 16  # bytes of a message beside its body, at most
_PLAIN = (int, str, bytes, float, bool, type(None))


def dump(what: object, name: str, *, in_worker: bool = False) -> Body:
    """Pickle it. name: what it is, for the error. Raises UnpicklableError; MessageTooLong: no channel takes it."""
    buffers: list[Buffer] = []

    def keep(buffer: _pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:  # not in one piece
            return True
        return False

    if in_worker or type(what) in _PLAIN:
        data, _ = capture_exception(lambda: _pickle.dumps(what, _PROTOCOL, buffer_callback=keep))
        if data is not None:
            return _fitting(data, *buffers)
        buffers.clear()  # cloudpickle can, or says better why not
    from infini_run.crews.by_value import dumps

    return _fitting(dumps(what, name, keep), *buffers)


def _fitting(*parts: Buffer) -> Body:
    size = sum(memoryview(part).nbytes for part in parts) + _HEAD
    if size > LIMIT:
        raise MessageTooLong(size, LIMIT)
    return Body(parts=parts)


def load(body: Body) -> object:
    """What was pickled; what is large in it (an array, say) in memory of its own, that can be written to. Raises
    whatever its own __setstate__ or import raises."""
    first, *buffers = body.parts
    return _pickle.loads(first, buffers=map(bytearray, buffers))


def load_task(body: Body) -> object:
    """In a worker: the same; what is imported meanwhile may know of it."""
    global _loading
    _loading = True
    try:
        return load(body)
    finally:
        _loading = False


def import_for_worker(name: str) -> None:
    """In a process that workers are forked from: the same for what it imports for them."""
    global _loading
    _loading = True
    try:
        import_module(name)
    finally:
        _loading = False


def check_may_launch() -> None:
    """Raises UsageError: this would be done in every worker, without end."""
    if _loading:
        raise UsageError(
            "a launch while a worker imports what it needs: the module starts one when it is imported; put that"
            ' under `if __name__ == "__main__":`'
        )


_loading = False
