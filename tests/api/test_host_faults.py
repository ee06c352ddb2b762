"""A library in a host program that is process 1, reaps our ranks, forks while we start them, or dies of SIGPIPE."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.command import CHILDREN, Command
from tests.support.launch_shapes import UNSHARE, as_root
from tests.support.paths import ROOT

UNDER_PYTHON = [*shlex.split(os.environ.get("TEST_PYTHON", sys.executable)), "-c"]


@pytest.fixture
def host():
    """Run Python text in a process of its own, as a host program would, behind the words `under`."""
    started = []

    def start(text, *words, under=(), **kwargs):
        argv = [*under, *UNDER_PYTHON, textwrap.dedent(text), *map(str, words)]
        started.append(Command(argv, **kwargs))
        return started[-1]

    yield start
    for command in started:
        command.close()


def run_host(host, text, *words, **kwargs):
    """To its end, which is a good one; what it wrote."""
    command = host(text, *words, **kwargs)
    assert command.wait() == 0, (command.out + command.err).decode()
    return command.out.decode()


# ---- the host is process 1 of its container


PROCESS_1 = """
    import os, subprocess, sys
    import infini_run as ir

    assert os.getpid() == 1
    own = subprocess.Popen(["sleep", "600"])
    up, says = os.pipe()
    os.set_inheritable(says, True)
    with ir.ProcessLauncher(["sleep", "600"], grace=0) as other:
        other.launch()
        report = ir.run(["sh", "-c", "setsid sleep 200 & exit 0"], grace=0.5)
        assert report.leftover_count == 1, report
        kids = open("/proc/self/task/1/children").read().split()
        print(*(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] for pid in kids))
        with ir.ProcessLauncher(["sh", "-c", f"sleep 200 & echo up >&{says}; wait"]) as killed:
            killed.launch()
            os.read(up, 3)
            killed.kill()
            killed.wait()
        assert own.poll() is None, "the host's own child was signalled"
        assert other.running(), "another launch's rank was signalled"
    own.kill()
    own.wait()
"""


@as_root
@pytest.mark.root
@pytest.mark.parametrize("path", ["", "fork,oldpidfd"])
def test_a_host_that_is_process_1_keeps_its_children_and_its_other_launches(path, host, tmp_path, monkeypatch):
    monkeypatch.setenv("INFINI_RUN_DEBUG", path)
    said = run_host(host, PROCESS_1, tmp_path, under=UNSHARE)
    if not path:  # a stray that came to the host is reaped, where that can be done for it alone
        assert "Z" not in said, said


@as_root
@pytest.mark.root
def test_a_process_that_was_brought_into_the_container_and_has_our_variables_is_no_stray(host, tmp_path):
    """docker exec, nsenter: its parent is outside of the PID namespace, and there shows as 0."""
    text = """
        import os, sys
        import infini_run as ir
        script = 'echo id $INFINI_RUN_ID; read x; setsid sleep 200 & exit 0'
        launcher = ir.ProcessLauncher(["sh", "-c", script], stdin=0, grace=0.5)
        launcher.launch()
        launcher.wait()
        print("strays", len(launcher.report().leftover_processes), flush=True)
        sys.stdin.read()
        launcher.close()
    """
    command = host(text, under=UNSHARE, stdin=subprocess.PIPE)
    mark = command.read_lines(b"id")[0][1]
    (inside,) = [int(pid) for pid in children_of(command.pid)]
    words = ["nsenter", f"--target={inside}", "--pid", "--mount", "env", f"INFINI_RUN_ID={mark}", "sleep", "600"]
    visitor = subprocess.Popen(words)
    try:
        command.process.stdin.write(b"\n")
        command.process.stdin.flush()
        assert command.read_lines(b"strays")[0][1] == "1"
        assert visitor.poll() is None
    finally:
        visitor.kill()
        visitor.wait()
    command.process.stdin.close()
    command.process.stdin = None
    assert command.wait() == 0, command.err


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


# ---- the host reaps what is ours, and another process has the number


REAP = """
    def reap():
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                os.sched_yield()
"""
STRANGER = """
    import os, signal, subprocess, sys, threading, time
    import infini_run as ir

    how, taker = sys.argv[1], sys.argv[2:]
    gate, opened = os.pipe()
    go, went = os.pipe()
    os.set_inheritable(gate, True)
    os.set_inheritable(go, True)
    process = subprocess.Popen([*taker, str(gate)], close_fds=False, stdout=subprocess.PIPE, text=True)
    if how == "ignores":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        threading.Thread(target=reap, daemon=True).start()
    script = f"read x <&{go}; exit 0"
    launcher = ir.ProcessLauncher(["sh", "-c", script], grace=0)
    launcher.launch()
    (rank,) = launcher.status()
    os.write(went, b"\\n")
    while os.path.exists(f"/proc/{rank.pid}"):
        os.sched_yield()
    os.write(opened, str(rank.pid).encode())
    assert process.stdout.readline().split() == ["taken", "-1", str(rank.pid)]
    launcher.signal(signal.SIGUSR1)
    launcher.signal(signal.SIGUSR1, rank=0)
    launcher.terminate()  # grace=0: SIGKILL to its group
    launcher.kill()
    launcher.wait()
    os.kill(rank.pid, signal.SIGHUP)
    print(process.stdout.readline().split()[0], flush=True)
    os.kill(rank.pid, signal.SIGKILL)
    os._exit(0)
