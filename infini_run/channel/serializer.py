"""Objects to bytes and back, for channels and for crews. A Parcel is a pickle and, beside it, the large buffers that
it refers to, without a copy.

Protocol 5 puts large arrays out of band (PEP 574). The same happens here to large bytes and bytearrays, which pickle
would copy into its stream. Functions and classes go by cloudpickle, by value where no module has them. Its import
takes 20 ms, so it comes with the first of them: plain types and this project's records need none of it.
"""

from __future__ import annotations

import _pickle as pickle  # `pickle` imports `re`, which only its Python twin needs
from functools import lru_cache
from types import FunctionType

from infini_run.channel.errors import CannotUnpickle, UnpicklableError
from infini_run.channel.portable import OF_DESCRIPTORS, check_portable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pickle import PickleBuffer
    from typing import Any

    Buffer = bytes | bytearray | memoryview | PickleBuffer

LARGE = 1 << 18  # bytes of a buffer from which on a copy costs more than a separate place
_PROTOCOL = 5
_DEFINED = (type, FunctionType, type(lru_cache(int)))  # what code defines and a module may have
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_HINTS = {
    "coroutine": "run it with asyncio.run, and send what it returns",
    **dict.fromkeys(("generator", "async_generator"), "send a list of what it yields"),
}
_OF_A_MANAGER = "use one of a multiprocessing.Manager()"
_OF_CHILDREN = (
    "multiprocessing.synchronize", "multiprocessing.queues", "multiprocessing.sharedctypes", *OF_DESCRIPTORS
)  # fmt: skip
# opcodes before the length of bytes in the stream (pickletools): BINBYTES, BINBYTES8, BYTEARRAY8
_SHORT, _LONG = (b"B",), (b"\x8e", b"\x96")
_NEXT_BUFFER = b"\x97"


class Parcel:
    """An object as bytes: its pickle, and the buffers that belong to it. A Parcel can be sent in turn, and whoever
    passes it on does not look into it."""

    __slots__ = ("buffers", "head")

    def __init__(self, head: bytes, buffers: Sequence[Buffer] = ()) -> None:
        self.head = head
        self.buffers = buffers

    @property
    def size(self) -> int:
        """How many bytes it has."""
        size = len(self.head)
        for buffer in self.buffers:
            size += memoryview(buffer).nbytes
        return size

    def deserialize(self) -> object:
        """Return the object. Large bytes and arrays in it are the buffers themselves. Raises CannotUnpickle."""
        return deserialize(self.head, self.buffers)

    def __reduce__(self) -> tuple[object, ...]:
        return Parcel, (self.head, list(self.buffers))

    def __repr__(self) -> str:
        return f"<Parcel of {self.size} bytes>"


class _NeedsCloudpickle(Exception):
    """The object may need cloudpickle."""


class _Pickler(pickle.Pickler):
    """A pickler of plain types and of this project's own."""

    def reducer_override(self, thing: object) -> Any:
        check_portable(thing)
        if isinstance(thing, _DEFINED):
            home = thing.__module__
            if home != "builtins" and not home.startswith("infini_run."):
                raise _NeedsCloudpickle
        return NotImplemented


class _Chunks(list):  # type: ignore[type-arg]
    """A file to pickle into that keeps each chunk without a copy."""

    write = list.append
    seen = 0  # chunks that were searched


def serialize(thing: object, name: str = "message", where: str = "", *, by_reference: bool = False) -> Parcel:
    """Pickle an object. Its large buffers are not copied: leave them alone until the Parcel has gone.

    Args:
        thing: the object.
        name: what an error calls it; the path of the part at fault follows.
        where: added to that path in the error's text, " of rank 3" for instance.
        by_reference: functions and classes go by the names of their modules if they have one, which needs no
            cloudpickle. For a process whose modules the receiver has.

    Raises:
        UnpicklableError: with the path of the part that does not pickle.
    """
    if (type(thing) is tuple and _ATOMS.issuperset(map(type, thing))) or (
        type(thing) in _ATOMS and not _is_large(thing)
    ):
        head = pickle.dumps(thing, _PROTOCOL)
        if len(head) < LARGE:
            return Parcel(head)
    try:
        return _pack(thing, pickle.Pickler if by_reference else _Pickler)
    except BaseException as error:
        if isinstance(error, Exception):  # by cloudpickle it may go
            return _pack_by_value(thing, name, where)
        raise


