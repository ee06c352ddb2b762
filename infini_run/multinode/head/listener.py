"""The TCP port for agents, and the connections to it that have not proved yet that they know the token.

The one rule: an unauthenticated connection has no effect on the job. The head drops one that sends something else, or
nothing for 10 s, and reports the first few. One turn of the loop accepts a few connections at most, so it serves
those of the job in between. After all nodes have joined, new ones get a small share of the head's time. If there are
too many, the address with the most of them loses its oldest; one that has sent an agent's greeting goes last.
"""

from __future__ import annotations

import os
import time
from _functools import partial

from infini_run.core.group import forking
from infini_run.errors import LinkError, UsageError
from infini_run.multinode.link import protocol
from infini_run.multinode.link.handshake import Handshake
from infini_run.multinode.link.message_schema import is_seconds
from infini_run.multinode.link.protocol import HANDSHAKE_S, unpack_json
from infini_run.multinode.link.tcp import accept, find_address, listen, own_addresses
from infini_run.record import record
from infini_run.system.fork_hooks import close_link
from infini_run.system.poller import READ
from infini_run.system.resource_limits import LIMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable

    from infini_run.multinode.link.connection import Connection
    from infini_run.system.poller import Poller

_SPARE = 256  # unauthenticated connections beyond one per node
_AT_ONCE = 32  # connections that are accepted in one turn
_PAUSE_S = 0.1  # between two such turns, after all nodes have joined
_NO_ROOM_S = (
    1.0  # until it tries again to accept, after it had no descriptor to spare: no event reports that one is free
)
_REPORTED = 8  # rejected connections, of strangers and of launchers with another token


@record
class Identity:
    """What an agent says that it is.

    Args:
        node: index of its node; HANDED_OUT: the head chooses.
        host: its name; "": it does not say.
        run_id: the user's name for the run in a manual launch; else None.
        last_job: launch id of the job of which it was a node before, or asked to be; "": of none.
        last_timeout_s: --node_timeout there.
    """

    node: int
    host: str
    run_id: str | None
    last_job: str
    last_timeout_s: float


class _Unauthenticated:
    def __init__(self, address: str, end_s: float) -> None:
        self.address = address
        self.end_s = end_s
        self.handshake: Handshake | None = None  # from its first frame on: until then it costs nothing more


