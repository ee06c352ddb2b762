"""A training of N steps in which one rank is slow: slow_loop.py meet|apart|after SLOW_RANK STEPS [STEP_S SLOW_S].

meet: the ranks report, then wait for each other; after: they report after that; apart: they never wait.
"""

import os
import random
import socket
import sys
import time

import infini_run

kind, slow, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
step_s, slow_step_s = map(float, sys.argv[4:] or (0.1, 0.4))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if kind != "apart" and rank == 0:
    listener = socket.create_server(where)
    peers = [listener.accept()[0] for _ in range(size - 1)]
elif kind != "apart":
    deadline = time.monotonic() + 60
    while True:
        try:
            peers = [socket.create_connection(where)]
            break
        except OSError:
            assert time.monotonic() < deadline, "rank 0 does not listen"
            time.sleep(0.02)


def meet():
    """Rank 0 hears of all, then tells all."""
    if rank:
        peers[0].sendall(b".")
        assert peers[0].recv(1)
        return
    assert all(peer.recv(1) for peer in peers)
    for peer in peers:
        peer.sendall(b".")


for step in range(1, steps + 1):
    # no two steps of a training take equally long
    time.sleep((slow_step_s if rank == slow else step_s) + random.uniform(0, 0.02))
    if kind != "after":
        infini_run.progress(step)
    if kind != "apart":
        meet()
    if kind == "after":
        infini_run.progress(step)
if kind == "apart" and rank != slow:
    time.sleep(steps * (slow_step_s - step_s))  # until the slow one is done: the file of a queue, say
