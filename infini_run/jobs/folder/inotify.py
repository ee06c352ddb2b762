"""Changes in a directory, as a descriptor (inotify(7)). What another machine writes over the network is no event
here (system/file_systems.py)."""

from __future__ import annotations

import ctypes
import errno
import os

from infini_run.errors import InfiniRunError
from infini_run.system.io_sizes import READ_CHUNK

_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200  # linux/inotify.h
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK


class Changes:
    """A descriptor that is readable after a write, a creation, or a rename in one of the directories, or the removal
    of one."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.inotify_init1(_FLAGS))

    def fileno(self) -> int:
        return self._fd

    def add(self, path: str, *, names_only: bool = False) -> None:
        """Watch a directory; the second time changes nothing.

        Args:
            path: The directory.
            names_only: Wake for names that come, go, or change, not for writes.

        Raises:
            InfiniRunError: The kernel does not watch it.
        """
        mask = _CREATE | _MOVED_TO | (_MOVED_FROM | _DELETE if names_only else _MODIFY | _DELETE_SELF | _MOVE_SELF)
        self._checked(self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask))

    def clear(self) -> bool:
        """Return whether there was something, and drop it. The caller then looks itself."""
        was_something = False
        while True:
            try:
                was_something = bool(os.read(self._fd, READ_CHUNK)) or was_something
            except BlockingIOError:
                return was_something

    def close(self) -> None:
        """Close the descriptor. Safe twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            hint = "; raise fs.inotify.max_user_instances or max_user_watches (sysctl)" if number in _LIMITS else ""
            raise InfiniRunError(f"inotify: {os.strerror(number)}{hint}")
        return result


_LIMITS = (errno.EMFILE, errno.ENOSPC)