"""
TAKER = [sys.executable, "-ISE", CHILDREN / "take_number.py"]


@as_root
@pytest.mark.root
@pytest.mark.parametrize(
    ("path", "how"),
    [("", "ignores"), ("", "reaps"), ("oldpidfd", "ignores"), ("oldpidfd", "reaps"), ("fork,nopidfd", "ignores")],
)
def test_who_has_taken_the_number_of_a_rank_gets_no_signal_of_ours(path, how, host, monkeypatch):
    monkeypatch.setenv("INFINI_RUN_DEBUG", path)
    assert run_host(host, f"    import os{REAP}{STRANGER}", how, *TAKER, under=UNSHARE) == "SIGHUP\n"


@as_root
@pytest.mark.root
def test_the_status_of_the_hosts_own_child_with_the_number_of_a_rank_stays_the_hosts(host):
    text = """
        import os
        import infini_run as ir
        go, went = os.pipe()
        os.set_inheritable(go, True)
        launcher = ir.ProcessLauncher(["sh", "-c", f"read x <&{go}"], grace=0)
        launcher.launch()
        (rank,) = launcher.status()
        os.write(went, b"\\n")
        assert os.waitpid(rank.pid, 0)[0] == rank.pid
        pid = 0
        while pid != rank.pid:
            with open("/proc/sys/kernel/ns_last_pid", "w") as file:
                file.write(str(rank.pid - 1))
            pid = os.fork()
            if pid == 0:
                os._exit(7)
            if pid != rank.pid:
                os.waitpid(pid, 0)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        launcher.wait()
        assert launcher.report().exits[0].status_lost
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        launcher.close()
    """
    assert run_host(host, text, under=UNSHARE) == "7\n"


@pytest.mark.parametrize("path", ["", "oldpidfd", "fork,nopidfd"])
def test_a_group_is_stopped_though_the_host_has_reaped_its_leader(path, host, bell, monkeypatch):
    """The rank that fails takes the others down, also what is left of one that had ended."""
    monkeypatch.setenv("INFINI_RUN_DEBUG", path)
    text = """
        import os, signal, sys
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        import infini_run as ir
        script = '''
            if [ $RANK != 0 ]; then sleep 600; fi
            (trap 'echo told > "$0"; exit' TERM; echo up > "$0"; while :; do sleep 0.01; done) &'''
        with ir.ProcessLauncher(["sh", "-c", script, sys.argv[1]], nproc_per_node=2, keep_going=True) as launcher:
            launcher.launch()
            sys.stdin.readline()
            launcher.terminate()
            launcher.wait()
    """
    command = host(text, bell.path, stdin=subprocess.PIPE)
    assert bell.hear(1)[0].startswith("up")
    command.process.stdin.write(b"\n")
    command.process.stdin.flush()
    assert bell.hear(1) == ["told"]
    assert command.wait() == 0, command.err


SSH_ENDS = """
    import signal, sys, threading
    import infini_run as ir
    if sys.argv[1].startswith("ignores"):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        threading.Thread(target=reap, daemon=True).start()
    try:
        ir.run(["true"], hosts=["a"])
    except ir.NodeLost as error:
        print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("reaps", ["ignores SIGCHLD", "waits for every child"])
