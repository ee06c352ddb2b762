"""--isolate: the job in a PID namespace of its own, which ends with its launcher, whatever ends that."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.launch.test_control import ask
from tests.support.command import LIBC_OWN, play
from tests.support.processes import GUARD, marked, processes
from tests.support.waiting import until

STRAY = ["daemon", "name=left-behind", "say=stray", "wait", "done"]
STUBBORN = ["daemon", "ignore=TERM", *STRAY[1:]]
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root"),
]


def as_somebody(uid):
    """Without root's powers but the one to read what is in root's home, where this Python may live."""
    words = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return ("setpriv", *words, "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override")


def test_ranks_see_a_pid_namespace_of_their_own(infini_run, every_path):
    command = infini_run("--isolate", "--nproc_per_node=2", *play("say=ready", "ask=parent", "ask=pids"))
    assert command.wait() == 0
    pids = [int(words[-1]) for words in command.read_lines(b"ready", 2)]
    assert all(1 < pid < 100 for pid in pids)
    assert [words[1] for words in command.read_lines(b"parent", 2)] == ["1", "1"]
    assert all(int(words[1]) <= 3 for words in command.read_lines(b"pids", 2))


def test_who_asks_gets_the_pids_that_it_sees(infini_run, every_path):
    """They name the launch, and a debugger finds the ranks by them."""
    command = infini_run("--isolate", "--nproc_per_node=2", *play("say=up", "wait"))
    command.read_lines(b"up", 2)
    _, columns, *rows = ask("--top", command.pid).splitlines()
    pids = [int(row.split()[2]) for row in rows]
    assert columns.split()[2] == "PID"
    for rank, pid in enumerate(pids):
        assert f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert ask("--top", pid).splitlines()[0].endswith(": 2 running")
    stacks = json.loads(ask("--stacks=json", command.pid))["stacks"]
    assert [stack["pid"] for stack in stacks] == pids
    assert all(stack["processes"][0]["pid"] == stack["pid"] for stack in stacks)
    until(lambda: ask("--top", command.pid).count("%") == 2)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.parametrize("code", [0, 1, 7, 127, 255])
@pytest.mark.rows(6)
def test_exit_code_passes(infini_run, code, every_path):
    assert infini_run("--isolate", "--nproc_per_node=2", "sh", "-c", f"exit {code}").wait() == code


def test_what_does_nothing_is_told_of_once(infini_run):
    """The inner command reads the same words."""
    command = infini_run("--isolate", "--join_timeout=7", "echo", "--nproc_per_node=2")
    assert command.wait() == 0
    assert command.err.count(b"--join_timeout=7: no effect here") == 1
    assert command.err.count(b"--nproc_per_node after echo goes to that program") == 1


def test_failure_and_report_pass(infini_run, tmp_path, every_path):
    words = ["@1", "die=SEGV", "@*", "wait"]
    command = infini_run("--isolate", "--nproc_per_node=2", f"--report={tmp_path}/r", *play(*words))
    assert command.wait() == 128 + signal.SIGSEGV
    assert command.err.count(b"\n") == 1
    assert b"rank 1 on " in command.err
    assert b"killed by SIGSEGV" in command.err
    report = json.loads((tmp_path / "r").read_text())
    assert (report["first_failure"], report["exit_code"]) == (1, 139)


@pytest.mark.parametrize("name", ["TERM", "INT", "QUIT"])
@pytest.mark.rows(5)
def test_stopping_signal_reaches_the_ranks_and_is_told(infini_run, name, every_path):
    command = infini_run("--isolate", "--nproc_per_node=2", *play(f"end={name}:0", "say=ready", "wait"))
    command.read_lines(b"ready", 2)
    command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == 0
    assert command.out.count(f"got {name}".encode()) == 2


@pytest.mark.parametrize("name", ["SEGV", "ABRT"])
def test_fault_signal_from_outside_leaves_nothing(infini_run, name):
    command = infini_run("--isolate", *play("end=TERM:0", "say=ready", "wait"))
    command.read_lines(b"ready")
    command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == 0
    assert b"got TERM" in command.out


def test_second_term_kills_at_once(infini_run, every_path):
    command = infini_run("--isolate", "--grace=1000", *play(*STUBBORN, "tell=TERM", "say=ready", "wait"))
    command.read_lines(b"ready")
    command.signal(signal.SIGTERM)
    command.read_lines(b"got TERM")
    command.insist(signal.SIGTERM)
    assert command.wait() == 143
    assert not marked()


@pytest.mark.parametrize("name", ["USR1", "HUP", "WINCH"])
def test_signal_is_passed_on(infini_run, name):
    command = infini_run("--isolate", *play(f"tell={name}", "say=ready", "wait"))
    command.read_lines(b"ready")
    command.signal(signal.Signals[f"SIG{name}"])
    command.read_lines(f"got {name}".encode())
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.parametrize("seed", range(4))
def test_term_at_any_moment_of_the_start_is_not_lost(infini_run, seed):
    chance = random.Random(seed)
    for _ in range(5):
        command = infini_run("--isolate", "--grace=1000", "--nproc_per_node=4", "sleep", "1000")
        until(lambda pid=command.pid: any(parent == pid for parent, _, _ in processes().values()))
        end_s = time.perf_counter() + chance.uniform(0, 0.06)
        while time.perf_counter() < end_s:  # the moment is the test's input: it is drawn, not waited for
            pass
        command.signal(signal.SIGTERM)
        assert command.wait() == 143, command.err


def test_a_term_that_is_there_before_anything_is_started_is_not_lost(infini_run):
    def prepare():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)

    command = infini_run("--isolate", "--grace=1000", "sleep", "1000", preexec_fn=prepare)
    assert command.wait() == 143


def test_mask_and_ignored_signals_come_through(infini_run):
    def prepare():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    command = infini_run("--isolate", "cat", "/proc/self/status", preexec_fn=prepare)
    assert command.wait() == 0
    fields = dict(line.split(b":\t") for line in command.out.split(b"\n") if line.startswith(b"Sig"))
    assert int(fields[b"SigBlk"], 16) == 1 << signal.SIGUSR1 - 1 | 1 << signal.SIGTERM - 1
    assert int(fields[b"SigIgn"], 16) & ~LIBC_OWN == 1 << signal.SIGHUP - 1


def test_nothing_of_the_isolation_is_seen_in_the_environment(infini_run):
    command = infini_run("--isolate", "env")
    assert command.wait() == 0
    assert b"ISOLATED" not in command.out


@pytest.mark.parametrize("stray", [STRAY, STUBBORN], ids=["meek", "stubborn"])
def test_strays_are_ended(infini_run, stray, every_path):
    command = infini_run("--isolate", "--grace=0.2", "--nproc_per_node=2", *play(*stray, "exit=0"))
    assert command.wait() == 0
    assert b"stopped 2 processes left behind: left-behind (" in command.err
    assert not marked()


def test_everything_dies_with_a_launcher_that_was_killed(infini_run, every_path):
    words = [*STUBBORN, "ignore=TERM", "ignore=HUP", "say=ready", "wait"]
    command = infini_run("--isolate", "--nproc_per_node=3", *play(*words))
    command.read_lines(b"ready", 3)
    assert len(marked()) >= 6
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    until(lambda: not marked())


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, to slow a system call down")
@pytest.mark.rows(2)
def test_launcher_killed_before_its_child_has_asked_to_die_with_it(infini_run, tmp_path, every_path):
    """Nor is there a guard, which would end the child."""
    slow = (
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=setpgid",
        "-e",
        "inject=setpgid:delay_enter=3000000",
    )
    command = infini_run("--isolate", f"--log_dir={tmp_path}", *play("say=ready", "wait"), under=slow)

    def children_of(*pids):
        return {child: name for child, (parent, _, name) in processes().items() if parent in pids}

    until(lambda: len(children_of(*children_of(command.pid))) == 2)
    (launcher,) = children_of(command.pid)
    (guard,) = [child for child, name in children_of(launcher).items() if name == GUARD]
    os.kill(guard, signal.SIGKILL)
    os.kill(launcher, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL  # strace ends with the last of them
    assert b"ready" not in command.out
    assert not marked()


def test_everything_dies_with_the_inner_launcher(infini_run, every_path):
    command = infini_run("--isolate", *play(*STUBBORN, "say=ready", "wait"))
    command.read_lines(b"ready")
    (inner,) = [pid for pid, (parent, _, name) in processes().items() if parent == command.pid and name != GUARD]
    os.kill(inner, signal.SIGKILL)
    assert command.wait() == 137
    assert not marked()


def test_program_that_is_missing_is_127(infini_run):
    command = infini_run("--isolate", "no-such-program-anywhere")
    assert command.wait() == 127
    assert command.err.count(b"\n") == 1


def test_without_root_it_works_or_is_refused_in_one_line(infini_run, every_path):
    command = infini_run("--isolate", *play("ask=parent"), under=as_somebody(30000 + os.getpid() % 20000))
    code = command.wait()
    if code == 0:
        assert command.read_lines(b"parent")[0][1] == "1"
    else:
        assert code == 1
        assert command.err.startswith(b"infini-run: --isolate: ")
        assert b"needs root" in command.err
        assert command.err.count(b"\n") == 1


def test_refusal_is_one_line(infini_run, every_path):
    """With no user namespace to be had, nobody but root can make one (sysctl as in some distributions)."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1)")
    limit = 'echo 0 > /proc/sys/user/max_pid_namespaces; exec "$@"'
    command = infini_run(
        "--isolate",
        "--nproc_per_node=4",
        "true",
        under=("unshare", "--user", "--map-root-user", "sh", "-c", limit, "sh"),
    )
    assert command.wait() == 1
    assert command.err.startswith(b"infini-run: --isolate: ")
    assert b"needs root" in command.err
    assert command.err.count(b"\n") == 1
