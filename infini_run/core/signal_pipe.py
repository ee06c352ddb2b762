"""What a process is told by signals, as a descriptor: for one that owns itself and waits for descriptors."""

from __future__ import annotations

import _signal as signal
import os

_LEFT_ALONE = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
}
STOP_SIGNALS = {
    signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS,
    signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ,
}  # fmt: skip


class SignalPipe:
    """What the process is told, as a descriptor: each byte read from it is a signal's number. SIGCHLD is among them
    for process 1, to which all orphans come; SIGURG, which means nothing to others, for who asks for it."""

    def __init__(self, *, hears_urgent: bool = False) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it would leave no exit code of what we start
        self._before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        left_alone = _LEFT_ALONE - ({signal.SIGCHLD} if os.getpid() == 1 else set())
        left_alone -= {signal.SIGURG} if hears_urgent else set()
        for number in signal.valid_signals() - left_alone:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and what a shell ignores in the background
                signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def read(self) -> bytes:
        try:
            return os.read(self.fd, 256)
        except BlockingIOError:
            return b""


class CtrlZ:
    """SIGTSTP as a descriptor that can be read when it has come; all other signals stay as they are."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_ignored = signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN
        if not self._is_ignored:
            signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            signal.signal(signal.SIGTSTP, _nothing)

    def has_come(self) -> bool:
        """Whether it has since the last look."""
        try:
            return signal.SIGTSTP in os.read(self.fd, 256)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """It is as before; one that has come and was not acted on comes again."""
        if not self._is_ignored:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            if self.has_come():
                os.kill(os.getpid(), signal.SIGTSTP)
        os.close(self.fd)
        os.close(self._write_fd)


def stop_self() -> None:
    """Stop as SIGTSTP does, which is told otherwise; return when continued. The kernel stops none whom no shell could
    continue (setpgid(2), orphaned process groups)."""
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, _nothing)


def _nothing(number: int, frame: object) -> None:
    """The number is in the pipe already."""