def test_an_ssh_whose_code_the_host_took_is_told_by_its_words(reaps, host, tmp_path, monkeypatch):
    """Not as one that "ended with 0"; and it is tried again, as where the code is known."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"""#!/bin/sh
        if [ -e {tmp_path}/tried ]; then echo 'Permission denied (publickey).' >&2
        else : > {tmp_path}/tried; echo 'kex_exchange_identification: Connection closed' >&2; fi
        exit 255""")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = run_host(host, f"    import os{REAP}{SSH_ENDS}", reaps)
    assert " exited with 0" not in said
    assert "Permission denied (publickey).; it accepts none of your keys" in said


# ---- the host forks while ranks are started


FORKS = """
    import os, sys, threading
    import infini_run as ir

    hold, _ = os.pipe()
    def fork():
        while not stop:
            pid = os.fork()
            if pid == 0:
                os.read(hold, 1)
                os._exit(0)
            pids.append(pid)
            os.sched_yield()
    stop, pids = [], []
    thread = threading.Thread(target=fork)
    thread.start()
    with ir.ProcessLauncher(["cat"], nproc_per_node=32, stdin="all", log_dir=sys.argv[1], grace=0) as launcher:
        launcher.launch()
        stop.append(1)
        thread.join()
        ended = launcher.wait(20)
        launcher.kill()
        launcher.wait()
        held = [text for text in launcher.report().notices if "open" in text]
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    print("ended" if ended else "hangs", len(held), len(pids) > 0)
"""


# Its first hook has run before ours is there; it goes on when some of the ranks have been started. Unless the child
# goes on, too, the ranks' input does not end.
HAS_BEGUN_TO_FORK = """
    import os, sys, threading, time
    import infini_run as ir

    begun, main, seen, pids = threading.Event(), threading.main_thread(), [], []
    stdin, typing = os.pipe()
    os.dup2(stdin, 0)
    os.close(stdin)
    def wait():
        if threading.current_thread() is main or seen:
            return
        begun.set()
        children = f"/proc/self/task/{main.native_id}/children"
        while not seen or seen[-1] < 3:
            seen.append(len(open(children).read().split()))
    def fork():
        pids.append(os.fork())
        if pids == [0]:
            os.close(typing)
            if os.fork() == 0:
                os._exit(0)
            time.sleep(600)
    os.register_at_fork(before=wait)
    thread = threading.Thread(target=fork, daemon=True)
    thread.start()
    begun.wait()
    assert "infini_run.core.group" not in sys.modules
    with ir.ProcessLauncher(["cat"], nproc_per_node=64, stdin="all", log_dir=sys.argv[1], grace=0) as launcher:
        launcher.launch()
        thread.join()
        os.close(typing)
        print("ended" if launcher.wait(20) else "hangs", seen[-1])
        launcher.kill()
    os.kill(pids[0], 9)
    os.waitpid(pids[0], 0)
