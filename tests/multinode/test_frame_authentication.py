"""A link is what its two ends say, or it ends: who stands between them changes, drops, repeats and moves nothing."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from contextlib import suppress
from struct import unpack_from

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.errors import LinkError
from infini_run.multinode.link import protocol
from infini_run.multinode.link.connection import Connection
from infini_run.multinode.link.handshake import Handshake
from infini_run.multinode.link.protocol import pack
from infini_run.system.frames import TAG
from tests.multinode.test_by_hand import no_agent_left, node, port, ring, told  # noqa: F401
from tests.support.waiting import until

PROBLEM = "a frame of the link was changed, dropped, repeated, or reordered on its way"
HEAD = 5  # bytes of a frame's head


class Relay:
    """Two ends of a link that have shaken hands, and all bytes between them in our hands."""

    def __init__(self, token=b"t"):
        self.sockets, self.wires = [], []
        for _ in range(2):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self.sockets.append(ours)
            self.wires.append(Connection(fd := theirs.detach(), fd))
        hands = [Handshake(wire, token, is_head=wire is self.wires[0]) for wire in self.wires]
        while not all(hand.is_done for hand in hands):
            for side in range(2):
                self.sockets[1 - side].send(self.said(side))
                for kind, payload in self.wires[1 - side].read():
                    hands[1 - side].handle_frame(kind, payload)

    def said(self, side):
        """What that end has sent."""
        try:
            return self.sockets[side].recv(1 << 20)
        except BlockingIOError:
            return b""

    def frames(self, side, *frames):
        """Those frames, as they go over the link."""
        found = []
        for each in frames:
            self.wires[side].send(each)
            found.append(self.said(side))
        return found

    def hear(self, side, data):
        """What that end makes of it."""
        self.sockets[side].send(data)
        return list(self.wires[side].read())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (*self.sockets, *self.wires):
            each.close()


FRAMES = [(protocol.LAUNCH, b'{"node":1}'), (protocol.HEARTBEAT, b""), (protocol.INPUT, b"x" * 50)]


@pytest.mark.parametrize("side", [0, 1], ids=["head", "agent"])
def test_what_nobody_touched_comes_as_it_went(side):
    with Relay() as relay:
        data = b"".join(relay.frames(side, *(pack(*each) for each in FRAMES)))
        assert relay.hear(1 - side, data) == FRAMES


@pytest.mark.parametrize("side", [0, 1], ids=["head", "agent"])
@given(at=st.integers(0), bit=st.integers(0, 7))
def test_no_bit_can_be_changed(side, at, bit):
    """That of a length included: no end waits for bytes that nobody has said."""
    with Relay() as relay:
        data = bytearray(b"".join(relay.frames(side, *(pack(*each) for each in FRAMES))))
        data[at % len(data)] ^= 1 << bit
        with pytest.raises(LinkError, match=PROBLEM):
            relay.hear(1 - side, bytes(data))


@pytest.mark.parametrize(
    "order", [[1], [0, 2], [0, 0], [0, 1, 1], [1, 0, 2], [0, 2, 1], [2, 1, 0]], ids=lambda order: f"{order}"
)
def test_no_frame_can_be_dropped_repeated_or_moved(order):
    with Relay() as relay:
        sent = relay.frames(0, *(pack(*each) for each in FRAMES))
        with pytest.raises(LinkError, match=PROBLEM):
            relay.hear(1, b"".join(sent[at] for at in order))


def test_heads_and_payloads_cannot_be_put_together_anew():
    with Relay() as relay:
        one, two = relay.frames(0, pack(protocol.INPUT, b"rm a"), pack(protocol.INPUT, b"rm b"))
        with pytest.raises(LinkError, match=PROBLEM):
            relay.hear(1, one[: HEAD + TAG] + two[HEAD + TAG :])


def test_what_an_end_said_is_not_taken_from_the_other_one():
    with Relay() as relay:
        (beat,) = relay.frames(0, pack(protocol.HEARTBEAT))
        with pytest.raises(LinkError, match=PROBLEM):
            relay.hear(0, beat)


def test_what_was_said_on_another_link_of_the_same_token_is_not_taken():
    with Relay() as before, Relay() as relay:
        (beat,) = before.frames(0, pack(protocol.HEARTBEAT))
        with pytest.raises(LinkError, match=PROBLEM):
            relay.hear(1, beat)


def test_a_length_is_not_believed_before_its_tag_has_come():
    """Nor is memory taken for it."""
    with Relay() as relay:
        (sent,) = relay.frames(0, pack(protocol.INPUT, b"x"))
        with pytest.raises(LinkError, match=PROBLEM):
            relay.hear(1, b"I" + (1 << 25).to_bytes(4, "big") + sent[HEAD : HEAD + TAG])


# ---- a relay between two launchers


class Man:
    """Between an agent and the head's port: passes all on, but does something to the first frame of that kind."""

    def __init__(self, to, kind, act, from_head=True):
        self._kind, self._act, self._from_head = kind, act, from_head
        self.done = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._to = to
        self._ears, self._bell = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        if self._listener not in select.select([self._listener, self._ears], [], [])[0]:
            return
        agent, _ = self._listener.accept()
        head = socket.socket()
        with agent, head, suppress(ConnectionError):  # an end may have gone
            until(lambda: head.connect_ex(("127.0.0.1", self._to)) == 0)  # it may not listen yet
            self._pass_on(agent, head)

    def _pass_on(self, agent, head):
        held = b""
        while True:
            for one in select.select([head, agent, self._ears], [], [])[0]:
                data = b"" if one == self._ears else one.recv(1 << 16)
                if not data:
                    return
                if (one is head) == self._from_head and not self.done.is_set():
                    data, held = self._cut(held + data)
                (agent if one is head else head).sendall(data)

    def _cut(self, data):
        """The frames that are whole, and the rest. Those of the handshake have no tags."""
        at = 0
        while len(data) - at >= HEAD:
            kind, size = unpack_from(">cI", data, at)
            tags = 0 if kind in (protocol.CHALLENGE, protocol.PROOF) else TAG * (2 if size else 1)
            end = at + HEAD + size + tags
            if len(data) < end:
                break
            if kind == self._kind and not self.done.is_set():
                self.done.set()
                return data[:at] + self._act(data[at:end]) + data[end:], b""
            at = end
        return data[:at], data[at:]

    def close(self):
        os.write(self._bell, b"x")
        self._thread.join()
        self._listener.close()
        for fd in (self._ears, self._bell):
            os.close(fd)


