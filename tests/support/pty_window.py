"""A terminal window for a test: a pty, a program on it, and pyte, which knows what a person would see."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time

import pyte

from tests.support.command import COMMAND
from tests.support.waiting import LIMIT_S


class Window:
    """`program` (infini-run with these words, where it is none) on a terminal of `lines` times `columns`.

    has_job: it is the terminal's session leader, so Ctrl-C, SIGWINCH and a hang-up reach it.
    """

    def __init__(self, *words, columns=100, lines=24, program=COMMAND, has_job=True, before="", **environ):
        self.master, slave = os.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.seen = b""
        self.show(before.encode())  # what was there before us
        self._size(columns, lines)
        self.modes = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [*program, *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **environ},
            preexec_fn=lambda: (os.setsid(), has_job and fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
        )
        self.slave = slave  # ours, so that what we never read is kept, and the modes can be looked at
        self.pid = self.process.pid

    def show(self, data):
        self.seen += data
        self._stream.feed(data)

    def _size(self, columns, lines):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns, lines):
        """As a window manager does: the kernel tells the foreground (SIGWINCH)."""
        self.screen.resize(lines, columns)
        self._size(columns, lines)

    @property
    def text(self):
        return [line.rstrip() for line in self.screen.display]

    def rows(self, rank):
        """Every line of a rank, as words."""
        return [line.split() for line in self.text if line.split()[:1] == [str(rank)]]

    def row(self, rank):
        """The line of a rank, as words; [] where it is not shown."""
        found = self.rows(rank)
        assert len(found) <= 1, f"drawn twice: {self.text}"
        return found[0] if found else []

    def read(self, limit_s=LIMIT_S):
        """What has come; False: nothing did in time."""
        if not select.select([self.master], [], [], max(0.0, limit_s))[0]:
            return False
        self.show(os.read(self.master, 65536))
        return True

    def see(self, what):
        """Read on until `what()` holds for the screen."""
        end = time.monotonic() + LIMIT_S
        while not what():
            came = self.read(end - time.monotonic())
            assert came, f"never seen: {self.text}"

    def type(self, text):
        os.write(self.master, text.encode())

    def wait(self):
        """Its exit code as a shell has it: 130 if it died of SIGINT. Everything that it wrote is seen."""
        end = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it never ended: {self.text}"
            self.read(0.02)
        while self.read(0):
            pass
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def hang_up(self):
        os.close(self.slave)
        os.close(self.master)
        self.master = self.slave = -1

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.master >= 0:
            self.hang_up()