"""


@pytest.mark.parametrize("path", ["", "fork,nopidfd"])
def test_a_fork_that_has_begun_before_our_hook_waits_for_the_end_of_the_start(path, host, tmp_path, monkeypatch):
    monkeypatch.setenv("INFINI_RUN_DEBUG", path)
    ended, started = run_host(host, HAS_BEGUN_TO_FORK, tmp_path).split()
    assert ended == "ended"
    if int(started) > 64:  # and the guard
        pytest.skip("all ranks had been started before the fork had a turn")


@pytest.mark.parametrize("path", ["", "fork,nopidfd"])
def test_a_child_that_is_forked_while_ranks_are_started_holds_no_pipe_of_theirs(path, host, tmp_path, monkeypatch):
    monkeypatch.setenv("INFINI_RUN_DEBUG", path)
    assert run_host(host, FORKS, tmp_path) == "ended 0 True\n"


# ---- on many hosts: a fake ssh runs the agent here


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    """An `ssh` that runs on this machine what it is to run elsewhere: its last word."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text('#!/bin/sh\nfor word; do :; done\nexec sh -c "$word"\n')
    (folder / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


NODES = f"remote_python={sys.executable!r}"


STARTS = {
    "hosts": f"""
        command = ["sh", "-c", "exit 0"]
        ir.run(command, hosts=["one", "other"], rdzv_endpoint="127.0.0.1:29500", {NODES})
    """,
    "a crew": """
        ir.Launcher(nproc_per_node=4).run(os.getpid)
    """,
    "a zygote": """
        for _ in range(8):
            ir.Launcher(nproc_per_node=2, preload=["fractions"]).run(os.getpid)
    """,
}


FORKING = """
import os, threading
import infini_run as ir

def is_link(fd):
    path = f"/proc/self/fd/{fd}"
    return int(fd) > 2 and os.path.exists(path) and os.readlink(path).startswith(("socket:", "pipe:"))

def fork():
    while not stop:
        pid = os.fork()
        if pid == 0:
            os._exit(any(map(is_link, os.listdir("/proc/self/fd"))))
        held.append(os.waitpid(pid, 0)[1])
stop, held = [], []
ir.run, ir.Launcher  # imported: a fork that has begun before knows nothing of us
thread = threading.Thread(target=fork)
thread.start()
"""
HELD = """
stop.append(1)
thread.join()
print(sum(map(bool, held)), len(held) > 0)
"""


@pytest.mark.parametrize("start", STARTS)
def test_a_child_that_is_forked_while_a_launch_goes_on_has_no_link_of_it(start, host, fake_ssh):
    assert run_host(host, FORKING + textwrap.dedent(STARTS[start]) + HELD) == "0 True\n"


LEFT = """
import os, resource, sys
import infini_run as ir

def descriptors():
    return sorted(os.listdir("/proc/self/fd"))

def launch():
    try:
        ir.run(["true"], hosts=["one"], rdzv_endpoint="127.0.0.1:29500", events="/dev/null")
    except ir.InfiniRunError:
        return

ir.run  # imported: so are the modules of it
before = descriptors()
"""
FAILING = {
    "directory": """
        os.rmdir(os.getcwd())
        launch()
    """,
    "descriptors": """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        launch()  # it imports the rest
        for limit in range(len(before), len(before) + 24):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            launch()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    """,
}


@pytest.mark.parametrize("how", FAILING)
def test_failed_start_of_launch_on_hosts_leaves_no_descriptor(how, host, tmp_path, fake_ssh, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = LEFT + textwrap.dedent(FAILING[how]) + "print(descriptors() == before)"
    assert run_host(host, text) == "True\n"


BLOCK = """
import ctypes, mmap

libc, low, size = ctypes.CDLL(None), 0x10000000, 64 << 20
libc.mmap.restype = ctypes.c_void_p
MAP_FIXED_NOREPLACE, MADV_NOHUGEPAGE = 0x100000, 15
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
sizes = ctypes.c_void_p(low), ctypes.c_size_t(size)
assert libc.mmap(*sizes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)) == low
assert libc.madvise(*sizes, MADV_NOHUGEPAGE) in (0, -1)  # -1: this kernel has no huge pages
ctypes.memset(low, 1, size)
"""
LAUNCHES = """
for _ in range({count}):
    ir.run(["sh", "-c", "exit 0"], nproc_per_node={nproc})
"""
LISTS = """
import os
from infini_run.control.launches import find_launches
os.fork(), os.fork()
while True:
    find_launches(os.environ)
"""


def test_a_child_that_is_forked_while_a_launch_ends_closes_what_was_closed_just_then(host):
    """The kernel copies descriptors before memory. A large block low in memory makes that take long, so that much is
    closed between the two."""
    assert run_host(host, BLOCK + FORKING + LAUNCHES.format(count=100, nproc=16) + HELD) == "0 True\n"


def test_a_child_that_is_forked_while_somebody_lists_launches_has_no_connection(host):
    """`--list` would wait for the end of that."""
    with subprocess.Popen([sys.executable, "-c", LISTS], start_new_session=True) as lists:
        try:
            assert run_host(host, BLOCK + FORKING + LAUNCHES.format(count=40, nproc=16) + HELD) == "0 True\n"
        finally:
            os.killpg(lists.pid, signal.SIGKILL)


def test_an_exception_of_a_signal_during_a_fork_holds_up_no_launch(host):
    """It comes in the first hook in Python after the fork."""
    text = """
    import functools, os, signal, sys, threading
    os.register_at_fork(before=functools.partial(signal.setitimer, signal.ITIMER_REAL, 1e-6))
    import infini_run as ir

    def leave(*given):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, leave)
    raised = []
    sys.unraisablehook = raised.append
    ir.run(["true"])
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
    finally:
        os.waitpid(pid, 0)
    thread = threading.Thread(target=ir.run, args=(["true"],), daemon=True)
    thread.start()
    thread.join(20)
    print(len(raised), thread.is_alive(), flush=True)
    os._exit(0)  # a thread that waits for ever is not waited for
    """
    assert run_host(host, text) == "1 False\n"


PROFILED = """
import os, sys, threading
import infini_run as ir

codes = []

def fork_at(is_place):
    \"\"\"Fork there, as the handler of a signal may that comes just then.\"\"\"
    def profile(frame, event, given):
        if is_place(frame, event, given):
            sys.setprofile(None)
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            codes.append(os.waitpid(pid, 0)[1])
            sys.setprofile(profile)
    sys.setprofile(profile)
"""


def test_a_child_that_is_forked_by_a_signals_handler_just_after_a_launch_was_freed_does_not_free_it_again(host):
    text = """
    fork_at(lambda frame, event, given: event == "c_return" and "group_free" in given.__name__)
    ir.run(["true"])
    sys.setprofile(None)
    print(codes)
    """
    assert run_host(host, PROFILED + textwrap.dedent(text)) == "[0]\n"


def test_an_exception_of_a_signal_while_a_fork_waits_leaves_the_lock_of_forks_as_it_was(host):
    text = """
    import signal, time
    ir.run(["true"])
    from infini_run.core.group import _forkers, forking
    raised = []
    sys.unraisablehook = lambda given: raised.append(given.exc_type.__name__)
    held, done = threading.Event(), threading.Event()
    def leave(*given):
        raise KeyboardInterrupt
    def hold():
        with forking:
            held.set()
            while not _forkers:  # nothing else tells that it waits
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            done.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    signal.signal(signal.SIGALRM, leave)
    pid = os.fork()
    if pid == 0:
        os._exit(not forking.acquire(timeout=20))
    codes.append(os.waitpid(pid, 0)[1])
    done.set()
    thread.join()
    print(raised, codes, _forkers, forking._is_owned(), forking.acquire(timeout=20))
    """
    assert run_host(host, PROFILED + textwrap.dedent(text)) == "['KeyboardInterrupt'] [0] [] False True\n"


def test_a_fork_of_a_signals_handler_within_a_fork_leaves_the_lock_of_forks_as_it_was(host):
    """At each step of the hooks that take the lock and give it back."""
    text = """
    ir.run(["true"])
    from infini_run.core.group import _begin_fork, _end_fork, _forkers, forking
    raised = []
    sys.unraisablehook = raised.append
    places = (_begin_fork.__code__, _end_fork.__code__)
    fork_at(lambda frame, event, given: frame.f_code in places)
    pid = os.fork()
    sys.setprofile(None)
    if pid == 0:
        os._exit(len(_forkers))
    codes.append(os.waitpid(pid, 0)[1])
    thread = threading.Thread(target=lambda: print(forking.acquire(timeout=20)))
    thread.start()
    thread.join()
    print(len(codes) > 9, set(codes), len(raised), _forkers)
    """
    assert run_host(host, PROFILED + textwrap.dedent(text)) == "True\nTrue {0} 0 []\n"


INHERITED = """
import asyncio, os, signal, time
import infini_run as ir

def work(ctx, task):
    while not os.path.exists(GATE):
        time.sleep(0.02)
    return task

def in_a_child(use):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            print(use(), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

async def awaited(thing):
    return await thing
"""
USES = {
    "crew": (
        "ir.Crew(work, nproc=1)",
        "ask, results, others = it.ask(1), it.map([2]), it.map([3], ordered=False)",
        ["ask.result()", "asyncio.run(awaited(ask))", "list(results)", "list(others)", "it.ask(1)"],
        "ask.result(), list(results), list(others), it.ask(0).result()",
        ("CrewClosed", "the crew", "(1, [2], [3], 0)"),
    ),
    "pool": (
        "ir.Pool(nproc=1, preload=['fractions'])",
        "",
        ["it.run(len, 'ab')"],
        "list(it.run(len, 'ab'))",
        ("UsageError", "this Pool", "[2]"),
    ),
    "launch": (
        "ir.Launcher(nproc=1).start(work, None, 1)",
        "",
        ["it.result()", "it.wait()", "asyncio.run(awaited(it))"],
        "list(it.result())",
        ("InfiniRunError", "the launch", "[1]"),
    ),
    "processes": (
        "ir.ProcessLauncher(['sh', '-c', f'until [ -e {GATE} ]; do sleep 0.02; done'], nproc=1)",
        "it.launch()",
        ["it.wait()", "it.status()", "it.report()"],
        "it.wait(), it.report().exit_code",
        ("InfiniRunError", "this ProcessLauncher's launch", "(True, 0)"),
    ),
}


@pytest.mark.parametrize("kind", USES)
def test_a_forked_child_is_told_that_what_it_uses_is_its_parents(host, tmp_path, kind):
    """It waits for nothing that only the parent hears of; and the parent's is as it was."""
    make, begin, uses, after, (error, what, result) = USES[kind]
    children = [f"in_a_child(lambda: {use})" for use in uses]
    gate = f"GATE = {str(tmp_path / 'gate')!r}"
    text = "\n".join([INHERITED, gate, f"it = {make}", begin, *children, "open(GATE, 'w').close()"])
    text += f"\nprint(({after}))\nit.close()\n"
    line = f"{error}: {what} belongs to the parent of this forked process; make a new one here\n"
    assert run_host(host, text) == line * len(uses) + result + "\n"


def test_results_that_were_there_before_a_fork_are_there_in_the_child(host):
    text = """
    GATE = "/"
    with ir.Crew(work, nproc=1) as crew, ir.Launcher(nproc=1).start(work, None, 0) as handle:
        results, others, ask = crew.map([1, 2]), crew.map([3], ordered=False), crew.ask(4)
        print(ask.result(), list(handle.result()), flush=True)
        in_a_child(lambda: (ask.result(), list(results), list(others), list(handle.result())))
    """
    assert run_host(host, INHERITED + textwrap.dedent(text)) == "4 [0]\n(4, [1, 2], [3], [0])\n"


CLOSING = """
    import os, socket
    from infini_run import channel
    from infini_run.system import fork_hooks

    def is_open(fd):
        try:
            os.fstat(fd)
        except OSError:
            return False
        return True

    def in_a_child(look):
        pid = os.fork()
        if pid == 0:
            os._exit(look())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_a_socket_that_is_being_closed_while_the_process_forks_is_closed_in_the_child(host):
    """Its object says that it is closed; the system call is yet to come."""
    text = """
    class HalfClosed(socket.socket):
        def close(self):
            self.number = self.detach()
            print(in_a_child(lambda: is_open(self.number)), is_open(self.number))
            os.close(self.number)

    ours, theirs = socket.socketpair()
    half_closed = HalfClosed(fileno=ours.detach())
    fork_hooks.close_link(half_closed)
    taken = socket.socket()  # the host's own, of the same number
    assert taken.fileno() == half_closed.number
    print(in_a_child(lambda: is_open(half_closed.number)))
    """
    assert run_host(host, textwrap.dedent(CLOSING) + textwrap.dedent(text)) == "0 True\n1\n"


def test_what_a_closing_had_not_reached_is_its_owners_to_close_and_ends_no_other_hook(host):
    text = """
    import sys
    failed, parent = [], os.getpid()
    sys.unraisablehook = failed.append

    class Unclosed(socket.socket):
        def close(self):
            if os.getpid() == parent:
                print(in_a_child(look))
            super().close()

    (tx, rx), theirs = channel.pair()
    others = [channel.pair() for _ in range(3)]
    numbers = [side[0].fileno() for pair in (((tx, rx), theirs), *others) for side in pair]
    line = tx._line.sock
    tx._line.sock = Unclosed(fileno=line.detach())
    def look():
        return bool(failed) + 2 * any(map(is_open, numbers))
    tx.close_copy()
    rx.close_copy()
    """
    assert run_host(host, textwrap.dedent(CLOSING) + textwrap.dedent(text)) == "0\n"


def test_a_hook_that_raises_in_a_child_keeps_no_other_from_its_turn(host):
    text = """
    import sys
    failed, had = [], []
    sys.unraisablehook = failed.append

    class Owner:
        def after_fork_in_child(self):
            had.append(self)
            raise RuntimeError("of one owner")

    owners = [Owner() for _ in range(3)]
    for owner in owners:
        fork_hooks.call_in_forked_children(owner)
    print(in_a_child(lambda: 10 * len(had) + len(failed)))
    """
    assert run_host(host, textwrap.dedent(CLOSING) + textwrap.dedent(text)) == "31\n"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_a_child_of_the_host_does_not_hold_up_a_console_that_cannot_be_reopened(host, tmp_path):
    """A pipe of another user: a thread of ours writes to it, which alone uses its descriptors."""
    text = """
        import os, subprocess, sys
        os.seteuid(65534)
        end, pipe = os.pipe()
        os.seteuid(0)
        python = [sys.executable, "-W", "ignore", "-c", sys.argv[1]]  # of a fork beside a thread
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *python]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=pipe, stderr=pipe, cwd="/") as launch:
            os.close(pipe)
            with open(end) as said:
                print(*sorted(said), sep="", end="")
        """
    inner = f"""
        import os, threading
        try:
            os.open("/proc/self/fd/1", os.O_WRONLY)
        except PermissionError:
            os.write(2, b"0 no new opening\\n")
        import infini_run as ir

        def fork():
            with open({str(tmp_path / "up")!r}) as up:
                up.read()
            if os.fork() == 0:
                os.closerange(1, 3)
                os.read(0, 1)  # until the reader has had the end of the output, and has gone
                os._exit(0)
            with open({str(tmp_path / "go")!r}, "w"):
                pass
        os.mkfifo({str(tmp_path / "up")!r})
        os.mkfifo({str(tmp_path / "go")!r})
        thread = threading.Thread(target=fork)
        thread.start()
        ir.run(["sh", "-c", "echo 1 up; : > {tmp_path}/up; : < {tmp_path}/go"], console="prefix", nproc_per_node=1)
        os.write(2, b"2 the launch has ended\\n")
        thread.join()
    """
    said = run_host(host, text, textwrap.dedent(inner))
    assert said == "0 no new opening\n2 the launch has ended\n[rank 0] 1 up\n", said


# ---- the host has left SIGPIPE at its default


WRITERS = {
    "link": """
        from infini_run.multinode.link.connection import Connection
        ours, theirs = socket.socketpair()
        theirs.close()
        wire = Connection(fd := ours.detach(), fd)
        for _ in range(3):
            wire.send(b"x" * 100)
        assert not wire.wants_write
        wire.close()
    """,
    "zygote": """
        from infini_run.crews.spawn.zygote_protocol import MessageSocket, send_with_fds
        ours, theirs = socket.socketpair()
        theirs.close()
        for fds in ((), (0,)):
            try:
                send_with_fds(ours, "message", fds)
            except BrokenPipeError:
                pass
        MessageSocket(ours).send("message")
        ours.close()
    """,
    "console": """
        from infini_run.core.nonblocking_writer import NonblockingWriter
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        outlet = NonblockingWriter(1)
        outlet.write(b"a line")
        assert isinstance(outlet.problem, BrokenPipeError)
        outlet.close()
    """,
    "what we say": """
        from infini_run.node.host_stderr import print_line
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        os.close(reader)
        print_line("a line")
    """,
    "a job's remark": """
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        os.close(reader)
        import tempfile
        with tempfile.TemporaryDirectory() as jobs:
            flags = {"layout": "determined", "gres": False, "tres": True, "slots": 1, "dir": jobs}
            job = ir.submit(["true"], scheduler="local", **flags)
            assert job.wait().code == 0
    """,
    "the exit": """
        crew = ir.Crew(lambda ctx, task: signal.pause(), drain_s=0.1, grace=0.1)
        crew.ask("")
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        os.close(reader)
    """,
    "core": """
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        report = ir.run(["sh", "-c", "echo word; exec cat"], nproc_per_node=2, console="prefix", stdin="all")
        assert report.notices, report
    """,
    "many hosts": f"""
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        os.close(reader)
        report = ir.run(["echo", "word"], hosts=["one", "other"], rdzv_endpoint="127.0.0.1:29500", {NODES})
        assert report.exit_code == 0
    """,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_reader_that_has_gone_does_not_end_a_host_with_sigpipe(writer, host, fake_ssh):
    before = """
        import os, signal, socket
        import infini_run as ir
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    """
    after = """
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set() == signal.sigpending()
    """
    run_host(host, "".join(map(textwrap.dedent, (before, WRITERS[writer], after))))


def test_a_line_of_ours_waits_a_moment_for_a_reader_that_does_not_read(host):
    """The thread that prints it may be about to stop ranks."""
    text = """
        import os
        from infini_run.node.host_stderr import print_line
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(writer, True)
        stderr = os.dup(2)
        os.dup2(writer, 2)
        print_line("a line")
        os.dup2(stderr, 2)
        print_line("another")
    """
    command = host(text)
    assert command.wait() == 0
    assert command.err == b"infini-run: another\n"


def test_a_sigpipe_that_was_pending_before_is_not_taken(host):
    text = """
        import os, signal, threading
        from infini_run.core.quiet_write import write
        reader, writer = os.pipe()
        os.close(reader)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        signal.pthread_kill(threading.get_ident(), signal.SIGPIPE)
        try:
            write(writer, b"x")
        except BrokenPipeError:
            print(signal.SIGPIPE in signal.sigpending())
    """
    assert run_host(host, text) == "True\n"


def test_a_child_that_is_forked_while_another_thread_closes_an_end_waits_for_no_lock(host):
    text = """
        import os, signal, time
        import infini_run as ir

        handle = ir.Launcher(nproc_per_node=1).start(time.sleep, 1000)
        tasks = handle._launch.workers[0].process.tasks
        with tasks._line.lock:  # as a thread has it that is not there in the child
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                tasks.close()
                os._exit(0)
        print(os.waitpid(pid, 0)[1], tasks.closed)
        handle.kill()
        handle.close()
    """
    assert run_host(host, text) == "0 False\n"


def test_handler_reads_events_while_another_thread_waits_for_its_lock(host):
    text = """
        import faulthandler, sys, threading
        import infini_run as ir
        from tests.support.waiting import until

        def is_reading():
            code = sys._current_frames()[thread.ident].f_code
            return code.co_name == "_read" or code.co_filename.endswith("node/launch.py")

        faulthandler.dump_traceback_later(60, exit=True)
        with ir.ProcessLauncher(["sleep", "1000"]) as ranks:
            ranks.launch()
            ranks.events(60)
            with ranks._launch.run.lock:  # as in `status`, where a signal's handler interrupts it
                thread = threading.Thread(target=ranks.events)
                thread.start()
                until(is_reading)
                print(ranks.running())
            ranks.kill()
            thread.join()
    """
    assert run_host(host, text) == "True\n"


def test_a_start_and_a_client_do_not_wait_for_each_others_lock(host):
    """One thread accepts clients while another starts ranks of the same launch again: each needs both locks."""
    text = """
        import contextlib, faulthandler, threading
        import infini_run as ir

        def start_again(group):
            for _ in range(20000):
                with contextlib.suppress(ir.StartError):  # for no workers at all
                    group.part_start((), (), ())

        faulthandler.dump_traceback_later(60, exit=True)
        with ir.ProcessLauncher(["sleep", "1000"]) as ranks:
            ranks.launch()
            launch = ranks._launch.run
            thread = threading.Thread(target=start_again, args=(launch.group,))
            thread.start()
            while thread.is_alive():
                launch._add_clients()
            ranks.kill()
    """
    run_host(host, text)


INTERRUPTED = """
    import gc, os, sys, time
    import infini_run as ir
    from tests.support.waiting import until

    def start(way):
        if way == "run":
            ir.run(["true"])
        elif way == "crew":
            ir.Crew(lambda crew, task: task, nproc=nproc)
        else:
            ir.Launcher(nproc=nproc).run(int)

    way, what, name, nproc, left = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    ir.Launcher(nproc=1).run(int)
    before = set(os.listdir("/proc/self/fd"))

    def interrupt(frame, event, argument):
        global left
        called = frame.f_code.co_name if event == "call" else getattr(argument, "__name__", "")
        if (event, called) == (what, name):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        start(way)
    except KeyboardInterrupt as error:
        print("interrupted")
        sys.last_value = error  # as a notebook keeps it
    sys.setprofile(None)
    gc.collect()

    def is_clean():
        children = open("/proc/self/task/%d/children" % os.getpid()).read()
        return not children and set(os.listdir("/proc/self/fd")) == before

    until(is_clean)
