"""The callables that run in a worker: the code behind them, and the sys.path on which a worker finds their
modules."""

from __future__ import annotations

import os
import sys
from functools import partial
from types import ModuleType

from infini_run.errors import UsageError
from infini_run.system.interpreter import is_frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

# Flags of a code object (inspect's CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR), and what to do about each
_HINTS = {
    0x20: "is a generator function, and calling it runs nothing; return a list of what it yields",
    0x80: "is an async function, and calling it runs nothing; use a function that returns asyncio.run({name}(...))",
    0x200: "is an async generator, and calling it runs nothing; collect what it yields in a function with "
    "asyncio.run",
}


def check_callable_runs(thing: object, what: str) -> None:
    """Raise UsageError, with a hint, if a call of `thing` only makes a coroutine or a generator. Then nothing of its
    body would run, and what it returns does not pickle. `what` is the name of the argument."""
    function = _function_of(thing)
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    for flag, hint in _HINTS.items():
        if flags & flag:
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(f"{what}: {name} {hint.format(name=getattr(function, '__name__', name))}")


def name_of(function: object) -> str:
    """Return a function's name for people, also behind a partial."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", "") or type(function).__qualname__


def title_of(what: str) -> str:
    """Return how --list shows what this program starts, such as `train() in train.py`.

    Args:
        what: The call, or the kind of workers.
    """
    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    return what if script in ("", "-c") else f"{what} in {script}"


def _function_of(thing: object) -> object:
    """Return the function that a call of `thing` runs first: behind a partial, a method, an object with __call__."""
    while isinstance(thing, partial):
        thing = thing.func
    if not hasattr(thing, "__code__") and not hasattr(thing, "__func__") and not isinstance(thing, type):
        thing = getattr(type(thing), "__call__", None)  # noqa: B004  its code is looked at
    return getattr(thing, "__func__", thing)


def fault_of_call(
    called: Any, args: Sequence[object], kwargs: Mapping[str, object], *, follow_wrapped: bool = False
) -> str:
    """Return why such a call fails; "": it works, or the callable does not say what it takes, as some of C do not."""
    from inspect import signature  # workers import this module, and start faster without

    try:
        takes = signature(called, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return ""
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def called_as(thing: Any) -> str:
    """Return the call as in its definition, `name(a, b)`; of a partial with what is left to give."""
    from inspect import signature

    function = thing
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or repr(function)
    try:
        return f"{name}{signature(thing, follow_wrapped=False)}"
    except (TypeError, ValueError):
        return name


def path_of_workers() -> tuple[str, ...]:
    """Return sys.path for workers: absolute, because they may start in another directory.

    An empty entry is the current directory. Another relative one is what it was at the first search in it, as for
    this process's own imports. With such an entry, the current directory may have changed after an import, so the
    folders of imported modules come last. A frozen program has its modules within it, so the Python of its workers
    keeps its own path: ().
    """
    if is_frozen():
        return ()
    try:
        here = os.getcwd()
    except OSError:  # it was removed: an empty entry leads nowhere
        here = ""
    given = [entry for entry in sys.path if isinstance(entry, str)]
    found = [path for entry in given if (path := _absolute(entry, here))]
    return tuple(found if found == given else dict.fromkeys([*found, *_roots()]))


def _absolute(entry: str, here: str) -> str:
    """Return the absolute path; empty if the entry leads nowhere."""
    if os.path.isabs(entry):
        return entry
    first = getattr(sys.path_importer_cache.get(entry), "path", "") if entry else ""
    here = first if isinstance(first, str) and os.path.isabs(first) else here and os.path.join(here, entry)
    return here and os.path.normpath(here)


def _roots() -> Iterator[str]:
    """Yield the folders of imported modules."""
    for name, module in list(sys.modules.items()):
        if "." in name or not isinstance(module, ModuleType):
            continue
        place = next(iter(vars(module).get("__path__") or ()), None) or vars(module).get("__file__")
        if isinstance(place, str) and os.path.isabs(place):
            folder, file = os.path.split(place)
            if file.partition(".")[0] == name:  # else some other part of Python has found it
                yield folder
