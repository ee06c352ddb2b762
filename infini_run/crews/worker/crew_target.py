"""What a crew's workers are for: from what the caller gave to the three functions that a worker calls.

A target is a function of (ctx, task) or of the task alone, or any other callable of these. It may be a class with a
method `task`, or a functools.partial of either. It may also be an object with a method `task`, of which each worker
gets a copy. A check before the start shows whether such a call works.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, MethodType

from infini_run.channel.errors import CannotUnpickle
from infini_run.crews.callables import called_as, check_callable_runs, fault_of_call
from infini_run.crews.protocol import Body, dump
from infini_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

_GETS_CONTEXT = (
    "a function of two arguments gets (ctx, task); for the task alone, use functools.partial(FUNCTION, NAME=VALUE)"
)
_METHODS = {"task": ("ctx", "task"), "start": ("ctx",), "stop": ("ctx",)}  # and what each is called with


class TaskHandler:
    """What the worker is for, as three functions. is_executor: SystemExit in a task is its answer, and does not end
    the worker; and a task that cannot be unpickled is an _UnreadableCall. part: the object whose methods MethodCalls
    name; None: the target is a function."""

    def __init__(
        self,
        task: Callable[..., Any],
        start: Callable[..., Any],
        stop: Callable[..., Any],
        is_executor: bool = False,
        part: object = None,
    ) -> None:
        self.part = part
        self.task = task
        self.start = start
        self.stop = stop
        self.is_executor = is_executor


class _UnreadableCall(CannotUnpickle):
    """A call of an Executor that cannot be unpickled in its worker."""


class Caller:
    """The target of an Executor: each task is a call, (function, args, kwargs). One object of it in each worker first
    calls the initializer, unless that is None."""

    def __init__(self, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> None:
        self._initializer = initializer
        self._initargs = initargs

    def start(self, ctx: object) -> None:
        initializer, initargs = self._initializer, self._initargs
        self._initializer, self._initargs = None, ()
        if initializer is not None:
            initializer(*initargs)

    def task(self, ctx: object, task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
        function, args, kwargs = task
        return function(*args, **kwargs)


class Chunk:
    """Items that travel as one task."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[object, ...]) -> None:
        self.items = items

    def __reduce__(self) -> tuple[object, ...]:
        return Chunk, (self.items,)


class MethodCall:
    """A task that calls a method of the worker's object."""

    __slots__ = ("args", "kwargs", "method")

    def __init__(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.method = method
        self.args = args
        self.kwargs = kwargs

    def __reduce__(self) -> tuple[object, ...]:
        return MethodCall, (self.method, self.args, self.kwargs)


def methods_of(target: object) -> dict[str, Callable[..., Any]]:
    """Return the methods that a MethodCall can name, by their names: the public ones of a class or an object, but for
    those that the crew calls. None of a function."""
    made = _class_of(target) or target
    if not isinstance(made, type) and not _has_task(made):
        return {}
    names = [name for name in dir(made) if not name.startswith("_") and name not in _METHODS]
    return {name: method for name in names if isinstance(method := getattr(made, name), (FunctionType, MethodType))}


def name_of_target(target: object) -> str:
    """Return a target's name for people: that of the class behind a partial, an alias, or an object."""
    made = _class_of(target) or target
    return getattr(made, "__qualname__", "") or type(made).__qualname__


def pack_target(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Body:
    """Pickle a target with the arguments that each worker makes it with. Raises UsageError: it is none;
    UnpicklableError, with the name of the part."""
    made = _class_of(target) or target
    if not _has_task(made) and not (methods_of(made) if isinstance(made, type) else callable(made)):
        raise UsageError(
            f"target={target!r}: expected a function of (ctx, task), or a class with task(self, ctx, task)"
        )
    is_object = _has_task(made) or isinstance(made, type)
    for name in _METHODS if is_object else ():
        check_callable_runs(getattr(made, name, None), f"target: {name}")
    if not is_object:
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
            return TaskHandler(partial(_call_with_context, target, args, kwargs), nothing, nothing)
        return TaskHandler(lambda ctx, task: target(task, *args, **kwargs), nothing, nothing)
    start, stop = getattr(target, "start", nothing), getattr(target, "stop", nothing)
    task = getattr(target, "task", None) or partial(_refuse_task, type(target).__qualname__)
    return TaskHandler(task, start, stop, is_executor=type(target) is Caller, part=target)


def _call_with_context(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ctx: object, task: object
) -> Any:
    try:
        return function(ctx, task, *args, **kwargs)
    except TypeError as error:
        is_about_context = type(error) is TypeError and "Context" in str(error)
        if is_about_context and not fault_of_call(function, (task, *args), kwargs):  # it takes the task alone, too
            error.args = (f"{error}; {_GETS_CONTEXT}",)
        raise


def _refuse_task(name: str, ctx: object, task: object) -> None:
    raise UsageError(f"ask(...): the target {name} has no method task; use call(METHOD, ...)")


def _check_calls(target: object, made: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function gets the context before the task; True for anything else. Raises UsageError: a worker
    cannot make its object, or cannot call it."""
    if not _has_task(made) and not isinstance(made, type):
        return _takes_context(target, args, kwargs)
    if _class_of(target) is not None:
        fault = fault_of_call(target, args, kwargs)
        if fault:
            raise UsageError(f"target: {called_as(target)}: {fault}; it is called with args= and kwargs=")
    for name, given in _METHODS.items():
        method = getattr(made, name, None)
        fault = fault_of_call(method, (*_self_of(made, name), *given), {}) if callable(method) else ""
        if fault:
            raise UsageError(f"target: {called_as(method)}: {fault}; it is called with ({', '.join(given)})")
    return True


def _self_of(made: object, name: str) -> tuple[str, ...]:
    """Return what a method of a class has before the caller's arguments."""
    from inspect import getattr_static  # workers import this module, and start faster without

    found = getattr_static(made, name) if isinstance(made, type) else None
    return ("self",) if hasattr(found, "__get__") and not isinstance(found, (staticmethod, classmethod)) else ()


def _takes_context(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the call is (ctx, task) or (task): the first that works, and that the function behind decorators
    takes, too."""
    calls = {True: ("ctx", "task", *args), False: ("task", *args)}
    going = [with_context for with_context, call in calls.items() if not fault_of_call(function, call, kwargs)]
    if not going:
        more = (*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items()))
        tried = " nor ".join(f"({', '.join((*call, *more))})" for call in (("ctx", "task"), ("task",)))
        raise UsageError(f"target: {called_as(function)} can be called with neither {tried}")
    declared = [one for one in going if not fault_of_call(function, calls[one], kwargs, follow_wrapped=True)]
    return (declared or going)[0]


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
