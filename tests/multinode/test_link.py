"""The Link over real sockets: who knows the token comes in, nobody else; nothing blocks, nothing is lost."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infini_run.errors import LinkError, UsageError
from infini_run.multinode.agent.head_link import HeadGone, HeadLink
from infini_run.multinode.head.listener import AgentListener
from infini_run.multinode.link import protocol, tcp
from infini_run.multinode.link.connection import MAGIC, Connection
from infini_run.multinode.link.handshake import Handshake, Silent, Unheard
from infini_run.multinode.link.heartbeat_process import HeartbeatProcess, no_frame
from infini_run.multinode.link.lease import AgentTime, Lease
from infini_run.multinode.link.protocol import pack, pack_json
from infini_run.multinode.link.tcp import retry_unheard
from infini_run.system.poller import Poller
from tests.support.processes import no_descriptor_left, state_of
from tests.support.waiting import until


@pytest.fixture
def wires():
    """Two ends of one connection."""
    ends = [Connection(fd := end.detach(), fd) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def read(wire):
    assert select.select([wire.fileno()], [], [], 10)[0], "nothing came"
    return list(wire.read())


def shake(head, agent, head_token=b"t", agent_token=b"t"):
    hands = [Handshake(head, head_token, is_head=True), Handshake(agent, agent_token, is_head=False)]
    while not all(hand.is_done for hand in hands):
        for wire, hand in zip((head, agent), hands, strict=True):
            if select.select([wire.fileno()], [], [], 0)[0]:
                for kind, payload in wire.read():
                    hand.handle_frame(kind, payload)
    return hands


def test_both_sides_know_the_token(wires):
    shake(*wires)
    wires[0].send(pack(protocol.SPEC, b"x" * 1000))
    assert read(wires[1]) == [(protocol.SPEC, b"x" * 1000)]


def test_an_agent_with_another_token_is_refused(wires):
    with pytest.raises(LinkError, match="another token"):
        shake(*wires, agent_token=b"other")


def test_a_head_with_another_token_never_gets_in(wires):
    """It refuses us; one that did not would have to prove itself."""
    agent = Handshake(wires[1], b"t", is_head=False)
    agent.handle_frame(protocol.CHALLENGE, b"h" * 32)
    with pytest.raises(LinkError, match="another token"):
        agent.handle_frame(protocol.PROOF, b"p" * 32)
    assert not agent.is_done


def test_what_was_said_before_proves_nothing_later(wires):
    """All that an agent said, said again by somebody who heard it."""
    head = Handshake(wires[0], b"t", is_head=True)
    agent = Handshake(wires[1], b"t", is_head=False)
    agent.handle_frame(protocol.CHALLENGE, head._own_nonce)
    said = read(wires[0])
    for kind, payload in said:
        head.handle_frame(kind, payload)
    assert head.is_done
    again = Handshake(wires[0], b"t", is_head=True)
    again.handle_frame(*said[0])
    with pytest.raises(LinkError, match="another token"):
        again.handle_frame(*said[1])


def test_our_own_challenge_is_not_answered(wires):
    """Else it would prove itself with what we say."""
    head = Handshake(wires[0], b"t", is_head=True)
    with pytest.raises(LinkError):
        head.handle_frame(protocol.CHALLENGE, head._own_nonce + head._greeting(head._own_nonce))


@pytest.mark.parametrize(("size", "is_head"), [(31, 0), (33, 0), (64, 0), (31, 1), (33, 1), (63, 1)])
def test_a_challenge_has_its_sides_length(wires, size, is_head):
    hand = Handshake(wires[0], b"t", is_head=is_head)
    with pytest.raises(LinkError, match="not what infini-run sends"):
        hand.handle_frame(protocol.CHALLENGE, b"x" * size)


def test_an_agent_that_sends_no_greeting_is_let_in_and_counts_as_a_stranger_until_then(wires, monkeypatch):
    """One of version 0.1: later it is told which version the head has."""
    greeting = Handshake._greeting
    monkeypatch.setattr(Handshake, "_greeting", lambda hand, nonce: greeting(hand, nonce) if hand._is_head else b"")
    assert [hand.is_likely_agent for hand in shake(*wires)] == [False, False]


@pytest.mark.parametrize("kind", sorted(protocol.KINDS - {protocol.CHALLENGE, protocol.PROOF}))
def test_no_other_word_is_heard_before_the_proof(wires, kind):
    with pytest.raises(LinkError):
        Handshake(wires[0], b"t", is_head=True).handle_frame(kind, b"")


def test_a_stranger_may_not_say_much(wires):
    Handshake(wires[0], b"t", is_head=True)
    wires[1].send(pack(protocol.CHALLENGE, b"x" * 65))
    with pytest.raises(LinkError):
        read(wires[0])


def test_what_finds_no_room_is_kept_and_comes_whole(wires):
    size = 8 << 20
    wires[0].send(pack(protocol.OUT, b"a" * size))
    assert wires[0].wants_write
    assert wires[0].send_state[1]
    wires[0].send(pack(protocol.HEARTBEAT))
    got = []
    while len(got) < 2:
        wires[0].flush()
        got += read(wires[1])
    assert [(kind, len(payload)) for kind, payload in got] == [(protocol.OUT, size), (protocol.HEARTBEAT, 0)]
    assert not wires[0].wants_write


def test_the_end_in_mid_frame_is_told(wires):
    os.write(wires[1].fileno(), pack(protocol.OUT, b"half")[:7])
    wires[1].close()
    assert read(wires[0]) == []
    with pytest.raises(LinkError, match="in the middle of a frame"):
        read(wires[0])
    assert wires[0].has_ended


@pytest.mark.parametrize("sent", [0, 7])
def test_a_head_whose_link_ends_has_gone_in_mid_frame_or_not(wires, sent):
    os.write(wires[1].fileno(), pack(protocol.OUT, b"half")[:sent])
    wires[1].close()
    poller = Poller()
    link = HeadLink(wires[0], poller, on_frame=lambda *_: None, on_lost=lambda: None)
    try:
        with pytest.raises(HeadGone):
            link.next_frame(protocol.SPEC)
    finally:
        poller.close()


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--exit_if_lost=1",), 1)])
def test_an_agent_of_an_engine_whose_head_has_gone_ends_without_a_word(words, code):
    """A line to a pipe that nobody reads, or another code, makes srun kill the other agents."""
    argv = [sys.executable, "-m", "infini_run.multinode.agent_main", *words]
    done = subprocess.run(argv, input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, MAGIC, b"")


def test_after_the_end_nothing_is_sent_and_nothing_raised(wires):
    wires[1].close()
    wires[0].send(pack(protocol.HEARTBEAT))
    wires[0].send(pack(protocol.HEARTBEAT))
    assert read(wires[0]) == []
    assert wires[0].has_ended
    wires[0].close()
    wires[0].close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.binary(max_size=300), st.integers(1, 40))
def test_noise_before_the_opening_is_none_of_ours(noise, size):
    ours, theirs = socket.socketpair()
    wire = Connection(fd := ours.detach(), fd, awaits_magic=True)
    try:
        data = noise.replace(MAGIC, b"") + MAGIC + pack(protocol.HEARTBEAT)
        got = []
        for at in range(0, len(data), size):
            theirs.send(data[at : at + size])
            got += read(wire)
        assert got == [(protocol.HEARTBEAT, b"")]
        assert wire.preamble == ""
    finally:
        wire.close()
        theirs.close()


def test_noise_without_end_is_refused():
    ours, theirs = socket.socketpair()
    wire = Connection(fd := ours.detach(), fd, awaits_magic=True)
    theirs.setblocking(False)
    try:
        for _ in range(10):
            theirs.send(b"x" * 100_000)
            assert read(wire) == []
        theirs.send(b"x" * 100_000)
        with pytest.raises(LinkError, match="what prints it"):
            read(wire)
    finally:
        wire.close()
        theirs.close()


# ---- who dials


@pytest.fixture
def listener():
    poller, admitted, notices = Poller(), [], []
    listener = AgentListener(
        "t",
        2,
        poller,
        lambda wire, who, _: admitted.append((wire, who.node, who.host)),
        lambda _: None,
        notices.append,
    )
    target = listener.open(0)
    listener.port = int(target.rpartition(":")[2])
    listener.poll, listener.admitted, listener.notices = poller.poll, admitted, notices
    yield listener
    for wire, *_ in admitted:
        wire.close()
    listener.close()
    listener.close()
    poller.close()


def connect(listener):
    end = socket.create_connection(("127.0.0.1", listener.port))
    return Connection(fd := end.detach(), fd)


@pytest.mark.parametrize("place", ["nowhere", "its folder is a file", "a folder in its place"])
def test_a_token_that_cannot_be_removed_is_no_fault(listener, tmp_path, place):
    (tmp_path / "shared").mkdir()
    token = tmp_path / "shared/token"
    listener.write_token(str(token))
    token.unlink()
    if place == "its folder is a file":
        (tmp_path / "shared").rmdir()
        (tmp_path / "shared").touch()
    elif place == "a folder in its place":
        token.mkdir()
    listener.remove_token()
    assert token.is_dir() == (place == "a folder in its place")


def test_who_knows_the_token_is_admitted(listener):
    wire = connect(listener)
    hand = Handshake(wire, b"t", is_head=False)
    while not hand.is_done:
        listener.poll(0.01)
        if select.select([wire.fileno()], [], [], 0)[0]:
            for kind, payload in wire.read():
                hand.handle_frame(kind, payload)
    wire.send(pack_json(protocol.IDENTITY, {"node": 1, "host": "a"}))
    until(lambda: (listener.poll(0.01), listener.admitted)[1])
    assert listener.admitted[0][1:] == (1, "a")
    assert listener.notices == []
    wire.close()


@pytest.mark.parametrize(
    "name",
    [
        b"[]",
        b"{}",
        b'{"node": "x"}',
        b'{"node": 1, "host": 2}',
        b'{"node": 1, "last_job": 2}',
        b'{"node": 1, "last_timeout_s": -1}',
        b"{",
    ],
)
def test_who_does_not_say_which_node_it_is_is_turned_away(listener, name):
    wire = connect(listener)
    hand = Handshake(wire, b"t", is_head=False)
    while not hand.is_done:
        listener.poll(0.01)
        if select.select([wire.fileno()], [], [], 0)[0]:
            for kind, payload in wire.read():
                hand.handle_frame(kind, payload)
    wire.send(pack(protocol.IDENTITY, name))
    until(lambda: (listener.poll(0.01), listener.notices)[1])
    assert listener.admitted == []
    wire.close()


def test_strangers_are_let_go_and_told_of_a_few_times(listener):
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", listener.port)) as scan:
            scan.send(b"GET / HTTP/1.1\r\n\r\n" * 3)
            until(lambda: (listener.poll(0.01), scan.recv(1000, socket.MSG_PEEK) == b"" or _is_reset(scan))[1])
    assert len(listener.notices) == 8
    assert listener.notices[-1].endswith("(not reporting more of these)")


def test_a_launcher_with_another_token_is_told_of_after_many_strangers(listener):
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", listener.port)) as scan:
            scan.send(b"GET / HTTP/1.1\r\n\r\n" * 3)
            until(lambda: (listener.poll(0.01), scan.recv(1000, socket.MSG_PEEK) == b"" or _is_reset(scan))[1])
    wire = connect(listener)
    hand = Handshake(wire, b"another", is_head=False)
    until(lambda: (listener.poll(0.01), _read_all(wire, hand), wire.has_ended)[2])
    assert listener.notices[-1].endswith(
        "the other side has another token, or something changed its bytes on the way"
    )
    wire.close()


def _read_all(wire, hand):
    if select.select([wire.fileno()], [], [], 0)[0]:
        for kind, payload in wire.read():
            hand.handle_frame(kind, payload)


def _is_reset(scan):
    try:
        while scan.recv(1000, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_who_says_nothing_is_let_go_after_a_while(listener):
    scans = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(3)]
    until(lambda: (listener.poll(0.01), len(listener._waiting) == 3)[1])
    listener.run_due(listener.next_deadline_s - 1)
    assert len(listener._waiting) == 3
    listener.run_due(listener.next_deadline_s + 10)
    assert listener._waiting == {}
    assert listener.notices == []
    for scan in scans:
        scan.close()


def test_without_a_descriptor_the_oldest_stranger_goes(listener):
    scans = [socket.create_connection(("127.0.0.1", listener.port))]
    until(lambda: (listener.poll(0.01), listener._waiting)[1])
    scans.append(socket.create_connection(("127.0.0.1", listener.port)))
    with no_descriptor_left():
        until(lambda: (listener.poll(0.01), _is_reset(scans[0]))[1])
    assert len(listener._waiting) == 1
    assert listener.notices == []
    for scan in scans:
        scan.close()


def test_without_any_descriptor_nobody_is_let_in_and_nothing_spins(listener):
    with socket.create_connection(("127.0.0.1", listener.port)):
        with no_descriptor_left():
            until(lambda: (listener.poll(0.01), listener.notices)[1])
        assert listener.notices == [
            "cannot accept more nodes: the limit on open descriptors was reached; raise ulimit -n or ulimit -Hn"
        ]
        listener.poll(0)
        assert len(listener.notices) == 1
        assert listener._waiting == {}


def test_listener_without_any_descriptor_accepts_again_once_there_is_one(listener):
    with socket.create_connection(("127.0.0.1", listener.port)):
        with no_descriptor_left():
            until(lambda: (listener.poll(0.01), listener.notices)[1])
            listener.run_due(listener.next_deadline_s)
            listener.poll(1)
            assert len(listener.notices) == 1, "one line for all tries"
        listener.run_due(listener.next_deadline_s)
        until(lambda: (listener.poll(0.01), len(listener._waiting) == 1)[1])


def crowd(listener, count, address="127.0.0.1", said=b""):
    there = len(listener._waiting) + listener.dropped
    scans = [
        socket.create_connection(("127.0.0.1", listener.port), source_address=(address, 0)) for _ in range(count)
    ]
    for scan in scans:
        scan.send(said)
    until(lambda: (listener.poll(0.01), len(listener._waiting) + listener.dropped >= there + count)[1])
    return scans


def hang_up(*scans):
    for scan in scans:
        scan.close()


def test_there_are_never_more_strangers_than_a_limit(listener):
    scans = crowd(listener, 300)
    assert len(listener._waiting) == listener._limit == 258
    assert [_is_reset(scan) for scan in scans] == [True] * 42 + [False] * 258
    hang_up(*scans)


def test_the_address_that_has_the_most_gives_room(listener):
    one, other = crowd(listener, 20, "127.0.0.2"), crowd(listener, 300)
    assert not any(_is_reset(scan) for scan in one)
    assert sum(_is_reset(scan) for scan in other) == 62
    hang_up(*one, *other)


@pytest.mark.parametrize("said", [b"", pack(protocol.CHALLENGE, b"x" * 64)], ids=["silent", "half-a-handshake"])
@pytest.mark.parametrize("is_late", [False, True], ids=["", "greets-late"])
def test_strangers_go_before_who_has_greeted_us_as_an_agent_does(listener, said, is_late):
    wire = connect(listener)
    if is_late:
        scans = crowd(listener, 200, said=said)
        hand = Handshake(wire, b"t", is_head=False)
        listener.poll(0)
        scans += crowd(listener, 300, said=said)
    else:
        hand = Handshake(wire, b"t", is_head=False)
        scans = crowd(listener, 300, said=said)
    while not hand.is_done:
        assert not wire.has_ended
        listener.poll(0.01)
        for kind, payload in wire.read():
            hand.handle_frame(kind, payload)
    hang_up(wire, *scans)


def test_a_greeting_of_another_token_keeps_no_place(listener):
    wire = connect(listener)
    Handshake(wire, b"another", is_head=False)
    scans = crowd(listener, 300)
    until(lambda: (list(wire.read()), wire.has_ended)[1])
    assert not _is_reset(scans[-1])
    hang_up(wire, *scans)


def test_a_turn_lets_a_few_in_and_once_all_have_come_there_is_a_rest_between(listener):
    scans = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(100)]
    until(lambda: (listener.poll(0.01), listener._waiting)[1])
    assert len(listener._waiting) == 32
    listener.expect(False)
    listener.poll(0)
    for _ in range(3):
        listener.poll(0)
        assert len(listener._waiting) == 64
    listener.run_due(listener.next_deadline_s)
    listener.poll(0)
    assert len(listener._waiting) == 96
    hang_up(*scans)


def test_who_is_silent_is_told_nothing_and_costs_no_handshake(listener):
    (scan,) = crowd(listener, 1)
    assert not select.select([scan], [], [], 0)[0]
    hang_up(scan)


def test_a_full_queue_of_the_kernel_is_a_reason_to_dial_again(monkeypatch):
    monkeypatch.setattr(tcp, "_CONNECT_S", 0.1)
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.1", 0))
        server.listen(0)  # there is room for one
        first.connect(server.getsockname())
        target = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unheard, match="timed out"):
            tcp.connect(target)
        with pytest.raises(LinkError, match="timed out") as given_up:
            tcp.connect_with_retry(target, 0, pytest.fail)
        assert not isinstance(given_up.value, Unheard), "it would be tried for as long again"
    with pytest.raises(LinkError, match="refused") as refused:
        tcp.connect(target)
    assert not isinstance(refused.value, Unheard)


def fails_then(returned, *errors, first_s=0.0):
    """An attempt that raises these errors, the first one after a time, and then returns."""
    left = [*errors]

    def attempt():
        if not left:
            return returned
        if len(left) == len(errors):
            time.sleep(first_s)
        raise left.pop(0)

    return attempt


def test_an_agent_that_was_let_go_unheard_dials_again():
    assert retry_unheard(fails_then(7, Unheard("let go"), Unheard("let go")), is_head_there=False) == 7
    with pytest.raises(LinkError, match="token"):
        retry_unheard(fails_then(7, LinkError("another token")), is_head_there=True)


def test_silence_is_a_reason_to_dial_again_only_where_a_head_listens_for_certain():
    assert retry_unheard(fails_then(7, Silent("nothing"), Unheard("let go")), is_head_there=True) == 7
    with pytest.raises(Silent):
        retry_unheard(fails_then(7, Silent("nothing")), is_head_there=False)


@pytest.mark.parametrize("uptime_s", [0.0, 10_000.1, 20_000.2, 40_000.3, 80_000.7, 160_000.9])
def test_an_engines_agent_lets_go_of_a_silent_connection_before_it_dials_again(uptime_s):
    """Whatever a sum of the clock and the limit is rounded to."""
    code = f"""
        import sys, time
        monotonic = time.monotonic
        time.monotonic = lambda: monotonic() + {uptime_s}
        from infini_run.multinode import agent_main
        from infini_run.multinode.agent import agent, head_link
        agent.HANDSHAKE_S = head_link.HANDSHAKE_S = 0.1
        sys.exit(agent_main.main(sys.argv[1:]))
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        words = [f"--link=127.0.0.1:{server.getsockname()[1]}", "--node=0"]
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *words], stderr=subprocess.PIPE)
        for _ in range(2):
            with server.accept()[0] as connection:
                connection.settimeout(10)
                while connection.recv(4096):
                    pass
    error = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert b"the head does not respond" in error, "refused now: that is no reason to dial again"


