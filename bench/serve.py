"""What crew.py measures, in a process of its own: `serve.py measure ROUNDS` prints its samples as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import infini_run as ir

COUNT = 2000
LARGE = 100 << 20  # bytes
CPU_COUNT = 20_000  # the clock of a child's CPU ticks a hundred times a second


def double(n):
    return 2 * n


def same(thing):
    return thing


def serve(ctx, task):
    if task == "hang":
        ctx.emit("hanging")
        signal.pause()
    return task if type(task) is bytearray else 2 * task


def deaths(rounds):
    """From the kill to the failure of its ask, and to that of the others, in ms: a crew that is one for all."""
    own, others = [], []
    with ir.Crew(
        serve, nproc=4, grace=5, restart=ir.Restart(strategy="one_for_all", max_restarts=rounds + 1)
    ) as crew:
        for _ in range(rounds):
            asks = [crew.worker(rank).ask("hang") for rank in range(4)]
            hanging = 0
            while hanging < 4:
                hanging += sum(event.kind == "emitted" for event in crew.events())
            pid = crew.status().workers[1].pid
            begin = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            asks[1].exception()
            own.append((time.perf_counter() - begin) * 1e3)
            for ask in asks:
                ask.exception()
            others.append((time.perf_counter() - begin) * 1e3)
    return own, others


def timed(what, scale, rounds):
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        what()
        found.append((time.perf_counter() - begin) * scale)
    return found


def cpu_s():
    """The CPU time of this process and of its children that live, in seconds."""
    found = time.process_time()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def in_turns(whats, now_s, scale, rounds):
    """What each takes by this clock, one after the other in each round."""
    found = [[] for _ in whats]
    for _ in range(rounds):
        for samples, what in zip(found, whats, strict=True):
            begin_s = now_s()
            what()
            samples.append((now_s() - begin_s) * scale)
    return found


def whole():
    with ir.Crew(serve, nproc=2) as crew:
        crew.ask(1).result()


def measure(rounds):
    own, others = deaths(rounds)
    samples = {"own": own, "others": others, "whole": timed(whole, 1e3, rounds)}
    with ir.Crew(serve, nproc=2) as crew, ProcessPoolExecutor(2) as executor:
        list(crew.map(range(COUNT)))
        list(executor.map(double, range(COUNT)))
        samples["trip"] = timed(lambda: crew.worker(0).ask(1).result(), 1e6, rounds * 20)
        whats = [lambda: list(crew.map(range(COUNT))), lambda: list(executor.map(double, range(COUNT)))]
        samples["map"], samples["executor"] = in_turns(whats, time.perf_counter, 1e6 / COUNT, max(3, rounds // 2))
        many = range(CPU_COUNT)
        whats = [lambda: list(crew.map(many)), lambda: list(executor.map(double, many))]
        samples["map_cpu"], samples["executor_cpu"] = in_turns(whats, cpu_s, 1e6 / CPU_COUNT, max(3, rounds // 4))
        large = bytearray(LARGE)
        whats = [lambda: crew.ask(large).result(), lambda: executor.submit(same, large).result()]
        in_turns(whats, time.perf_counter, 1, 1)
        samples["large"], samples["executor_large"] = in_turns(whats, time.perf_counter, 1e3, max(3, rounds // 2))
    print(json.dumps(samples))


if __name__ == "__main__":
    measure(int(sys.argv[2]))
