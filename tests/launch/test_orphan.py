"""Nothing that a job started outlives it, and nothing that it did not start is touched."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import infini_run as ir
from tests.support.build_c import build
from tests.support.command import COMMAND, play
from tests.support.launch_shapes import with_strace
from tests.support.processes import GUARD, children, is_alive, marked, processes, state_of
from tests.support.rows import FORK_STORM
from tests.support.waiting import LIMIT_S, until

STRAY = ["daemon", "name=left-behind", "say=stray", "wait", "done"]
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SLOW = pytest.mark.parametrize(
    "slow", [("slow=512",), ("threads=20", "slow=512")], ids=["one", "threads"]
)  # some 60 ms
STUBBORN = ["daemon", "ignore=TERM", *STRAY[1:]]


def strays_of(command, n=1):
    return [int(words[-1]) for words in command.read_lines(b"stray", n)]


# ---- every way to end, every way to hide


@pytest.mark.parametrize("stray", [STRAY, STUBBORN], ids=["meek", "stubborn"])
def test_daemons_are_gone_after_success(infini_run, stray, every_path):
    command = infini_run("--nproc_per_node=3", "--grace=0.2", *play(*stray, "exit=0"))
    strays = strays_of(command, 3)
    assert command.wait() == 0
    assert not any(map(is_alive, strays))
    assert b"stopped 3 processes left behind: left-behind (" in command.err
    assert all(f"left-behind ({pid})".encode() in command.err for pid in strays)


TRACKED = """
import os, signal, sys
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
if sys.argv[1:]:
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(tell, b"!")
        signal.pause()
    os.read(ready, 1)
"""


@pytest.mark.parametrize("flags", [(), ("--grace=0",)])
@pytest.mark.parametrize("code", [0, 3])
def test_resource_tracker_is_no_leftover_when_its_rank_ended(infini_run, flags, code, tmp_path):
    """It ignores TERM, and ends when the last that holds its pipe has ended: some milliseconds after the rank."""
    (tmp_path / "rank.py").write_text(f"{TRACKED}\nos._exit({code})")
    command = infini_run(
        "--nproc_per_node=4", "--keep_going", f"--report={tmp_path}/report", *flags, tmp_path / "rank.py"
    )
    assert command.wait() == code
    assert b"left behind" not in command.err
    assert json.loads((tmp_path / "report").read_text())["leftover_processes"] == []


SERVED = """
import multiprocessing, os, signal, sys

def work(holds, begun):
    if holds:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun.set()
    if holds:
        signal.pause()

if __name__ == "__main__":
    server = multiprocessing.get_context("forkserver")
    begun = server.Event()
    worker = server.Process(target=work, args=(bool(sys.argv[2:]), begun))
    worker.start()
    begun.wait()
    if not sys.argv[2:]:
        worker.join()
    os._exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("flags", [(), ("--grace=0",)])
@pytest.mark.parametrize("code", [0, 3])
def test_fork_server_is_no_leftover_when_its_rank_ended(infini_run, flags, code, tmp_path):
    (tmp_path / "rank.py").write_text(SERVED)
    command = infini_run(
        "--nproc_per_node=2", "--keep_going", f"--report={tmp_path}/report", *flags, tmp_path / "rank.py", code
    )
    assert command.wait() == code
    assert b"left behind" not in command.err
    assert json.loads((tmp_path / "report").read_text())["leftover_processes"] == []


@pytest.mark.parametrize("under", [(), ("sh", "-c", """trap '' INT; exec "$0" "$@" """)], ids=["plain", "background"])
@pytest.mark.parametrize(("grace", "n"), [("0.2", 2), ("0", 1)])
def test_fork_of_a_fork_server_is_a_leftover(infini_run, grace, n, under, tmp_path):
    """It has the server's arguments; in the background of a script, both ignore INT. After the grace the tracker,
    whose pipe it holds, is one, too."""
    (tmp_path / "rank.py").write_text(SERVED)
    command = infini_run(f"--grace={grace}", tmp_path / "rank.py", "0", "held", under=under)
    assert command.wait() == 0
    assert re.search(rb"stopped (\d+) process(es)? left behind", command.err)[1] == b"%d" % n


