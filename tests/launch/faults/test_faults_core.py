"""Any system call of the core may fail: the command then does its job or says cleanly why not; nothing is left.

tests/c/faulty.c makes the k-th call of a function fail. Each function's first call is taken, and
a sample of all, seeded by TEST_SEED; `make walk` (TEST_ROWS=all) takes them all.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import select
import shutil
import signal
import struct
import subprocess

import pytest

from tests.support.paths import C
from tests.support.processes import marked
from tests.support.rows import SEED, sample
from tests.support.waiting import LIMIT_S

# what each function can really fail with; man pages, section ERRORS
SHORT = ("EMFILE", "ENFILE", "ENOMEM")
# Left out: prctl(2), by which we become a subreaper (tests/launch/test_orphan.py refuses it), and name the guard.
ERRORS = {
    "epoll_create1": SHORT,
    "epoll_ctl": ("ENOMEM", "ENOSPC"),
    "epoll_wait": ("EINTR",),
    "timerfd_create": SHORT,
    "signalfd": SHORT,
    "pipe2": ("EMFILE", "ENFILE"),
    "opendir": SHORT,
    "open": (*SHORT, "EACCES", "EINTR"),
    "fcntl": ("EMFILE",),
    "read": ("EINTR",),
    "write": ("EINTR", "EAGAIN", "ENOSPC", "EPIPE"),
    "poll": ("EINTR", "ENOMEM"),
    "malloc": ("ENOMEM",),
    "calloc": ("ENOMEM",),
    "realloc": ("ENOMEM",),
    "strdup": ("ENOMEM",),
    "mmap": ("ENOMEM",),
    "setpgid": ("EACCES", "ESRCH", "EPERM"),
    "getpgid": ("ESRCH",),
    "kill": ("ESRCH",),
    "pthread_create": ("EAGAIN",),
    "clone": ("EAGAIN", "ENOMEM", "EPERM", "ENOSYS", "EINVAL"),
    "getrlimit": ("EPERM",),
    "setrlimit": ("EPERM",),
    "chdir": ("EACCES",),
    "stat": ("EACCES", "ENOENT"),
    "setsockopt": ("ENOPROTOOPT",),
    "socket": ("EMFILE", "ENOMEM", "EAFNOSUPPORT"),
    "bind": ("EADDRINUSE", "ENOMEM"),
    "recvmsg": ("EINTR", "ENOMEM"),
    "syscall56": ("EAGAIN", "ENOMEM", "EPERM"),  # clone
    "syscall247": ("EINTR",),  # waitid
    "syscall424": ("EPERM", "ENOSYS", "ESRCH"),  # pidfd_send_signal
    "syscall434": (*SHORT, "ENOSYS", "EPERM"),  # pidfd_open
}
RUNS_EACH, AT_MOST_EACH = 12, 40  # of a scenario; of a function and errno, where all are taken
CPU_S = 5.0  # a launch uses a twentieth of a second: who uses so much spins
LINES = 40_000  # on stdin, more than any pipe holds

pytestmark = [
    pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="the sanitizer must be the first library"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are x86-64's"),
]


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler here")
    library = tmp_path_factory.mktemp("faulty") / "faulty.so"
    words = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1", "-o", library, C / "faulty.c", "-ldl"]
    subprocess.run([compiler, *words], check=True)
    return library


def names():
    """The counters of the shim, in order."""
    text = (C / "faulty.c").read_text()
    listed = re.findall(r"\bX\((\w+), (?:MINUS|NOTHING|NUMBER)\)", text)
    return [*listed, "malloc", "calloc", "realloc", *(f"syscall{number}" for number in range(512))]


class Shim:
    """The environment of a launch in which one call fails, and how often each was called."""

    def __init__(self, library, folder, fault=""):
        self._counts = folder / "counts"
        self._counts.write_bytes(bytes(8 * 1024))
        self.environ = {**os.environ, "LD_PRELOAD": str(library), "FAULTY_COUNTS": str(self._counts), "FAULTY": fault}

    def counts(self):
        numbers = struct.unpack("1024Q", self._counts.read_bytes())
        return dict(zip(names(), numbers, strict=False))


# ---- what is launched: each returns when the launcher has ended


def carried(infini_run, folder, environ):
    """Input to all, output of both streams to console and log, a stray of each rank."""
    script = "wc -l; echo error >&2; setsid sleep 1000 </dev/null >/dev/null 2>&1 &"
    words = ["--nproc_per_node=3", "--console=prefix", "--stdin=all", f"--log_dir={folder}/logs", "--grace=0.3"]
    command = infini_run(*words, "sh", "-c", script, env=environ, stdin=subprocess.PIPE)
    out, err = command.process.communicate(b"x\n" * LINES, timeout=LIMIT_S)
    is_lost = environ["FAULTY"].startswith("write:")  # where it goes takes no more, and the job goes on
    for rank in range(3) if command.process.returncode == 0 and not is_lost else ():
        assert b"[rank %d] %d\n" % (rank, LINES) in out
        assert b"[rank %d err] error\n" % rank in err
        log = (folder / "logs" / f"rank_{rank}.log").read_bytes()
        assert sorted(log.splitlines()) == [b"%d" % LINES, b"err: error"]
    return command.process.returncode, 0, err


def told(infini_run, folder, environ):
    """Told to stop: ranks that obey, a stray that does not."""
    stray = "setsid sh -c 'trap \"\" TERM; echo stray; exec sleep 1000' &"
    script = f"{stray} trap 'exit 5' TERM; echo ready; while :; do sleep 0.02; done"
    command = infini_run("--nproc_per_node=2", "--console=prefix", "--grace=0.3", "sh", "-c", script, env=environ)
    fds, heard = [command.process.stdout.fileno(), command.process.stderr.fileno()], b""
    while heard.count(b"ready") + heard.count(b"stray") < 4 and b"infini-run: " not in heard:
        ready, _, _ = select.select(fds, [], [], LIMIT_S)
        assert ready, f"nothing came after {heard!r}"
        chunks = [os.read(fd, 65536) for fd in ready]
        heard += b"".join(chunks)
        if b"" in chunks:
            break
    command.process.send_signal(signal.SIGTERM)
    _, err = command.process.communicate(timeout=LIMIT_S)
    return command.process.returncode, 143, heard + err


def old_kernel(infini_run, folder, environ):
    """No pidfd, a plain fork, inherited output; a rank fails while another ignores TERM."""
    environ["INFINI_RUN_DEBUG"] = "fork,nopidfd"
    script = "trap '' TERM; if [ $RANK = 1 ]; then exit 3; fi; exec sleep 1000"
    command = infini_run("--nproc_per_node=2", "--grace=0.1", "sh", "-c", script, env=environ)
    _, err = command.process.communicate(timeout=LIMIT_S)
    return command.process.returncode, 3, err


SCENARIOS = {"carried": carried, "told": told, "old_kernel": old_kernel}


def complaint_of(scenario, infini_run, folder, environ):
    """What is wrong about a launch in which one call fails; "" if nothing is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        code, expected, err = scenario(infini_run, folder, environ)
    except (subprocess.TimeoutExpired, AssertionError) as error:
        return repr(error)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told_lines = [line for line in err.split(b"\n") if line.startswith(b"infini-run: ")]
    refused = code == 1 and len(told_lines) == 1 and b"started: " in told_lines[0]
    if marked():
        return f"left {marked()}, exit {code}, {err!r}"
    if b"survived SIGKILL" in err or b"Traceback" in err or not (code == expected or refused):
        return f"exit {code}, {err!r}"
    return f"{cpu_s:.1f} s of CPU: it spun" if cpu_s > CPU_S else ""


