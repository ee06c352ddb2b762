"""Where our cgroup is delegated to us, each rank has a leaf in it, and nothing gets out of that."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.faults.test_faults_core import Shim, complaint_of, shim  # noqa: F401
from tests.launch.test_isolate import as_somebody
from tests.launch.test_program_restarts import (  # noqa: F401
    ATTEMPT,
    STAY,
    alone,
    check_leftovers_of_b_alone_end,
    gate,
)
from tests.launch.test_programs import sh
from tests.support.command import COMMAND, Command, play
from tests.support.processes import is_alive
from tests.support.rows import FORK_STORM, sample
from tests.support.waiting import LIMIT_S, until

ROOTS = [
    root for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")) if (root / "cgroup.procs").exists()
]
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or not ROOTS, reason="needs root and a cgroup v2 mount"),
]
PATHS = ("", "fork")  # without pidfds, so before Linux 5.3, there is no clone into a cgroup either
HIDDEN = "env -i setsid sh -c 'trap \"\" TERM HUP; echo hidden 0 $$; sleep 1000 & wait' & "


@pytest.fixture(params=PATHS, ids=lambda path: path or "clone")
def delegated(request, monkeypatch):
    """A cgroup that is delegated, as systemd marks it; and how a process enters it before its exec."""
    monkeypatch.setenv("INFINI_RUN_DEBUG", request.param)
    folder = ROOTS[0] / f"infini-run-test-{os.urandom(4).hex()}"
    try:
        folder.mkdir()
        os.setxattr(folder, "user.delegate", b"1")
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folder
    until(lambda: "populated 0" in (folder / "cgroup.events").read_text())
    inside = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
    folder.rmdir()
    assert inside == [], "cgroups that a launch has left"


def enter(folder):
    return lambda: (folder / "cgroup.procs").write_text("0")


def leaves(folder):
    found = ((Path(parent), name) for parent, names, _ in os.walk(folder) for name in names)  # some go meanwhile
    return sorted(str((parent / name).relative_to(folder)) for parent, name in found if name.startswith("rank-"))


def test_restarted_ranks_have_leaves_of_their_own_and_find_no_others(infini_run, delegated):
    script = f"cat {delegated}/infini-run-*/rank-*/cgroup.procs | wc -l; ls -d {delegated}/infini-run-* | wc -l; "
    script += HIDDEN + "[ $TORCHELASTIC_RESTART_COUNT = 1 ]"
    flags = ("--max_restarts=1", "--restart_delay=0", "--grace=0.2", "--console=prefix")
    command = infini_run(*flags, "sh", "-c", script, preexec_fn=enter(delegated))
    assert command.wait() == 0
    told = [line.split()[-1] for line in command.out.decode().splitlines() if "hidden" not in line]
    assert len(told) == 4
    assert told[1] == told[3] == "1"  # one launch's folder, its own
    assert not leaves(delegated)


def test_part_that_restarts_ends_what_hid_in_its_leaves(infini_run, delegated, bell, gate):  # noqa: F811
    """It has no variable and no group of its rank; that of the other program lives on."""
    hides = f"env -i setsid sh -c 'echo '$ROLE_NAME' $$ > {bell.path}; exec sleep 1000' &"
    fails = f"test {ATTEMPT} = 1 && {{ echo again > {bell.path}; {STAY}; }}; {hides} read go < {gate.path}; exit 3"
    words = alone(sh(f"{hides} {STAY}"), sh(fails), "--grace=0.2")
    check_leftovers_of_b_alone_end(infini_run(*words, preexec_fn=enter(delegated)), bell, gate)
    assert not leaves(delegated)


def test_each_rank_is_born_into_a_leaf_of_its_own(infini_run, delegated):
    command = infini_run("--nproc_per_node=3", "sh", "-c", "grep ^0:: /proc/self/cgroup", preexec_fn=enter(delegated))
    assert command.wait() == 0
    lines = sorted(command.out.decode().split())
    assert [line.rpartition("/")[2] for line in lines] == ["rank-0", "rank-1", "rank-2"]
    assert all(line.startswith(f"0::/{delegated.name}/infini-run-ir-") for line in lines)


def test_what_wiped_its_environment_and_left_every_group_dies_with_a_killed_launcher(infini_run, delegated):
    command = infini_run(
        "--nproc_per_node=2", "sh", "-c", HIDDEN + "echo ready $RANK $$; wait", preexec_fn=enter(delegated)
    )
    pids = [int(words[-1]) for word in (b"hidden", b"ready") for words in command.read_lines(word, 2)]
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    until(lambda: not any(map(is_alive, pids)))
    until(lambda: not leaves(delegated))  # and the guard has removed its folder


HOST = """
import sys
import infini_run as ir
try:
    report = ir.run(sys.argv[1:], nproc_per_node=2, grace=0.2)
    print("strays", *(stray.pid for stray in report.leftover_processes))
