"""The limits that a launch meets: descriptors, processes, core files (getrlimit(2), the kernel's pids.rst)."""

from __future__ import annotations

import os
from resource import RLIM_INFINITY, RLIMIT_CORE, RLIMIT_NOFILE, RLIMIT_NPROC, getrlimit

from infini_run.doctor.finding import Finding, failing, note, ok
from infini_run.environments.slurm import explain_binding
from infini_run.errors import counted
from infini_run.node.resources import FDS_OF_LAUNCHER, FDS_PER_RANK
from infini_run.system.cgroup import count_cpus, count_own_cpus, own_folders, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_PIPES = 2  # of a rank: stdout and stderr, each with two ends
_FEW_FILES = 1024  # of a training process: below, data loaders meet it
_THREADS = 16  # that a rank of PyTorch has at the least


def check_limits(environ: Mapping[str, str]) -> list[Finding]:
    """Look at the limits on open files, processes and core files, and at the CPUs of a task of srun."""
    cpus = count_cpus()
    soft, hard = getrlimit(RLIMIT_NOFILE)
    core, _ = getrlimit(RLIMIT_CORE)
    binding = explain_binding(environ, *count_own_cpus())
    return [
        *([note("CPUs", binding)] if binding else []),
        describe_files(soft, hard, cpus),
        describe_processes(_processes_left(), cpus),
        describe_core(core, read_text("/proc/sys/kernel/core_pattern").strip()),
    ]


def describe_files(soft: int, hard: int, ranks: int) -> Finding:
    """Say how many ranks the limits on open descriptors have room for.

    Args:
        soft, hard: of RLIMIT_NOFILE; infini-run raises its own soft limit to the hard one, and its ranks get theirs
            back.
        ranks: how many a machine like this may be asked for: one per CPU.
    """
    if hard == RLIM_INFINITY:
        return ok("open files", "no limit")
    room = max(0, (hard - FDS_OF_LAUNCHER - 3) // (2 * _PIPES + FDS_PER_RANK))
    soft_text = "unlimited" if soft == RLIM_INFINITY else str(soft)
    text = f"ulimit -n is {soft_text} (hard: {hard}), enough for the pipes of {counted(room, 'rank')}"
    if room == 0:
        return failing("open files", f"ulimit -n is {soft_text} (hard: {hard}), too few for one rank; raise it")
    if room < ranks:
        return note("open files", f"{text}, fewer than the {counted(ranks, 'CPU')}; raise ulimit -Hn for more ranks")
    if soft != RLIM_INFINITY and soft < _FEW_FILES:
        return note(
            "open files", f"{text}; a rank has {soft}, too few for many data loaders; run ulimit -n {_FEW_FILES}"
        )
    return ok("open files", text)


def _processes_left() -> list[tuple[int, str]]:
    """Return how many more processes and threads there may be, and by which limit."""
    left = []
    soft, _ = getrlimit(RLIMIT_NPROC)
    if soft != RLIM_INFINITY and os.geteuid() != 0:  # root is not bound by it (setrlimit(2))
        left.append((soft - _threads_of(os.geteuid()), f"ulimit -u, {soft}"))
    for _, folder in own_folders("pids"):
        most, now = (read_text(f"{folder}/pids.{name}").strip() for name in ("max", "current"))
        if most.isdecimal() and now.isdecimal():
            left.append((int(most) - int(now), f"the cgroup's pids.max, {most}"))
    most = read_text("/proc/sys/kernel/threads-max").strip()
    if most.isdecimal():
        running = read_text("/proc/loadavg").split("/")[-1:]
        now = (running or ["0"])[0].split(" ")[0]
        left.append((int(most) - (int(now) if now.isdecimal() else 0), f"kernel.threads-max, {most}"))
    return left


def _threads_of(uid: int) -> int:
    """Return the threads of a user's processes, as far as /proc shows them."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # gone meanwhile
                continue
    return count


def describe_processes(left: list[tuple[int, str]], ranks: int) -> Finding:
    """Say whether ranks and their threads can be started.

    Args:
        left: how many more there may be, by each limit, with its name.
        ranks: how many a machine like this may be asked for.
    """
    if not left:
        return ok("processes", "no limit")
    most, limit = min(left)
    what = "process or thread" if most == 1 else "processes or threads"
    text = f"{max(0, most)} more {what} can start ({limit})"
    if most < 1:  # the doctor's own two processes make room for a launcher and its guard
        return failing("processes", f"{text}: no rank can start; raise it")
    if most < _THREADS * ranks:
        why = f"too few for {counted(ranks, 'rank')}, one per CPU, with {_THREADS} threads each"
        return note("processes", f"{text}, {why}")
    return ok("processes", text)


def describe_core(soft: int, pattern: str) -> Finding:
    """Say what a rank that crashes leaves.

    Args:
        soft: of RLIMIT_CORE, in bytes.
        pattern: kernel.core_pattern (core(5)).
    """
    if pattern.startswith("|"):
        return ok("core files", f"a crashing rank sends its core to {pattern[1:].split(' ')[0]}")
    if soft == 0:
        return ok("core files", "off: a crashing rank writes none; run ulimit -c unlimited to get one")
    size = "whole" if soft == RLIM_INFINITY else f"of at most {soft >> 20} MiB"
    where = pattern if pattern.startswith("/") else f"{pattern or 'core'} in its working directory"
    return note("core files", f"{size}, to {where}: if many ranks crash, they write as much as they hold in memory")
