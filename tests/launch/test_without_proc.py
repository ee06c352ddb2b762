"""What ranks leave is ended, or named, also where /proc does not show it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import COMMAND
from tests.support.hidden_proc import HIDING, hidden
from tests.support.launch_shapes import as_root, strace, with_strace
from tests.support.processes import is_alive, marked
from tests.support.waiting import LIMIT_S, until

pytestmark = as_root

CODE = '"$@"; code=$?; while read pid; do kill -0 $pid 2>&- && echo left $pid; done < %s; exit $code'
IN_GROUP = "sleep 4111 & echo $! >> {}"
DAEMON = "setsid sh -c 'echo $$ >> {}; exec sleep 4111' & until grep --quiet --line-regexp $! {}; do :; done"
STUBBORN = "(trap '' TERM; exec setsid sleep 4111) & echo $! >> {}"
FAMILY = "setsid sh -c 'sleep 4111 & echo $! >> {}; wait' & until test -s {}; do :; done; echo $! >> {}"
OTHER_USER = "setsid setpriv --reuid=65534 sh -c 'echo $$; exec sleep 4111 >&-' >> {} & until test -s {}; do :; done"
each_leftover = pytest.mark.parametrize(
    "leave", [IN_GROUP, DAEMON, STUBBORN, FAMILY], ids=["in its group", "daemon", "stubborn", "family"]
)
each_hiding = pytest.mark.parametrize("hiding", HIDING)
LIBRARY = """
import json, subprocess, sys
import infini_run
own = subprocess.Popen(["sleep", "1000"])
report = infini_run.run(["sh", "-c", sys.argv[1]], nproc_per_node=2, grace=1000)
print(json.dumps([[process.name for process in report.leftover_processes], report.leftover_count, report.notices]))
print("own", own.poll())
own.kill()
own.wait()
"""


@each_hiding
def test_part_that_restarts_ends_what_is_in_its_groups(infini_run, left, hiding):
    """A daemon that left its rank's group is ended with the job, at the latest."""
    again = f"test $TORCHELASTIC_RESTART_COUNT = 1 && {{ kill -0 $(cat {left}) 2>&- && exit 9; exit 0; }}"
    script = f"exec >&- 2>&- <&-; {again}; (trap '' TERM; exec sleep 4111) & echo $! > {left}; exit 3"
    words = ["--restart_scope=program", "--restart_delay=0", "--grace=0.3", "--program=a", "sleep", "1", ":"]
    words += ["--program=b", "--max_restarts=1", "sh", "-c", script]
    command = infini_run(*words, under=hidden(hiding))
    assert command.wait() == 0, command.err
    assert b"infini-run: b: restart 1 of 1 in 0 ms: b 0 on " in command.err


@pytest.fixture
def left(tmp_path):
    """A file for the pids of leftover processes."""
    path = tmp_path / "left"
    path.touch()
    return path


def watching(hiding: str, left: Path) -> tuple[str, ...]:
    """The same, with a shell that tells at its command's end which of them live."""
    return (*hidden(hiding), "sh", "-c", CODE % left, "sh")


def quiet(script: str, left: Path) -> list[str]:
    """A rank of a shell, whose leftovers do not hold the test's pipes."""
    return ["sh", "-c", f"exec >&- 2>&- <&-; {script.format(*[left] * 3)}"]


# ---- the command


@each_hiding
@each_leftover
def test_leftovers_are_ended_without_proc(infini_run, left, hiding, leave, tmp_path):
    rank = quiet(f"{leave}; exit 0", left)
    command = infini_run(f"--report={tmp_path}/r", "--grace=0.5", *rank, under=watching(hiding, left))
    assert command.wait() == 0, command.err
    assert b"left " not in command.out
    assert left.read_text()
    report = json.loads((tmp_path / "r").read_text())
    assert {process["name"] for process in report["leftover_processes"]} == {"?"}
    assert {process["pid"] for process in report["leftover_processes"]} <= set(map(int, left.read_text().split()))
    assert b"stopped" in command.err
    assert report["stuck"] == []


@pytest.mark.parametrize("debug", ["oldpidfd", "nopidfd", "fork"])
@each_leftover
def test_old_kernels_end_leftovers_without_proc(infini_run, left, leave, debug, monkeypatch):
    monkeypatch.setenv("INFINI_RUN_DEBUG", debug)
    rank = quiet(f"{leave}; exit 0", left)
    command = infini_run("--nproc_per_node=2", "--grace=0.5", *rank, under=watching("empty", left))
    assert command.wait() == 0, command.err
    assert b"left " not in command.out


