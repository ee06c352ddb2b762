"""The Python API beside what else lives in its process: threads, an event loop, handlers, other children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import infini_run as ir
from tests.support.command import Command
from tests.support.processes import marked
from tests.support.waiting import LIMIT_S, until

IDLE = 'echo "$RANK" > "$0"; exec sleep 600'


def in_thread(function):
    """What `function` returns in a thread of its own that has ended."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(LIMIT_S)
    assert results, "the thread failed or hangs"
    return results[0]


@pytest.fixture
def host(tmp_path):
    """Run Python text in a process of its own, as a host program would."""
    started = []

    def start(text, *words, **kwargs):
        started.append(Command([sys.executable, "-c", textwrap.dedent(text), *words], **kwargs))
        return started[-1]

    yield start
    for command in started:
        command.close()


# ---- threads


DROPPED = {
    "launcher": "one = ir.ProcessLauncher(['sleep', '600']); one.launch()",
    "pool": "one = ir.Pool(nproc=1, preload=['fractions'])",
    "crew": "one = ir.Crew(print, nproc=1)",
}


@pytest.mark.parametrize("make", DROPPED.values(), ids=DROPPED)
def test_collection_waits_for_no_fork_of_another_thread(make, host):
    """A hook older than infini-run's waits in the fork for a lock of the thread that collects, as logging's does."""
    program = f"""
        import gc, os, threading

        lock, is_forking, is_held = threading.RLock(), threading.Event(), threading.Event()
        os.register_at_fork(
            before=lambda: (is_forking.set(), lock.acquire()),
            after_in_parent=lock.release,
            after_in_child=lock.release,
        )
        import infini_run as ir

        def drop():
            {make}
            one.itself = one

        def collect():
            with lock:
                is_held.set()
                is_forking.wait()
                gc.collect()

        gc.disable()
        drop()
        thread = threading.Thread(target=collect)
        thread.start()
        is_held.wait()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        thread.join()
    """
    program = host(program)
    assert program.wait(LIMIT_S / 4) == 0
    until(lambda: marked() == {})


def test_a_thread_can_run_a_launch():
    assert in_thread(lambda: ir.run(["true"], nproc_per_node=2).exit_code) == 0


def test_several_threads_launch_at_once_and_each_gets_its_own_end():
    def launch(code):
        report = ir.run(["sh", "-c", f"exit {code}"], nproc_per_node=2, check=False, keep_going=True)
        ends[code] = [e.code for e in report.exits]

    ends = {}
    threads = [threading.Thread(target=launch, args=(code,)) for code in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert ends == {code: [code, code] for code in range(8)}


def test_ranks_outlive_the_thread_that_launched_them(tmp_path, bell):
    os.mkfifo(tmp_path / "go")
    script = 'echo up > "$0"; read code < "$1"; exit "$code"'
    with ir.ProcessLauncher(["sh", "-c", script, bell.path, f"{tmp_path}/go"]) as launcher:
        thread_id = in_thread(lambda: (launcher.launch(), bell.hear(1), threading.get_native_id()))[2]
        until(lambda: str(thread_id) not in os.listdir("/proc/self/task"))
        assert launcher.running()
        (tmp_path / "go").write_text("5\n")
        assert launcher.wait()
        assert launcher.exit_code(0) == 5


def test_one_thread_waits_while_another_stops(bell):
    with ir.ProcessLauncher(["sh", "-c", IDLE, bell.path], nproc_per_node=2) as launcher:
        launcher.launch()
        waited = []
        threads = [threading.Thread(target=lambda: waited.append(launcher.wait())) for _ in range(3)]
        for thread in threads:
            thread.start()
        bell.hear(2)
        launcher.terminate()
        for thread in threads:
            thread.join(LIMIT_S)
        assert waited == [True] * 3


def test_one_thread_waits_for_events_while_another_closes(bell):
    def follow():
        while more := launcher.events():
            kinds.extend(event.kind for event in more)
        done.append(True)

    kinds, done = [], []
    launcher = ir.ProcessLauncher(["sh", "-c", IDLE, bell.path])
    launcher.launch()
    thread = threading.Thread(target=follow)
    thread.start()
    bell.hear(1)
    launcher.close()
    thread.join(LIMIT_S)
    assert done == [True]
    assert set(kinds) <= {"started", "exited", "ended"}


def ask_all_at_once(launcher):
    """What each of some questions, asked by a thread of its own, was answered."""
    answers = []
    asked = [launcher.wait, launcher.status, lambda: launcher.signal(0), launcher.close, launcher.report]
    threads = [threading.Thread(target=lambda ask=ask: answers.append(ask())) for ask in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return len(asked) - len(answers)


def test_closing_while_others_ask_is_safe_every_time():
    for _ in range(30):
        launcher = ir.ProcessLauncher(["true"])
        launcher.launch()
        assert ask_all_at_once(launcher) == 0
        assert launcher.exit_code(0) is not None


def test_an_event_loop_goes_on_while_a_launch_runs_in_a_thread(bell):
    async def main():
        running = asyncio.create_task(
            asyncio.to_thread(
                ir.run, ["sh", "-c", 'echo up > "$0"; read x < "$0.go"; exit 4', bell.path], check=False
            )
        )
        await asyncio.to_thread(bell.hear, 1)
        assert not running.done()
        await asyncio.to_thread(Path(bell.path + ".go").write_text, "")
        return await running

    os.mkfifo(bell.path + ".go")
    assert asyncio.run(main()).exits[0].code == 4


def test_two_launchers_do_not_hear_of_each_other(bell):
    with (
        ir.ProcessLauncher(["sh", "-c", IDLE, bell.path]) as one,
        ir.ProcessLauncher(["sh", "-c", IDLE, bell.path]) as other,
    ):
        one.launch()
        other.launch()
        bell.hear(2)
        one.kill()
        one.wait()
        assert one.exit_code(0) == 137
        assert other.exit_code(0) is None
        assert [event.kind for event in other.events()] == ["started"]


# ---- the host's own children, handlers, streams


def test_the_hosts_own_children_are_neither_reaped_nor_signalled(bell):
    ended = subprocess.Popen(["sh", "-c", "exit 7"])
    living = subprocess.Popen(["sh", "-c", 'echo host > "$0"; exec sleep 600', bell.path])
    try:
        assert bell.hear(1) == ["host"]
        ir.run(["true"], nproc_per_node=3)
        with ir.ProcessLauncher(["sh", "-c", IDLE, bell.path], grace=0) as launcher:
            launcher.launch()
            bell.hear(1)
            launcher.signal(signal.SIGUSR1)
            launcher.kill()
            launcher.wait()
        assert ended.wait() == 7
        assert living.poll() is None
    finally:
        living.terminate()
        assert living.wait() == -signal.SIGTERM


def test_the_hosts_handlers_and_mask_stay_as_they_are(bell):
    def state():
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        status = Path("/proc/self/status").read_text().splitlines()
        return handlers, [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]

    before = state()
    with ir.ProcessLauncher(["sh", "-c", IDLE, bell.path], nproc_per_node=2) as launcher:
        launcher.launch()
        bell.hear(2)
        assert state() == before
    assert state() == before


def test_the_hosts_directory_limits_and_environment_stay_as_they_are(tmp_path):
    import resource

    before = os.getcwd(), dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o22)
    ir.run(["true"], nproc_per_node=2, log_dir=tmp_path, cwd=tmp_path)
    assert (os.getcwd(), dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o22)) == before
    os.umask(before[3])