LATE = """
import os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
reads, writes = os.pipe()
if os.fork() == 0:
    os.close(writes)
    os.read(reads, 1)  # its rank has ended
    time.sleep(float(sys.argv[1]))
    os.set_inheritable(reads, True)
    words = f"from multiprocessing.resource_tracker import main; main({reads})"
    os.execv(sys.executable, [sys.executable, "-c", words])
"""


@pytest.mark.parametrize("grace", ["0", "30"])
def test_resource_tracker_is_no_leftover_before_its_exec(infini_run, grace, tmp_path):
    """A busy machine may give it no turn until its rank has ended."""
    (tmp_path / "rank.py").write_text(LATE)
    command = infini_run(f"--grace={grace}", f"--report={tmp_path}/report", tmp_path / "rank.py", "0.1")
    assert command.wait() == 0
    assert b"left behind" not in command.err
    assert json.loads((tmp_path / "report").read_text())["leftover_processes"] == []


def test_process_that_blocks_signals_as_tracker_is_leftover_without_grace(infini_run, tmp_path):
    (tmp_path / "rank.py").write_text(LATE)
    command = infini_run("--grace=0", tmp_path / "rank.py", "1000")
    assert command.wait() == 0
    assert b"stopped 1 process left behind: python" in command.err


def test_resource_tracker_is_leftover_when_somebody_holds_it(infini_run, tmp_path):
    (tmp_path / "rank.py").write_text(TRACKED)
    command = infini_run("--grace=0.2", tmp_path / "rank.py", "held")
    assert command.wait() == 0
    assert b"stopped 2 processes left behind" in command.err


@pytest.fixture
def not_adopting(infini_run):
    """Start the command where PR_SET_CHILD_SUBREAPER is refused, as by qemu's user-mode emulation; it, and the strays
    that have told of themselves."""

    def start(*words, n, grace=0.2, shell=""):
        deny = (build("deny.c", instead_of="*"), "prctl", "0", str(PR_SET_CHILD_SUBREAPER))
        program = ["sh", "-c", shell] if shell else play(*words)
        command = infini_run(f"--nproc_per_node={n}", f"--grace={grace}", *program, under=deny)
        try:
            return command, strays_of(command, n)
        except AssertionError:
            if command.wait() == 77:
                pytest.skip("no filter is permitted here")
            raise

    return start


@pytest.mark.parametrize("stray", [STRAY, STUBBORN], ids=["meek", "stubborn"])
def test_daemons_are_gone_where_we_may_not_adopt_orphans(not_adopting, stray, every_path):
    command, strays = not_adopting(*stray, "exit=0", n=3)
    assert command.wait() == 0
    assert not any(map(is_alive, strays))
    assert b"stopped 3 processes left behind: left-behind (" in command.err


@SLOW
@pytest.mark.parametrize("stray", [STRAY, STUBBORN], ids=["meek", "stubborn"])
def test_a_daemon_whose_exit_takes_long_is_waited_for_where_we_may_not_adopt_it(
    not_adopting, stray, slow, every_path
):
    """It has no environment any more, by which it is known, and still holds what it had open: a GPU, say."""
    command, strays = not_adopting("daemon", *slow, *stray[1:], "exit=0", n=1)
    assert command.wait() == 0
    assert not any(map(is_alive, strays))


@SLOW
def test_what_was_killed_with_its_rank_and_takes_long_to_exit_is_waited_for_where_we_may_not_adopt_it(
    not_adopting, slow, every_path
):
    """Nobody has looked at it before: it is known by its group."""
    command, strays = not_adopting("ignore=TERM", "group", *slow, "say=stray", "wait", "done", "wait", n=1)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert not any(map(is_alive, strays))


@SLOW
def test_what_exits_already_is_waited_for_until_then_and_not_for_the_grace(not_adopting, slow, every_path):
    """Without a pidfd nothing tells of the end of what is no child of ours."""
    rank = ("group", *slow, "say=stray", "wait", "done", "say=rank", "wait")
    command, strays = not_adopting(*rank, n=1, grace=1000)
    for pid in (*strays, *command.pids_of(b"rank").values()):
        os.kill(pid, signal.SIGKILL)
    assert command.wait() == 137
    assert not any(map(is_alive, strays))


