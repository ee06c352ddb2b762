"""The messages between a supervisor and its workers.

A message is one BYTES frame of a channel: the length of a head (u32), the head (JSON: a list, the kind first), and
then the body, a pickled object of the user's. Of RunTask, TaskStarted, and TaskDone there are most. If their body is
one piece, their head is a code (a byte that no length begins with) and numbers (i64). A process that passes a message
on never unpickles.

The one rule: code behind `decode` can rely on the type of every value. Whatever a process sends is a message or
ChannelBroken.

Down: WorkerSetup, RunTask, Cancel, Closing, Shutdown. Up: Ready, TaskStarted, Emit, TaskDone, TaskFailed,
TaskCancelled, Log, StatusText, Progress, Extend, Ping. The task of an Emit, a TaskFailed or a Progress is NO_TASK
while the worker starts or stops.
"""

from __future__ import annotations

from struct import Struct

from infini_run.channel.decoder import NOT_OURS
from infini_run.channel.endpoint import LIMIT
from infini_run.channel.errors import ChannelBroken, MessageTooLong
from infini_run.channel.serializer import load_pickle, serialize
from infini_run.record import fields as fields_of
from infini_run.record import record
from infini_run.system.json_codec import decode as read_json
from infini_run.system.json_codec import encode as write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from infini_run.channel.serializer import Buffer

    TaskEnd: TypeAlias = "TaskDone | TaskFailed | TaskCancelled"
    Message: TypeAlias = (
        "WorkerSetup | RunTask | Cancel | Closing | Shutdown | Ready | TaskStarted | Emit | TaskEnd | Log"
        " | StatusText | Progress | Extend | Ping"
    )

NO_TASK = -1
_HEAD = 1 << 16  # bytes of a message beside its body, at most
_MOST = 1 << 63  # of a number
_COPIED = 1 << 12  # bytes of a frame up to which a copy is cheaper than a view


@record
class Body:
    """An object of the user's, pickled (channel/serializer.py). Empty: there is no object.

    Args:
        parts: the pickle, then the large buffers beside it.
        writable: of each buffer, whether it was writable, as its copy will be.
    """

    parts: Sequence[Buffer] = ()
    writable: tuple[bool, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts)

    def load(self) -> object:
        """Make the object, in separate memory. Raises what its own code raises: an import, or its __setstate__;
        CannotUnpickle for sys.exit (channel/serializer.py)."""
        head, *buffers = self.parts
        if not buffers:
            return load_pickle(head)
        pairs = zip(buffers, self.writable, strict=True)
        return load_pickle(head, [(bytearray if writable else bytes)(data) for data, writable in pairs])


def dump(thing: object, name: str, where: str = "", *, by_reference: bool = False) -> Body:
    """Pickle an object; arguments as for channel/serializer.py. Raises UnpicklableError; MessageTooLong: no channel
    takes it."""
    parcel = serialize(thing, name, where, by_reference=by_reference)
    if not parcel.buffers and len(parcel.head) + _HEAD <= LIMIT:
        return Body(parts=(parcel.head,))
    if parcel.size + _HEAD > LIMIT:
        raise MessageTooLong(parcel.size + _HEAD, LIMIT)
    writable = tuple(not memoryview(buffer).readonly for buffer in parcel.buffers)
    return Body(parts=(parcel.head, *parcel.buffers), writable=writable)


