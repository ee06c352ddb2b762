"""The check for modules that gevent or eventlet replaced in this process. Then waits of the standard library switch
greenlets, and descriptors and locks no longer work across threads. infini-run refuses before anything starts, instead
of a hang."""

from __future__ import annotations

import sys

from infini_run.errors import UsageError

# For each tool: the module that patches, its test of a module, and the call that patches all.
_TOOLS = {
    "gevent": ("gevent.monkey", "is_module_patched", "gevent.monkey.patch_all"),
    "eventlet": ("eventlet.patcher", "is_monkey_patched", "eventlet.monkey_patch"),
}
# By the names of the arguments of these calls. gevent tests by a module's own name: `_thread`.
_OF_THREADS = ("select", "socket", "thread", "_thread")
# eventlet takes poll(2) out of select, and waitpid and read of its os wait in its hub; gevent's wait as they should.
_OF_WAITS = {"gevent": (), "eventlet": ("os", "select")}


def check_threads(what: str) -> None:
    """Raise UsageError if `what` waits in its own threads, and a module that these need is patched."""
    _check(what, _OF_THREADS)


def check_waits(what: str) -> None:
    """Raise UsageError if a module is patched that `what` needs to wait in the caller's thread."""
    _check(what, ())


def _check(what: str, names: tuple[str, ...]) -> None:
    for tool, (module, test, patch) in _TOOLS.items():
        if module not in sys.modules:
            continue
        is_patched = getattr(sys.modules[module], test)
        found = sorted({name.lstrip("_") for name in (*names, *_OF_WAITS[tool]) if is_patched(name)})
        if found:
            without = ", ".join(f"{name}=False" for name in found)
            raise UsageError(
                f"{what}: {tool} has patched {', '.join(found)} in this process, so it cannot wait for ranks; use "
                f"{patch}({without}), or launch from a process without it"
            )
