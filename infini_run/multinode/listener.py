"""Who has dialled and has not proved that he is ours: anybody, as long as the port is open.

The one rule: none of it is the job's affair. Who says something else, says nothing for too long, or comes with too
many, is let go; what is said is told, a few times. However many dial, one turn lets in a few of them, the job's own
links have theirs in between, and once all nodes have come strangers get a small share of the head's time. Where there
is no room the address that has the most of it gives some, and who has said nothing goes before who has.
"""

from __future__ import annotations

import os
import time
from _functools import partial

from infini_run.core.group import forking
from infini_run.errors import LinkError, UsageError
from infini_run.multinode import protocol
from infini_run.multinode.connection import Handshake
from infini_run.multinode.protocol import unpack_json
from infini_run.multinode.tcp import accept, find_address, listen, own_addresses
from infini_run.system.poller import READ
from infini_run.system.resource_limits import LIMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable

    from infini_run.multinode.connection import Connection
    from infini_run.system.poller import Poller

_PROVE_S = 10.0  # that a handshake may take
_MOST = 256  # strangers beyond one for each node
_AT_ONCE = 32  # who are let in in one turn
_REST_S = 0.1  # between two such turns, where nobody is expected
_TOLD = 8  # who was turned away, until it is enough


class _Unauthenticated:
    def __init__(self, address: str, end_s: float) -> None:
        self.address = address
        self.end_s = end_s
        self.handshake: Handshake | None = None  # as soon as he has said a word: who says none costs nothing more


