"""A channel between processes that die, fork, and have little memory."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from infini_run import channel
from infini_run.channel.errors import ChannelBroken, ChannelClosed
from tests.support.channel_players import Player, fork, two_players
from tests.support.waiting import LIMIT_S


@pytest.fixture
def start():
    """Start a Python program that has `tx` and `rx`; our side of it, and the process."""
    started = []

    def begin(code, *words):
        (tx, rx), theirs = channel.pair()
        fd = theirs[0].fileno()
        head = f"import sys; from infini_run import channel; tx, rx = channel.connect({fd})\n"
        process = subprocess.Popen([sys.executable, "-c", head + code, *map(str, words)], pass_fds=[fd])
        for half in theirs:
            half.close_copy()
        started.append((tx, rx, process))
        return tx, rx, process

    yield begin
    for tx, rx, process in started:
        tx.close(linger_s=0)
        rx.close()
        process.kill()
        process.wait()


def test_a_program_talks_over_what_it_inherits(start):
    tx, rx, process = start("for message in rx: tx.send(message * 2)\ntx.close()")
    tx.send(21)
    tx.send("ab")
    tx.close()
    assert list(rx) == [42, "abab"]
    assert process.wait(LIMIT_S) == 0


def test_one_that_is_killed_in_mid_message_is_broken_at_once(start):
    _, rx, process = start("tx.send('first'); tx.send_bytes(bytes(10_000_000))")
    assert rx.recv() == "first"
    assert select.select([rx], [], [], LIMIT_S)[0]  # a part of it is here; there is no room for all of it
    process.kill()
    with pytest.raises(ChannelBroken, match="in the middle of a message"):
        rx.recv(timeout_s=LIMIT_S)


def test_a_sender_that_waits_for_room_learns_of_the_death(start):
    tx, rx, process = start("tx.send('ready'); import signal; signal.pause()")
    assert rx.recv() == "ready"
    killer = subprocess.Popen(["/bin/sh", "-c", f"read line; kill -9 {process.pid}"], stdin=subprocess.PIPE)
    killer.stdin.write(b"go\n")
    killer.stdin.close()
    with pytest.raises(ChannelBroken):
        tx.send_bytes(bytes(100_000_000))
    assert killer.wait(LIMIT_S) == 0


def test_exit_without_a_word_is_no_end(start):
    _, rx, _ = start("tx.send('result'); import os; os._exit(0)")
    assert rx.recv() == "result"
    with pytest.raises(ChannelBroken):
        rx.recv()


def test_nobody_reads_so_nobody_grows(start):
    """Back-pressure: the kernel's buffer is all there is. And the end is said behind it."""
    code = """
sent = 0
try:
    while True:
        tx.send_bytes(bytes(10_000), timeout_s=0)
        sent += 1
except TimeoutError:
    tx.close()
sys.exit(sent)
"""
    _, rx, process = start(code)
    sent = process.wait(LIMIT_S)
    assert 0 < sent < 256
    assert len(list(rx)) == sent


def test_a_forked_child_owns_no_end_and_keeps_none_open(start):
    """Such as a data loader's worker: with a copy of the socket it would hide that its parent has died."""
    code = """
import os
from infini_run.channel.errors import ChannelClosed
wait_fd, told_fd = os.pipe()
pid = os.fork()
if not pid:
    os.close(told_fd)
    if not os.read(wait_fd, 1):
        os._exit(0)
    try:
        tx.send("mine?")
    except ChannelClosed:
        os.kill(os.getppid(), 9)
        import signal
        signal.pause()
tx.send(pid)
os.write(told_fd, b"x")
os.waitpid(pid, 0)
"""
    _, rx, process = start(code)
    child = rx.recv()
    try:
        with pytest.raises(ChannelBroken):
            rx.recv(timeout_s=LIMIT_S)
    finally:
        os.kill(child, signal.SIGKILL)
    assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_a_fork_does_not_disturb_the_parent_whatever_it_does():
    (tx, rx), theirs = channel.pair()

    def play():
        for half in (tx, rx, *theirs):
            half.close()
            assert half.closed
        with pytest.raises(ChannelClosed):
            rx.recv()

    assert os.waitpid(fork(play), 0)[1] == 0
    tx.send(1)
    assert theirs[1].recv() == 1
    for half in (tx, rx, *theirs):
        half.close()


def test_connecting_to_what_is_no_socket_is_refused():
    read_fd, write_fd = os.pipe()
    with pytest.raises(OSError, match=r"not a socket|non-socket"):
        channel.connect(read_fd)
    os.close(read_fd)
    os.close(write_fd)


PEAK = """
import resource
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
"""
SENDER = """
size = int(sys.argv[1])
thing = {"bytes": bytes(size), "array": bytearray(size)}
before = peak()
tx.send(thing)
tx.send(peak() - before)
tx.close()
"""
RECEIVER = """
before = peak()
thing = rx.recv()
grown = peak() - before
tx.send((grown, len(thing["bytes"]), type(thing["bytes"]), type(thing["array"]), sum(thing["array"][::4096])))
tx.close()
"""


def test_200_mb_are_held_once_on_either_side(start):
    """The sender copies nothing, and the receiver has each byte where it stays."""
    size = 100_000_000
    relay_tx, relay_rx, _ = start(PEAK + RECEIVER)
    _, from_sender, _ = start(PEAK + SENDER, size)
    thing = from_sender.recv()
    sender_grew = from_sender.recv()
    relay_tx.send(thing)
    del thing
    receiver_grew, length, *kinds, total = relay_rx.recv()
    assert (length, kinds, total) == (size, [bytes, bytearray], 0)
    assert sender_grew < size // 20
    assert receiver_grew < 2 * size * 1.1


def test_players_agree_across_processes_when_both_talk_at_once():
    first, second = two_players()
    for number in range(200):
        first.tell("send", number, 1000)
        second.tell("send", number, 1000)
        assert first.hear() == second.hear() == ("ok", None)
        first.tell("recv", LIMIT_S)
        second.tell("recv", LIMIT_S)
        assert first.hear() == second.hear() == ("ok", number)
    for player in (first, second):
        assert isinstance(player, Player)
        assert player.ask("close tx") == ("ok", None)
    for player in (first, second):
        assert player.ask("recv", LIMIT_S)[0] == "ChannelEnd"
        player.tell("leave")
        assert player.reap() == 0