def test_what_a_daemon_leaves_when_it_is_told_to_stop_is_waited_for_until_it_ends(not_adopting, tmp_path, every_path):
    """Nobody knows it before; it is not only looked for when the grace is over."""
    up = shlex.quote(f"{tmp_path}/up")
    leave = f"trap 'setsid sleep 1 & exit' TERM; echo stray 0 $$; echo > {up}; while :; do sleep 0.1; done"
    rank = f"mkfifo {up}; (setsid sh -c {shlex.quote(leave)} &); read line < {up}"
    command, _ = not_adopting(shell=rank, n=1, grace=1000)
    assert command.wait() == 0


@pytest.mark.parametrize("stray", [STRAY, STUBBORN], ids=["meek", "stubborn"])
def test_daemons_are_gone_after_a_failure(infini_run, stray, every_path):
    command = infini_run("--nproc_per_node=3", "--grace=0.2", *play(*stray, "@1", "exit=3", "@*", "wait"))
    assert command.wait() == 3
    assert command.out.count(b"stray") >= 1
    assert b"left-behind (" in command.err  # the others may not have their name yet


@pytest.mark.parametrize("stray", [STRAY, STUBBORN], ids=["meek", "stubborn"])
def test_daemons_are_gone_after_term(infini_run, stray, every_path):
    command = infini_run("--nproc_per_node=3", "--grace=0.2", *play(*stray, "say=ready", "wait"))
    strays = strays_of(command, 3)
    command.pids_of(b"ready", 3)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert not any(map(is_alive, strays))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_what_a_shell_has_in_the_background_ignores_ctrl_c_and_is_ended_by_term(infini_run, number, every_path):
    """POSIX 2.11: an asynchronous list of a shell without job control ignores INT and QUIT."""
    command = infini_run("--nproc_per_node=2", "--grace=1000", "sh", "-c", "sleep 1000 & echo stray $!; wait")
    strays = strays_of(command, 2)
    until(lambda: all(processes()[pid][2] == "sleep" for pid in strays))  # the shell's child ignores them, then execs
    command.signal(number)
    assert command.wait() == 128 + number
    assert not any(map(is_alive, strays))
    assert b"stopped 2 processes left behind: sleep (" in command.err


def test_before_linux_5_16_quit_is_quit_once_every_child_has_executed(infini_run):
    """The guard too: until then it would be TERM (signal_send.c)."""
    command = infini_run("--grace=1000", *play("end=QUIT:0", "say=ready", "wait"), under=("setarch", "--uname-2.6"))
    command.pids_of(b"ready", 1)
    until(lambda: (command.pid, GUARD) in {(parent, name) for parent, _, name in processes().values()})
    command.signal(signal.SIGQUIT)
    assert command.wait() == 0


def test_daemons_are_gone_after_a_second_term(infini_run, every_path):
    words = [*STUBBORN, "tell=TERM", "say=ready", "wait"]
    command = infini_run("--nproc_per_node=3", "--grace=1000", *play(*words))
    strays = strays_of(command, 3)
    command.pids_of(b"ready", 3)
    command.signal(signal.SIGTERM)
    command.pids_of(b"got TERM", 3)
    command.insist(signal.SIGTERM)
    assert command.wait() == 143
    assert not any(map(is_alive, strays))


def test_second_term_does_not_wait_for_strays_that_are_being_stopped(infini_run, every_path):
    command = infini_run("--grace=1000", *play("daemon", "tell=TERM", "say=stray", "wait", "done", "exit=0"))
    strays_of(command)
    command.read_lines(b"got TERM")
    command.signal(signal.SIGTERM)
    command.read_error_until(b"SIGTERM: stopping")
    command.insist(signal.SIGTERM)
    assert command.wait() == 0


