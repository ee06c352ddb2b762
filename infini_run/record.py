"""Frozen records from annotations: what `dataclasses` gives, without its 8 ms of imports.

The one rule: a record is decided once. Its fields are keyword-only, it is never changed, and two
records are equal when they are of one class and their fields are. Not slotted: slots need every class
made twice, which is a tenth of what the start-up may cost.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from typing_extensions import dataclass_transform

    T = TypeVar("T")


def fields(cls: type | object) -> tuple[str, ...]:
    """Return the names of a record's fields, in order."""
    names: tuple[str, ...] = cls._fields  # type: ignore[union-attr]
    return names


_new, _set = object.__new__, object.__setattr__  # a record's own refuses to be set


def _init(self: Any, /, *unnamed: Any, **given: Any) -> None:  # /: else each name is compared with "self"
    cls = type(self)
    if unnamed:
        raise TypeError(f"{cls.__name__}() takes its values by name: {', '.join(f'{name}=' for name in cls._fields)}")
    names = cls._names
    values = given if len(given) == len(names) else cls._defaults | given
    if len(values) != len(names) or not names.issuperset(given):  # cheaper than to compare keys
        _refuse(cls, cls._defaults | values)
    _set(self, "__dict__", values)


def _init_and_check(self: Any, /, *unnamed: Any, **given: Any) -> None:
    _init(self, *unnamed, **given)
    self.__post_init__()


def _refuse(cls: Any, values: dict[str, Any]) -> None:
    for name in cls._fields:
        if name not in values:
            raise TypeError(f"{cls.__name__}() needs {name}=")
    unknown = ", ".join(sorted(values.keys() - cls._names))
    raise TypeError(f"{cls.__name__}() has no field {unknown}")


def _setattr(self: Any, name: str, value: object) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")


def _delattr(self: Any, name: str) -> None:
    raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be deleted")


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
    return f"{type(self).__name__}({shown})"


def _eq(self: Any, other: object) -> bool:
    return vars(self) == vars(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), *(getattr(self, name) for name in self._fields)))


if TYPE_CHECKING:

    @dataclass_transform(kw_only_default=True, frozen_default=True)
    def record(cls: type[T]) -> type[T]: ...

else:

    def record(cls):
        """Make the annotated class a frozen, keyword-only record; a __post_init__ of it checks the values."""
        names = tuple(cls.__annotations__)
        cls._fields = names
        cls._names = frozenset(names)
        cls._defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        cls.__init__ = _init_and_check if hasattr(cls, "__post_init__") else _init
        cls.__setattr__ = _setattr
        cls.__delattr__ = _delattr
        cls.__repr__ = _repr
        cls.__eq__ = _eq
        cls.__hash__ = _hash
        return cls


def made(cls: type[T], values: dict[str, Any]) -> T:
    """Return a record of a class, made of values that it takes over. Calling the class costs several times as much;
    this is for records that each rank needs.

    Args:
        cls: the class.
        values: by name; what is not in it has its default.
    """
    kind: Any = cls
    names = kind._names
    is_known = names.issuperset(values)  # cheaper than to compare keys
    if len(values) != len(names):
        values = kind._defaults | values
    if not is_known or len(values) != len(names):
        _refuse(kind, kind._defaults | values)
    self = _new(cls)
    _set(self, "__dict__", values)
    return self


def replace(instance: T, **changes: object) -> T:
    """Return a copy of a record with some fields changed."""
    return type(instance)(**(vars(instance) | changes))
