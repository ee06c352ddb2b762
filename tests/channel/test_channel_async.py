"""The same object in coroutines: they wait without a thread, are cancelled without loss, and share with threads."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from infini_run import channel
from infini_run.channel.errors import ChannelBroken, ChannelClosed, ChannelEnd
from tests.channel.test_channel import FULL, Helper
from tests.support.waiting import LIMIT_S


@pytest.fixture
def sides():
    both = channel.pair()
    yield both
    for half in (*both[0], *both[1]):
        half.close(*(0,) * isinstance(half, channel.Sender))


@pytest.fixture
def way(sides):
    return sides[0][0], sides[1][1]


def run(coroutine):
    """In a loop of its own; nothing may take for ever, nor leave a task."""

    async def main():
        result = await asyncio.wait_for(coroutine, LIMIT_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(main())


async def settled(count=5):
    """When every task that can go on has."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_async_for_gives_all_up_to_the_end(way):
    tx, rx = way

    async def receive():
        return [message async for message in rx]

    async def both():
        receiving = asyncio.create_task(receive())
        for number in range(1000):
            await tx.asend(number)
        await tx.asend_bytes(bytes(FULL))
        await tx.aclose()
        return await receiving

    assert run(both()) == [*range(1000), bytes(FULL)]


def test_both_directions_wait_in_one_loop(sides):
    """A sender and a receiver of one side have one descriptor."""
    (tx, rx), (their_tx, their_rx) = sides

    async def play():
        sending = asyncio.create_task(tx.asend(b"x" * FULL))
        receiving = asyncio.create_task(rx.arecv())
        await settled()
        await their_tx.asend("hello")
        assert await receiving == "hello"
        assert await their_rx.arecv_bytes() == b"x" * FULL
        await sending

    run(play())


def test_a_receiver_that_is_cancelled_loses_nothing(way):
    tx, rx = way

    async def play():
        for number in range(100):
            waiting = asyncio.create_task(rx.arecv())
            await settled(number % 4)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await tx.asend(number)
            assert await rx.arecv() == number

    run(play())


def test_a_receiver_that_is_cancelled_in_mid_message_has_it_next_time(way):
    tx, rx = way

    async def play():
        sending = asyncio.create_task(tx.asend(b"x" * FULL))
        while not sending.done():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(rx.arecv(), 1e-9)
            state = rx._decoder._state
            if isinstance(state, tuple) and state[3] > FULL // 2:  # most of it is here
                break
            await settled(1)
        assert await rx.arecv() == b"x" * FULL
        await sending

    run(play())


def test_a_send_that_is_cancelled_is_not_delivered_and_tears_nothing(way):
    tx, rx = way

    async def play():
        for _ in range(3):
            sending = asyncio.create_task(tx.asend({"large": bytearray(FULL)}))
            await settled()
            assert not sending.done()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        sending = asyncio.create_task(tx.asend("small"))
        assert await rx.arecv() == "small"
        await sending
        await tx.aclose()
        with pytest.raises(ChannelEnd):
            await rx.arecv()

    run(play())


def test_many_tasks_take_turns_in_the_order_in_which_they_came(way):
    tx, rx = way

    async def play():
        receiving = [asyncio.create_task(rx.arecv()) for _ in range(20)]
        await settled()
        sending = [asyncio.create_task(tx.asend((number, b"x" * 100_000))) for number in range(20)]
        came = await asyncio.gather(*receiving)
        await asyncio.gather(*sending)
        return [number for number, _ in came]

    assert run(play()) == list(range(20))


def test_a_plain_send_goes_behind_one_that_waits_in_the_same_loop(way):
    """It finishes what the coroutine has begun: were it to wait for it, the loop would stand still."""
    tx, rx = way
    helper = Helper(lambda: [rx.recv(), rx.recv()])

    async def play():
        sending = asyncio.create_task(tx.asend(b"x" * 10 * FULL))
        await settled()
        tx.send("behind")
        await sending

    run(play())
    assert helper.end() == ("ok", [b"x" * 10 * FULL, "behind"])


def test_a_coroutine_waits_for_a_thread_that_receives_and_stops_no_loop(way):
    tx, rx = way
    helper = Helper(rx.recv).until_blocked()

    async def play():
        waiting = asyncio.create_task(rx.arecv())
        await settled()
        assert not waiting.done()
        await tx.asend(1)
        await tx.asend(2)
        return await waiting

    assert {run(play()), helper.end()[1]} == {1, 2}


def test_two_loops_in_two_threads_share_a_receiver(way):
    tx, rx = way

    async def receive():
        return [message async for message in rx]

    helpers = [Helper(lambda: asyncio.run(receive())) for _ in range(2)]
    for number in range(200):
        tx.send(number)
    tx.close()
    assert sorted(number for helper in helpers for number in helper.end()[1]) == list(range(200))


def at_call(name, act):
    """Call `act` once, when this thread next calls a function of that name."""

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_qualname.endswith(name):
            sys.setprofile(None)
            act()

    sys.setprofile(look)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="co_qualname")
def test_coroutine_gets_message_read_by_thread_just_before_it_waits(way):
    tx, rx = way

    def read():
        tx.send(1)
        tx.send(2)
        assert rx.recv() == 1  # and reads the other one, too

    async def receive():
        at_call("_until_ready", read)
        return await rx.arecv()

    assert run(receive()) == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="co_qualname")
def test_loop_keeps_its_queue_when_another_loop_begins(way):
    _, rx = way
    loops = asyncio.new_event_loop(), asyncio.new_event_loop()
    queues = []
    at_call("WeakKeyDictionary.__init__", lambda: queues.append(rx._queue_for(loops[1])))
    rx._queue_for(loops[0])
    assert rx._queue_for(loops[1]) is queues[0]
    for loop in loops:
        loop.close()


@pytest.mark.parametrize("from_thread", [False, True])
def test_closing_wakes_coroutines_that_wait(sides, from_thread):
    tx, rx = sides[0]

    def close():
        rx.close()
        tx.close(linger_s=0)

    async def play():
        waiting = [asyncio.create_task(tx.asend(bytes(FULL))), asyncio.create_task(rx.arecv())]
        await settled()
        if from_thread:
            closing.start()
        else:
            close()
        return [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)]

    closing = threading.Thread(target=close)
    assert run(play()) == [ChannelClosed, ChannelClosed]
    if from_thread:
        closing.join()
    with pytest.raises(ChannelBroken):
        sides[1][1].recv()


def test_aclose_waits_for_what_is_half_sent_and_no_longer_than_it_lingers(sides):
    (tx, rx), (their_tx, their_rx) = sides

    async def play():
        sending = asyncio.create_task(tx.asend(bytes(FULL)))
        await settled()
        closing = asyncio.create_task(tx.aclose())
        await settled()
        assert await their_rx.arecv() == bytes(FULL)
        await closing
        await sending
        with pytest.raises(ChannelEnd):
            await their_rx.arecv()
        abandoned = asyncio.create_task(their_tx.asend(bytes(FULL)))
        await settled()
        await their_tx.aclose(linger_s=0.01)
        with pytest.raises(ChannelClosed):
            await abandoned
        with pytest.raises(ChannelBroken):
            await rx.arecv()

    run(play())


def test_a_block_of_a_coroutine_closes(way):
    tx, rx = way

    async def play():
        async with tx:
            await tx.asend(1)
        async with rx:
            came = [message async for message in rx]
        await rx.aclose()
        with pytest.raises(ChannelClosed):
            await rx.arecv()
        return came

    assert run(play()) == [1]