def test_daemon_gets_the_stop_signal_and_its_grace(infini_run, every_path):
    command = infini_run(
        "--stop_signal=USR1", "--grace=1000", *play("daemon", "end=USR1:0", "say=stray", "wait", "done", "exit=0")
    )
    strays_of(command)
    assert command.wait() == 0
    assert b"got USR1" in command.out


def test_daemon_that_is_stopped_is_ended_too(infini_run, every_path):
    words = ["daemon", "end=TERM:0", "say=stray", "wait", "done", "say=ready", "wait"]
    command = infini_run("--grace=1000", *play(*words))
    stray = strays_of(command)[0]
    rank = command.pids_of(b"ready")[0]
    os.kill(stray, signal.SIGSTOP)
    until(lambda: state_of(stray) == "T")
    os.kill(rank, signal.SIGKILL)
    assert command.wait() == 137
    assert b"got TERM" in command.out


def test_children_of_daemons_are_ended_with_them(infini_run, every_path):
    words = ["daemon", "ignore=TERM", *STUBBORN, *STUBBORN, "say=stray", "wait", "done", "exit=0"]
    command = infini_run("--grace=0.2", *play(*words))
    strays = strays_of(command, 3)
    assert command.wait() == 0
    assert not any(map(is_alive, strays))


@FORK_STORM
@pytest.mark.parametrize("ignoring", [[], ["ignore=TERM"]], ids=["meek", "stubborn"])
def test_tree_that_forks_as_fast_as_it_is_killed_is_ended(infini_run, ignoring, every_path):
    hopper = ["daemon", *ignoring, "say=stray", "hop", "done"]
    command = infini_run("--grace=0.1", "--nproc_per_node=2", *play(*hopper, *hopper, "exit=0"))
    strays_of(command, 4)
    assert command.wait() == 0, command.err
    assert not marked()


@FORK_STORM
@pytest.mark.parametrize("path", ["nochildren", "nochildren,nopidfd"])
def test_a_tree_that_forks_without_end_is_ended_where_no_list_of_children_is(infini_run, monkeypatch, path):
    monkeypatch.setenv("INFINI_RUN_DEBUG", path)  # as without CONFIG_PROC_CHILDREN
    hopper = ["daemon", "say=stray", "hop", "done"]
    command = infini_run("--grace=0.1", "--nproc_per_node=2", *play(*hopper, *hopper, "exit=0"))
    strays_of(command, 4)
    assert command.wait() == 0, command.err
    assert not marked()


def test_strays_that_are_killed_at_once_are_named_in_the_order_of_their_numbers(infini_run, every_path):
    command = infini_run("--grace=0", *play(*(STUBBORN * 5), "exit=0"))
    strays = strays_of(command, 5)
    assert command.wait() == 0
    names = ", ".join(f"left-behind ({pid})" for pid in sorted(strays)[:4])
    assert f"stopped 5 processes left behind: {names}, ...".encode() in command.err


def test_many_strays_are_counted_and_few_are_named(infini_run):
    command = infini_run(*play(*(STRAY * 40), "exit=0"))
    strays_of(command, 40)
    assert command.wait() == 0
    assert not marked()
    assert command.err.count(b"\n") == 1
    assert b"stopped 40 processes left behind" in command.err
    assert b", ..." in command.err


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be in any group")
def test_strays_of_a_user_with_many_groups_are_named(infini_run):
    """/proc/PID/status has them in one line, before what it says of signals."""
    groups = ",".join(str(1_000_000_000 + i) for i in range(400))
    words = ("--grace=0.2", *play(*STRAY, "exit=0"))
    command = infini_run(*words, under=("setpriv", f"--groups={groups}"))
    assert command.wait() == 0
    assert b"left behind: left-behind (" in command.err


def test_strays_that_need_two_signals_are_counted_once(infini_run, tmp_path):
    command = infini_run(f"--report={tmp_path}/r", "--grace=0.1", *play(*(STUBBORN * 20), "exit=0"))
    strays_of(command, 20)
    assert command.wait() == 0
    report = json.loads((tmp_path / "r").read_text())
    assert report["leftover_count"] == 20
    assert len(report["leftover_processes"]) == 16
    assert b"stopped 20 processes left behind" in command.err


