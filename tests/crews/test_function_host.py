"""Launcher beside the program that uses it: scripts without a main guard, notebooks, threads, forks, handles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import infini_run as ir
from tests.support.processes import is_alive, marked
from tests.support.waiting import LIMIT_S, until

WAYS = {"exec": (), "fork": ["fractions"]}


@pytest.fixture(params=WAYS)
def preload(request):
    return WAYS[request.param]


def python(*words, text=None, **kwargs):
    done = subprocess.run(
        [sys.executable, *map(str, words)], input=text, capture_output=True, text=True, timeout=LIMIT_S, **kwargs
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SCRIPT = """
import os
import infini_run as ir

os.write(1, b"once\\n")

def work():
    return int(os.environ["RANK"]) + BASE

BASE = 10
os.write(1, f"{list(ir.Launcher(nproc_per_node=2, preload=PRELOAD).run(work))}\\n".encode())  # two may share it
"""


def test_a_script_that_launches_at_its_top_level_runs_once(tmp_path, preload):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("PRELOAD", repr(preload)))
    assert python(script) == ["once", "[10, 11]"]
    ranks = python("-m", "infini_run", "--nproc_per_node=2", script)
    assert sorted(ranks) == ["[10, 11]", "[10, 11]", "once", "once"]
    assert python("-m", "script", cwd=tmp_path) == ["once", "[10, 11]"]


def test_code_of_no_file_runs_as_in_a_notebook(preload):
    text = SCRIPT.replace("PRELOAD", repr(preload))
    assert python("-", text=text) == ["once", "[10, 11]"]
    assert python("-c", text) == ["once", "[10, 11]"]
    assert python("-c", f"exec(compile({text!r}, '<ipython-input-1>', 'exec'))") == ["once", "[10, 11]"]


def test_a_module_that_launches_when_it_is_imported_is_one_error_and_no_flood(tmp_path, preload):
    (tmp_path / "eager.py").write_text(SCRIPT.replace("PRELOAD", repr(preload)))
    code = """
        import infini_run as ir
        try:
            import eager
        except ir.UsageError as error:
            print(error)
    """
    lines = python("-c", textwrap.dedent(code), cwd=tmp_path)
    assert "a worker imports your module, which launches workers or submits a job" in lines[-1]
    assert len(lines) <= 4


def test_a_launch_that_nobody_waits_for_is_finished_before_the_program_ends(preload, bell):
    code = f"""
        import os, time, infini_run as ir
        def ring(bell, text):
            with open(bell, "w") as file:
                file.write(text + "\\n")
        def work(bell):
            ring(bell, str(os.getpid()))
            time.sleep(1)
            ring(bell, "done")
        handle = ir.Launcher(nproc_per_node=2, preload={preload!r}).start(work, {bell.path!r})
        input()
    """
    program = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE)
    pids = [int(word) for word in bell.hear(2)]
    program.communicate(b"\n", timeout=LIMIT_S)
    assert program.returncode == 0
    assert not any(map(is_alive, pids))
    assert [word.strip() for word in bell.hear(2)] == ["done", "done"]


def test_a_thread_may_launch_and_may_end_before_its_launch(preload):
    handles = []
    launcher = ir.Launcher(nproc_per_node=2, preload=preload)

    def work():
        time.sleep(0.3)
        return os.environ["RANK"]

    thread = threading.Thread(target=lambda: handles.append(launcher.start(work)))
    thread.start()
    thread.join()
    with handles[0] as handle:
        assert list(handle.result()) == ["0", "1"]


def test_a_fork_of_the_program_has_no_part_in_the_launch(preload, bell):
    def work(bell):
        with open(bell, "w") as file:
            file.write("up\n")
        signal.sigwait({signal.SIGUSR1})
        return "done"

    with ir.Launcher(nproc_per_node=1, preload=preload).start(_blocked(work), bell.path) as handle:
        bell.hear(1)
        child = subprocess.Popen(["sleep", "0"], preexec_fn=lambda: None)  # by fork, and its hooks run
        child.wait()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert handle.signal(signal.SIGUSR1) == 1
        assert list(handle.result()) == ["done"]


def _blocked(function):
    def work(*args):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        return function(*args)

    return work


# ---- handles


def idle(bell):
    with open(bell, "w") as file:
        file.write(f"{os.getpid()}\n")
    signal.pause()


def test_a_handle_waits_and_has_the_result(preload):
    with ir.Launcher(nproc_per_node=2, preload=preload).start(os.getpid) as handle:
        assert isinstance(handle, ir.LaunchHandle)
        assert handle.wait(LIMIT_S)
        assert list(handle.result()) == handle.pids
        assert [exit_.code for exit_ in handle.exits] == [0, 0]
        assert handle.done()


def test_leaving_the_block_stops_what_still_runs(preload, bell):
    with ir.Launcher(nproc_per_node=2, preload=preload).start(idle, bell.path) as handle:
        pids = [int(word) for word in bell.hear(2)]
        until(lambda: sorted(pids) == sorted(handle.pids))  # a fork may ring before its start is reported
        assert not handle.done()
        assert not handle.wait(0)
        with pytest.raises(TimeoutError, match="did not finish within 0 s; it keeps running"):
            handle.result(0)
    assert not any(map(is_alive, pids))
    with pytest.raises(ir.InfiniRunError, match="stopped before all ranks returned"):
        handle.result()
    handle.close()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_handle_stops_and_kills(preload, bell, how):
    def stubborn(bell):
        signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "kill" else signal.SIG_DFL)
        idle(bell)

    with ir.Launcher(nproc_per_node=2, preload=preload, grace=600).start(stubborn, bell.path) as handle:
        bell.hear(2)
        getattr(handle, how)()
        assert handle.wait(LIMIT_S)
        assert {exit_.signal for exit_ in handle.exits} == {signal.SIGKILL if how == "kill" else signal.SIGTERM}


def test_a_signal_reaches_one_rank_or_all(preload, bell):
    with ir.Launcher(nproc_per_node=2, preload=preload, keep_going=True).start(idle, bell.path) as handle:
        bell.hear(2)
        assert handle.signal(signal.SIGUSR1, 1) == 1
        until(lambda: handle.exits[1] is not None)
        assert handle.exits[1].signal == signal.SIGUSR1
        assert handle.signal(signal.SIGUSR2) == 1
        with pytest.raises(ir.WorkerDied, match=r"rank 1 .* killed by SIGUSR1"):
            handle.result(LIMIT_S)
    assert handle.signal(signal.SIGUSR1) == 0


def test_several_handles_at_once(preload):
    launcher = ir.Launcher(nproc_per_node=2, preload=preload)
    handles = [launcher.start(lambda n=n: n) for n in range(4)]
    assert [list(handle.result(LIMIT_S)) for handle in handles] == [[n, n] for n in range(4)]
    for handle in handles:
        handle.close()


@pytest.mark.parametrize("host", ["idle", "busy"])
def test_an_interrupt_of_a_run_stops_its_ranks_and_is_raised(preload, bell, host):
    """In a program that handles it: the ranks get their grace, and what they do in it is seen. In a busy one the
    interrupt comes while the thread that watches over the ranks is still starting."""
    code = f"""
        import os, signal, sys, threading, infini_run as ir
        def compute():
            while True:
                pass
        if {host!r} == "busy":
            sys.setswitchinterval(0.1)
            threading.Thread(target=compute, daemon=True).start()
        def work(bell):
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            with open(bell, "w") as file:
                file.write("up\\n")
            signal.sigwait([signal.SIGTERM])
            print("saved", flush=True)
            sys.exit(0)
        try:
            ir.Launcher(nproc_per_node=2, preload={preload!r}).run(work, {bell.path!r})
        except KeyboardInterrupt:
            print("interrupted")
    """
    program = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    bell.hear(2)
    program.send_signal(signal.SIGINT)
    out, _ = program.communicate(timeout=LIMIT_S)
    lines = out.decode().splitlines()
    assert sorted(lines[:2]) == ["[rank 0] saved", "[rank 1] saved"]
    assert lines[2:] == ["interrupted"]
    assert program.returncode == 0
    assert marked() == {}
