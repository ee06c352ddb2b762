"""Whether other machines may write on a file system, too. Then this kernel knows neither their writes nor their
locks."""

from __future__ import annotations

import os

# nobody else writes to these; of other kinds that is unknown
_OWN = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "jfs", "nilfs2", "reiserfs", "zfs", "ecryptfs"),
    *("overlay", "aufs", "tmpfs", "ramfs", "rootfs", "devtmpfs"),
    *("vfat", "exfat", "ntfs3", "fuseblk", "squashfs", "erofs", "iso9660", "udf"),
)


def is_remote(path: str) -> bool:
    """Return whether others may write there without this kernel's knowledge; True if unknown."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return is_others(kind_of(os.path.realpath(path), file.read()))
    except OSError:
        return True


def is_others(kind: str) -> bool:
    """Return whether other machines may write on a file system of that type: all but those that belong to one
    machine."""
    return kind not in _OWN


def kind_of(path: str, mounts: str) -> str:
    """Return the type of the file system that `path` is on. `mounts` is as in proc_pid_mountinfo(5); a later one
    hides an earlier one at the same place."""
    best, kind = "", ""
    for line in mounts.splitlines():
        words = line.split(" ")
        place = words[4].encode("latin-1", "replace").decode("unicode_escape") if "\\" in words[4] else words[4]
        is_under = path == place or path.startswith(place.rstrip("/") + "/")
        if is_under and len(place) >= len(best):
            best, kind = place, words[words.index("-") + 1]
    return kind.removeprefix("fuse.")