def test_strays_are_in_the_report(infini_run, tmp_path):
    command = infini_run(f"--report={tmp_path}/r", *play(*STRAY, "exit=0"))
    stray = strays_of(command)[0]
    assert command.wait() == 0
    assert json.loads((tmp_path / "r").read_text())["leftover_processes"] == [{"pid": stray, "name": "left-behind"}]


# ---- what is not ours


def test_children_inherited_through_exec_are_not_touched(infini_run, every_path):
    before = 'sleep 1000 & echo "foreign $!"; exec "$@"'
    command = infini_run("--nproc_per_node=2", *play(*STRAY, "exit=0"), under=("sh", "-c", before, "sh"))
    foreign = int(command.read_lines(b"foreign")[0][-1])
    try:
        strays = strays_of(command, 2)
        until(lambda: state_of(command.pid) in ("Z", ""))
        assert is_alive(foreign)
        assert not any(map(is_alive, strays))
    finally:
        os.kill(foreign, signal.SIGKILL)
    assert command.wait() == 0
    until(lambda: not is_alive(foreign))


# ---- launchers in launchers


def test_nested_launchers_each_clean_their_own(infini_run, every_path):
    inner = [*COMMAND, "--nproc_per_node=2", *play(*STRAY, "end=TERM:0", "say=ready", "wait")]
    command = infini_run("--nproc_per_node=2", *inner)
    strays = strays_of(command, 4)
    command.read_lines(b"ready", 4)
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert not any(map(is_alive, strays))
    assert command.err.count(b"stopped 2 processes left behind") == 2


def test_nested_launcher_hands_a_failure_up(infini_run, every_path):
    inner = [*COMMAND, "--nproc_per_node=2", *play(*STRAY, "@1", "exit=5", "@*", "wait")]
    command = infini_run("--nproc_per_node=2", *inner)
    assert command.wait() == 5
    assert not marked()


def test_what_a_killed_nested_launcher_left_is_swept_by_the_outer_one(infini_run, every_path):
    inner = [*COMMAND, "--nproc_per_node=2", *play(*STUBBORN, "say=ready", "wait")]
    command = infini_run("--grace=0.2", *inner)
    strays = strays_of(command, 2)
    ranks = command.read_lines(b"ready", 2)
    (launcher,) = [pid for pid, (parent, _, name) in processes().items() if parent == command.pid and name != GUARD]
    os.kill(launcher, signal.SIGKILL)
    assert command.wait() == 137
    assert GUARD.encode() not in command.err
    assert not any(is_alive(pid) for pid in [*strays, *(int(words[-1]) for words in ranks)])


# ---- our own end


def test_a_stray_that_has_the_name_of_a_guard_is_killed_when_the_launcher_was(infini_run):
    """Not at once: it might be one that is still to be executed."""
    command = infini_run(*play("daemon", f"name={GUARD}", *STRAY[2:], "say=ready", "wait"))
    (stray,) = strays_of(command)
    command.pids_of(b"ready", 1)
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    until(lambda: not is_alive(stray))


# ---- a rank that somebody traces


# ---- in a library


@pytest.fixture
def host_children():
    """Children of a host program: one that lives, one that has ended and was not waited for."""
    lives = subprocess.Popen(["sleep", "1000"])
    ended = subprocess.Popen(["sh", "-c", "exit 7"])
    until(lambda: state_of(ended.pid) == "Z")
    yield lives, ended
    lives.kill()
    lives.wait()
    ended.wait()


@pytest.mark.parametrize("stray", [STRAY, STUBBORN], ids=["meek", "stubborn"])
def test_library_ends_strays_and_leaves_the_hosts_children_alone(host_children, tmp_path, stray, every_path):
    lives, ended = host_children
    command = play(*stray, "say=ready", "exit=0")
    report = ir.run(
        command, nproc_per_node=2, grace=0.2, log_dir=tmp_path, console="none", env={**os.environ, "A": "b"}
    )
    pids = [int(line.split()[-1]) for path in tmp_path.glob("*.log") for line in path.read_text().splitlines()]
    assert len(pids) == 4
    assert not any(map(is_alive, pids))
    assert sorted(stray.name for stray in report.leftover_processes) == ["left-behind"] * 2
    assert state_of(lives.pid) == "S"
    assert state_of(ended.pid) == "Z"
    assert ended.wait() == 7