class _Crowd:
    """Strangers by the address that they come from, in the order in which they came."""

    def __init__(self) -> None:
        self._from: dict[str, dict[Connection, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._from)

    def add(self, wire: Connection, address: str) -> None:
        self._from.setdefault(address, {})[wire] = None

    def remove(self, wire: Connection, address: str) -> None:
        """Safe for one who is not there."""
        those = self._from.get(address, {})
        those.pop(wire, None)
        if not those:
            self._from.pop(address, None)

    def oldest_of_most(self) -> Connection:
        """The first who came from where the most come from."""
        those = max(self._from.values(), key=len)
        return next(iter(those))


class AgentListener:
    """admit: gets the wire of one that is ours, the number and the host that it says it is, and where it dials from.
    notice: gets lines for the user."""

    def __init__(
        self,
        token: str,
        nodes: int,
        poller: Poller,
        admit: Callable[[Connection, int, str, str], None],
        notice: Callable[[str], None],
    ) -> None:
        self._token = token
        self._token_file = ""
        self._most = nodes + _MOST
        self._poller = poller
        self._admit = admit
        self._notice = notice
        self._turned_away = 0
        self.let_go = 0  # who have proved nothing
        self._strangers: dict[Connection, _Unauthenticated] = {}  # in the order in which they came
        self._silent, self._speaking = _Crowd(), _Crowd()
        self._is_expecting = True
        self._rest_end_s = float("inf")
        self._listener: socket | None = None

    def open(self, port: int, asked: str = "") -> str:
        """Listen on an address or an interface (none: on all); where agents are to dial. Raises UsageError: the port
        is taken, or there is no such address."""
        address = find_address(asked) if asked else ""
        self._listener = listener = listen(port, address)
        self._poller.watch(listener.fileno(), READ, self._accept)
        hosts = f"[{address}]" if ":" in address else address or ",".join(own_addresses())
        return f"{hosts}:{listener.getsockname()[1]}"

    def write_token(self, path: str) -> None:
        """Where agents find it that can be given no environment. Raises UsageError."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; start from a directory that the nodes share") from None
        self._token_file = path
        try:
            with open(fd, "wb") as file:
                file.write(os.fsencode(self._token))
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None

    def rest(self) -> None:
        """All have come: who dials now is no node of this job, and has time."""
        self._is_expecting = False
        self.remove_token()

    def remove_token(self) -> None:
        """All have read it. Safe twice."""
        path, self._token_file = self._token_file, ""
        if path:
            try:
                os.unlink(path)
            except OSError:  # somebody else was faster, or the disk has gone: there is nothing that we could do
                return

    @property
    def next_end_s(self) -> float:
        """When `expire` has something to do."""
        return min(self._first_end_s, self._rest_end_s)

    @property
    def _first_end_s(self) -> float:
        return next((stranger.end_s for stranger in self._strangers.values()), float("inf"))

    def expire(self, now_s: float) -> None:
        """Let those go that have said too little for too long; listen again after a rest."""
        while self._first_end_s <= now_s:
            self._let_go(next(iter(self._strangers)))
        if self._rest_end_s <= now_s and self._listener is not None:
            self._rest_end_s = float("inf")
            self._poller.watch(self._listener.fileno(), READ, self._accept)

    def _accept(self) -> None:
        for at in range(_AT_ONCE):
            with forking:  # a child that is forked meanwhile would hold the connection, and nobody could forget it
                if (found := self._next(is_first=at == 0)) is None:
                    return
                wire, address = found
                wire.keep_small()
                if len(self._strangers) >= self._most:
                    self._make_room()
                self._strangers[wire] = _Unauthenticated(address, time.monotonic() + _PROVE_S)
                self._silent.add(wire, address)
            self._poller.watch(wire.fileno(), READ, partial(self._hear, wire))
            self._hear(wire)  # who is ours has said his first word before we come to him
        if not self._is_expecting and self._listener is not None:
            self._poller.unwatch(self._listener.fileno())
            self._rest_end_s = time.monotonic() + _REST_S

    def _make_room(self) -> None:
        crowd = self._silent or self._speaking
        self._let_go(crowd.oldest_of_most())

    def _next(self, is_first: bool) -> tuple[Connection, str] | None:
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
                    self._poller.unwatch(self._listener.fileno())
                    limit = LIMITS.get(error.errno or 0, error.strerror)
                    self._notice(f"no more nodes can be let in: {limit}")
                    return None
                self._make_room()

    def _hear(self, wire: Connection) -> None:
        stranger = self._strangers[wire]
        try:
            for kind, payload in wire.read():
                handshake = stranger.handshake or self._begin(wire, stranger)
                if not handshake.done:
                    handshake.take(kind, payload)
                elif kind == protocol.IDENTITY:
                    self._pass_on(wire, unpack_json(payload))
                    return
        except LinkError as error:
            self._turn_away(f"{stranger.address} dialled the link's port and was turned away: {error}")
            self._let_go(wire)
            return
        if wire.has_ended:
            self._let_go(wire)

    def _begin(self, wire: Connection, stranger: _Unauthenticated) -> Handshake:
        self._silent.remove(wire, stranger.address)
        self._speaking.add(wire, stranger.address)
        stranger.handshake = Handshake(wire, os.fsencode(self._token), is_head=True)
        return stranger.handshake

    def _pass_on(self, wire: Connection, name: object) -> None:
        node = name.get("node") if isinstance(name, dict) else None
        host = name.get("host", "") if isinstance(name, dict) else ""
        if type(node) is not int or not isinstance(host, str):
            raise LinkError("it does not say which node it is")
        address = self._strangers[wire].address
        self._forget(wire)
        self._admit(wire, node, host, address)

    def _turn_away(self, text: str) -> None:
        self._turned_away += 1
        if self._turned_away <= _TOLD:
            self._notice(text + (" (no more of these will be told)" if self._turned_away == _TOLD else ""))

    def _forget(self, wire: Connection) -> None:
        stranger = self._strangers.pop(wire)
        for crowd in (self._silent, self._speaking):
            crowd.remove(wire, stranger.address)
        self._poller.unwatch(wire.fileno())

    def _let_go(self, wire: Connection) -> None:
        self.let_go += 1
        self._forget(wire)
        wire.close()

    def after_fork_in_child(self) -> None:
        """In a forked child: the file with the token stays."""
        self._token_file = ""
        self.close()

    def close(self) -> None:
        """Safe twice."""
        self.remove_token()
        for wire in list(self._strangers):
            self._let_go(wire)
        if self._listener is not None:
            self._poller.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._rest_end_s = float("inf")