@each_hiding
def test_next_attempt_starts_after_leftovers_end_without_proc(infini_run, left, hiding):
    beside = f"while read pid; do kill -0 $pid 2>&- && echo beside $pid; done < {left}"
    rank = f"{beside}; exec >&- 2>&- <&-; {STUBBORN.format(left)}; exit 3"
    command = infini_run(
        "--max_restarts=2", "--restart_delay=0", "--grace=0.2", "sh", "-c", rank, under=watching(hiding, left)
    )
    assert command.wait() == 3
    assert command.out == b""
    assert len(left.read_text().split()) == 3
    assert command.err.count(b"stopped 1 process left behind") == 3


@pytest.mark.parametrize("hiding", [None, "unmounted"])
def test_no_attempt_starts_beside_living_leftover(infini_run, left, hiding):
    """One that became another user, which a launcher without CAP_KILL cannot end."""
    weak = ("setpriv", "--bounding-set=-kill", "--inh-caps=-kill")
    under = (*(hidden(hiding) if hiding else ()), *weak)
    rank = quiet(f"{OTHER_USER}; exit 3", left)
    command = infini_run("--max_restarts=2", "--restart_delay=0", "--grace=0.2", *rank, under=under)
    try:
        assert command.wait() == 3
        pid = left.read_text().strip()
        assert is_alive(int(pid))
        name = b"sleep" if hiding is None else b"?"
        assert b"process %s (%s) survived SIGKILL (state " % (pid.encode(), name) in command.err
        assert b"not restarted: some processes did not end" in command.err
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
        until(lambda: not marked())


def test_children_before_launch_are_not_touched_without_proc(infini_run, left):
    """Nor waited for: they were there before the first rank."""
    before = 'sleep 1000 & echo foreign $!; exec "$@"'
    rank = quiet(f"{DAEMON}; exit 0", left)
    command = infini_run(*rank, under=(*hidden("unmounted"), "sh", "-c", before, "sh"), stdout=subprocess.PIPE)
    foreign = int(command.read_lines(b"foreign")[0][-1])
    try:
        command.read_error_until(b"left behind: ? (")
        assert is_alive(foreign)
        assert not is_alive(int(left.read_text()))
    finally:
        os.kill(foreign, signal.SIGKILL)
    assert command.wait() == 0


def test_leftover_that_hidepid_hides_is_ended(infini_run, left):
    """A launcher that may not trace others sees no process of another user."""
    blind = "setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace"
    hide = f'mount -t proc -o hidepid=2,gid=65533 proc /proc; exec {blind} "$@"'
    rank = quiet(f"{OTHER_USER}; exit 0", left)
    command = infini_run(
        "--grace=0.5",
        *rank,
        under=("unshare", "--mount", "--pid", "--fork", "sh", "-c", hide, "sh", "sh", "-c", CODE % left, "sh"),
    )
    assert command.wait() == 0
    assert b"left " not in command.out
    assert b"stopped 1 process left behind: " in command.err


# ---- a library


def in_library(hiding: str, left: Path, script: str) -> tuple[list, bytes]:
    """What a launch within a host program reports, and what the shell around that says is left."""
    words = [*watching(hiding, left), sys.executable, "-c", LIBRARY, quiet(script, left)[-1]]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    report, own, *rest = done.stdout.splitlines()
    assert own == b"own None"
    return json.loads(report), b"".join(rest)


@each_hiding
def test_library_ends_groups_of_ranks_without_proc(left, hiding):
    (names, count, notices), rest = in_library(hiding, left, f"{IN_GROUP}; exit 0")
    assert rest == b""
    assert (names, count) == (["process group"] * 2, 2)
    assert [notice.split("(")[0] for notice in notices] == ["cannot read /proc "]


@pytest.mark.parametrize("debug", ["oldpidfd", "nopidfd"])
def test_library_on_old_kernel_ends_groups_without_proc(left, debug, monkeypatch):
    """At once: nothing would tell whether a group is empty."""
    monkeypatch.setenv("INFINI_RUN_DEBUG", debug)
    (names, count, _), _ = in_library("empty", left, f"(trap '' TERM; {IN_GROUP}); exit 0")
    assert (names, count) == ([], 0)
    until(lambda: not any(is_alive(int(pid)) for pid in left.read_text().split()))


def test_library_that_is_process_1_reaps_groups_without_proc(left):
    """What is left of them has become its child, and would be taken for living."""
    words = [
        *hidden("unmounted in a namespace"),
        sys.executable,
        "-c",
        LIBRARY,
        quiet(f"{IN_GROUP}; exit 0", left)[-1],
    ]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])[:2] == [["process group"] * 2, 2]


