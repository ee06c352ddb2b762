"""An agent's end of the Link: proves itself, answers heartbeats, and notices when the head has gone or is silent."""

from __future__ import annotations

import time

import infini_run.lean_os as os
from infini_run.errors import InfiniRunError, LinkError, ProgramError, UsageError
from infini_run.multinode.link import message_schema, protocol
from infini_run.multinode.link.clock_offset import clock_answer
from infini_run.multinode.link.lease import LEAST_LEASE
from infini_run.multinode.link.protocol import HANDSHAKE_S, pack_json
from infini_run.report.text import duration_text
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.multinode.link.connection import Connection
    from infini_run.multinode.link.handshake import Handshake
    from infini_run.multinode.link.lease import Lease
    from infini_run.system.poller import Poller

_HEARTBEATS = 3  # within the head's patience, while this process is suspended
_QUEUED = (protocol.SPEC, protocol.LAUNCH, protocol.GOODBYE)  # frames that wait for `next_frame`
_HEAD_GONE = "lost the connection to the head"
_LATE_S = 1.0  # a wait that ends so long after its end: this process was stopped, or its machine slept


class HeadGone(LinkError):
    """The end of the Link without a reason: the head was killed, has given this node up, or is out of reach."""


class TurnedAway(LinkError):
    """A head without a place for this node (yet). launch_id: of its job; "" if unknown. timeout_s: its
    --node_timeout."""

    def __init__(self, message: str, launch_id: str = "", timeout_s: float = 0.0) -> None:
        super().__init__(message)
        self.launch_id = launch_id
        self.timeout_s = timeout_s


