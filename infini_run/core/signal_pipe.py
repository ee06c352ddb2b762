"""Signals to a process as a descriptor: for a process that is not a rank's launcher itself (a head, a spawn server).

What each signal means is in csrc/group/signals.c, for this process and for the launcher of one node alike.
"""

from __future__ import annotations

import _signal as signal
import os

from infini_run._irun import lib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _that_mean(*meanings: int) -> frozenset[int]:
    return frozenset(number for number in signal.valid_signals() if lib.ir_signal_meaning(number) in meanings)


STOP_SIGNALS = _that_mean(lib.IR_SIGNAL_STOPS)
END_SIGNALS = STOP_SIGNALS | {signal.SIGHUP}  # they end a launcher that has no ranks to pass HUP to
GROUP_SIGNALS = _that_mean(lib.IR_SIGNAL_FORWARD_TO_GROUP)  # they go to process groups, others to leaders
_END_OTHERS = _that_mean(lib.IR_SIGNAL_FORWARD) | {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
_LEFT_ALONE = _that_mean(lib.IR_SIGNAL_DROPPED) | {signal.SIGKILL, signal.SIGSTOP}


class SignalPipe:
    """Every byte read from `fd` is the number of a signal that came to this process. Signals ignored at entry do not
    come. SIGCHLD comes only to process 1, which gets all orphans, and with `reaps`.

    Args:
        reaps: this process gets orphans, too (PR_SET_CHILD_SUBREAPER).
    """

    def __init__(self, *, reaps: bool = False) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it would hide the exit codes of children
        self._before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        left_alone = _LEFT_ALONE if reaps or os.getpid() == 1 else _LEFT_ALONE | {signal.SIGCHLD}
        self._handlers: dict[int, Any] = {}
        for number in signal.valid_signals() - left_alone:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:  # nohup, and what a shell ignores in the background
                signal.signal(number, _nothing)
                self._handlers[number] = signal.SIG_DFL if handler is None else handler
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def read(self) -> bytes:
        """Return the numbers of the signals that came since the last call, one in each byte."""
        try:
            return os.read(self.fd, 256)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Let each signal do what it did before. One that ends or suspends, and that nobody read, is raised again.
        The caller has blocked all of them."""
        signal.set_wakeup_fd(self._before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        unread = END_SIGNALS.union({signal.SIGTSTP}).intersection(self.read())
        os.close(self.fd)
        os.close(self._write_fd)
        for number in unread:
            os.kill(os.getpid(), number)


def stop_self() -> None:
    """Suspend this process as SIGTSTP does by default; return after SIGCONT.

    The kernel does not suspend a process that no shell could continue (setpgid(2), orphaned process groups).
    """
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, _nothing)


def end_as_interrupted(number: int, *, whole_group: bool = False) -> None:
    """End this process by SIGINT or SIGQUIT after a key of the terminal has stopped its job. A shell ends a loop only
    if the program died of the signal. Process 1 cannot, and returns.

    Args:
        number: The signal. 0, or another one: do nothing.
        whole_group: The key reached a rank alone, which had the terminal. The rest of this process's group, such as
            the shell script that runs it, has to get the signal, too.
    """
    if number in (signal.SIGINT, signal.SIGQUIT):
        lib.ir_entry_end_by(number, whole_group)


def is_in_foreground() -> bool:
    """Return whether this process is in the foreground of its terminal: the terminal's keys send it signals."""
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)


def end_by_signals() -> None:
    """Let the signals that people and schedulers send end process 1, as they end any other process, if not within a
    name lookup. Without a handler the kernel drops them there (pid_namespaces(7)). Signals ignored at entry stay
    ignored."""
    for number in _END_OTHERS - _LEFT_ALONE - {signal.SIGURG}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    os._exit(128 + number)


def _nothing(number: int, frame: object) -> None:
    """Handle a signal by nothing: its number is already in the pipe."""
