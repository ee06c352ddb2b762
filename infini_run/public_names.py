"""What a shell completes of an object: the names that its users call, and not those that this package does."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection


def public_names(thing: object, hidden: Collection[str] = ()) -> list[str]:
    """Return the names of an object for its `__dir__`: no private one, and none of `hidden`, which only this package
    or the standard library calls."""
    return [name for name in object.__dir__(thing) if name not in hidden and (name[0] != "_" or name[:2] == "__")]