def _is_large(thing: object) -> bool:
    return type(thing) is bytes and len(thing) >= LARGE


def _pack_by_value(thing: object, name: str, where: str) -> Parcel:
    from infini_run.channel.by_value import ByValuePickler

    try:
        return _pack(thing, ByValuePickler)
    except BaseException as error:
        if isinstance(error, Exception):
            fault = _unpicklable(thing, name, where, error)
            raise fault from error
        raise


def _unpicklable(thing: object, name: str, where: str, error: Exception) -> UnpicklableError:
    """Return the error of an object whose pickling raised `error`."""
    if isinstance(error.__context__, RecursionError) or isinstance(error, (RecursionError, MemoryError)):
        return UnpicklableError(
            f"{name}{where} cannot be sent: too deep, or too large, to be pickled ({error})", name
        )
    from infini_run.channel.unpicklable import find_unpicklable

    path, part = find_unpicklable(thing, name, _fault_of)
    kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
    why = _fault_of(part) or error
    hint = _OF_A_MANAGER if kind.rpartition(".")[0] in _OF_CHILDREN else _HINTS.get(kind)
    text = f"{path}{where} cannot be sent: a {kind} does not pickle ({type(why).__name__}: {why})"
    text += f"; {hint}" if hint else ""
    return UnpicklableError(text, path)


def _fault_of(thing: object) -> Exception | None:
    from infini_run.channel.by_value import ByValuePickler

    try:
        ByValuePickler(_Nowhere(), _PROTOCOL, buffer_callback=bool).dump(thing)
    except BaseException as error:
        if isinstance(error, Exception):
            return error
        raise
    return None


class _Nowhere:
    """A file to pickle into that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def _pack(thing: object, pickler: type[pickle.Pickler]) -> Parcel:
    chunks = _Chunks()
    buffers: list[Buffer] = []

    def keep(buffer: PickleBuffer) -> bool:
        if memoryview(buffer).nbytes < LARGE:
            return True
        try:
            raw = buffer.raw()
        except BufferError:  # not in one piece: it goes into the stream
            return True
        _take_out(chunks, buffers)
        buffers.append(raw)
        return False

    pickler(chunks, _PROTOCOL, buffer_callback=keep).dump(thing)
    _take_out(chunks, buffers)
    return Parcel(chunks[0] if len(chunks) == 1 else b"".join(chunks), buffers)


def _take_out(chunks: _Chunks, buffers: list[Buffer]) -> None:
    """Take large bytes out of the stream, and put a buffer out of band in their place. The pickler writes them
    unchanged, after the chunk that ends with their opcode and length. Nothing else comes in one piece so large, but
    text."""
    start, chunks.seen = max(chunks.seen, 1), len(chunks)
    for at in range(start, len(chunks)):
        size = len(chunks[at])
        if size < LARGE:
            continue
        before = chunks[at - 1]
        if before[-5:-4] in _SHORT and int.from_bytes(before[-4:], "little") == size:
            cut = 5
        elif before[-9:-8] in _LONG and int.from_bytes(before[-8:], "little") == size:
            cut = 9
        else:
            continue
        buffers.append(chunks[at])
        chunks[at - 1], chunks[at] = before[:-cut], _NEXT_BUFFER


def deserialize(head: Buffer, buffers: Sequence[Buffer] = ()) -> object:
    """Return the object. Raises CannotUnpickle: the code that it needs is missing, fails, or calls sys.exit."""
    try:
        return load_pickle(head, buffers)
    except BaseException as error:
        if not isinstance(error, Exception) or isinstance(error, CannotUnpickle):
            raise
        raise CannotUnpickle(f"a message cannot be unpickled: {type(error).__name__}: {error}") from error


def load_pickle(head: Buffer, buffers: Sequence[Buffer] = ()) -> object:
    """Return the object. Raises what its code raises. For SystemExit and KeyboardInterrupt without a signal it raises
    CannotUnpickle, because the code of a message ends no program."""
    try:
        return pickle.loads(head, buffers=buffers)
    except (SystemExit, KeyboardInterrupt) as error:
        from infini_run.system.signal_origin import came_by_signal

        if came_by_signal(error):
            raise
        text = f"the code of a message raised {type(error).__name__}" + (f": {error}" if str(error) else "")
        raise CannotUnpickle(text) from error