@pytest.mark.parametrize(
    ("kind", "act", "from_head"),
    [
        (protocol.SPEC, lambda data: data.replace(b'"PATH":"', b'"PATH":"/a:', 1).replace(b"sh", b"ls", 1), True),
        (protocol.LAUNCH, lambda data: data + data, True),
        (protocol.OUT, lambda data: b"", False),
    ],
    ids=["a-changed-environment", "an-order-said-twice", "output-that-is-dropped"],
)
def test_a_relay_that_touches_a_frame_ends_the_job_and_is_told_of(node, port, kind, act, from_head):  # noqa: F811
    man = Man(port + 1, kind, act, from_head)
    head = node(0, "echo", "one")
    try:
        agent = node(1, "echo", "one", flags=(f"--link_port={man.port}",))
        assert man.done.wait(60)
        assert head.wait() == 1
        assert agent.wait() == 1
    finally:
        man.close()
    assert PROBLEM in "\n".join(told(head, agent))


def test_a_relay_that_only_passes_on_is_not_noticed(node, bell, port):  # noqa: F811
    man = Man(port + 1, b"-", bytes)
    head = node(0, *ring(bell))
    try:
        agent = node(1, *ring(bell), flags=(f"--link_port={man.port}",))
        bell.hear(4)
        head.signal(signal.SIGTERM)
        assert [head.wait(), agent.wait()] == [143, 143]
    finally:
        man.close()
