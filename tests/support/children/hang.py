"""A training that hangs in the way that is asked for: KIND, the rank that is to blame, and perhaps a file.

The others wait in a collective, as they do in any training: here, for a byte that nobody sends.
"""

import ctypes
import fcntl
import os
import signal
import socket
import sys
import threading
import time

KIND, ODD, FILE = (*sys.argv[1:], "")[:3]
RANK = int(os.environ["RANK"])
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
CLONE_VFORK = 0x4000
ours, theirs = socket.socketpair()


def all_reduce():
    ours.recv(1)


def all_gather():
    ours.recv(1)


def loader():
    """One rank waits for its data."""
    time.sleep(1000)


def left_early():
    """It has finished, and the others are in a collective more than it."""
    sys.exit(0)


def suspended():
    """Somebody has sent it SIGSTOP, in the middle of the collective."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    all_reduce()


def uninterruptible():
    """State D: the parent of a vfork whose child does not exec."""
    if LIBC.syscall(CLONE, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        while True:
            signal.pause()


def terminal():
    """It asks a question that nobody answers."""
    with open("/dev/tty") as tty:
        tty.readline()


def dead_child():
    """The process that loads its data has died, and it waits for the next batch."""
    reading, _ = os.pipe()
    if os.fork() == 0:
        os._exit(1)
    os.read(reading, 1)


def python_deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def native_deadlock():
    mutex = ctypes.create_string_buffer(64)
    LIBC.pthread_mutex_lock(mutex)
    LIBC.pthread_mutex_lock(mutex)


def spinning():
    at = 0
    while True:
        at = at + 1
        at = at - 1


def file_lock():
    """All wait for one file."""
    with open(FILE) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def main():
    if KIND == "two_collectives":
        (all_reduce if RANK % 2 else all_gather)()
    elif KIND == "file_lock" or str(RANK) == ODD:
        globals()[KIND]()
    all_reduce()


main()