def test_a_host_that_ignores_sigchld_still_learns_of_the_end(host):
    text = """
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        import infini_run as ir
        report = ir.run(["sh", "-c", "exit 3"], check=False)
        print(report.exits[0].status_lost, report.exits[0].is_failure)
    """
    command = host(text)
    assert command.wait() == 0, command.err
    assert command.out == b"True True\n"  # the kernel gave the code to nobody: told as it is, not as success


def test_a_notebook_can_launch(host, tmp_path):
    text = """
        import io, sys
        out = sys.stdout = io.StringIO()
        sys.stderr = io.StringIO()
        import infini_run as ir
        for _ in range(2):
            report = ir.run(["sh", "-c", "read x; echo out $RANK"], nproc_per_node=2, check=False, console="prefix")
            assert [e.code for e in report.exits] == [0, 0], report
        try:
            ir.launch_local("false", 2, log_dir=sys.argv[1])
        except ir.WorkerError as error:
            assert error.exit_code == 1
        assert out.getvalue() == ""
        sys.__stdout__.write("done\\n")
    """
    command = host(text, f"{tmp_path}/logs")
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert sorted(lines) == ["[rank 0] out 0"] * 2 + ["[rank 1] out 1"] * 2 + ["done"]


# ---- the host's end


WATCHING = """
    import sys, threading
    import infini_run as ir

    command = ["sh", "-c", 'echo $RANK > "$0"; exec sleep 600', sys.argv[1]]
    how = sys.argv[2]
    launcher = ir.ProcessLauncher(command, nproc_per_node=2)
    try:
        if how == "run":
            ir.run(command, nproc_per_node=2)
        with launcher:
            launcher.launch()
            while how == "events":
                launcher.events()
            launcher.wait()
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("how", ["run", "wait", "events"])
def test_ctrl_c_while_waiting_stops_every_rank(how, host, bell):
    command = host(WATCHING, bell.path, how)
    bell.hear(2)
    command.signal(signal.SIGINT)
    assert command.wait() == 0, command.err
    assert command.out == b"interrupted\n"
    assert marked() == {}


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "sys.exit(3)"])
def test_a_host_that_ends_without_closing_leaves_no_rank(end, host, bell):
    text = f"""
        import os, sys
        import infini_run as ir
        command = ["sh", "-c", 'echo $RANK > "$0"; exec sleep 600', sys.argv[1]]
        launcher = ir.ProcessLauncher(command, nproc_per_node=2)
        launcher.launch()
        sys.stdin.read()
        {end}
    """
    command = host(text, bell.path, stdin=subprocess.PIPE)
    bell.hear(2)
    assert command.wait() in (3, -9)
    until(lambda: marked() == {})