def check_parts(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise UnpicklableError if the function or an argument does not pickle alone: the error names it."""
    dump(function, f"the function {getattr(function, '__qualname__', function)!r}")
    for index, value in enumerate(args):
        dump(value, f"argument {index}")
    for name, value in kwargs.items():
        dump(value, f"argument {name}")


# ---- down


@record
class WorkerSetup:
    """The first message, and the only one that every worker gets.

    Args:
        rank, local_rank, world_size: of the worker.
        path, argv: the supervisor's sys.path and sys.argv.
        restarts: how often this worker restarted.
        log_level: of the logging records that it hands up; -1: none.
        watchdog_s: how long it may be silent in a task, in seconds; 0: no limit.
        stack_signal: the signal that ends a hang, at which it writes its Python stack; 0: none.
        target: a function or a class for the tasks; empty: each task is a call, (function, args, kwargs).
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    path: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    restarts: int = 0
    log_level: int = -1
    watchdog_s: float = 0.0
    stack_signal: int = 0
    target: Body = Body()


@record
class RunTask:
    """Something to do. The worker answers with TaskStarted when it begins, and a TaskEnd."""

    task: int
    body: Body


@record
class Cancel:
    """Nobody wants that task's result any more."""

    task: int


@record
class Closing:
    """The crew is closing: tasks still come, and one that runs until then may end."""


@record
class Shutdown:
    """The last message: do what came before it, then end, within `deadline_s` seconds."""

    deadline_s: float


# ---- up


@record
class Ready:
    """It has started, and takes tasks."""


@record
class TaskStarted:
    """It begins with this task."""

    task: int


@record
class Emit:
    """Something that a task has to say before its end."""

    task: int
    body: Body


@record
class TaskDone:
    """A successful task, and its result.

    Args:
        task: its number.
        body: the result.
        then: the task that the worker begins with now, as TaskStarted reports it; NO_TASK: none.
    """

    task: int
    body: Body
    then: int = NO_TASK


@record
class TaskFailed:
    """A task that raised.

    Args:
        task: its number; NO_TASK: the worker could not start, or not stop.
        kind, text: the type's name and str() of the exception.
        trace: the traceback as Python prints it.
        time_s: when, in seconds since the epoch.
        body: the exception itself, if it comes back from a pickle as it was.
        why: why it does not; "": it does.
    """

    task: int
    kind: str
    text: str
    trace: str
    time_s: float = 0.0
    body: Body = Body()
    why: str = ""


@record
class TaskCancelled:
    """A task that ended by its cancellation."""

    task: int


@record
class Log:
    """A logging.LogRecord's fields, pickled."""

    body: Body


@record
class StatusText:
    """What it is doing, in words."""

    text: str


@record
class Progress:
    """How much of a task is done. If `done` is an int and `of` 0: the progress of the job, over all restarts."""

    task: int
    done: float
    of: float


@record
class Extend:
    """A silence of this many seconds from the message on: the worker is then neither hung nor late."""

    seconds: float


@record
class Ping:
    """It lives."""


_KINDS: dict[str, type] = {
    "hello": WorkerSetup,
    "task": RunTask,
    "cancel": Cancel,
    "closing": Closing,
    "shutdown": Shutdown,
    "ready": Ready,
    "taken": TaskStarted,
    "emit": Emit,
    "done": TaskDone,
    "failed": TaskFailed,
    "cancelled": TaskCancelled,
    "log": Log,
    "status": StatusText,
    "progress": Progress,
    "extend": Extend,
    "ping": Ping,
}
_RUN, _STARTED, _DONE = 0xF1, 0xF2, 0xF3  # a length that begins so would be 4 GB
_ONE, _TWO = Struct(">Bq"), Struct(">Bqq")
_NAMES = {kind: name for name, kind in _KINDS.items()}


def kind_of(message: Message) -> str:
    """Return the kind of a message, in lower case: done, failed, ..."""
    return _NAMES[type(message)]


def encode(message: Message) -> list[Buffer]:
    """Return a frame in pieces, to send one after the other, without a copy of what is large."""
    if isinstance(message, TaskDone) and len(message.body.parts) == 1:
        return [_TWO.pack(_DONE, message.task, message.then), message.body.parts[0]]
    if isinstance(message, RunTask) and len(message.body.parts) == 1:
        return [_ONE.pack(_RUN, message.task), message.body.parts[0]]
    if isinstance(message, TaskStarted):
        return [_ONE.pack(_STARTED, message.task)]
    kind: Any = type(message)
    fields = dict(vars(message))
    body: Body = fields.pop(_BODY[kind]) if kind in _BODY else _NOTHING
    parts = body.parts
    sizes = tuple(memoryview(part).nbytes for part in parts)
    head = write_json((kind_of(message), sizes, body.writable, *(fields[name] for name in _PLAIN[kind])))
    return [len(head).to_bytes(4, "big") + head, *parts]


def decode(frame: bytes | memoryview) -> Message:
    """Return the message of a frame; its body is a view of the frame, or a copy. Raises ChannelBroken if it is no
    message."""
    code, size = (frame[0], len(frame)) if frame else (0, 0)
    if code == _DONE and size > _TWO.size:
        _, task, then = _TWO.unpack_from(frame)
        return TaskDone(task=task, body=_rest(frame, _TWO.size), then=then)
    if code == _RUN and size > _ONE.size:
        return RunTask(task=_ONE.unpack_from(frame)[1], body=_rest(frame, _ONE.size))
    if code == _STARTED and size == _ONE.size:
        return TaskStarted(task=_ONE.unpack(frame)[1])
    return _decode_json(frame)


def _rest(frame: bytes | memoryview, at: int) -> Body:
    """Return the body behind the head of a frame."""
    return Body(parts=(frame[at:] if len(frame) < _COPIED else memoryview(frame)[at:],), writable=())


def _decode_json(frame: bytes | memoryview) -> Message:
    view = memoryview(frame)
    at = 4 + int.from_bytes(view[:4], "big")
    try:
        name, sizes, writable, *values = read_json(bytes(view[4:at]))
        kind: Any = _KINDS[name]
        fields = dict(zip(_PLAIN[kind], values, strict=True))
        fit = all(_FITS[kind.__annotations__[field]](value) for field, value in fields.items())
        if not fit or not _fits_body(kind, sizes, writable) or at + sum(sizes) != view.nbytes:
            raise ValueError
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
    ):  # no JSON, no list, no kind, another number of fields
        raise ChannelBroken(NOT_OURS) from None
    fields = {field: tuple(value) if type(value) is list else value for field, value in fields.items()}
    if kind in _BODY:
        parts = []
        for size in sizes:
            parts.append(view[at : at + size])
            at += size
        fields[_BODY[kind]] = Body(parts=parts, writable=tuple(writable))
    message: Message = kind(**fields)
    return message


def _fits_body(kind: object, sizes: object, writable: object) -> bool:
    if type(sizes) is not list or not all(type(size) is int and size >= 0 for size in sizes):
        return False
    if type(writable) is not list or not all(type(flag) is bool for flag in writable):
        return False
    if kind not in (WorkerSetup, TaskFailed) and bool(sizes) != (kind in _BODY):
        return False
    return len(writable) == max(0, len(sizes) - 1)


def _is_whole(value: object) -> bool:
    return type(value) is int and -_MOST <= value < _MOST


def _is_text(value: object) -> bool:
    return type(value) is str


_FITS: dict[str, Callable[[Any], bool]] = {  # by the annotation of a field
    "int": _is_whole,
    "float": lambda value: type(value) is float or _is_whole(value),
    "str": _is_text,
    "tuple[str, ...]": lambda value: type(value) is list and all(map(_is_text, value)),
}
_NOTHING = Body()
_BODY: dict[object, str] = {
    kind: "target" if kind is WorkerSetup else "body"
    for kind in (WorkerSetup, RunTask, Emit, TaskDone, TaskFailed, Log)
}
_PLAIN: dict[object, list[str]] = {
    kind: [name for name in fields_of(kind) if name != _BODY.get(kind)] for kind in _KINDS.values()
}
