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
    """The base class of a channel's errors."""


class ChannelClosed(ChannelError):
    """This process closed the endpoint itself, or is a forked child, in which the parent's endpoints are closed."""


class ChannelBroken(ChannelError):
    """The other side died. Or, when sending, the other side closed its Receiver. A Receiver first gets every message
    that the other side sent whole."""


class ChannelEnd(ChannelError):
    """The other side closed its Sender, and this side received everything."""


class MessageTooLong(ChannelError, ValueError):
    """A message exceeds the channel's limit, or there is no memory for it. When sending, no part of it was sent. When
    receiving, this message is lost, and the channel continues with the next one. `size` and `limit` are bytes."""

    def __init__(self, size: int, limit: int, finds_no_memory: bool = False) -> None:
        why = f"finds no memory; {NO_MEMORY}" if finds_no_memory else f"exceeds the channel's limit of {limit}"
        super().__init__(f"a message of {size} bytes {why}")
        self.size = size
        self.limit = limit
        self.finds_no_memory = finds_no_memory

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.size, self.limit, self.finds_no_memory)


class UnpicklableError(ChannelError, PicklingError, TypeError):
    """An object does not pickle, so nothing was sent. `path` names the part at fault, such as `config['lock']`."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.path)


class CannotUnpickle(ChannelError):
    """A message arrived whole, but cannot be unpickled here. The channel continues with the next one."""
