"""Who has dialled and has not proved that he is ours: anybody, as long as the port is open.

The one rule: none of it is the job's affair. Who says something else, says nothing for too long, or comes with too
many, is let go; that is told, a few times.
"""

from __future__ import annotations

import os
import time
from _functools import partial

from infini_run import frame
from infini_run.dial import accept, listen, own_addresses
from infini_run.errors import LinkError, UsageError
from infini_run.frame import unpack_json
from infini_run.link import Handshake
from infini_run.poller import READ
from infini_run.shortage import LIMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from infini_run.link import Wire
    from infini_run.poller import Poller

_PROVE_S = 10.0  # that a handshake may take
_MOST = 256  # strangers beyond one for each node
_TOLD = 8  # who was turned away, until it is enough


class _Stranger:
    def __init__(self, handshake: Handshake, end_s: float) -> None:
        self.handshake = handshake
        self.end_s = end_s


class Lobby:
    """admit: gets the wire of one that is ours, the number and the host that it says it is.
    notice: gets lines for the user."""

    def __init__(
        self,
        token: str,
        nodes: int,
        poller: Poller,
        admit: Callable[[Wire, int, str], None],
        notice: Callable[[str], None],
    ) -> None:
        self._token = token
        self._token_file = ""
        self._most = nodes + _MOST
        self._poller = poller
        self._admit = admit
        self._notice = notice
        self._turned_away = 0
        self._strangers: dict[Wire, _Stranger] = {}  # in the order in which they came
        self._listener: socket | None = None

    def open(self, port: int) -> str:
        """Listen; where agents are to dial. Raises UsageError: the port is taken."""
        self._listener = listener = listen(port)
        self._poller.watch(listener.fileno(), READ, self._accept)
        return f"{','.join(own_addresses())}:{listener.getsockname()[1]}"

    def write_token(self, path: str) -> None:
        """Where agents find it that can be given no environment. Raises UsageError."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; start from a directory that the nodes share") from None
        self._token_file = path
        with open(fd, "wb") as file:
            file.write(os.fsencode(self._token))

    def remove_token(self) -> None:
        """All have read it. Safe twice."""
        path, self._token_file = self._token_file, ""
        if path:
            os.unlink(path)

    @property
    def next_end_s(self) -> float:
        """When `expire` has something to do."""
        return next((stranger.end_s for stranger in self._strangers.values()), float("inf"))

    def expire(self, now_s: float) -> None:
        """Let those go that have said too little for too long."""
        while self._strangers and self.next_end_s <= now_s:
            self._let_go(next(iter(self._strangers)))

    def _accept(self) -> None:
        is_first = True
        while (found := self._next(is_first)) is not None:
            is_first, (wire, address) = False, found
            if len(self._strangers) >= self._most:
                self._let_go(next(iter(self._strangers)))
            handshake = Handshake(wire, os.fsencode(self._token), is_head=True, who=address)
            self._strangers[wire] = _Stranger(handshake, time.monotonic() + _PROVE_S)
            self._poller.watch(wire.fileno(), READ, partial(self._hear, wire))

    def _next(self, is_first: bool) -> tuple[Wire, str] | None:
        """Who dials next; None: nobody now. Where no descriptor is left the oldest stranger gives his; but for the
        first, who is surely there, that may be said with nobody waiting."""
        assert self._listener is not None
        while True:
            try:
                return accept(self._listener)
            except OSError as error:
                if not is_first:
                    return None  # who waits is told of again
                if not self._strangers:  # it would be ready again and again
                    self._poller.forget(self._listener.fileno())
                    limit = LIMITS.get(error.errno or 0, error.strerror)
                    self._notice(f"no more nodes can be let in: {limit}")
                    return None
                self._let_go(next(iter(self._strangers)))

    def _hear(self, wire: Wire) -> None:
        handshake = self._strangers[wire].handshake
        try:
            for kind, payload in wire.read():
                if not handshake.done:
                    handshake.take(kind, payload)
                elif kind == frame.NAME:
                    self._pass_on(wire, unpack_json(payload))
                    return
        except LinkError as error:
            self._turn_away(f"{handshake.who} dialled the link's port and was turned away: {error}")
            self._let_go(wire)
            return
        if wire.has_ended:
            self._let_go(wire)

    def _pass_on(self, wire: Wire, name: object) -> None:
        node = name.get("node") if isinstance(name, dict) else None
        host = name.get("host", "") if isinstance(name, dict) else ""
        if not isinstance(node, int) or not isinstance(host, str):
            raise LinkError("it does not say which node it is")
        del self._strangers[wire]
        self._poller.forget(wire.fileno())
        self._admit(wire, node, host)

    def _turn_away(self, text: str) -> None:
        self._turned_away += 1
        if self._turned_away <= _TOLD:
            self._notice(text + (" (no more of these will be told)" if self._turned_away == _TOLD else ""))

    def _let_go(self, wire: Wire) -> None:
        del self._strangers[wire]
        self._poller.forget(wire.fileno())
        wire.close()

    def forget(self) -> None:
        """In a forked child: the file with the token stays."""
        self._token_file = ""
        self.close()

    def close(self) -> None:
        """Safe twice."""
        self.remove_token()
        for wire in list(self._strangers):
            self._let_go(wire)
        if self._listener is not None:
            self._poller.forget(self._listener.fileno())
            self._listener.close()
            self._listener = None
