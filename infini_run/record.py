"""Frozen records from annotations: what `dataclasses` gives, without its 8 ms of imports.

The one rule: a record is decided once. Its fields are keyword-only, it is never changed, and two
records are equal when they are of one class and their fields are.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from typing_extensions import dataclass_transform

    T = TypeVar("T")


def _init(self: Any, **given: Any) -> None:
    cls = type(self)
    values = cls._defaults | given if cls._defaults else given
    if len(values) != len(cls.__slots__) or values.keys() != cls._names:
        _refuse(cls, values)
    for set_field, value in zip(cls._setters, map(values.__getitem__, cls.__slots__)):  # noqa: B905 (of one length)
        set_field(self, value)


def _refuse(cls: Any, values: dict[str, Any]) -> None:
    for name in cls.__slots__:
        if name not in values:
            raise TypeError(f"{cls.__name__}() needs {name}=")
    unknown = ", ".join(sorted(values.keys() - cls._names))
    raise TypeError(f"{cls.__name__}() has no field {unknown}")


def _setattr(self: Any, name: str, value: object) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")


def _delattr(self: Any, name: str) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be deleted")


def _repr(self: Any) -> str:
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
    return f"{type(self).__name__}({fields})"


def _values(self: Any) -> tuple[object, ...]:
    return tuple(getattr(self, name) for name in self.__slots__)


def _eq(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), _values(self)))


def _reduce(self: Any) -> tuple[object, ...]:
    return _rebuild, (type(self), _values(self))


def _rebuild(cls: type, values: tuple[object, ...]) -> object:
    return cls(**dict(zip(cls.__slots__, values, strict=True)))  # type: ignore[attr-defined]


if TYPE_CHECKING:

    @dataclass_transform(kw_only_default=True, frozen_default=True)
    def record(cls: type[T]) -> type[T]: ...

else:

    def record(cls):
        """Make the annotated class a frozen, slotted, keyword-only record."""
        names = tuple(cls.__annotations__)
        body = {k: v for k, v in cls.__dict__.items() if k not in names and k not in ("__dict__", "__weakref__")}
        body |= {
            "__slots__": names,
            "_defaults": {name: cls.__dict__[name] for name in names if name in cls.__dict__},
            "__init__": _init,
            "__setattr__": _setattr,
            "__delattr__": _delattr,
            "__repr__": _repr,
            "__eq__": _eq,
            "__hash__": _hash,
            "__reduce__": _reduce,
        }
        made = type(cls.__name__, cls.__bases__, body)
        made._names = frozenset(names)
        made._setters = tuple(made.__dict__[name].__set__ for name in names)
        return made


def replace(instance: T, **changes: object) -> T:
    """A copy of a record with some fields changed."""
    fields = {name: getattr(instance, name) for name in instance.__slots__}  # type: ignore[attr-defined]
    return type(instance)(**(fields | changes))
