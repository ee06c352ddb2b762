"""What can be called in a worker: the code behind a callable, and the sys.path on which a worker finds its module."""

from __future__ import annotations

import os
import sys
from functools import partial

from infini_run.errors import UsageError

TYPE_CHECKING = False

# Flags of a code object (inspect's CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR), and what to do about each
_HINTS = {
    0x20: "is a generator function, whose call runs nothing: return a list of what it yields",
    0x80: "is an async function, whose call runs nothing: give a function that returns asyncio.run({name}(...))",
    0x200: "is an async generator, whose call runs nothing: collect what it yields in a function with asyncio.run",
}


def check_callable_runs(thing: object, what: str) -> None:
    """Raises UsageError, with a hint, if a call of `thing` only makes a coroutine or a generator: then nothing of its
    body would run, and what it returns does not pickle. what: the name of the argument that it is."""
    function = _function_of(thing)
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    for flag, hint in _HINTS.items():
        if flags & flag:
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(f"{what}: {name} {hint.format(name=getattr(function, '__name__', name))}")


def _function_of(thing: object) -> object:
    """The function that a call of `thing` runs first: behind a partial, a method, an object with __call__."""
    while isinstance(thing, partial):
        thing = thing.func
    if not hasattr(thing, "__code__") and not hasattr(thing, "__func__") and not isinstance(thing, type):
        thing = getattr(type(thing), "__call__", None)  # noqa: B004  its code is looked at
    return getattr(thing, "__func__", thing)


def path_of_workers(thing: object) -> tuple[str, ...]:
    """sys.path for workers that run `thing`: absolute, because they may start in another directory.

    An empty entry is the current directory. The folder that the module of `thing` was found in is added if it is in
    no entry any more, because the current directory has changed since.
    """
    try:
        here = os.getcwd()
    except OSError:  # it was removed: relative entries lead nowhere
        here = ""
    given = [entry for entry in sys.path if isinstance(entry, str) and (here or os.path.isabs(entry))]
    found = [os.path.normpath(os.path.join(here, entry)) if not os.path.isabs(entry) else entry for entry in given]
    root = _root_of(thing)
    if root and root not in found and "" in sys.path:
        found.append(root)
    return tuple(found)


def _root_of(thing: object) -> str:
    """The folder from which the module of a callable was imported; empty: it has none, or no file."""
    function = thing if isinstance(thing, type) else _function_of(thing)
    name = getattr(function, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or not isinstance(file, str) or not os.path.isabs(file):
        return ""
    is_package = os.path.basename(file).startswith("__init__.")
    for _ in range(name.count(".") + 1 + is_package):
        file = os.path.dirname(file)
    return file
