"""A worker that says 20 things and its last error, and closes, while its supervisor is busy.

race.py queue|channel busy|twice|killed. `queue` is the channel of the seed (EXO): a multiprocessing.Queue and an
Event, both held by both processes, both of which close them. `channel` is ours. One line of JSON says what the
supervisor got, and how it ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import sys

from infini_run import channel
from infini_run.channel.errors import ChannelEnd, ChannelError

EVENTS = [*range(20), "error: out of memory"]


class ClosedResourceError(Exception):
    pass


class Shared:
    """Either end of the seed's channel, in either process."""

    def __init__(self, context):
        self.buffer = context.Queue()
        self.closed = context.Event()

    def send(self, item):
        self.buffer.put(item)

    def receive(self):
        if self.closed.is_set():
            raise ClosedResourceError
        return self.buffer.get()

    def close(self):
        self.closed.set()
        self.buffer.close()

    def join(self):
        self.buffer.join_thread()


def burst(send, close):
    for event in EVENTS:
        send(event)
    close()


def die_in_mid_message(send, _):
    """Once the reader has had a part of it."""
    send("x" * 10_000_000)
    signal.pause()


def by_queue(play):
    context = multiprocessing.get_context("fork")
    shared = Shared(context)

    def close():
        shared.close()
        shared.join()

    worker = context.Process(target=play, args=(shared.send, close))
    worker.start()
    return worker.pid, shared.receive, worker.join, shared


def by_channel(play):
    (tx, rx), theirs = channel.pair()
    fd = os.dup(theirs[0].fileno())

    def run():
        tx, _ = channel.connect(fd)
        play(tx.send, tx.close)

    worker = multiprocessing.get_context("fork").Process(target=run)
    worker.start()
    os.close(fd)
    for half in (tx, *theirs):
        half.close_copy()
    return worker.pid, rx.recv, worker.join, rx


def busy(start):
    """The supervisor takes one event, and the next when the worker has ended."""
    taken = multiprocessing.get_context("fork").Event()

    def burst_and_close_once_one_is_taken(send, close):
        burst(send, lambda: taken.wait() and close())

    _, receive, join, _ = start(burst_and_close_once_one_is_taken)
    got = [receive()]
    taken.set()
    join()
    try:
        while True:
            got.append(receive())
    except (ClosedResourceError, ChannelError) as error:
        return {"got": got, "end": type(error).__name__}


def twice(start):
    """Both sides close, and the worker's last words come after."""
    _, _, join, end = start(burst)
    join()
    ends = []
    for act in (end.close, end.close, *([lambda: end.send(1)] if start is by_queue else [])):
        try:
            act()
        except ValueError as error:
            ends.append(str(error))
    return {"end": ends}


def killed(start):
    """What a supervisor sees of a worker that was killed in the middle of a message: does its stream end?"""
    pid, receive, join, end = start(die_in_mid_message)
    fd = end.buffer._reader.fileno() if start is by_queue else end.fileno()
    select.select([fd], [], [])
    os.kill(pid, signal.SIGKILL)
    join()
    if start is by_channel:
        try:
            receive()
        except (ChannelError, ChannelEnd) as error:
            return {"end": type(error).__name__}
    os.set_blocking(fd, False)
    try:
        while os.read(fd, 1 << 20):
            pass
    except BlockingIOError:
        os._exit(print(json.dumps({"end": "never"}), flush=True) or 0)
    return {"end": "EOF"}


if __name__ == "__main__":
    start = by_queue if sys.argv[1] == "queue" else by_channel
    print(json.dumps({"busy": busy, "twice": twice, "killed": killed}[sys.argv[2]](start)), flush=True)
