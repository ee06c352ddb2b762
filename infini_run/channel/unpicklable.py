"""The search for the part of an object that does not pickle, and for its path: `message["model"].hooks[2]`.

The search runs only after pickling failed. It tries each part alone and goes into those that fail, until it finds one
of whose own parts none fails.
"""

from __future__ import annotations

from functools import partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DEPTH = 100  # of the path; what is nested deeper is the fault itself
_OF_CLASSES = ("__dict__", "__weakref__", "__module__", "__doc__", "__qualname__")
_Part = tuple[str, object]


def find_unpicklable(thing: object, name: str, fault_of: Callable[[object], Exception | None]) -> tuple[str, object]:
    """Return the path of what does not pickle in `thing`, which errors call `name`, and that part. `fault_of` says
    why a thing does not pickle; None: it does."""
    search = _Search(fault_of)
    return search.fault_in(thing, name, _DEPTH) or search.dead_ends[0]


class _Search:
    """A search for the fault in depth. Objects refer to each other in circles: a child to its parent, a method to its
    class through the cell `__class__` that super() needs. A part that fails only because of something above it is a
    dead end; the fault is in another part of that."""

    def __init__(self, fault_of: Callable[[object], Exception | None]) -> None:
        self._fault_of = fault_of
        self._seen: dict[int, object] = {}  # the objects too: the id of one that is gone would be another's
        self.dead_ends: list[_Part] = []

    def fault_in(self, thing: object, name: str, depth: int) -> _Part | None:
        """Return the path and the part of `thing`, which does not pickle; None if only a circle was found."""
        self._seen[id(thing)] = thing
        is_dead_end = False
        for step, part in _parts(thing) if depth else ():
            if id(part) in self._seen:
                is_dead_end = True
            elif self._fault_of(part) is not None:
                found = self.fault_in(part, name + step, depth - 1)
                if found is not None:
                    return found
                is_dead_end = True
        if is_dead_end:
            self.dead_ends.append((name, thing))
            return None
        return name, thing


def _parts(thing: object) -> Iterator[_Part]:
    """Return what pickling `thing` would go into, if it has a name in it. A lock or a queue of multiprocessing is one
    whole, with its own error."""
    if type(thing).__module__.startswith("multiprocessing."):
        return
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield f"'s key {key!r:.80}", key
            yield f"[{key!r:.80}]", value
    elif isinstance(thing, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(thing))
        yield from _fields(thing)
    elif isinstance(thing, (set, frozenset)):
        yield from ((f"'s element {part!r:.80}", part) for part in thing)
    elif isinstance(thing, FunctionType):
        yield from _parts_of_function(thing)
    elif isinstance(thing, (MethodType, BuiltinMethodType)):
        yield ".__self__", thing.__self__
        yield ".__func__", getattr(thing, "__func__", None)
    elif isinstance(thing, partial):
        yield ".func", thing.func
        yield from ((f".args[{index}]", part) for index, part in enumerate(thing.args))
        yield from ((f".keywords[{key!r}]", part) for key, part in thing.keywords.items())
    elif isinstance(thing, type):
        yield from ((f".{key}", part) for key, part in vars(thing).items() if key not in _OF_CLASSES)
    else:
        yield from _fields(thing)


def _fields(thing: object) -> Iterator[_Part]:
    """Return the attributes that an object's own __getstate__ keeps, or all that it has."""
    for key, part in getattr(thing, "__dict__", {}).items():
        yield f".{key}", part
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, key) and key not in ("__dict__", "__weakref__"):
                yield f".{key}", getattr(thing, key)


def _parts_of_function(function: FunctionType) -> Iterator[_Part]:
    """Return what cloudpickle takes with a function: what it closes over, its defaults, the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"'s variable {name}", cell.cell_contents
        except ValueError:  # it has none yet
            continue
    for index, part in enumerate(function.__defaults__ or ()):
        yield f"'s default {index}", part
    for name, part in (function.__kwdefaults__ or {}).items():
        yield f"'s default {name}", part
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield f"'s global {name}", function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
