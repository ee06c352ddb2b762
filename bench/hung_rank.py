"""One rank of a training that hangs: hung_rank.py UP GO STAMP GAPS. Rank 0 says that it hangs, and when.

Rank 1 computes: it writes the longest time for which it was held into GAPS, before GO and since. A time in which it
waited for a CPU does not count (the run delay of /proc/PID/schedstat). All others wait in a collective.
"""

import os
import socket
import sys
import threading
import time

up, go, stamp, gaps = sys.argv[1:]
rank = int(os.environ["RANK"])
ours, theirs = socket.socketpair()


def all_reduce():
    ours.recv(1)


def wait_go():
    with open(go) as fifo:
        fifo.read()


def load_batch():
    address = os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        with open(stamp, "w") as file:
            file.write(str(time.monotonic_ns()))
        notify.sendto(b"WATCHDOG=trigger", address)
    time.sleep(1000)


def compute():
    begun = threading.Event()
    threading.Thread(target=lambda: (wait_go(), begun.set()), daemon=True).start()
    longest, last, delay = [0, 0], time.monotonic_ns(), run_delay()
    while True:
        now = time.monotonic_ns()
        if now - last > 1_000_000:
            delayed, at = run_delay(), begun.is_set()
            held, delay = now - last - (delayed - delay), delayed
            if held > longest[at]:
                longest[at] = held
                with open(gaps, "w") as file:
                    file.write(" ".join(map(str, longest)))
            now = time.monotonic_ns()
        last = now


def run_delay():
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1])


with open(up, "wb", buffering=0) as fifo:
    fifo.write(b".")
if rank == 1:
    with open(gaps, "w") as file:
        file.write("0 0")
    compute()
if rank == 0:
    wait_go()
    time.sleep(1.0)
    load_batch()
all_reduce()
