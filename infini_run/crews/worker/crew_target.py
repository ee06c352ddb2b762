"""What a crew's workers are for: from what the caller gave to the three functions that a worker calls.

A target is a function of (ctx, task) or of the task alone, or any other callable of these. It may be a class with a
method `task`, or a functools.partial of either. It may also be an object with a method `task`, of which each worker
gets a copy. A check before the start shows whether such a call works.
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

_METHODS = {"task": ("ctx", "task"), "start": ("ctx",), "stop": ("ctx",)}  # and what each is called with


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
        raise UsageError(
            f"target={target!r}: expected a function of (ctx, task), or a class with task(self, ctx, task)"
        )
    for name in _METHODS if _has_task(made) else ():
        check_callable_runs(getattr(made, name, None), f"target: {name}")
    if not _has_task(made):
        check_callable_runs(target, "target")
    if (args or kwargs) and _has_task(made) and _class_of(target) is None:
        raise UsageError(
            f"target={target!r}: already an object; use args= and kwargs= only with a class or a function"
        )
    takes_context = _check_calls(target, made, args, kwargs)
    if not args and not kwargs and takes_context:
        return dump(target, "target")
    try:
        return dump((target, tuple(args), dict(kwargs), takes_context), "target")
    except TypeError:
        for name, value in {"target": target, "args": tuple(args), "kwargs": dict(kwargs)}.items():
            dump(value, name)
        raise


def make_handler(target: Any) -> TaskHandler:
    """Return the functions of an unpickled target, in the worker."""
    args, kwargs, takes_context = (), {}, True
    if type(target) is tuple:  # and not a named one, which may have a method `task`
        target, args, kwargs, takes_context = target
    if _class_of(target) is not None:
        target = target(*args, **kwargs)
    elif not _has_task(target):
        if takes_context:
            return TaskHandler(lambda ctx, task: target(ctx, task, *args, **kwargs), nothing, nothing)
        return TaskHandler(lambda ctx, task: target(task, *args, **kwargs), nothing, nothing)
    return TaskHandler(target.task, getattr(target, "start", nothing), getattr(target, "stop", nothing))


def _check_calls(target: object, made: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function gets the context before the task; True for anything else. Raises UsageError: a worker
    cannot make its object, or cannot call it."""
    if not _has_task(made):
        return _takes_context(target, args, kwargs)
    if _class_of(target) is not None:
        fault = _fault_of_call(target, args, kwargs)
        if fault:
            raise UsageError(f"target: {_called(target)}: {fault}; it is called with args= and kwargs=")
    for name, given in _METHODS.items():
        method = getattr(made, name, None)
        fault = _fault_of_call(method, (*_self_of(made, name), *given), {}) if callable(method) else ""
        if fault:
            raise UsageError(f"target: {_called(method)}: {fault}; it is called with ({', '.join(given)})")
    return True


def _self_of(made: object, name: str) -> tuple[str, ...]:
    """Return what a method of a class has before the caller's arguments."""
    from inspect import getattr_static  # as below: workers import this module, and start faster without

    found = getattr_static(made, name) if isinstance(made, type) else None
    return ("self",) if hasattr(found, "__get__") and not isinstance(found, (staticmethod, classmethod)) else ()


def _takes_context(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the call is (ctx, task) or (task): the first that works, and that the function behind decorators
    takes, too."""
    calls = {True: ("ctx", "task", *args), False: ("task", *args)}
    going = [with_context for with_context, call in calls.items() if not _fault_of_call(function, call, kwargs)]
    if not going:
        more = (*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items()))
        tried = " nor ".join(f"({', '.join((*call, *more))})" for call in (("ctx", "task"), ("task",)))
        raise UsageError(f"target: {_called(function)} can be called with neither {tried}")
    declared = [one for one in going if not _fault_of_call(function, calls[one], kwargs, follow_wrapped=True)]
    return (declared or going)[0]


def _fault_of_call(
    called: Any, args: Sequence[object], kwargs: Mapping[str, object], *, follow_wrapped: bool = False
) -> str:
    """Return why such a call fails; "": it works, or the callable does not say what it takes, as some of C do not."""
    from inspect import signature

    try:
        takes = signature(called, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return ""
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _called(thing: Any) -> str:
    """Return the call as in its definition, `name(a, b)`."""
    from inspect import signature

    name = getattr(thing, "__qualname__", None) or repr(thing)
    try:
        return f"{name}{signature(thing, follow_wrapped=False)}"
    except (TypeError, ValueError):
        return name


def nothing(context: object) -> None:
    """Do nothing: a start, or a stop, without one."""


def _class_of(target: object) -> type | None:
    """Return the class that each worker makes one object of; None: it is no class, nor a partial or an alias
    (`Box[int]`) of one."""
    while isinstance(target, partial):
        target = target.func
    target = getattr(target, "__origin__", target)
    return target if isinstance(target, type) else None


def _has_task(thing: object) -> bool:
    return callable(getattr(thing, "task", None))