class HeadLink:
    """The Link, as the agent uses it.

    Args:
        on_frame: called with kind and payload of each frame, but for those of the handshake and heartbeats.
        on_lost: called once, when the head has gone or is given up.

    `watchers` run before each wait, to give the poller what to wait for; the link's own is the first.
    """

    def __init__(
        self,
        connection: Connection,
        poller: Poller,
        *,
        on_frame: Callable[[bytes, bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.connection = connection
        self._poller = poller
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._handshake: Handshake | None = None
        self._frames: list[tuple[bytes, bytes]] = []
        self._last_received_s = time.monotonic()
        self._last_wait_s = _boot_s()  # the time when the last wait returned
        self._absence_s = 0.0, -float("inf")  # how long this process was stopped or its machine slept, and its end
        self.silence_limit_s = float("inf")
        self.lease: Lease | None = None  # of a node without which the job continues
        self.due_s = float("inf")  # when a watcher has something to do (monotonic)
        self.is_lost = False
        self.loss = _HEAD_GONE
        self.watchers: list[Callable[[], None]] = [self._watch]

    # ---- joining

    def authenticate(
        self, token: bytes, identity: dict[str, object], *, limit_s: float, print_line: Callable[[str], None]
    ) -> None:
        """Prove that this process knows the token, and name this node.

        Args:
            identity: fields of the IDENTITY frame.
            limit_s: how long to wait. Ctrl-Z may have suspended the head of a manual launch. But another program may
                have taken its port, so after 10 s a line reports that nothing came.

        Raises:
            Unheard: the head dropped the connection before it had sent anything, or in the middle of its answer after
                a head has accepted this token.
            TurnedAway: the head has no place for this node, or not yet.
            LinkError: the other side has another token, or is the head of another job.
        """
        from infini_run.multinode.link.handshake import Handshake, Silent, Unheard

        handshake = self._handshake = Handshake(self.connection, token, is_head=False)
        start_s, notice = time.monotonic(), ""
        while not handshake.is_done:
            silence_s = limit_s if notice else min(HANDSHAKE_S, limit_s)
            end_s = start_s + silence_s
            self.poll(max(0.0, end_s - time.monotonic()))
            if self.is_lost:
                is_known = identity.get("last_job")  # a head has accepted the token before
                error_class = LinkError if handshake.has_received and not is_known else Unheard
                raise error_class("the head rejected this launcher's token, or is not infini-run")
            if time.monotonic() >= end_s and not handshake.is_done:
                notice = (
                    f"no response from what listens there for {silence_s:g} s; check that it is node 0's infini-run"
                )
                if silence_s >= limit_s:
                    raise Silent(notice)
                print_line(f"infini-run: {notice}")
        self.connection.send(pack_json(protocol.IDENTITY, identity))
        try:
            kind, payload = self.next_frame(protocol.SPEC, protocol.GOODBYE)
        except HeadGone:
            raise TurnedAway("the head is gone, before it sent the job") from None  # another may come
        if kind == protocol.GOODBYE:
            answer = message_schema.read(payload, message_schema.TURNED_AWAY)
            node = "this node" if identity["node"] == -1 else f"node {identity['node']}"
            text = f"the head rejected {node}: {answer['error']}"
            if not answer["may_return"]:
                raise LinkError(text)
            raise TurnedAway(text, answer["launch_id"], answer["timeout_s"])
        self._frames.insert(0, (kind, payload))  # a GOODBYE may be among it

    # ---- waiting

    def silence_left_s(self) -> float | None:
        """Return for how long the head may still be silent; None: for ever."""
        if self.silence_limit_s == float("inf"):
            return None
        return max(0.0, self._last_received_s + self.silence_limit_s - time.monotonic())

    def wait_s(self) -> float | None:
        """Return for how long to wait at most; None: for ever. Limits are the head's silence, the next request for
        the lease, and the watchers."""
        silence_s = self.silence_left_s()
        if self.lease is None:
            return silence_s
        left_s = self.lease.left_s  # one that expired, or is not granted yet, has no end to wait for
        wait_s = min(
            self.lease.due_in_s, left_s if left_s > 0 else float("inf"), max(0.0, self.due_s - time.monotonic())
        )
        return wait_s if silence_s is None else min(silence_s, wait_s)

    def forgive_silence(self) -> None:
        """Excuse the head's silence until now: nobody listened, and its frames may be waiting."""
        self._last_received_s, self._last_wait_s = time.monotonic(), _boot_s()

    def next_frame(self, *kinds: bytes) -> tuple[bytes, bytes]:
        """Wait for a SPEC, LAUNCH or GOODBYE of these kinds, and drop the others. Raises LinkError: the head has
        gone."""
        while True:
            while self._frames:
                kind, payload = self._frames.pop(0)
                if kind in kinds:
                    return kind, payload
            if self.is_lost:
                raise self.lost_error()
            self.poll(self.wait_s())

    def poll(self, timeout_s: float | None) -> None:
        """Wait for what the watchers ask for, and handle what there is."""
        for watch in self.watchers:
            watch()
        if self.lease is not None and self.lease.due_in_s <= 0 and not self.is_lost:
            self.connection.send(self.lease.request())
        self._poller.poll(timeout_s, self._note_absence)
        left_s = self.silence_left_s()
        if left_s is not None and left_s <= 0 and not self.is_lost:
            silence = f"no message from the head for {self.silence_limit_s:g} s (--node_timeout)"
            self.give_up(self._given_up() or silence)
        for watch in self.watchers:  # while ranks run, their group waits for the poller's own descriptor
            watch()

    def _note_absence(self) -> None:
        """Note an absence of this process. No wait is as long as --node_timeout, for the head's silence ends it; nor
        0.68 of it, if there is a lease."""
        before_s, self._last_wait_s = self._last_wait_s, _boot_s()
        least_s = self.silence_limit_s + _LATE_S if self.lease is None else LEAST_LEASE * self.silence_limit_s
        if self._last_wait_s - before_s >= least_s:
            self._absence_s = self._last_wait_s - before_s, self._last_wait_s

    def own_absence(self, least_s: float, what: str) -> str:
        """Return why the link was lost, if this process was just stopped for at least `least_s` seconds; else "".

        Args:
            what: what follows from such a stop.
        """
        away_s, end_s = self._absence_s
        if away_s < least_s or _boot_s() - end_s >= self.silence_limit_s:
            return ""
        return f"this launcher was suspended for {duration_text(away_s)}, or its machine slept: {what}"

    def _given_up(self) -> str:
        what = f"the head gives up a node after {self.silence_limit_s:g} s (--node_timeout)"
        return self.own_absence(self.silence_limit_s + _LATE_S, what)

    def drain(self) -> None:
        """Wait until the head has taken everything, or has gone."""
        while self.connection.wants_write and not self.is_lost:
            self.poll(None)

    def _watch(self) -> None:
        connection, watch = self.connection, self._poller.watch
        if connection.has_ended:
            return
        write = WRITE if connection.wants_write else 0
        if connection.fileno() == connection.write_fd:
            watch(connection.fileno(), READ | write, self._read)
        else:
            watch(connection.fileno(), READ, self._read)
            watch(connection.write_fd, write, connection.flush)

    # ---- frames

    def send_error(self, error: InfiniRunError) -> None:
        """Tell the head why this node cannot continue."""
        kind = "program" if isinstance(error, ProgramError) else "usage" if isinstance(error, UsageError) else "start"
        content = {"error": str(error), "exit_code": error.exit_code, "kind": kind, "host": os.uname().nodename}
        self.connection.send(pack_json(protocol.HELLO, content))

    def _read(self) -> None:
        self.connection.flush()
        try:
            for kind, payload in self.connection.read():
                self._last_received_s = time.monotonic()
                self._handle_frame(kind, payload)
        except LinkError as error:
            if self._handshake is None or self._handshake.is_done:
                self.send_error(error)  # the other direction may still work
            self.give_up(self._given_up() if self.connection.has_ended else str(error))
            return
        if self.connection.has_ended:
            self.give_up(self._given_up())

    def _handle_frame(self, kind: bytes, payload: bytes) -> None:
        if self._handshake is not None and not self._handshake.is_done:
            self._handshake.handle_frame(kind, payload)
        elif kind == protocol.HEARTBEAT:
            self.connection.send(clock_answer(payload))
        elif kind == protocol.LEASE and self.lease is not None:
            self.lease.extend(payload)
        else:
            if kind in _QUEUED:
                self._frames.append((kind, payload))
            self._on_frame(kind, payload)

    def lost_error(self) -> LinkError:
        """Return what to raise after the loss."""
        return (HeadGone if self.loss == _HEAD_GONE else LinkError)(self.loss)

    def give_up(self, reason: str = "") -> None:
        """Give the head up: no more reads or writes."""
        self.is_lost, self.loss = True, reason or self.loss
        for fd in (self.connection.fileno(), self.connection.write_fd):
            self._poller.unwatch(fd)
        self.connection.close()
        self._on_lost()

    # ---- Ctrl-Z

    def suspend(self, suspend: Callable[[], None], print_line: Callable[[str], None]) -> None:
        """Call `suspend`, which returns after SIGCONT; a fork sends the heartbeats meanwhile."""
        from infini_run.multinode.link.heartbeat_process import HeartbeatProcess, no_frame

        if self.lease is not None:
            limit = f"{self.silence_limit_s:g} s (--node_timeout)"
            print_line(f"infini-run: {os.uname().nodename}: suspended; the job continues without it after {limit}")
        if self.is_lost or self.lease is not None:  # whose lease nobody can extend meanwhile
            suspend()
            return
        substitute = None
        try:
            substitute = HeartbeatProcess({self.connection: no_frame}, self.silence_limit_s / _HEARTBEATS)
        except OSError as error:
            print_line(f"infini-run: node 0 will get no messages from this node, and give up: {error.strerror}")
        before_s = self._last_wait_s
        suspend()
        if substitute is not None:
            substitute.end()
        self.forgive_silence()
        if substitute is None:  # then the head has received nothing
            self._last_wait_s = before_s


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
