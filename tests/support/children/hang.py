"""A training that hangs in the way that is asked for: KIND, the rank that is to blame, and perhaps a file.

The others wait in a collective, as they do in any training: here, for a byte that nobody sends.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
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


def failed():
    """Its error stops nobody, with --keep_going."""
    sys.exit(3)


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
    """It asks a question that nobody answers: at its terminal, or at the head's, if its host has none."""
    try:
        tty = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        tty = 0
    os.read(tty, 1)


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


def in_threads():
    """All train in a thread that the main thread waits for, and one is in no collective there."""
    python_deadlock()


def beside_threads():
    """As in_threads, with a thread more: only what they do shows for which of the two the main thread waits."""
    python_deadlock()


def native_deadlock():
    mutex = ctypes.create_string_buffer(64)
    LIBC.pthread_mutex_lock(mutex)
    LIBC.pthread_mutex_lock(mutex)


def spinning():
    with contextlib.suppress(PermissionError):
        os.nice(-20)  # it is seen to compute on a busy machine, too
    at = 0
    while True:
        at = at + 1
        at = at - 1


def writing():
    """It saves, and says so; the others wait."""
    while True:
        print("saved", flush=True)
        time.sleep(0.05)


def other_caller():
    """It is in the same line as the others, on another way."""
    all_reduce()


def triggered():
    """The rank after it says that the job hangs, once all others are where they wait, and is not to blame."""
    open(f"{FILE}.{RANK}", "w").close()
    time.sleep(1000)


def slow_link():
    """A collective of all ranks over the network, in which what the odd one sends is very long on its way."""
    global ours
    port, link, is_slow = FILE.split(":")
    while not os.path.exists(is_slow):
        sum(range(100_000))  # a sign of life: it does not hang yet
        time.sleep(0.05)
    ours, theirs = socket.socketpair()
    words = [sys.executable, link, "127.0.0.1", port, is_slow, "600" if str(RANK) == ODD else "0"]
    subprocess.Popen(words, stdin=theirs, stdout=theirs)
    ours.sendall(b".")


def file_lock():
    """All wait for one file."""
    with open(FILE) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def main():
    if KIND == "two_collectives":
        (all_reduce if RANK % 2 else all_gather)()
    elif KIND in ("file_lock", "slow_link") or str(RANK) == ODD:
        globals()[KIND]()
    elif KIND == "triggered" and str(RANK - 1) != ODD:
        open(f"{FILE}.{RANK}", "w").close()
    elif KIND == "triggered":
        while not all(
            os.path.exists(f"{FILE}.{rank}") for rank in range(int(os.environ["WORLD_SIZE"])) if rank != RANK
        ):
            time.sleep(0.05)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"WATCHDOG=trigger", os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
    all_reduce()


if KIND in ("in_threads", "beside_threads"):
    if KIND == "beside_threads":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    training = threading.Thread(target=main)
    training.start()
    training.join()
else:
    main()
