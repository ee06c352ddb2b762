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


def double(n):
    return 2 * n


def serve(ctx, task):
    if task == "hang":
        ctx.emit("hanging")
        signal.pause()
    return 2 * task


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
        samples["map"] = timed(lambda: list(crew.map(range(COUNT))), 1e6 / COUNT, max(3, rounds // 4))
        samples["executor"] = timed(
            lambda: list(executor.map(double, range(COUNT))), 1e6 / COUNT, max(3, rounds // 4)
        )
    print(json.dumps(samples))


if __name__ == "__main__":
    measure(int(sys.argv[2]))