except ir.WorkerError as error:
    print("failed", error.exit_code)
"""


def test_library_finds_what_hid_from_it_everywhere_else(delegated):
    script = HIDDEN + 'read word < "/proc/$!/stat"; exec sleep 0.1'
    command = Command([sys.executable, "-c", HOST, "sh", "-c", script], preexec_fn=enter(delegated))
    try:
        assert command.wait() == 0
        lines = [line.split() for line in command.out.decode().splitlines()]
        hidden = [int(words[-1]) for words in lines if words[0] == "hidden"]
        assert len(hidden) == 2
        assert not any(map(is_alive, hidden))
        assert set(map(str, hidden)) <= {word for words in lines if words[0] == "strays" for word in words}
    finally:
        command.close()


@FORK_STORM
def test_those_that_fork_as_fast_as_they_are_killed_are_killed_at_once(infini_run, delegated):
    words = ["daemon", "say=stray", "hop", "done"]
    command = infini_run(
        "--nproc_per_node=2", "--grace=0", *play(*words * 8, "say=ready", "exit=0"), preexec_fn=enter(delegated)
    )
    assert command.wait() == 0


def nested(*words):
    """A rank that delegates its leaf to a launcher of its own."""
    inner = shlex.join([*COMMAND, "--nproc_per_node=2", *words])
    delegate = "import os, sys; os.setxattr(sys.argv[1], 'user.delegate', b'1')"
    leaf = f"{ROOTS[0]}$(sed -n 's/^0:://p' /proc/self/cgroup)"
    return ("sh", "-c", f'{sys.executable} -c "{delegate}" "{leaf}"; {inner} & wait')


def test_a_nested_launch_has_its_leaves_inside_its_ranks(infini_run, delegated):
    command = infini_run(*nested("sh", "-c", "grep ^0:: /proc/self/cgroup"), preexec_fn=enter(delegated))
    assert command.wait() == 0
    lines = sorted(command.out.decode().split())
    assert len(lines) == 2
    assert all(line.count("/infini-run-ir-") == 2 for line in lines)
    assert [line.rpartition("/")[2] for line in lines] == ["rank-0", "rank-1"]


def test_a_killed_launcher_takes_a_nested_one_and_both_their_cgroups(infini_run, delegated):
    command = infini_run(*nested("sh", "-c", HIDDEN + "echo ready $RANK $$; wait"), preexec_fn=enter(delegated))
    pids = [int(words[-1]) for word in (b"hidden", b"ready") for words in command.read_lines(word, 2)]
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    until(lambda: not any(map(is_alive, pids)))
    until(lambda: not leaves(delegated))


def test_cgroups_that_a_rank_has_made_are_removed_with_what_is_in_them(infini_run, delegated):
    leaf = f"{ROOTS[0]}$(sed -n 's/^0:://p' /proc/self/cgroup)"
    script = f'd="{leaf}/own"; mkdir "$d"; {HIDDEN}echo $! > "$d/cgroup.procs"; exit 0'
    command = infini_run("--nproc_per_node=2", "--grace=0.2", "sh", "-c", script, preexec_fn=enter(delegated))
    assert command.wait() == 0


def test_a_rank_that_cannot_be_created_takes_the_others_down_at_once(infini_run, delegated):
    pids = Path("/sys/fs/cgroup/pids") / delegated.name
    try:
        pids.mkdir()
    except OSError:
        pytest.skip("needs the pids controller of cgroup v1")
    try:
        (pids / "pids.max").write_text("7")

        def enter_both():
            (pids / "cgroup.procs").write_text("0")
            (delegated / "cgroup.procs").write_text("0")

        command = infini_run("--nproc_per_node=8", "--grace=0", "sleep", "1000", preexec_fn=enter_both)
        assert command.wait() == 1
        assert b"cannot be started: creating the process: " in command.err
        assert not leaves(delegated)
    finally:
        until(lambda: not (pids / "cgroup.procs").read_text())
        pids.rmdir()


def test_a_cgroup_that_is_not_delegated_is_left_alone(infini_run, delegated):
    os.removexattr(delegated, "user.delegate")
    command = infini_run("sh", "-c", "grep ^0:: /proc/self/cgroup", preexec_fn=enter(delegated))
    assert command.wait() == 0
    assert command.out.decode().split() == [f"0::/{delegated.name}"]


def test_a_cgroup_that_may_have_no_more_children_is_no_hindrance(infini_run, delegated):
    (delegated / "cgroup.max.descendants").write_text("2")
    command = infini_run("--nproc_per_node=3", "sh", "-c", "grep ^0:: /proc/self/cgroup", preexec_fn=enter(delegated))
    assert command.wait() == 0
    assert command.out.decode().split() == [f"0::/{delegated.name}"] * 3


def test_a_cgroup_that_is_said_not_to_be_delegated_is_left_alone(infini_run, delegated):
    os.setxattr(delegated, "user.delegate", b"0")
    command = infini_run("sh", "-c", "grep ^0:: /proc/self/cgroup", preexec_fn=enter(delegated))
    assert command.wait() == 0
    assert command.out.decode().strip() == f"0::/{delegated.name}"


def test_somebody_elses_cgroup_is_left_alone_though_it_can_be_written(infini_run, delegated):
    os.chmod(delegated, 0o777)
    os.chmod(delegated / "cgroup.procs", 0o666)
    words = ("sh", "-c", "grep ^0:: /proc/self/cgroup")
    command = infini_run(*words, under=as_somebody(30000 + os.getpid() % 20000), preexec_fn=enter(delegated))
    assert command.wait() == 0, command.err
    assert command.out.decode().strip() == f"0::/{delegated.name}"


# ---- any call may fail

ERRORS = {
    "mkdir": ("EAGAIN", "EACCES"),
    "mkdirat": ("EAGAIN",),
    "openat": ("EMFILE", "ENOENT"),
    "fdopendir": ("ENOMEM",),
    "fdopen": ("ENOMEM",),
    "unlinkat": ("EBUSY",),
    "rmdir": ("EBUSY",),
    "statfs": ("EACCES",),
    "stat": ("EACCES",),
    "access": ("EACCES",),
    "getxattr": ("ENODATA",),
    "open": ("ENFILE",),
    "read": ("EINTR",),
    "malloc": ("ENOMEM",),
    "write": ("EINTR",),
}
AT_MOST_EACH = 6


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="the sanitizer must be the first library")
def test_whatever_call_fails_the_job_is_done_or_refused_and_no_cgroup_is_left(
    infini_run,
    shim,  # noqa: F811
    tmp_path,
    delegated,
):
    """The same as test_faults_core.py, where there are leaves."""

    def leave(infini_run, folder, environ):
        flags = ("--nproc_per_node=2", "--grace=0.2")
        script = HIDDEN.replace("echo hidden 0 $$; ", "") + "exit 3"
        command = infini_run(*flags, "sh", "-c", script, env=environ, preexec_fn=enter(delegated))
        _, err = command.process.communicate(timeout=LIMIT_S)
        return command.process.returncode, 3, err

    plain = Shim(shim, tmp_path)
    assert not complaint_of(leave, infini_run, tmp_path, plain.environ)
    wrong = []
    for function, errors in ERRORS.items():
        count = plain.counts().get(function, 0)
        for error in errors:
            for k in sample(range(1, count + 1, max(1, count // AT_MOST_EACH)), 1):
                fault = Shim(shim, tmp_path, f"{function}:{k}:{getattr(errno, error)}")
                complaint = complaint_of(leave, infini_run, tmp_path, fault.environ)
                if complaint:
                    wrong.append(f"call {k} of {function} fails with {error}: {complaint}")
    for folder in sorted(delegated.rglob("*"), reverse=True):  # what could not be removed, as the call for it failed
        if folder.is_dir():
            until(lambda folder=folder: "populated 0" in (folder / "cgroup.events").read_text())
            folder.rmdir()
    assert not wrong, "\n".join(wrong)
