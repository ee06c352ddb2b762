"""What our control groups say of memory: counted where the kernel counts, nothing where it does not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from infini_run.system.cgroup import oom_kills, own_folders
from tests.support.cgroups import cgroup
from tests.support.waiting import until

V1 = "4:memory:/job\n0::/\n"
V2 = "0::/user.slice/job\n"


@pytest.fixture
def tree(tmp_path):
    """Files as /proc/self/cgroup, /proc/self/mountinfo and the mounts would be."""

    def make(groups, *mounts, files=()):
        for name, text in dict(files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        lines = [
            f"30 20 0:26 {root} {str(tmp_path / at).replace(' ', chr(92) + '040')} rw - {kind} {kind} {options}\n"
            for kind, options, root, at in mounts
        ]
        (tmp_path / "groups").write_text(groups)
        (tmp_path / "mounts").write_text("".join(lines))
        return str(tmp_path / "groups"), str(tmp_path / "mounts")

    return make


@pytest.mark.parametrize(
    ("groups", "mount", "file", "text"),
    [
        (V1, ("cgroup", "rw,memory", "/", "m"), "m/job/memory.oom_control", "oom_kill_disable 0\noom_kill 3\n"),
        (V2, ("cgroup2", "rw", "/", "u"), "u/user.slice/job/memory.events", "low 0\noom 9\noom_kill 3\n"),
        (V1, ("cgroup", "rw,memory", "/", "a b"), "a b/job/memory.oom_control", "oom_kill 3\n"),
        (V2, ("cgroup2", "rw", "/user.slice", "u"), "u/job/memory.events", "oom_kill 3\n"),
        ("0::/\n", ("cgroup2", "rw", "/", "u"), "u/memory.events", "oom_kill 3\n"),
        (V2, ("cgroup2", "rw", "/", "u"), "u/user.slice/memory.events", "oom_kill 3\n"),
    ],
)
def test_kills_are_counted_in_our_group_or_the_nearest_above_that_counts(groups, mount, file, text, tree):
    assert oom_kills(*tree(groups, mount, files={file: text})) == 3


@pytest.mark.parametrize(
    ("groups", "mounts", "files"),
    [
        (V1, (), {}),
        (V1, (("cgroup", "rw,cpu", "/", "m"),), {"m/job/memory.oom_control": "oom_kill 3\n"}),
        (V1, (("cgroup", "rw,memory", "/", "m"),), {"m/other/memory.oom_control": "oom_kill 3\n"}),
        (V1, (("cgroup", "rw,memory", "/", "m"),), {"m/job/memory.oom_control": "under_oom 0\n"}),
        (V2, (("cgroup2", "rw", "/", "u"),), {"u/user.slice/job/memory.events": "oom_kill x\n"}),
        (V2, (("cgroup2", "rw", "/", "u"),), {"u/user.slice/job/memory.events": ""}),
        ("", (("cgroup2", "rw", "/", "u"),), {"u/memory.events": "oom_kill 3\n"}),
        ("nonsense\n\n:::\n", (("cgroup2", "rw", "/", "u"),), {}),
    ],
)
def test_nothing_is_counted_where_nobody_counts_for_us(groups, mounts, files, tree):
    assert oom_kills(*tree(groups, *mounts, files=files)) == 0


def test_files_that_are_not_there_count_nothing():
    assert oom_kills("/nonexistent", "/nonexistent") == 0


def test_our_own_group_is_seen_on_this_machine_or_nobody_has_any():
    for version, folder in own_folders("memory"):
        assert version in (1, 2)
        assert os.path.isdir(folder)


LIMIT = 48 << 20
EATER = "data = [bytes(1 << 20) + b'x' for _ in range(4096)]; data = [bytearray(b) for b in data]"


@pytest.fixture
def limited():
    """The words that put a command into a memory cgroup with a small limit."""
    limits = {
        1: {"memory.limit_in_bytes": str(LIMIT), "memory.swappiness": "0"},
        2: {"memory.max": str(LIMIT), "memory.swap.max": "0"},
    }
    with cgroup("memory", limits) as folder:
        yield ("sh", "-c", f'echo $$ > "{folder}/cgroup.procs"; exec "$@"', "sh")


# The third argument by which the launcher waits without a limit: of poll(2), or of ppoll(2) where there is no poll.
NO_LIMIT = "0xffffffff" if os.uname().machine == "x86_64" else "0x0"


def waits_without_limit(pid):
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return len(words) > 3 and words[3] == NO_LIMIT


@pytest.mark.skipif("TEST_PYTHON" in os.environ, reason="the sanitizer's own memory makes the launcher the victim")
def test_a_rank_that_the_kernel_killed_for_memory_is_told_so(limited, infini_run, tmp_path):
    """The launcher counts what the kernel killed before it waits; on a busy machine a rank could be dead by then."""
    go = tmp_path / "go"
    os.mkfifo(go)
    script = (
        f"import os; os.environ['RANK'] == '1' or __import__('signal').pause(); open({str(go)!r}).read(); {EATER}"
    )
    command = infini_run("--nproc_per_node=2", sys.executable, "-SE", "-c", script, under=limited)
    with go.open("w"):
        until(lambda: waits_without_limit(command.pid))
    assert command.wait() == 128 + signal.SIGKILL, command.err
    assert b"rank 1 " in command.err
    assert b"killed by SIGKILL (by the kernel, for memory)" in command.err
    assert b"next: give the job more memory, or use less in each rank" in command.err


def test_a_rank_that_somebody_else_killed_is_not_told_so(limited, infini_run):
    command = infini_run("sh", "-c", "kill -9 $$", under=limited)
    assert command.wait() == 128 + signal.SIGKILL
    assert b"killed by SIGKILL (pid" in command.err
    assert b"run dmesg, to see if the kernel sent SIGKILL" in command.err
