"""A channel within one process: what is sent is received, once, in order, and every end has its word."""

from __future__ import annotations

import array
import gc
import pickle
import select
import signal
import subprocess
import sys
import threading

import pytest

from infini_run import channel
from infini_run.channel.errors import (
    CannotUnpickle,
    ChannelBroken,
    ChannelClosed,
    ChannelEnd,
    ChannelError,
    MessageTooLong,
    UnpicklableError,
)
from tests.support.channel_players import Bomb
from tests.support.waiting import LIMIT_S, until

FULL = 1 << 20  # bytes that do not fit into the kernel's buffer


@pytest.fixture
def sides():
    """(tx, rx) of one side, (tx, rx) of the other."""
    both = channel.pair()
    yield both
    for half in (*both[0], *both[1]):
        half.close(*(0,) * isinstance(half, channel.Sender))


@pytest.fixture
def way(sides):
    """A sender, and the receiver of what it sends."""
    return sides[0][0], sides[1][1]


def blocks(thread):
    """Whether a thread is in a system call that waits."""
    with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


class Helper(threading.Thread):
    """Does something; `end` gives what came of it, or what was raised."""

    def __init__(self, act, *args):
        super().__init__()
        self._act, self._args, self._came = act, args, None
        self.start()

    def run(self):
        try:
            self._came = "ok", self._act(*self._args)
        except (ChannelError, TimeoutError) as error:
            self._came = type(error).__name__, str(error)

    def end(self):
        self.join(LIMIT_S)
        assert not self.is_alive(), "it hangs"
        return self._came

    def until_blocked(self):
        until(lambda: blocks(self))
        return self


THINGS = (None, True, 7, 2.5, "word", b"", b"bytes", (1, b"x" * 100), {"a": [1, {2}]}, bytearray(b"abc"), range(3))


@pytest.mark.parametrize("thing", THINGS, ids=repr)
def test_a_thing_arrives_as_it_was(way, thing):
    tx, rx = way
    tx.send(thing)
    came = rx.recv()
    assert came == thing
    assert type(came) is type(thing)