class _ByAddress:
    """Connections by the address that they come from, oldest first."""

    def __init__(self) -> None:
        self._from: dict[str, dict[Connection, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._from)

    def add(self, connection: Connection, address: str) -> None:
        self._from.setdefault(address, {})[connection] = None

    def remove(self, connection: Connection, address: str) -> None:
        """Remove a connection. Safe for one that is unknown."""
        connections = self._from.get(address, {})
        connections.pop(connection, None)
        if not connections:
            self._from.pop(address, None)

    def oldest_of_most(self) -> Connection:
        """Return the oldest connection from the address with the most."""
        most: dict[Connection, None] = max(self._from.values(), key=len)
        return next(iter(most))


class AgentListener:
    """The head's port.

    Args:
        token: the secret.
        nodes: how many agents to expect.
        on_authenticated: called with a connection that has proved itself, what the agent says that it is, and the
            address that it comes from.
        on_last_word: called with what claims to be the last word of a node, from anybody.
        notice: called with lines for the user.
    """

    def __init__(
        self,
        token: str,
        nodes: int,
        poller: Poller,
        on_authenticated: Callable[[Connection, Identity, str], None],
        on_last_word: Callable[[bytes], None],
        notice: Callable[[str], None],
    ) -> None:
        self._token = token
        self._token_file = ""
        self._limit = nodes + _SPARE
        self._poller = poller
        self._on_authenticated = on_authenticated
        self._on_last_word = on_last_word
        self._notice = notice
        self._turned_away = {False: 0, True: 0}  # whether it spoke the protocol
        self.dropped = 0  # connections that had proved nothing
        self._waiting: dict[Connection, _Unauthenticated] = {}  # oldest first
        self._strangers, self._likely_agents = _ByAddress(), _ByAddress()
        self._is_expecting = True
        self._pause_end_s = float("inf")
        self._has_no_room = False  # a line has said so
        self._listener: socket | None = None

    def open(self, port: int, asked: str = "", listening: socket | None = None) -> str:
        """Listen.

        Args:
            port: 0: one that is free.
            asked: an address or an interface of this machine; empty: all.
            listening: a socket that already listens there. None: open one.

        Returns:
            `HOST,HOST:PORT`, to which agents connect.

        Raises:
            UsageError: the port is in use, or there is no such address.
        """
        address = find_address(asked) if asked else ""
        self._listener = listener = listening or listen(port, address)
        self._poller.watch(listener.fileno(), READ, self._accept)
        hosts = f"[{address}]" if ":" in address else address or ",".join(own_addresses())
        return f"{hosts}:{listener.getsockname()[1]}"

    def write_token(self, path: str) -> None:
        """Write the token to a new file of mode 0600, for agents that get no environment. Raises UsageError."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; use a directory that the nodes share") from None
        self._token_file = path
        try:
            with open(fd, "wb") as file:
                file.write(os.fsencode(self._token))
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None

    def expect(self, is_expecting: bool) -> None:
        """Say whether a node may still join; if none may, what connects is no node of this job, and has time."""
        self._is_expecting = is_expecting

    def remove_token(self) -> None:
        """Remove the file: all agents have read it. Safe twice."""
        path, self._token_file = self._token_file, ""
        if path:
            try:
                os.unlink(path)
            except OSError:  # another process was faster, or the disk has gone: nothing can be done
                return

    @property
    def next_deadline_s(self) -> float:
        """When `run_due` has something to do."""
        return min(self._first_end_s, self._pause_end_s)

    @property
    def _first_end_s(self) -> float:
        return next((waiting.end_s for waiting in self._waiting.values()), float("inf"))

    def run_due(self, now_s: float) -> None:
        """Drop connections that have not proved themselves in time; accept again after a pause."""
        while self._first_end_s <= now_s:
            self._drop(next(iter(self._waiting)))
        if self._pause_end_s <= now_s and self._listener is not None:
            self._pause_end_s = float("inf")
            self._poller.watch(self._listener.fileno(), READ, self._accept)

    def _accept(self) -> None:
        for at in range(_AT_ONCE):
            with forking:  # a child that is forked meanwhile would keep the connection
                if (accepted := self._accept_next(is_first=at == 0)) is None:
                    return
                connection, address = accepted
                self._has_no_room = False
                connection.restrict()
                if len(self._waiting) >= self._limit:
                    self._make_room()
                self._waiting[connection] = _Unauthenticated(address, time.monotonic() + HANDSHAKE_S)
                self._strangers.add(connection, address)
            self._poller.watch(connection.fileno(), READ, partial(self._read, connection))
            self._read(connection)  # mostly an agent has sent its first frame by now
        if not self._is_expecting and self._listener is not None:
            self._poller.unwatch(self._listener.fileno())
            self._pause_end_s = time.monotonic() + _PAUSE_S

    def _make_room(self) -> None:
        group = self._strangers or self._likely_agents
        self._drop(group.oldest_of_most())

    def _accept_next(self, is_first: bool) -> tuple[Connection, str] | None:
        """Accept a connection; None: there is none. Without a free descriptor, the oldest unauthenticated connection
        gives its own. The kernel may report that want even if no connection waits, except for the first one of a
        turn."""
        assert self._listener is not None
        while True:
            try:
                return accept(self._listener)
            except OSError as error:
                if not is_first:
                    return None  # if one waits, the poller reports it again
                if not self._waiting:  # it would be ready again and again
                    self._poller.unwatch(self._listener.fileno())
                    self._pause_end_s = time.monotonic() + _NO_ROOM_S
                    if not self._has_no_room:
                        self._has_no_room = True
                        limit = LIMITS.get(error.errno or 0, error.strerror)
                        self._notice(f"cannot accept more nodes: {limit}")
                    return None
                self._make_room()

    def _read(self, connection: Connection) -> None:
        waiting = self._waiting[connection]
        try:
            for kind, payload in connection.read():
                if kind == protocol.LAST_WORD and waiting.handshake is None:
                    self._release(connection)
                    connection.close()
                    self._on_last_word(payload)
                    return
                handshake = waiting.handshake or self._begin(connection, waiting)
                if not handshake.is_done:
                    handshake.handle_frame(kind, payload)
                    if handshake.is_likely_agent:
                        self._strangers.remove(connection, waiting.address)
                        self._likely_agents.add(connection, waiting.address)
                elif kind == protocol.IDENTITY:
                    self._pass_on(connection, unpack_json(payload))
                    return
        except LinkError as error:
            is_launcher = waiting.handshake is not None and waiting.handshake.has_received
            self._turn_away(
                f"rejected {waiting.address}, which connected to the link's port: {error}", is_launcher=is_launcher
            )
            self._drop(connection)
            return
        if connection.has_ended:
            self._drop(connection)

    def _begin(self, connection: Connection, waiting: _Unauthenticated) -> Handshake:
        waiting.handshake = Handshake(connection, os.fsencode(self._token), is_head=True)
        return waiting.handshake

    def _pass_on(self, connection: Connection, content: object) -> None:
        fields = content if isinstance(content, dict) else {}
        node, host, run_id = fields.get("node"), fields.get("host", ""), fields.get("run_id")
        last_job, last_timeout_s = fields.get("last_job", ""), fields.get("last_timeout_s", 0.0)
        if type(node) is not int or not isinstance(host, str) or not isinstance(run_id, (str, type(None))):
            raise LinkError("its messages do not name its node")
        if not isinstance(last_job, str) or not is_seconds(last_timeout_s):
            raise LinkError("its messages do not name its node")
        address = self._waiting[connection].address
        self._release(connection)
        identity = Identity(node=node, host=host, run_id=run_id, last_job=last_job, last_timeout_s=last_timeout_s)
        self._on_authenticated(connection, identity, address)

    def _turn_away(self, text: str, *, is_launcher: bool) -> None:
        self._turned_away[is_launcher] += 1
        count = self._turned_away[is_launcher]
        if count <= _REPORTED:
            self._notice(text + (" (not reporting more of these)" if count == _REPORTED else ""))

    def _release(self, connection: Connection) -> None:
        waiting = self._waiting.pop(connection)
        for group in (self._strangers, self._likely_agents):
            group.remove(connection, waiting.address)
        self._poller.unwatch(connection.fileno())

    def _drop(self, connection: Connection) -> None:
        self.dropped += 1
        self._release(connection)
        connection.close()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child; the file with the token stays."""
        self._token_file = ""
        self.close()

    def close(self) -> None:
        """Close everything. Safe twice."""
        self.remove_token()
        for connection in list(self._waiting):
            self._drop(connection)
        if self._listener is not None:
            self._poller.unwatch(self._listener.fileno())
            close_link(self._listener)
            self._listener = None
            self._pause_end_s = float("inf")
