"""Waiting for what a test is about, within a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.processes import children

# How long anything may take on a loaded machine before it counts as hung; AddressSanitizer makes forks slow.
LIMIT_S = 300.0 if "ASAN_OPTIONS" in os.environ else 120.0


def until(what: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait for something that no descriptor tells of. The pause is how often we look, not what we wait for: a look
    that takes long, as one that starts a process, leaves the processor to others for five times as long, and so does
    a wait that has lasted."""
    start_s = look_s = time.monotonic()
    while not what():
        now_s = time.monotonic()
        assert now_s < start_s + limit_s, f"never came true: {what}"
        time.sleep(min(max(0.005, 5 * (now_s - look_s), (now_s - start_s) / 50), 0.5))
        look_s = time.monotonic()


def stderr_so_far() -> str:
    """What has been written to our stderr, a file (capfd). `readouterr` reads that file, and then empties it: a line
    that comes in between is lost, so nothing can wait for one by it."""
    return Path("/proc/self/fd/2").read_text(errors="replace")


@contextlib.contextmanager
def ended_after() -> Iterator[None]:
    """What the block drops ends by itself, in time: wait for its processes and threads."""
    kids, threads = children(), threading.enumerate()
    yield
    until(lambda: children().keys() <= kids.keys() and all(thread in threads for thread in threading.enumerate()))


def interrupt_main(raised: threading.Event) -> None:
    """SIGINT to the main thread, again until `raised`: CPython sees one that comes just before it waits for a lock
    only when it wakes. The fixture `raised` makes a further one nothing."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    while not raised.wait(1):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
