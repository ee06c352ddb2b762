"""A Group for a test: what one worker is, and running a group to its end in one line."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time

from infini_run.core.c_structs import INHERIT, SpawnSpec
from infini_run.core.group import Group
from tests.support.processes import OURS
from tests.support.waiting import LIMIT_S

_serial = itertools.count()


def spec(rank, *argv, stdio=(INHERIT, INHERIT, INHERIT), output=(0, 0), log_fd=-1, env=(), cwd=None, notify=None):
    made = SpawnSpec(
        rank, os.fsencode(argv[0]), [os.fsencode(word) for word in argv], b"\0".join(os.fsencode(e) for e in env)
    )
    made.stdio = list(stdio)
    made.output = list(output)
    made.log_fd = log_fd
    made.cwd = cwd
    if notify is not None:
        made.notify = os.fsencode(notify)
        made.env = b"\0".join(filter(None, (made.env, b"NOTIFY_SOCKET=" + made.notify)))
    made.label = tuple((b"[rank %d%s] " % (rank, w), b"[rank %d%s +] " % (rank, w)) for w in (b"", b" err"))
    return made


class Live:
    """A group, all its events so far, and the mark that its workers carry."""

    def __init__(self, *specs, size=None, grace_s=10.0, env=(), **config):
        self.mark = os.fsencode(f"INFINI_RUN_ID=test-{os.getpid()}-{next(_serial)}")
        config.setdefault("stop_signal", signal.SIGTERM)
        config.setdefault("stop_scope", "group")
        self.group = Group(size or len(specs), mark=self.mark, grace_s=grace_s, **config)
        self.events = []
        self._env = [self.mark, "=".join(OURS).encode(), b"PATH=" + os.fsencode(os.environ["PATH"]), *env]
        if specs:
            self.spawn(*specs)

    def spawn(self, *specs):
        return self.group.spawn(specs, self._env)

    def settle(self):
        """Everything that can be done now is done."""
        while True:
            self.events += self.group.run_once()
            if self.group.ended or not self.group.wait(0):
                return

    def until(self, what):
        """Step until `what()` is true, blocking in between."""
        end = time.monotonic() + LIMIT_S
        self.events += self.group.run_once()
        while not what():
            assert time.monotonic() < end, f"never came; events so far: {self.events}"
            self.group.wait(1.0)
            self.events += self.group.run_once()

    def end(self):
        self.until(lambda: self.group.ended)
        return self.events

    def of(self, kind):
        return [event for event in self.events if event.kind == kind]

    def pid(self, worker):
        return next(event.pid for event in self.of("started") if event.worker == worker)

    def close(self):
        self.group.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read_all(fd):
    """Everything until the other end is closed (a pty's other end: EIO)."""
    data = bytearray()
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:
            return bytes(data)
        if not chunk:
            return bytes(data)
        data += chunk


def wait_for_line(fd):
    """One line from a child, byte by byte, so that nothing after it is taken."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([fd], [], [], LIMIT_S)[0], f"nothing came after {line!r}"
        byte = os.read(fd, 1)
        assert byte, f"it ended after {line!r}"
        line += byte
    return line