def test_the_time_for_dialling_again_begins_with_the_first_failure_and_ends(monkeypatch):
    monkeypatch.setattr(tcp, "_UNHEARD_S", 0.1)
    assert retry_unheard(fails_then(7, Unheard("let go"), first_s=0.2), is_head_there=False) == 7
    with pytest.raises(Unheard, match="last"):
        retry_unheard(fails_then(7, Unheard("first"), Unheard("last")), is_head_there=False)


# ---- while one side is stopped


@pytest.mark.parametrize("killed", [False, True])
def test_a_stand_in_sends_heartbeats_and_is_over_when_we_go_on(wires, killed):
    """Where it was killed nobody knows how far it wrote: it is reaped, and the next frame ends the link."""
    shake(*wires)
    stand_in = HeartbeatProcess({wires[0]: no_frame}, 0.01)
    try:
        beats = 0
        while beats < 3:
            beats += read(wires[1]).count((protocol.HEARTBEAT, b""))
        if killed:
            os.kill(stand_in._pid, signal.SIGKILL)
            until(lambda: state_of(stand_in._pid) == "Z")
    finally:
        stand_in.end()  # until then it holds whatever this process has open
    with pytest.raises(ChildProcessError):
        os.waitpid(stand_in._pid, os.WNOHANG)
    wires[0].send(pack(protocol.SPEC, b"again"))
    if killed:
        with pytest.raises(LinkError, match="repeated, or reordered"):
            sum(1 for _ in iter(lambda: read(wires[1]), []))
    else:
        while (protocol.SPEC, b"again") not in (came := read(wires[1])):
            assert set(came) == {(protocol.HEARTBEAT, b"")}


