"""The control groups of this process: the places of their files, and what they say of CPUs and of memory.

Paths and mounts follow cgroups(7) and proc_pid_mountinfo(5), for v1, v2, and hybrid mounts and in namespaces. An
unreadable file sets no limit and counts nothing.
"""

from __future__ import annotations

import infini_run.lean_os as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def own_folders(
    controller: str, cgroup_file: str = "/proc/self/cgroup", mountinfo_file: str = "/proc/self/mountinfo"
) -> Iterator[tuple[int, str]]:
    """Yield the directories of this process's cgroup and of all cgroups above it, its own first.

    Args:
        controller: a v1 controller, such as `cpu`.
        cgroup_file, mountinfo_file: the files of /proc to read.

    Returns:
        Pairs of the cgroup version (1 or 2) and a directory. Source: cgroups(7), proc_pid_mountinfo(5).
    """
    groups = dict(_own_groups(read_text(cgroup_file), controller))
    for version, root, mount in _mounts(read_text(mountinfo_file), controller):
        for folder in _from_ours_up(groups.get(version), root, mount):
            yield version, folder


def count_cpus(
    affinity: int | None = None,
    cgroup_file: str = "/proc/self/cgroup",
    mountinfo_file: str = "/proc/self/mountinfo",
) -> int:
    """Return how many CPUs this process can keep busy, at least 1. These are the CPUs that it may run on, or fewer by
    the quotas of its cgroups.

    Args:
        affinity: the number of CPUs that it may run on; None: as sched_getaffinity(2) says, which includes cpusets.
        cgroup_file, mountinfo_file: the files of /proc to read.

    Source: the kernel's cgroup-v2.rst (cpu.max) and sched-bwc.rst.
    """
    cpus = len(os.sched_getaffinity(0)) if affinity is None else affinity
    for version, folder in own_folders("cpu", cgroup_file, mountinfo_file):
        cpus = min(cpus, _quota(folder, version) or cpus)
    return max(cpus, 1)


def count_own_cpus() -> tuple[int, int]:
    """Return how many CPUs this process may run on, and how many this machine has online."""
    from posix import cpu_count

    own = len(os.sched_getaffinity(0))
    return own, cpu_count() or own


def _quota(folder: str, version: int) -> int | None:
    """Return the CPUs by this cgroup's quota, rounded up; None without a limit, or if it is unreadable."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = " ".join(read_text(f"{folder}/{name}") for name in names).split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None
    return -(-int(words[0]) // int(words[1]))


def oom_kills(cgroup_file: str = "/proc/self/cgroup", mountinfo_file: str = "/proc/self/mountinfo") -> int:
    """Return how many processes of this process's cgroup the kernel has killed for memory so far; 0 if no file
    counts them.

    Args:
        cgroup_file, mountinfo_file: the files of /proc to read.

    Source: the kernel's cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst (memory.oom_control, Linux 4.13).
    """
    for version, folder in own_folders("memory", cgroup_file, mountinfo_file):
        text = read_text(f"{folder}/memory.{'events' if version == 2 else 'oom_control'}")
        for line in text.split("\n"):
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return 0


def _own_groups(text: str, controller: str) -> Iterator[tuple[int, str]]:
    for line in text.split("\n"):
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _mounts(text: str, controller: str) -> Iterator[tuple[int, str, str]]:
    """Yield the cgroup version, the cgroup at its top, and the mount point of each mount that may have the
    controller."""
    for line in text.split("\n"):
        left, _, right = line.partition(" - ")
        place, (kind, _, options) = left.split(" "), [*right.split(" "), "", ""][:3]
        if len(place) > 4 and (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))):
            yield 2 if kind == "cgroup2" else 1, _unescape(place[3]), _unescape(place[4])


def _from_ours_up(group: str | None, root: str, mount: str) -> Iterator[str]:
    """Yield the folders of this process's cgroup and of all above it that this mount shows."""
    if group is None:
        return
    ours = [part for part in group.split("/") if part]
    top = [part for part in root.split("/") if part]
    # Paths count from the root of this process's cgroup namespace: a top that starts with .. is above that root.
    if top[:1] == [".."]:
        ours = top
    if ours[: len(top)] == top and ".." not in ours[len(top) :]:
        for depth in range(len(ours), len(top) - 1, -1):
            yield "/".join((mount, *ours[len(top) : depth]))


def _unescape(path: str) -> str:
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        path = path.replace("\\" + code, character)
    return path


def read_text(path: str) -> str:
    """Return the text of a file; empty if it is unreadable."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