def test_library_ends_strays_after_a_failure(host_children, tmp_path, every_path):
    before = children().keys()
    with pytest.raises(ir.WorkerError) as caught:
        ir.run(play(*STUBBORN, "@1", "exit=3", "@*", "wait"), nproc_per_node=2, grace=0.2)
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)
    assert children().keys() == before


HOST = """
import sys
import infini_run as ir
with ir.ProcessLauncher(sys.argv[1:], nproc_per_node=1, grace=0) as launcher:
    launcher.launch()
    sys.stdin.read()
    launcher.kill()
print("closed", flush=True)
"""


@with_strace
def test_a_library_leaves_the_inner_guard_to_its_work_before_that_is_executed(tmp_path):
    """Guards are executed late, as on a busy machine. Only the inner one knows the strays of inner ranks."""
    guard = Path(ir.__file__).parent / GUARD
    slow = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(guard), "-e", "trace=execve"]
    slow += ["-e", "inject=execve:delay_enter=2000000"]
    inner = [*COMMAND, f"--log_dir={tmp_path}", "--console=none", *play(*STUBBORN, "say=ready", "wait")]
    host = subprocess.Popen(
        [*slow, sys.executable, "-c", HOST, *inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        log = tmp_path / "rank_0.log"
        until(lambda: log.exists() and b"ready" in log.read_bytes() and b"stray" in log.read_bytes())
        is_early = GUARD in marked().values()  # one that is executed has no environment
        host.stdin.close()
        assert host.stdout.readline() == b"closed\n"
        until(lambda: not any(name == "left-behind" for name in marked().values()))
        assert host.wait(LIMIT_S) == 0
    finally:
        host.stdin.close()
        host.kill()
        host.wait()
        host.stdout.close()
    if not is_early:
        pytest.skip("the ranks needed longer than the inner guard")


def test_a_library_kills_a_stray_that_has_the_name_of_a_guard(tmp_path):
    words = play("daemon", f"name={GUARD}", *STRAY[2:], "say=ready", "wait")
    log = tmp_path / "rank_0.log"
    with ir.ProcessLauncher(words, nproc_per_node=1, grace=0, console="none", log_dir=tmp_path) as launcher:
        launcher.launch()
        until(lambda: not launcher.wait(0.01) and b"stray" in log.read_bytes())
        launcher.kill()
    until(lambda: not marked())


def test_children_of_a_foreign_child_are_not_touched(tmp_path):
    """They come to us when it ends, and were there before our first rank."""
    inner = f"sleep 1000 & echo $! > {tmp_path}/pid; until test -e {tmp_path}/go; do :; done"
    outer = f"(sh -c '{inner}' & ) ; until test -s {tmp_path}/pid; do :; done; exec {shlex.join(COMMAND)} "
    outer += f"sh -c 'echo > {tmp_path}/go; sleep 0.2'"
    subprocess.run(["sh", "-c", outer], check=True, stdin=subprocess.DEVNULL)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)  # it is there


def test_a_proc_of_another_pid_namespace_names_nobody(tmp_path):
    """unshare --pid without --mount-proc: its numbers are other processes'. Ours are our children."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    bystanders = [subprocess.Popen(["sleep", "1000"]) for _ in range(8)]
    try:
        words = ["unshare", "--pid", "--fork", *COMMAND, "--grace=1", "sh", "-c", "setsid sleep 1000 & exit 0"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        assert done.returncode == 0
        assert b"left behind: ? (3)" in done.stderr
        assert all(bystander.poll() is None for bystander in bystanders)
    finally:
        for bystander in bystanders:
            bystander.kill()
            bystander.wait()


def test_a_rank_that_left_its_group_is_stopped_all_the_same(infini_run):
    leave = "import os, time; os.setpgid(0, os.getpgid(os.getppid())); print('ready', flush=True); time.sleep(1000)"
    command = infini_run(sys.executable, "-c", leave)
    command.read_until(b"ready")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