"""


@pytest.mark.parametrize("way", ["function", "crew"])
@pytest.mark.parametrize(
    "where", [("call", "_record_started"), ("call", "exits"), ("call", "is_routine"), ("c_return", "ir_group_new")]
)
def test_an_interrupt_while_workers_start_leaves_nothing(host, way, where):
    assert run_host(host, INTERRUPTED, way, *where, "1", "1", cwd=ROOT) == "interrupted\n"


BETWEEN = [("function", "preassign", "2")]
BETWEEN += [
    (way, *where) for way in ("function", "crew") for where in [("begin", "1"), ("begin", "2"), ("post", "3")]
]


@pytest.mark.parametrize(("way", "name", "count"), BETWEEN)
def test_an_interrupt_between_the_workers_of_a_start_leaves_none(host, way, name, count):
    assert run_host(host, INTERRUPTED, way, "call", name, "3", count, cwd=ROOT) == "interrupted\n"


def test_progress_takes_a_stderr_that_has_no_isatty(host):
    text = """
        import sys
        import infini_run as ir

        class Tee:
            def __init__(self, file):
                self._file = file
            def write(self, text):
                return self._file.write(text)
            def flush(self):
                self._file.flush()

        sys.stderr = Tee(sys.stderr)
        print(list(ir.Launcher(nproc=1, progress=True).run(int)))
    """
    assert run_host(host, text) == "[0]\n"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")
def test_a_signal_to_another_users_process_is_an_error_of_ours(host):
    text = """
        import os, signal
        import infini_run as ir

        ranks, crew = ir.ProcessLauncher(["sleep", "1000"]), ir.Crew(lambda crew, task: task)
        with ranks, crew:
            ranks.launch()
            for owner in (ranks, crew):
                os.setresuid(65534, 65534, 0)  # as if the rank were a setuid program
                try:
                    owner.signal(signal.SIGUSR1, rank=0)
                except ir.InfiniRunError as error:
                    print(error)
                os.setresuid(0, 0, 0)
            ranks.kill()
    """
    assert run_host(host, text) == "the signal cannot be sent: Operation not permitted\n" * 2


CLOSED_IN_HANDLER = """
    import logging, os, signal, threading, time
    import infini_run as ir

    launcher = ir.ProcessLauncher(["sleep", "100"], grace=0)
    launcher.launch()
    signal.signal(signal.SIGUSR1, lambda *_: launcher.close())
    lock, has_begun = logging._lock, threading.Event()  # a hook of logging takes it after ours

    def fork():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    thread = threading.Thread(target=fork)
    from infini_run.core.group import _forkers
    with lock:
        os.register_at_fork(before=has_begun.set)  # the latest hook is the first
        thread.start()
        has_begun.wait()
        while not _forkers:
            time.sleep(0)
        signal.raise_signal(signal.SIGUSR1)
    thread.join()
    print("closed")
"""


def test_handler_closes_launcher_though_fork_waits_for_interrupted_code(host):
    assert run_host(host, CLOSED_IN_HANDLER) == "closed\n"
