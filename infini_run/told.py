"""What a process is told by signals, as a descriptor: for one that owns itself and waits for descriptors."""

from __future__ import annotations

import os
import signal

_LEFT_ALONE = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
}
STOPS = {
    signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS,
    signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ,
}  # fmt: skip


class Signals:
    """What the process is told, as a descriptor: each byte read from it is a signal's number. SIGCHLD is among them
    for process 1, to which all orphans come."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        left_alone = _LEFT_ALONE - ({signal.SIGCHLD} if os.getpid() == 1 else set())
        for number in signal.valid_signals() - left_alone:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and what a shell ignores in the background
                signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def read(self) -> bytes:
        try:
            return os.read(self.fd, 256)
        except BlockingIOError:
            return b""


def _nothing(number: int, frame: object) -> None:
    """The number is in the pipe already."""
