"""What a crew's workers are for: from what the caller gave to the three functions that a worker calls.

A target is a function of (ctx, task), any other callable of these two, a class with a method `task`, a
functools.partial of either, or an object with a method `task`, of which each worker gets a copy.
"""

from __future__ import annotations

from functools import partial

from infini_run.crews.callables import check_callable_runs
from infini_run.crews.protocol import Body, dump
from infini_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

_METHODS = ("task", "start", "stop")


class TaskHandler:
    """What the worker is for, as three functions."""

    def __init__(self, task: Callable[..., Any], start: Callable[..., Any], stop: Callable[..., Any]) -> None:
        self.task = task
        self.start = start
        self.stop = stop


class Chunk:
    """Items that travel as one task."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[object, ...]) -> None:
        self.items = items

    def __reduce__(self) -> tuple[object, ...]:
        return Chunk, (self.items,)


def pack_target(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Body:
    """Pickle a target with the arguments that each worker makes it with. Raises UsageError: it is none;
    UnpicklableError, with the name of the part."""
    made = _class_of(target) or target
    if not _has_task(made) and (isinstance(made, type) or not callable(made)):
        raise UsageError(f"target={target!r}: give a function of (ctx, task), or a class with task(self, ctx, task)")
    for name in _METHODS if _has_task(made) else ():
        check_callable_runs(getattr(made, name, None), f"target: {name}")
    if not _has_task(made):
        check_callable_runs(target, "target")
    if not args and not kwargs:
        return dump(target, "target")
    if _has_task(made) and _class_of(target) is None:
        raise UsageError(f"target={target!r} is made already: args= and kwargs= are for a class or a function")
    try:
        return dump((target, tuple(args), dict(kwargs)), "target")
    except TypeError:
        for name, value in {"target": target, "args": tuple(args), "kwargs": dict(kwargs)}.items():
            dump(value, name)
        raise


def make_handler(target: Any) -> TaskHandler:
    """In the worker: the functions of a target that was unpickled."""
    args, kwargs = (), {}
    if type(target) is tuple:  # and not a named one, which may have a method `task`
        target, args, kwargs = target
    if _class_of(target) is not None:
        target = target(*args, **kwargs)
    elif not _has_task(target):
        return TaskHandler(lambda ctx, task: target(ctx, task, *args, **kwargs), nothing, nothing)
    return TaskHandler(target.task, getattr(target, "start", nothing), getattr(target, "stop", nothing))


def nothing(context: object) -> None:
    """A start, or a stop, with nothing to do."""


def _class_of(target: object) -> type | None:
    """The class that each worker makes one object of; None: it is no class, nor a partial or an alias (`Box[int]`) of
    one."""
    while isinstance(target, partial):
        target = target.func
    target = getattr(target, "__origin__", target)
    return target if isinstance(target, type) else None


def _has_task(thing: object) -> bool:
    return callable(getattr(thing, "task", None))