@pytest.mark.parametrize("size", [0, 1, 16370, 16384, 32768, 65500, 65536, 1 << 18, 10_000_001])
@pytest.mark.parametrize("wrap", [bytes, bytearray, lambda data: {"data": [data]}, lambda data: data.decode()])
@pytest.mark.rows(12)
def test_any_size_arrives_whole(way, size, wrap):
    tx, rx = way
    thing = wrap((b"0123456789abcdef" * (size // 16 + 1))[:size])
    helper = Helper(lambda: [tx.send(thing), tx.send("after")])
    assert rx.recv() == thing
    assert rx.recv() == "after"
    assert helper.end()[0] == "ok"


@pytest.mark.parametrize("data", [b"abc", bytearray(b"abc"), memoryview(b"abc"), array.array("b", b"abc")])
def test_bytes_of_any_buffer_arrive_as_bytes(way, data):
    tx, rx = way
    tx.send_bytes(data)
    assert rx.recv_bytes() == b"abc"


def test_messages_keep_their_order_and_number(way):
    tx, rx = way
    helper = Helper(lambda: [tx.send(number) for number in range(10_000)] and tx.close())
    assert list(rx) == list(range(10_000))
    assert helper.end() == ("ok", None)


def test_functions_travel_by_value(way):
    tx, rx = way
    base = 40
    tx.send(lambda more: base + more)
    assert rx.recv()(2) == 42


def test_plain_things_do_not_import_cloudpickle():
    code = """
import sys
from infini_run import channel
(tx, _), (_, rx) = channel.pair()
tx.send((1, {"a": [b"b"]}))
print(rx.recv(), "cloudpickle" in sys.modules)
tx.send(lambda: 1)
print("cloudpickle" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(1, {'a': [b'b']}) False\nTrue\n"


def test_recv_bytes_leaves_an_object_to_recv(way):
    tx, rx = way
    tx.send([1])
    with pytest.raises(TypeError, match="use recv\\(\\)"):
        rx.recv_bytes()
    assert rx.pending
    assert rx.recv() == [1]


def test_pending_tells_of_a_message_that_select_no_longer_does(way):
    tx, rx = way
    for number in range(3):
        tx.send(number)
    assert not rx.pending
    assert rx.recv() == 0
    assert not select.select([rx], [], [], 0)[0]
    assert rx.pending
    assert [rx.recv(), rx.recv()] == [1, 2]
    assert not rx.pending
    tx.close()
    with pytest.raises(ChannelEnd):
        rx.recv()
    assert rx.pending


# --- the ends


def test_the_end_comes_after_everything_and_again(way):
    tx, rx = way
    tx.send("last")
    tx.close()
    assert rx.recv() == "last"
    for _ in range(3):
        with pytest.raises(ChannelEnd):
            rx.recv()


def test_the_end_is_said_however_full_the_channel_is(way):
    tx, rx = way
    sent = 0
    while outcome(tx.send_bytes, b"x" * 100, 0)[0] == "ok":
        sent += 1
    tx.close(linger_s=LIMIT_S)  # nobody reads
    assert len(list(rx)) == sent


def test_a_side_that_is_let_go_of_without_a_word_is_broken(sides):
    (tx, rx), theirs = sides
    theirs[0].send("last words")
    for half in theirs:
        half.close_copy()
    assert rx.recv() == "last words"
    for _ in range(2):
        with pytest.raises(ChannelBroken, match="other side died"):
            rx.recv()
    for _ in range(2):
        with pytest.raises(ChannelBroken, match="other side is gone"):
            tx.send(1)


def test_what_the_dead_had_not_read_does_not_spoil_what_they_said(sides):
    """The kernel says ECONNRESET then (unix(7)); not before all has been read."""
    (tx, rx), theirs = sides
    tx.send("never read")
    theirs[0].send("last words")
    theirs[0].close()
    for half in theirs:
        half.close_copy()
    assert list(rx) == ["last words"]


def test_half_a_message_is_told_as_such(sides):
    (_, rx), theirs = sides
    with pytest.raises(TimeoutError):
        theirs[0].send_bytes(bytes(FULL), timeout_s=0)
    for half in theirs:
        half.close_copy()
    with pytest.raises(ChannelBroken, match="in the middle of a message"):
        rx.recv()


def test_a_closed_receiver_breaks_its_sender_and_nothing_else(sides):
    (tx, rx), (their_tx, their_rx) = sides
    their_rx.close()
    with pytest.raises(ChannelBroken):
        tx.send(1)
    their_tx.send("still")
    assert rx.recv() == "still"


@pytest.mark.parametrize("act", ["send", "send_bytes", "recv", "recv_bytes", "next"])
def test_use_after_close_says_who_closed(sides, act):
    tx, rx = sides[0]
    tx.close()
    rx.close()
    acts = {"send": lambda: tx.send(1), "send_bytes": lambda: tx.send_bytes(b"1"), "recv": rx.recv}
    acts |= {"recv_bytes": rx.recv_bytes, "next": lambda: next(rx)}
    with pytest.raises(ChannelClosed, match="is closed"):
        acts[act]()


def test_closing_is_for_any_order_and_number_of_times(sides):
    halves = [*sides[0], *sides[1]]
    for half in (halves[2], halves[2], halves[1], halves[0], halves[3], halves[1]):
        half.close()
        half.close_copy()
        assert half.closed
        assert half.fileno() == -1
        assert "closed" in repr(half)


def test_a_block_closes():
    (tx, rx), (their_tx, their_rx) = channel.pair()
    with their_tx, their_rx, rx:
        with tx:
            tx.send(1)
        assert list(their_rx) == [1]


# --- time, and what is given up


def test_what_was_given_up_is_never_delivered_and_tears_nothing(way):
    tx, rx = way
    for size in (FULL, FULL + 1):
        with pytest.raises(TimeoutError, match="the receiver made no room"):
            tx.send({"large": b"x" * size}, timeout_s=0.01)
    helper = Helper(lambda: [tx.send("small"), tx.send_bytes(bytes(FULL)), tx.close()])
    assert list(rx) == ["small", bytes(FULL)]
    assert helper.end()[0] == "ok"


def test_parts_that_were_given_up_tear_nothing(way):
    tx, rx = way
    thing = [bytearray(b"x" * FULL), bytearray(b"y" * FULL)]
    for _ in range(3):
        with pytest.raises(TimeoutError):
            tx.send(thing, timeout_s=0)
        thing[0][:] = b"z" * FULL  # ours again
    helper = Helper(lambda: [tx.send(thing), tx.close()])
    assert list(rx) == [thing]
    assert helper.end()[0] == "ok"


def test_half_of_a_message_is_kept_for_the_next_recv(way):
    tx, rx = way
    helper = Helper(tx.send_bytes, bytes(FULL))
    outcomes = []
    until(lambda: outcomes.append(outcome(rx.recv_bytes, 0)) or outcomes[-1][0] == "ok")
    assert outcomes[-1] == ("ok", bytes(FULL))
    assert helper.end()[0] == "ok"


def outcome(act, *args):
    try:
        return "ok", act(*args)
    except TimeoutError as error:
        return "TimeoutError", str(error)


def test_nothing_in_time_is_said(way):
    with pytest.raises(TimeoutError, match="no message arrived in time"):
        way[1].recv(timeout_s=0.01)
    with pytest.raises(TimeoutError):
        way[1].recv(timeout_s=0)


def test_a_timeout_holds_while_another_thread_is_at_it(way):
    helper = Helper(way[1].recv).until_blocked()
    with pytest.raises(TimeoutError):
        way[1].recv(timeout_s=0.01)
    way[0].send(1)
    assert helper.end() == ("ok", 1)


# --- threads


@pytest.mark.parametrize("timeout_s", [None, LIMIT_S])
def test_closing_wakes_a_thread_that_receives(way, timeout_s):
    helper = Helper(way[1].recv, timeout_s).until_blocked()
    way[1].close()
    assert helper.end()[0] == "ChannelClosed"


@pytest.mark.parametrize("timeout_s", [None, LIMIT_S])
def test_closing_wakes_a_thread_that_sends(way, timeout_s):
    tx, rx = way
    helper = Helper(tx.send_bytes, bytes(FULL), timeout_s).until_blocked()
    tx.close(linger_s=0.01)
    assert helper.end()[0] == "ChannelClosed"
    with pytest.raises(ChannelBroken, match="in the middle of a message"):
        rx.recv()


def test_closing_waits_for_a_thread_that_sends_to_somebody_who_reads(way):
    tx, rx = way
    sending = Helper(tx.send_bytes, bytes(FULL)).until_blocked()
    closing = Helper(tx.close, LIMIT_S).until_blocked()
    assert list(rx) == [bytes(FULL)]
    assert sending.end()[0] == closing.end()[0] == "ok"


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_many_threads_send_is_mixed_by_whole_messages(way, size):
    tx, rx = way
    words = [bytes([65 + number]) * size for number in range(4)]
    helpers = [Helper(lambda word=word: [tx.send_bytes(word) for _ in range(50)]) for word in words]
    came = [rx.recv_bytes() for _ in range(200)]
    assert sorted(came) == sorted(words * 50)
    assert [helper.end()[0] for helper in helpers] == ["ok"] * 4


def test_many_threads_receive_each_message_once(way):
    tx, rx = way
    helpers = [Helper(lambda: list(rx)) for _ in range(4)]
    for number in range(1000):
        tx.send(number)
    tx.close()
    assert sorted(number for helper in helpers for number in helper.end()[1]) == list(range(1000))


# --- what does not go


def test_over_the_limit_says_both_sizes_and_sends_nothing():
    (tx, rx), theirs = channel.pair(limit=1000)
    with rx, theirs[0], theirs[1]:
        with pytest.raises(MessageTooLong) as told:
            tx.send_bytes(bytes(1001))
        assert (told.value.size, told.value.limit) == (1001, 1000)
        assert str(told.value) == "a message of 1001 bytes exceeds the channel's limit of 1000"
        with pytest.raises(ValueError, match="limit of 1000"):
            tx.send("x" * 1000)
        tx.send_bytes(bytes(1000))
        tx.close()
        assert list(theirs[1]) == [bytes(1000)]


@pytest.mark.parametrize("thing", [b"x" * 100_000, {"many": [b"x" * FULL] * 2, "more": bytearray(FULL)}])
def test_a_receiver_passes_over_what_is_over_its_own_limit(thing):
    (tx, rx), theirs = channel.pair()
    their_rx = channel.Receiver(theirs[1]._line, 1000)
    helper = Helper(lambda: [tx.send(thing), tx.send("small"), tx.close()])
    with pytest.raises(MessageTooLong):
        their_rx.recv()
    assert list(their_rx) == ["small"]
    assert helper.end()[0] == "ok"
    for half in (rx, *theirs, their_rx):
        half.close()


class Deep:
    def __init__(self):
        self.hooks = [1, 2, {"on": threading.Lock()}]


class Slotted:
    __slots__ = ("lock",)

    def __init__(self):
        self.lock = threading.Lock()


class Stubborn:
    def __reduce__(self):
        raise RuntimeError("not me")


def closure():
    held = Deep()
    return lambda: held


class Parent:
    """Its child refers to it, so that the child does not pickle either."""

    def __init__(self):
        self.child = Slotted.__new__(Slotted)
        self.child.lock = self
        self.held = threading.Lock()


def overriding():
    """A class that travels by value, whose method refers to it by the cell that super() needs."""

    class Overriding(Deep):
        def work(self):
            return super().work()

        held = threading.Lock()

    return Overriding


UNPICKLABLE = {
    "message": (item for item in ()),
    "message['model'].hooks[2]['on']": {"model": Deep()},
    "message[0].lock": [Slotted()],
    "message's variable held.hooks[2]['on']": closure(),
    "message[1]": (1, Stubborn()),
    "message.__self__.hooks[2]['on']": Deep().__init__,
    "message.held": Parent(),
    "message[0].held": [Parent()],
    "message['a'].held": {"a": overriding()},
}


@pytest.mark.parametrize("path", UNPICKLABLE)
def test_what_does_not_pickle_is_named_and_nothing_is_sent(way, path):
    tx, rx = way
    with pytest.raises(UnpicklableError) as told:
        tx.send(UNPICKLABLE[path])
    assert told.value.path == path
    assert str(told.value).startswith(f"{path} cannot be sent: a ")
    assert isinstance(told.value, TypeError)
    tx.send("next")
    assert rx.recv() == "next"


def test_too_deep_a_nest_is_refused(way):
    nest = []
    for _ in range(100_000):
        nest = [nest]
    with pytest.raises(UnpicklableError, match="too deep"):
        way[0].send(nest)


def test_what_does_not_unpickle_costs_only_itself(way):
    tx, rx = way
    helper = Helper(lambda: [tx.send(thing) for thing in (Bomb(), [Bomb(), b"x" * FULL], 2)])
    for _ in range(2):
        with pytest.raises(CannotUnpickle, match="ValueError: invalid literal") as told:
            rx.recv()
        assert isinstance(told.value.__cause__, ValueError)
    assert rx.recv() == 2
    assert helper.end()[0] == "ok"


@pytest.mark.parametrize(
    "error",
    [
        ChannelClosed("a"),
        ChannelBroken("b"),
        ChannelEnd("c"),
        MessageTooLong(5, 4),
        UnpicklableError("d", "p"),
        CannotUnpickle("e"),
    ],
)
def test_errors_travel(way, error):
    way[0].send(error)
    came = way[1].recv()
    assert (type(came), str(came), vars(came)) == (type(error), str(error), vars(error))
    assert pickle.loads(pickle.dumps(error)).args == error.args


# --- interrupts


class Interrupt(KeyboardInterrupt):
    pass


def interrupt(*_):
    raise Interrupt


@pytest.fixture
def again_and_again():
    """Call something until it has returned; it is interrupted after 50 us to 2 ms, each time. How often it was.

    The garbage collector rests meanwhile: what a signal handler raises in one of its callbacks (Hypothesis has one)
    is printed and forgotten, and no further interrupt would come."""

    def call(act):
        count, is_over = 0, False
        while not is_over:
            try:
                signal.setitimer(signal.ITIMER_REAL, 50e-6 * (1 + count * 7 % 40))
                act()
                is_over = True
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                count += 1
        return count

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()
    yield call
    gc.enable()
    signal.signal(signal.SIGALRM, before)


SIZES = (10, 20_000, 300_000)


def test_interrupts_of_a_receiver_tear_nothing_and_double_nothing(way, again_and_again):
    """An interrupt may lose the message that is just being handed over; it never loses the place in the stream."""
    tx, rx = way
    helper = Helper(lambda: [tx.send((number, b"x" * SIZES[number % 3])) for number in range(1500)] and tx.close())
    came = []
    interrupts = again_and_again(lambda: came.extend(rx))
    assert helper.end()[0] == "ok"
    numbers = [number for number, _ in came]
    assert numbers == sorted(set(numbers))
    assert all(data == b"x" * SIZES[number % 3] for number, data in came)
    assert 0 <= 1500 - len(numbers) <= interrupts
    assert interrupts > 10


def test_an_interrupt_that_loses_a_message_cannot_lose_the_end(way):
    tx, rx = way
    tx.send("last")
    tx.close()
    assert rx._decoder.read(rx._waiting) is not None  # and an interrupt comes before anybody has it
    for _ in range(2):
        rx._decoder.next_message()
    with pytest.raises(ChannelEnd):
        rx.recv()


def test_interrupts_of_a_sender_tear_nothing_and_lose_nothing_that_was_sent(way, again_and_again):
    tx, rx = way
    helper = Helper(list, rx)
    numbers, sent = iter(range(1500)), []

    def send():
        for number in numbers:
            tx.send((number, b"x" * SIZES[number % 3]))
            sent.append(number)

    interrupts = again_and_again(send)
    tx.close()
    came = helper.end()[1]
    arrived = [number for number, _ in came]
    assert arrived == sorted(set(arrived))
    assert set(sent) <= set(arrived)
    assert all(data == b"x" * SIZES[number % 3] for number, data in came)
    assert interrupts > 10


def test_a_signal_handler_that_sends_while_we_send_is_refused_and_does_not_hang(way):
    tx, _ = way
    told = []

    def handler(*_):
        with pytest.raises(ChannelError, match="interrupts"):
            tx.send("from the handler")
        told.append(True)
        tx.close(linger_s=0)  # which is all right, and ends the send

    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread()
    try:
        helper = Helper(lambda: [until(lambda: blocks(main)), signal.pthread_kill(main.ident, signal.SIGUSR1)])
        with pytest.raises(ChannelClosed):
            tx.send_bytes(bytes(FULL))
        assert helper.end()[0] == "ok"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [True]


# --- a caller with a loop of its own


def test_a_list_of_buffers_is_one_message(way):
    tx, rx = way
    parts = [b"ab", bytearray(b"cd"), memoryview(b"x" * 100_000)]
    tx.send_bytes(parts[:2])
    tx.send_bytes(parts)
    assert rx.recv_bytes() == b"abcd"
    assert rx.recv_bytes() == b"".join(parts)


def test_what_is_posted_goes_when_there_is_room_in_its_order(way):
    tx, rx = way
    assert tx.post_bytes(b"first")
    assert not tx.post_bytes(bytes(FULL))
    assert not tx.post_bytes([b"th", b"ird"])
    assert not tx.post_end()
    assert not tx.flush()
    assert rx.recv() == b"first"
    came = []
    while not tx.flush():
        came += [value for kind, value in [outcome(rx.recv, 0)] if kind == "ok"]
    came += rx
    assert came == [bytes(FULL), b"third"]
    with pytest.raises(ChannelClosed):
        tx.post_bytes(b"more")
    with pytest.raises(ChannelClosed):
        tx.send(1)


def test_what_was_posted_goes_before_what_is_sent_and_before_the_end(way):
    tx, rx = way
    tx.post_bytes(bytes(FULL))
    tx.post_bytes(b"second")
    helper = Helper(lambda: [tx.send("third"), tx.post_bytes(b"fourth"), tx.close()])
    assert list(rx) == [bytes(FULL), b"second", "third", b"fourth"]
    assert helper.end()[0] == "ok"


def test_posting_to_who_has_gone_is_broken(sides):
    tx = sides[0][0]
    assert not tx.post_bytes(bytes(FULL))
    sides[1][1].close()
    for _ in range(2):
        with pytest.raises(ChannelBroken):
            tx.flush()
    tx.close()
    with pytest.raises(ChannelClosed):
        tx.flush()
