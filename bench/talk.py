"""Two processes that talk, over a channel and over multiprocessing.Pipe, in turns: `talk.py measure ROUNDS`.

Prints JSON: for each figure, the samples of either. Each pair of processes is on the same cores as the other: who
shares a core with whom is half of what a round trip takes. Run by bench/channel.py in the venv that is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from infini_run import channel

TRIPS = 200  # of one sample
MESSAGES = 40
BUDGET_S, LEAST_ROUNDS = 15.0, 3  # on a machine with much else to do
WORD, THING, LARGE = b"x" * 64, ("task", 7, "x" * 40), bytes(1 << 20)
Talk = dict[str, Callable[..., Any]]


def of_channel(tx: channel.Sender, rx: channel.Receiver) -> Talk:
    return {"send": tx.send, "recv": rx.recv, "send_bytes": tx.send_bytes, "recv_bytes": rx.recv_bytes}


def of_pipe(pipe: Connection) -> Talk:
    return {name: getattr(pipe, name) for name in ("send", "recv", "send_bytes", "recv_bytes")}


def answer(talk: Talk) -> None:
    """The other process: what is asked for, until it is told to end."""
    while (order := talk["recv"]()) != "end":
        what, count = order
        if what == "sink":
            for _ in range(count):
                talk["recv_bytes"]()
            talk["send"]("done")
            continue
        send, recv = talk["send" + what], talk["recv" + what]
        for _ in range(count):
            send(recv())


class Pair:
    """We, and the other process."""

    def __init__(self, how: str) -> None:
        self._keep: list[Any] = []
        if how == "channel":
            ours, theirs = channel.pair()
            self.talk, fd = of_channel(*ours), theirs[0].fileno()
        else:
            pipe, other = multiprocessing.Pipe()
            self._keep.append(pipe)
            self.talk, fd = of_pipe(pipe), other.fileno()
        self.process = subprocess.Popen([sys.executable, __file__, "answer", how, str(fd)], pass_fds=[fd])
        if how == "channel":
            for half in theirs:
                half.close_copy()
        else:
            other.close()

    def trips(self, what: str, message: object) -> float:
        """Median microseconds of a round trip."""
        self.talk["send"]((what, TRIPS))
        send, recv, clock = self.talk["send" + what], self.talk["recv" + what], time.perf_counter_ns
        samples = []
        for _ in range(TRIPS):
            begin = clock()
            send(message)
            recv()
            samples.append(clock() - begin)
        return statistics.median(samples) / 1000

    def sink(self) -> float:
        """MB/s of large messages one way."""
        self.talk["send"](("sink", MESSAGES))
        begin = time.perf_counter_ns()
        for _ in range(MESSAGES):
            self.talk["send_bytes"](LARGE)
        self.talk["recv"]()
        return MESSAGES * len(LARGE) * 1000 / (time.perf_counter_ns() - begin)

    def end(self) -> None:
        self.talk["send"]("end")
        self.process.wait()


def place(pairs: dict[str, Pair], ours: int, theirs: int) -> None:
    os.sched_setaffinity(0, {ours})
    for pair in pairs.values():
        os.sched_setaffinity(pair.process.pid, {theirs})


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    pairs = {how: Pair(how) for how in ("channel", "pipe")}
    cores = sorted(os.sched_getaffinity(0))
    first, second = cores[0], cores[-1]
    figures: dict[str, tuple[int, Callable[[Pair], float]]] = {
        "bytes, one core": (first, lambda pair: pair.trips("_bytes", WORD)),
        "object, one core": (first, lambda pair: pair.trips("", THING)),
        "bytes, two cores": (second, lambda pair: pair.trips("_bytes", WORD)),
        "object, two cores": (second, lambda pair: pair.trips("", THING)),
        "1 MiB": (second, Pair.sink),
    }
    samples: dict[str, dict[str, list[float]]] = {name: {how: [] for how in pairs} for name in figures}
    end_s = time.monotonic() + BUDGET_S
    for number in range(rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() > end_s:
            break
        for name, (core, act) in figures.items():
            place(pairs, first, core)
            for how in list(pairs)[:: 1 if number % 2 else -1]:
                sample = act(pairs[how])
                if number:  # the first round warms up
                    samples[name][how].append(sample)
    for pair in pairs.values():
        pair.end()
    return samples


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        print(json.dumps(measure(int(sys.argv[2]))))
    elif sys.argv[2] == "channel":
        answer(of_channel(*channel.connect(int(sys.argv[3]))))
    else:
        answer(of_pipe(Connection(int(sys.argv[3]))))
