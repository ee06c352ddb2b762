"""Why a message could not be sent or received.

ChannelError                 the root, an InfiniRunError (exit code 1)
├── ChannelClosed            this end was closed by its owner
├── ChannelBroken            the other side has died, or takes no more
├── ChannelEnd               the other side has closed: all that it sent has been received
├── MessageTooLong           a message is over the channel's limit (a ValueError, too)
├── UnpicklableError         an object cannot be pickled: nothing was sent (a PicklingError and a TypeError, too)
└── CannotUnpickle           a message came whole, but cannot be made an object; the channel goes on
"""

from __future__ import annotations

from pickle import PicklingError

from infini_run.errors import NO_MEMORY, InfiniRunError


class ChannelError(InfiniRunError):
    """A message could not be sent or received."""


class ChannelClosed(ChannelError):
    """We have closed this end of the channel."""


class ChannelBroken(ChannelError):
    """The other side has died, or, to a sender, has closed its receiver. What it sent whole has been received."""


class ChannelEnd(ChannelError):
    """The other side has closed its end in good order, and everything that it sent has been received."""


class MessageTooLong(ChannelError, ValueError):
    """A message is over the channel's limit, or finds no memory: of a sent one nothing has gone, a received one was
    passed over. `size` and `limit` are bytes."""

    def __init__(self, size: int, limit: int, finds_no_memory: bool = False) -> None:
        why = f"finds no memory; {NO_MEMORY}" if finds_no_memory else f"is over the channel's limit of {limit}"
        super().__init__(f"a message of {size} bytes {why}")
        self.size = size
        self.limit = limit
        self.finds_no_memory = finds_no_memory

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.size, self.limit, self.finds_no_memory)


class UnpicklableError(ChannelError, PicklingError, TypeError):
    """An object cannot be pickled, so nothing was sent. `path` says where in it what is at fault is."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.path)


class CannotUnpickle(ChannelError):
    """A message has come whole, but cannot be made an object here. The channel goes on with the next one."""
