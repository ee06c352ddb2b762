"""Whether this process may launch functions.

Not while it imports modules for a worker: a module that launches during its import would do so in every worker,
without end. Nor where its threads are gevent's or eventlet's.
"""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.system.monkey_patches import check_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.crews.protocol import Body

_is_importing = False


def load_task(body: Body) -> object:
    """Unpickle a task, or a target, in a worker; `check_may_launch` raises in the imports of that."""
    global _is_importing
    _is_importing = True
    try:
        return body.load()
    finally:
        _is_importing = False


def import_for_worker(name: str) -> None:
    """Import a module in a process that forks workers; `check_may_launch` raises meanwhile."""
    from importlib import import_module

    global _is_importing
    _is_importing = True
    try:
        import_module(name)
    finally:
        _is_importing = False


def check_may_launch() -> None:
    """Raise UsageError if a worker imports what it needs, and this launch is a part of that. Also raise it after a
    patch of what a supervisor's thread waits with."""
    check_threads("functions and crews")
    if _is_importing:
        raise UsageError(
            "a worker imports your module, which launches workers or submits a job at its top level; put that under "
            '`if __name__ == "__main__":`'
        )
