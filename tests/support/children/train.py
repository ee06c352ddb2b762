"""A training in which rank 0 fails once a file is there: what rank 1 does, and the path of the file.

The others wait in a collective for a byte that nobody sends. A rank says that it is up once its main thread waits.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time

KIND, GO = sys.argv[1:]
RANK = int(os.environ["RANK"])
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
CLONE_VFORK = 0x4000
ours, theirs = socket.socketpair()


def all_reduce():
    ours.recv(1)


suspended = all_reduce


def loader():
    time.sleep(1000)


def uninterruptible():
    """State D: the parent of a vfork whose child does not exec."""
    if ctypes.CDLL(None).syscall(CLONE, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        while True:
            signal.pause()


def registered():
    """Its own faulthandler, on a signal that infini-run must not send."""
    faulthandler.register(signal.SIGUSR1)
    loader()


def waits():
    with open(f"/proc/self/task/{os.getpid()}/wchan") as file:
        return file.read() not in ("", "0")


def announce():
    while not waits():
        time.sleep(0.01)
    print("up", RANK, os.getpid(), flush=True)
    if RANK == 1 and KIND == "suspended":
        os.kill(os.getpid(), signal.SIGSTOP)
    while RANK == 0 and not os.path.exists(GO):
        time.sleep(0.01)
    if RANK == 0:
        os.write(2, b"ValueError: loss is NaN\n")
        os._exit(1)


threading.Thread(target=announce, daemon=True).start()
(globals()[KIND] if RANK == 1 else all_reduce)()
