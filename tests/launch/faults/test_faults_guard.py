"""Any system call of the guard may fail: it ends all the same, and what the launcher has left ends with it.

A small program plays the launcher, so that the guard can be started with the shim of tests/c/faulty.c; `make walk`
takes all points.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.faults.test_faults_core import SHORT, Shim, shim  # noqa: F401
from tests.support.build_c import build_guard
from tests.support.processes import OURS, is_alive, marked
from tests.support.rows import SEED, sample
from tests.support.waiting import until

# What each function of the guard can really fail with, once.
ERRORS = {
    "open": (*SHORT, "EACCES"),
    "opendir": SHORT,
    "read": ("EINTR", "ENOMEM"),
    "readdir": ("ENOMEM",),
    "realloc": ("ENOMEM",),
    "fcntl": ("EINVAL", "EINTR", "ENOLCK"),
    "kill": ("ESRCH",),
    "prctl": ("EINVAL",),
    "poll": ("EINTR",),
    "chdir": ("EACCES",),
    "dup2": ("EBUSY",),
    "sigwaitinfo": ("EINTR", "EAGAIN"),
    "fdopendir": ("ENOMEM",),
    "write": ("EINTR",),
    "syscall424": ("EPERM", "ENOSYS"),
    "syscall434": (*SHORT, "ENOSYS"),
}
# Without its lock nothing tells the guard of an exec.
OF_DEATH_ALONE = ("fcntl:1:EINVAL", "fcntl:1:ENOLCK")
RUNS, AT_MOST_EACH = 20, 12
MARK = f"INFINI_RUN_ID=guarded-{OURS[1]}"  # another test run may be at the same test: its guard is not to end ours
LAUNCHER = """
import fcntl, os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
guard, folder, preload = sys.argv[1], sys.argv[2], sys.argv[3:]
environ = {**os.environ, **dict(word.split("=", 1) for word in preload)}
quiet = {"stdout": subprocess.DEVNULL}
worker = subprocess.Popen(["sleep", "1000"], preexec_fn=os.setpgrp, **quiet)
for script in ("sleep 1000", "sleep 1000 & setsid sleep 1000"):
    subprocess.Popen(["sh", "-c", script], start_new_session=True, **quiet)
words = [guard, str(os.getpid()), str(os.getsid(0)), "0", os.environb[b"MARK"].decode(), folder, "", "", "", "locked"]
reading, writing = os.pipe()
fcntl.lockf(writing, fcntl.LOCK_EX)
os.write(writing, worker.pid.to_bytes(4, "little"))
guard = subprocess.Popen(words, env=environ, stdin=reading, start_new_session=True, **quiet)
print(guard.pid, flush=True)
signal.sigwait([signal.SIGUSR1])
os.execve("/bin/sleep", ["sleep", "1000"], {})
"""

pytestmark = [
    pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="the sanitizer must be the first library"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are x86-64's"),
]


def guarded(folder, fault, end):
    """A launch whose launcher is killed, or executes another program; whether its guard was there then. The guard has
    ended when this returns."""
    folder.mkdir()
    (folder / "rank_0.error.json").touch()
    preload = [f"{name}={fault.environ[name]}" for name in ("LD_PRELOAD", "FAULTY_COUNTS", "FAULTY")]
    name, _, value = MARK.partition("=")
    words = [sys.executable, "-ISc", LAUNCHER, build_guard(), str(folder), *preload]
    with subprocess.Popen(words, env={**os.environ, name: value, "MARK": MARK}, stdout=subprocess.PIPE) as launcher:
        try:
            guard = int(launcher.stdout.readline())
            until(lambda: list(marked().values()).count("sleep") == 4)
            until(lambda: not is_alive(guard) or waits_for_its_launcher(guard))
            was_there = is_alive(guard)
            if end == "exec":
                launcher.send_signal(signal.SIGUSR1)
                until(lambda: not is_alive(guard))
        finally:
            launcher.kill()
    until(lambda: not is_alive(guard))
    return was_there


def waits_for_its_launcher(guard):
    try:
        call = Path(f"/proc/{guard}/syscall").read_text().split()
    except ProcessLookupError:  # it exits
        return False
    except OSError:  # the kernel does not tell
        return True
    return call[0] == "128" or (call[0] == "72" and int(call[2], 16) == fcntl.F_SETLKW)  # rt_sigtimedwait, fcntl


def leftovers():
    """What the guard has left, a moment after its end; it is ended here."""
    end = time.monotonic() + 2
    while (left := marked()) and time.monotonic() < end:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not marked())
    return left


def points_of(counts, end):
    for function, errors in ERRORS.items():
        count = counts.get(function, 0)
        step = max(1, count // AT_MOST_EACH)
        points = ((function, name, k) for name in errors for k in range(1, count + 1, step))
        yield from (point for point in points if end == "kill" or "{0}:{2}:{1}".format(*point) not in OF_DEATH_ALONE)


@pytest.mark.parametrize("end", ["kill", "exec"])
def test_whatever_call_of_the_guard_fails_it_ends_and_nothing_is_left(shim, tmp_path, end):  # noqa: F811
    plain = Shim(shim, tmp_path)
    assert guarded(tmp_path / "plain", plain, end)
    assert not leftovers()
    assert not (tmp_path / "plain").exists()
    points = sample(points_of(plain.counts(), end), RUNS)
    print(f"{len(points)} points, TEST_SEED={SEED}", flush=True)
    assert len(points) > 10
    wrong = []
    for function, error, k in points:
        fault = Shim(shim, tmp_path, f"{function}:{k}:{getattr(errno, error)}")
        was_there = guarded(tmp_path / f"{function}{k}{error}", fault, end)
        left = leftovers()
        if left and was_there:  # one that could not begin has ended before its launcher, who tells of it
            wrong.append(f"call {k} of {function} fails with {error}: left {left}")
    assert not wrong, "\n".join([*wrong, f"TEST_SEED={SEED}"])
