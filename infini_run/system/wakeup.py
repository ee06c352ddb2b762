"""An eventfd (eventfd(2)) that wakes a thread that waits for descriptors."""

from __future__ import annotations

import os
from _thread import RLock


class Wakeup:
    """Readable from `wake` to `clear`. Any thread may call `wake`, a signal handler too; also after `close`."""

    _fd = -1  # without an eventfd

    def __init__(self) -> None:
        self._lock = RLock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        if self._fd >= 0:  # no other thread has it any more
            os.close(self._fd)

    def fileno(self) -> int:
        """Return the descriptor; -1 once closed."""
        return self._fd

    def wake(self) -> bool:
        """Make the descriptor readable. Return False if it is closed."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
            return self._fd >= 0

    def clear(self) -> bool:
        """Make the descriptor unreadable. Return whether it was readable."""
        try:
            return self._fd >= 0 and os.eventfd_read(self._fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the descriptor. Safe twice. The object forgets it first: in a child of a fork meanwhile its number
        may be another's."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def after_fork_in_child(self) -> None:
        """Close the child's copy. A thread of the parent may have had the lock."""
        self._lock = RLock()
        self.close()
