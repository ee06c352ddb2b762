"""What changes in a directory, as a descriptor (inotify(7)); and whether the kernel can know: what another machine
writes over the network is no event here."""

from __future__ import annotations

import ctypes
import errno
import os

from infini_run.errors import InfiniRunError
from infini_run.system.io_sizes import READ_CHUNK

# nobody else writes there; of a kind that is not listed nobody knows
_OWN = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "jfs", "nilfs2", "reiserfs", "zfs", "ecryptfs"),
    *("overlay", "aufs", "tmpfs", "ramfs", "rootfs", "devtmpfs"),
    *("vfat", "exfat", "ntfs3", "fuseblk", "squashfs", "erofs", "iso9660", "udf"),
)
_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200  # linux/inotify.h
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK


class Changes:
    """Readable when something was written, made or renamed in one of the directories, or one of them was removed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.inotify_init1(_FLAGS))

    def fileno(self) -> int:
        return self._fd

    def add(self, path: str, *, names_only: bool = False) -> None:
        """Watch a directory; one that is added twice is watched once.

        Args:
            path: The directory.
            names_only: Wake for names that come, go or change, not for what is written.

        Raises:
            InfiniRunError: It cannot be watched.
        """
        mask = _CREATE | _MOVED_TO | (_MOVED_FROM | _DELETE if names_only else _MODIFY | _DELETE_SELF | _MOVE_SELF)
        self._checked(self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask))

    def clear(self) -> bool:
        """Whether there was something. Who asks looks himself."""
        was_something = False
        while True:
            try:
                was_something = bool(os.read(self._fd, READ_CHUNK)) or was_something
            except BlockingIOError:
                return was_something

    def close(self) -> None:
        """Safe twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            hint = "; fs.inotify limits how many there may be (sysctl)" if number in _LIMITS else ""
            raise InfiniRunError(f"inotify: {os.strerror(number)}{hint}")
        return result


_LIMITS = (errno.EMFILE, errno.ENOSPC)


def is_remote(path: str) -> bool:
    """Whether others may write there without our kernel's knowing."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return is_others(kind_of(os.path.realpath(path), file.read()))


def is_others(kind: str) -> bool:
    """Whether other machines may write on a file system of that type: all but those known to be one machine's."""
    return kind not in _OWN


def kind_of(path: str, mounts: str) -> str:
    """The type of the file system that `path` is on. mounts: as proc_pid_mountinfo(5) has them; a later one hides an
    earlier one at the same place."""
    best, kind = "", ""
    for line in mounts.splitlines():
        words = line.split(" ")
        place = words[4].encode("latin-1", "replace").decode("unicode_escape") if "\\" in words[4] else words[4]
        is_under = path == place or path.startswith(place.rstrip("/") + "/")
        if is_under and len(place) >= len(best):
            best, kind = place, words[words.index("-") + 1]
    return kind.removeprefix("fuse.")
