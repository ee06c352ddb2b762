"""In a worker: multiprocessing with the resource tracker and the authkey of the process that started it.

The worker asks for each when it first needs it (lent_multiprocessing.py). Two modules of multiprocessing need changes
for that: at once if they are already loaded, as in a fork, else after an import of them. If nothing answers, because
that process is gone, a worker has a separate tracker and key, as any program.
"""

from __future__ import annotations

import _socket
import os
from struct import Struct

from infini_run.warm.imports import call_when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

HANDOVER = b"+"  # before a channel's first frame, none of which begins so (channel/decoder.py)
TRACKER, AUTHKEY = b"tracker", b"authkey"  # questions; each comes with the socket that the answer goes to
GRANTED = b"+"  # begins an answer; the tracker's comes with its descriptor. None: the answer ends at once
NO_WAIT = _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT
_ANSWER_S = 60.0  # the launcher may be suspended, or busy; then a worker has its own
_CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC
_INT = Struct("i")
_lender: _socket.socket | None = None


def borrow_from_caller(channel_fd: int) -> None:
    """Take what comes ahead of the first message, if something does, and adapt multiprocessing. channel_fd: this
    worker's channel, which nobody has read from."""
    global _lender
    channel = _socket.socket(fileno=channel_fd)
    try:
        fds: list[int] = []
        if channel.recv(1, _socket.MSG_PEEK) == HANDOVER:
            _, fds = receive_fds(channel, 1)
    except OSError:  # the launcher has gone
        return
    finally:
        channel.detach()
    if not fds:  # a spawner of the user's own has started it
        return
    _lender = _socket.socket(fileno=fds[0])
    call_when_imported(_ADAPTED)


def _ask(question: bytes) -> tuple[bytes, list[int]] | None:
    """Ask, and wait for the answer. None: there is nobody who would give one."""
    if _lender is None:
        return None
    ours, theirs = _socket.socketpair()
    ours.settimeout(_ANSWER_S)
    try:
        try:
            send_fd(_lender, question, theirs.fileno(), _socket.MSG_NOSIGNAL)
        finally:
            theirs.close()
        answer, fds = receive_fds(ours, 1 << 16)
        while answer and (more := ours.recv(1 << 16)):
            answer += more
    except OSError:
        return None
    finally:
        ours.close()
    return (answer[len(GRANTED) :], fds) if answer else None


# ---- the authkey


class _Config(dict):  # type: ignore[type-arg]
    """multiprocessing's settings of this process, which it hands down to its children."""

    def __missing__(self, name: str) -> object:
        if name != "authkey":
            raise KeyError(name)
        from multiprocessing.process import AuthenticationString  # type: ignore[attr-defined]

        answer = _ask(AUTHKEY)
        self[name] = AuthenticationString(os.urandom(32) if answer is None else answer[0])
        return self[name]

    def copy(self) -> dict[str, object]:
        return {**self, "authkey": self["authkey"]}


def _adapt_process(module: ModuleType) -> None:
    own = module.current_process()
    own._config = _Config(own._config)
    own._config.pop("authkey", None)  # one that is random, or that of a zygote


# ---- the tracker


def _adapt_tracker(module: ModuleType) -> None:
    tracker: Any = module._resource_tracker
    own: Any = type(tracker)

    class SharedTracker(own):  # type: ignore[misc]
        _fd: int | None
        _pid: int | None

        def ensure_running(self) -> None:
            """Start a tracker, if there is none to borrow. Before Python 3.14 the method of multiprocessing starts
            one itself."""
            if not hasattr(own, "_launch") and self._pid is None and not self._has_live():
                self._borrow()
            super().ensure_running()

        def _has_live(self) -> bool:
            return self._fd is not None and self._check_alive()

        def _launch(self) -> None:
            if not self._borrow():
                super()._launch()

        def _borrow(self) -> bool:
            """Borrow the caller's tracker. Return whether that worked."""
            before, answer = self._fd, _ask(TRACKER)
            if answer is None or not answer[1]:
                return False
            with self._lock:
                unwanted, self._fd = (before, answer[1][0]) if self._fd == before else (answer[1][0], self._fd)
            if unwanted is not None:
                os.close(unwanted)
            return True

    tracker.__class__ = SharedTracker
    tracker._fd = tracker._pid = None  # a zygote's: that continues with what the imports have registered
    module.ensure_running = tracker.ensure_running  # type: ignore[attr-defined]


# ---- when they are imported

_ADAPTED: dict[str, Callable[[ModuleType], None]] = {
    "multiprocessing.process": _adapt_process,
    "multiprocessing.resource_tracker": _adapt_tracker,
}


# ---- descriptors with a message


def send_fd(sock: _socket.socket, data: bytes, fd: int, flags: int = NO_WAIT) -> None:
    """Send data and a descriptor with it; never waits, unless the flags let it. Raises OSError."""
    sock.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, _INT.pack(fd))], flags)


def receive_fds(sock: _socket.socket, size: int = 64) -> tuple[bytes, list[int]]:
    """Return what comes next, at most `size` bytes, and the descriptors with it, which are the caller's to close.
    Nothing after the end. Raises OSError."""
    data, rights, _, _ = sock.recvmsg(size, _socket.CMSG_LEN(8 * _INT.size), _CLOEXEC)
    held = b"".join(some for _, kind, some in rights if kind == _socket.SCM_RIGHTS)
    return data, [fd for (fd,) in _INT.iter_unpack(held)]
