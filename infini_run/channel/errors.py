"""Why a message did not arrive.

ChannelError                 the root, an InfiniRunError (exit code 1)
├── ChannelClosed            the owner closed this end
├── ChannelBroken            the other side died, or takes no more
├── ChannelEnd               the other side closed, and this side received all that it sent
├── MessageTooLong           a message is over the channel's limit (a ValueError, too)
├── UnpicklableError         an object does not pickle: nothing was sent (a PicklingError and a TypeError, too)
└── CannotUnpickle           a message came whole, but does not become an object; the channel continues
"""

from __future__ import annotations

from _pickle import PicklingError

from infini_run.errors import NO_MEMORY, InfiniRunError


class ChannelError(InfiniRunError):
    """The root of a channel's errors."""


class ChannelClosed(ChannelError):
    """An end that this process closed."""


class ChannelBroken(ChannelError):
    """The other side died, or, to a sender, closed its receiver. A receiver got everything that it sent whole."""


class ChannelEnd(ChannelError):
    """The other side closed its end in good order, and this side received everything."""


class MessageTooLong(ChannelError, ValueError):
    """A message that is over the channel's limit, or finds no memory. Of a sent one nothing has gone; the receiver
    skipped a received one. `size` and `limit` are bytes."""

    def __init__(self, size: int, limit: int, finds_no_memory: bool = False) -> None:
        why = f"finds no memory; {NO_MEMORY}" if finds_no_memory else f"exceeds the channel's limit of {limit}"
        super().__init__(f"a message of {size} bytes {why}")
        self.size = size
        self.limit = limit
        self.finds_no_memory = finds_no_memory

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.size, self.limit, self.finds_no_memory)


class UnpicklableError(ChannelError, PicklingError, TypeError):
    """An object that does not pickle, so nothing was sent. `path` says where in it the fault is."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.path)


class CannotUnpickle(ChannelError):
    """A message that came whole, but does not become an object here. The channel continues with the next one."""