def points_of(counts):
    """Every (function, errno, k) that this scenario reaches; of long rows an even choice."""
    for function, errors in ERRORS.items():
        count = counts.get(function, 0)
        for name in errors:
            step = max(1, count // AT_MOST_EACH)
            yield from ((function, name, k) for k in range(1, count + 1, step))


@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_call_fails_the_job_is_done_or_refused_and_nothing_is_left(name, infini_run, shim, tmp_path):
    scenario = SCENARIOS[name]
    plain = Shim(shim, tmp_path)
    code, expected, err = scenario(infini_run, tmp_path / "plain", plain.environ)
    assert code == expected, err
    points = list(points_of(plain.counts()))
    first = [(function, name, k) for function, name, k in points if k == 1 and name == ERRORS[function][0]]
    rest = [point for point in points if point not in first]
    points = sample(first, 2 * RUNS_EACH) + sample(rest, RUNS_EACH)
    print(f"{name}: {len(points)} points, TEST_SEED={SEED}", flush=True)
    assert len(points) > 10
    wrong = []
    for function, error, k in points:
        fault = Shim(shim, tmp_path, f"{function}:{k}:{getattr(errno, error)}")
        complaint = complaint_of(scenario, infini_run, tmp_path / f"{function}{k}{error}", fault.environ)
        if complaint:
            wrong.append(f"{name}: call {k} of {function} fails with {error}: {complaint}")
            print(wrong[-1], flush=True)
    assert not wrong, "\n".join([*wrong, f"TEST_SEED={SEED}, {len(points)} points"])
