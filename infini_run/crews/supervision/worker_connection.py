"""The supervisor's end of the channel to one process of a worker: messages in and out, without ever blocking."""

from __future__ import annotations

import time

from infini_run.channel.errors import ChannelBroken, ChannelEnd, ChannelError
from infini_run.crews.protocol import decode, encode
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.channel.serializer import Buffer
    from infini_run.crews.protocol import Message
    from infini_run.crews.spawn.spawner import WorkerProcess
    from infini_run.system.poller import Poller

_TURN = 64  # messages of one worker before it is the next one's turn

ENDED, BROKEN, TORN = "ended", "broken", "torn"  # with END; without it; with what is no message


class WorkerConnection:
    """A channel to a worker's process. end_s: when the worker's direction ended, since the epoch; None: it has not.
    has_ended_in_order: it ended with END.

    Args:
        process: whose channel it is.
        poller: the supervisor's.
        is_backlogged: returns whether to leave messages in the channel.
        on_message: called for each message, in order.
        on_end: called once, with ENDED, BROKEN or TORN.
    """

    def __init__(
        self,
        process: WorkerProcess,
        poller: Poller,
        is_backlogged: Callable[[], bool],
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._process = process
        self._tasks, self._events = process.tasks, process.events
        self._poller = poller
        self._is_backlogged = is_backlogged
        self._on_message = on_message
        self._on_end = on_end
        self._has_posted = False  # something waits for room
        self._unsent: list[list[Buffer]] = []  # goes at the end of the supervisor's turn
        self._watched = (-1, 0)
        self.end_s: float | None = None
        self.has_ended_in_order = False

    # ---- down

    def post(self, message: Message) -> None:
        """Send a message; what finds no room goes out later, in order."""
        self._unsent.append(encode(message))
        self._send()

    def post_task(self, message: Message) -> None:
        """Send a message together with others, at the next `watch` or `post`."""
        self._unsent.append(encode(message))

    def _send(self) -> None:
        messages, self._unsent = self._unsent, []
        try:
            self._has_posted = not self._tasks.post_bytes(*messages)
        except ChannelError:
            return  # the process is dead: the end of the other direction will show it

    def post_end(self) -> None:
        """Send END, which is the last message."""
        if self._unsent:
            self._send()
        try:
            self._has_posted = not self._tasks.post_end()
        except ChannelError:
            return  # as in post

    def _flush(self) -> None:
        try:
            self._has_posted = not self._tasks.flush()
        except ChannelError:
            self._has_posted = False

    # ---- up

    @property
    def has_pending(self) -> bool:
        """Whether there are received messages that nobody has read, so that no descriptor shows them."""
        return self.end_s is None and self._events.pending and not self._is_backlogged()

    def read(self, most: int = _TURN) -> None:
        """Take in at most `most` messages that have arrived: what one read of a living process brings; then the
        poller reports more. While there is a backlog, take in only those of a process that is gone."""
        for count in range(most):
            if self.end_s is not None:
                return
            if self._process.exit is None and (self._is_backlogged() or (count and not self._events.pending)):
                return
            try:
                frame = self._events.recv_bytes(0.0)
            except TimeoutError:
                return
            except ChannelEnd:
                self._end(ENDED)
            except ChannelError:
                self._end(TORN if self._events.is_torn else BROKEN)
            except TypeError:  # an object, and no bytes
                self._end(TORN)
            else:
                self._deliver(frame)

    def _deliver(self, frame: bytes) -> None:
        try:
            message = decode(frame)
        except ChannelBroken:
            self._end(TORN)
        else:
            self._on_message(message)

    def _end(self, how: str) -> None:
        self.end_s, self.has_ended_in_order = time.time(), how == ENDED
        self._on_end(how)

    def end(self) -> None:
        """End the reading: the process is gone, and nothing of its output is unread."""
        if self.end_s is None:
            self.end_s = time.time()

    # ---- the poller

    def watch(self) -> None:
        """Send what is unsent, and tell the poller what to wait for now."""
        if self._unsent:
            self._send()
        wanted = (-1, 0)
        if self.end_s is None:
            events = 0 if self._is_backlogged() else READ
            wanted = self._events.fileno(), events | (WRITE if self._has_posted else 0)
        if wanted != self._watched:
            if wanted[0] != self._watched[0] or not wanted[1]:
                self.unwatch()
            if wanted[1]:
                self._poller.watch(*wanted, self._on_ready)
                self._watched = wanted

    def unwatch(self) -> None:
        """Watch nothing, until `watch`."""
        fd, self._watched = self._watched[0], (-1, 0)
        if fd >= 0:
            self._poller.unwatch(fd)

    def _on_ready(self) -> None:
        self.read()
        if self._has_posted and self.end_s is None:
            self._flush()