# ---- where the head listens


@pytest.mark.parametrize(("asked", "found"), [("lo", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_the_link_listens_on_the_one_address_that_was_asked_for(asked, found):
    poller = Poller()
    listener = AgentListener("t", 2, poller, lambda *_: None, lambda _: None, lambda _: None)
    hosts, _, port = listener.open(0, asked).rpartition(":")
    try:
        assert hosts.strip("[]") == found
        family = socket.AF_INET6 if ":" in found else socket.AF_INET
        with socket.socket(family) as end:
            end.connect((found, int(port)))
        if found == "127.0.0.1":
            with socket.socket() as end:
                assert end.connect_ex(("127.0.0.2", int(port))) != 0
    finally:
        listener.close()
        poller.close()


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("no-such-thing-here", "--link_address=no-such-thing-here: not an address or interface; use one of "),
        ("192.0.2.77", "--link_address=192.0.2.77: not an address of this machine"),
        ("a b", "--link_address=a b: not an address or interface"),
        ("x" * 300, "not an address or interface"),
    ],
)
def test_an_address_that_is_none_of_ours_is_refused(asked, problem):
    poller = Poller()
    with pytest.raises(UsageError) as caught:
        AgentListener("t", 2, poller, lambda *_: None, lambda _: None, lambda _: None).open(0, asked)
    assert problem in str(caught.value)
    poller.close()


# ---- leases, at the head's side


def test_a_grant_says_no_more_than_the_last_requests_have_shown():
    ours, theirs = AgentTime(), Lease(10)
    sent = theirs.request()
    payload = sent[-8:]
    assert ours.note(payload) == sent, "the first request comes back as it is"
    theirs.extend(ours.grant()[-8:])
    assert 9.5 < theirs.left_s <= 10
    ours.note((1).to_bytes(8, "big"))  # it was late, and says less than what was known
    granted_ns, now_ns = int.from_bytes(ours.grant()[-8:], "big"), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert int.from_bytes(payload, "big") <= granted_ns <= now_ns
    soon = theirs.request()
    assert ours.note(soon[-8:]) == soon
    assert int.from_bytes(ours.grant()[-8:], "big") >= int.from_bytes(payload, "big")


def test_a_request_is_overdue_although_old_ones_come():
    ours = AgentTime()
    assert not ours.is_request_overdue(0), "nobody has asked for a lease yet"
    request = Lease(10).request()[-8:]
    ours.note(request)
    assert not ours.is_request_overdue(1000)
    until(lambda: ours.is_request_overdue(0.3))
    ours.note(request)
    assert ours.is_request_overdue(0.2), "what comes back was sent long ago"
    ours.grant()
    assert not ours.is_request_overdue(1000)


@pytest.mark.parametrize("request_", [b"", b"1234567", b"\xff" * 8, b"\x7f" + b"\xff" * 7])
def test_what_is_no_request_for_a_lease_ends_the_link(request_):
    with pytest.raises(LinkError, match="a request for a lease"):
        AgentTime().note(request_)