def test_library_says_what_it_does_not_see(left):
    """A daemon that it cannot know is not touched."""
    (names, count, notices), rest = in_library("unmounted", left, f"{DAEMON}; exit 0")
    pids = left.read_text().split()
    try:
        assert rest == b"".join(b"left %s" % pid.encode() for pid in pids)
        assert (names, count) == ([], 0)
        assert notices == [
            "cannot read /proc (it is missing): processes that left their rank's process group may survive"
        ]
    finally:
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        until(lambda: not any(map(is_alive, map(int, pids))))


# ---- the guard


@pytest.mark.parametrize("hiding", ["unmounted", "empty"])
@pytest.mark.parametrize("debug", ["", "fork,nopidfd"])
def test_guard_ends_groups_of_ranks_without_proc(infini_run, left, hiding, debug, monkeypatch):
    monkeypatch.setenv("INFINI_RUN_DEBUG", debug)
    script = (
        f"echo started $$; {IN_GROUP.format(left)} >&- 2>&-; echo here 0 $!; if [ $RANK = 0 ]; then exit 0; fi; wait"
    )
    command = infini_run("--nproc_per_node=2", "sh", "-c", script, under=hidden(hiding))
    pids = [int(words[-1]) for words in command.read_lines(b"here", 2) + command.read_lines(b"started", 2)]
    command.read_error_until(b"process group may survive")
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    until(lambda: not any(map(is_alive, pids)))
    until(lambda: not marked())


def test_guard_spares_number_of_ended_rank_without_proc(tmp_path):
    """Rank 0 and all of its group have ended, and somebody else in the launcher's session leads a group of that
    number."""
    script = f"""
mkdir {tmp_path}/proc; mount -t proc proc {tmp_path}/proc; umount --lazy /proc
mkfifo {tmp_path}/told
told='echo $RANK $$ > {tmp_path}/told; [ $RANK = 0 ] || exec sleep 4111'
{shlex.join(COMMAND)} --keep_going --nproc_per_node=2 sh -c "$told" 2>&- &
launcher=$!
while read rank pid; do eval rank$rank=$pid; [ -n "$rank0" ] && [ -n "$rank1" ] && break; done <> {tmp_path}/told
while kill -0 $rank0 2>&-; do :; done
echo $((rank0 - 1)) > {tmp_path}/proc/sys/kernel/ns_last_pid
{sys.executable} -IS -c 'import os; os.setpgid(0, 0); os.execlp("sleep", "sleep", "1000")' &
until grep --quiet '(sleep) S' {tmp_path}/proc/$!/stat; do :; done
[ $! = $rank0 ] || echo missed
kill -KILL $launcher; wait $launcher 2>&-
while grep --quiet --no-messages '(irun-guard) [^Z]' {tmp_path}/proc/[0-9]*/stat; do :; done
grep --quiet '(sleep) S' {tmp_path}/proc/$!/stat && echo spared
"""
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=LIMIT_S)
    assert done.stdout == b"spared\n", done.stderr


# ---- /proc that fails in the middle

FAILING = {
    "getdents64": ("-P", "/proc", "-e", "trace=getdents64", "-e", "inject=getdents64:error=ENOMEM"),
    "readlink": (
        "-P",
        "/proc/self",
        "-e",
        "trace=readlink,readlinkat",
        "-e",
        "inject=readlink,readlinkat:error=ENOMEM",
    ),
    "openat": ("-P", "/proc", "-e", "trace=openat", "-e", "inject=openat:error=EMFILE"),
}


@with_strace
@pytest.mark.parametrize("call", FAILING)
@each_leftover
def test_leftovers_are_ended_when_reading_proc_fails(infini_run, left, call, leave, tmp_path):
    rank = quiet(f"{leave}; exit 0", left)
    command = infini_run("--grace=0.5", *rank, under=strace(tmp_path / "trace", "-f", *FAILING[call]))
    assert command.wait() == 0, command.err
    assert "(INJECTED)" in (tmp_path / "trace").read_text()
    assert b"stopped" in command.err
    assert not marked()


@with_strace
@pytest.mark.parametrize("call", FAILING)
def test_library_ends_groups_when_reading_proc_fails(left, call, tmp_path):
    """And says what it could not look at, after its bounds."""
    library = LIBRARY.replace("grace=1000", "grace=0.2")
    words = [sys.executable, "-c", library, quiet(f"{IN_GROUP}; exit 0", left)[-1]]
    words = [*strace(tmp_path / "trace", "-f", *FAILING[call]), *words]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    (_, _, notices), own = (json.loads(line) if line[:1] == b"[" else line for line in done.stdout.splitlines())
    assert own == b"own None"
    assert [notice.split("(")[0] for notice in notices] == ["cannot read /proc "]
    until(lambda: not any(is_alive(int(pid)) for pid in left.read_text().split()))
