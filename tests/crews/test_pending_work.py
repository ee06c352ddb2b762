"""Accepted work is finished or refused, never dropped: at the end of a block, when the interpreter exits, and when
nothing refers any more to what was to do it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

import infini_run as ir
from tests.support.command import CHILDREN
from tests.support.processes import is_alive, marked
from tests.support.waiting import LIMIT_S, ended_after, interrupt_main, until

sys.path.insert(0, str(CHILDREN))
from crew_parts import obey

ROOT = os.path.dirname(os.path.dirname(ir.__file__))
HEAD = f"""import sys; sys.path[:0] = [{ROOT!r}, {str(CHILDREN)!r}]
import infini_run as ir
from crew_parts import obey
"""


@pytest.fixture
def gate(tmp_path):
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def stay(bell):
    with open(bell, "w") as file:
        file.write(f"{os.getpid()}\n")
    signal.pause()


def leave(owner, error=None):
    """Leave the block of a crew or a launcher, by an exception if one is given."""
    with owner:
        if error is not None:
            raise error


def wait_at(bell, gate):
    with open(bell, "w") as file:
        file.write(f"{os.getpid()}\n")
    with open(gate) as file:
        return file.read()


# ---- the end of a block


def test_leaving_a_block_has_no_limit_of_its_own():
    with ir.Crew(obey) as crew:
        assert crew._supervisor.limits.drain_s == float("inf")
    with ir.Crew(obey, drain_s=float("inf")) as crew:
        ask = crew.ask(("square", 3))
    assert ask.result() == 9


def test_leaving_a_block_waits_for_every_task():
    with ir.Crew(obey, nproc=2) as crew:
        asks = [crew.ask(("sleep", 0.02)) for _ in range(40)] + [crew.worker(1).ask(("square", n)) for n in range(40)]
    assert [ask.result() for ask in asks] == [None] * 40 + [n * n for n in range(40)]


def test_a_limit_that_passes_is_an_error_that_names_what_was_left(bell, shut):
    crew = ir.Crew(obey, nproc=2, drain_s=0.3, grace=1)
    slow = crew.worker(1).ask(("be slow", bell.path, shut))
    crew.worker(1).ask("pid")
    bell.hear(1)
    pids = [worker.pid for worker in crew.status().workers]
    with pytest.raises(ir.DrainTimeout) as caught:
        leave(crew)
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.tasks, caught.value.ranks) == (2, (1,))
    assert str(caught.value) == (
        "the crew was closed, and drain_s=0.3 passed with 2 accepted tasks undone: 2 tasks of rank 1"
    )
    assert not any(map(is_alive, pids))
    assert isinstance(slow.exception(), ir.WorkerDied)


def test_a_limit_that_passes_in_a_coroutine_is_the_same_error(bell, shut):
    import asyncio

    async def main():
        async with ir.Crew(obey, drain_s=0.3, grace=1) as crew:
            crew.ask(("be slow", bell.path, shut))
            bell.hear(1)

    with pytest.raises(ir.DrainTimeout, match=r"drain_s=0\.3 passed with 1 accepted task undone: 1 task of rank 0"):
        asyncio.run(main())


def test_a_task_that_has_asked_for_more_time_is_no_error_if_it_is_done(bell, gate):
    """ctx.extend goes beyond drain_s; what has not begun is refused all the same."""
    bell_path, gate_path = bell.path, str(gate)

    def serve(ctx, task):
        ctx.extend(LIMIT_S)
        return wait_at(bell_path, gate_path)

    crew = ir.Crew(serve, nproc=1, drain_s=0.3, grace=1)
    extended, waiting = crew.worker(0).ask(0), [crew.ask(n) for n in range(3)]
    bell.hear(1)
    waiting[0].cancel()

    def open_when_late():
        until(waiting[1].done)
        gate.write_text("done")

    thread = threading.Thread(target=open_when_late)
    thread.start()
    undone = "2 accepted tasks undone: 2 tasks that no worker had started"
    with pytest.raises(ir.DrainTimeout, match=rf"drain_s=0\.3 passed with {undone}$") as caught:
        leave(crew)
    thread.join()
    assert (caught.value.tasks, caught.value.ranks) == (2, ())
    assert extended.result(0) == "done"
    assert [type(ask.exception(0)) for ask in waiting[1:]] == [ir.CrewClosed] * 2


def test_a_worker_that_fails_at_the_end_is_started_again_for_the_tasks_that_are_left():
    with ir.Crew(obey, nproc=1, restart=ir.Restart()) as crew:
        died = crew.worker(0).ask("killed")
        asks = [crew.ask(("square", n)) for n in range(100)]
        assert isinstance(died.exception(), ir.WorkerDied)
    assert [ask.result() for ask in asks] == [n * n for n in range(100)]


def test_a_failure_at_the_end_of_a_block_is_raised(bell, gate):
    crew = ir.Crew(obey, grace=1)
    begun = crew.ask(("be slow", bell.path, str(gate)))
    (words,) = bell.hear(1)
    killing = threading.Thread(target=lambda: _kill_when_draining(crew, int(words.split()[1])))
    killing.start()
    with pytest.raises(ir.CrewFailed):
        leave(crew)
    killing.join()
    assert isinstance(begun.exception(), ir.WorkerDied)


def _kill_when_draining(crew, pid):
    until(lambda: crew.status().phase == "DRAINING")
    os.kill(pid, signal.SIGKILL)


def test_a_hang_is_still_found_while_the_block_ends():
    with pytest.raises(ir.CrewFailed, match="no sign of life"), ir.Crew(obey, watchdog_s=0.3, grace=1) as crew:
        crew.ask("hangs")


def test_an_exception_that_leaves_the_block_cancels(bell, shut):
    crew = ir.Crew(obey, grace=1)
    slow = crew.ask(("be slow", bell.path, shut))
    bell.hear(1)
    with pytest.raises(KeyError):
        leave(crew, KeyError("mine"))
    assert isinstance(slow.exception(), ir.InfiniRunError)


def test_ctrl_c_while_a_block_waits_cancels(bell, shut, raised):
    crew = ir.Crew(obey, grace=1)
    slow = crew.ask(("be slow", bell.path, shut))
    bell.hear(1)

    def interrupt():
        until(lambda: crew.status().phase == "DRAINING")
        interrupt_main(raised)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt), crew:
        thread.start()
    thread.join()
    assert crew.status().phase == "CLOSED"
    assert isinstance(slow.exception(), ir.InfiniRunError)


@pytest.mark.parametrize("kind", [ir.Launcher, ir.Pool])
def test_a_block_of_a_launcher_waits_for_its_launches(kind, bell, gate):
    with kind(nproc_per_node=1) as launcher:
        handle = launcher.start(wait_at, bell.path, str(gate))
        bell.hear(1)
        writing = threading.Thread(target=lambda: gate.write_text("done"))
        writing.start()
    writing.join()
    assert handle.done()
    assert list(handle.result()) == ["done"]


@pytest.mark.parametrize("kind", [ir.Launcher, ir.Pool])
def test_an_exception_that_leaves_a_launcher_s_block_stops_its_launches(kind, bell):
    launcher = kind(nproc_per_node=1, grace=1)
    handle = launcher.start(stay, bell.path)
    (pid,) = map(int, bell.hear(1))
    with pytest.raises(KeyError):
        leave(launcher, KeyError("mine"))
    assert handle.done()
    assert not is_alive(pid)


# ---- the exit of the interpreter


def run_program(code, **more):
    words = [sys.executable, "-W", "error", "-c", HEAD + textwrap.dedent(code)]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, **more)


def test_tasks_that_are_pending_when_the_interpreter_exits_are_done(tmp_path):
    out = tmp_path / "out"
    done = run_program(
        f"""
        import atexit
        def write(ctx, n):
            import time
            time.sleep(0.05)
            with open({str(out)!r}, "a") as file:
                file.write(f"{{n}}\\n")
            return n
        crew = ir.Crew(write, nproc=2)
        atexit.register(lambda: print("the handlers of the program come later"))
        for n in range(20):
            crew.ask(n).add_done_callback(lambda ask: print(ask.result()))
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    *numbers, last = done.stdout.splitlines()
    assert sorted(map(int, numbers)) == list(range(20))
    assert last == "the handlers of the program come later"
    assert len(out.read_text().split()) == 20
    assert marked() == {}


def test_tasks_see_that_the_interpreter_exits():
    done = run_program(
        """
        crew = ir.Crew(obey)
        crew.ask("until closing").add_done_callback(lambda ask: print(ask.result()))
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closing\n", "")


def test_a_thread_that_outlives_the_main_one_goes_on_with_its_crew():
    done = run_program(
        """
        import threading
        crew = ir.Crew(obey)
        def work():
            threading.main_thread().join()
            print([crew.ask(("square", n)).result() for n in range(3)])
        threading.Thread(target=work).start()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 4]\n", "")


@pytest.mark.parametrize("crews", [1, 3])
def test_what_callbacks_submit_when_the_interpreter_exits_is_done_too(crews):
    """An end that comes with many events is read beside the calls of other threads; what comes by it is no less
    there."""
    done = run_program(
        f"""
        crews = [ir.Crew(obey, nproc=1) for _ in range({crews})]
        def go_on(count):
            if count == 30:
                return print("done")
            ask = crews[count % len(crews)].ask(("emit", 100))
            ask.add_done_callback(lambda ask: (ask.result(), go_on(count + 1)))
        go_on(0)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert marked() == {}


def test_a_launch_that_runs_when_the_interpreter_exits_is_finished(tmp_path):
    out = tmp_path / "out"
    done = run_program(
        f"""
        def work():
            import time
            time.sleep(0.5)
            with open({str(out)!r}, "a") as file:
                file.write("done ")
        handle = ir.Launcher(nproc_per_node=1).start(work)
        pool = ir.Pool(nproc_per_node=1, preload=["fractions"])
        other = pool.start(work)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert out.read_text() == "done done "
    assert marked() == {}


def test_a_limit_that_passes_at_the_exit_is_told():
    done = run_program("crew = ir.Crew(obey, drain_s=0.3, grace=1)\ncrew.ask('hangs')\n")
    assert done.returncode == 0
    assert "infini-run: the crew was closed, and drain_s=0.3 passed with 1 accepted task undone" in done.stderr
    assert marked() == {}


def test_a_crew_that_fails_at_the_exit_is_told():
    done = run_program("crew = ir.Crew(obey)\ncrew.ask(('sleep', 0.3))\ncrew.ask('killed')\ncrew.ask('pid')\n")
    assert done.returncode == 0
    assert done.stderr.startswith("infini-run: the crew failed; rank 0 on ")
    assert "killed by SIGKILL" in done.stderr


def test_a_launch_that_fails_at_the_exit_is_told_unless_a_thread_waits_for_it():
    done = run_program(
        """
        import threading
        def fail(text):
            raise ValueError(text)
        launcher = ir.Launcher(nproc_per_node=1)
        handle = launcher.start(fail, "nobody waits")
        def wait():
            try:
                launcher.run(fail, "it is caught")
            except ValueError as error:
                print(error)
        thread = threading.Thread(target=wait)
        thread.start()
        handle.wait(0)
        """
    )
    assert (done.returncode, done.stdout) == (0, "it is caught\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("infini-run: a launch failed, and nothing waited for it: rank 0 on ")
    assert line.endswith(": ValueError: nobody waits")


def fail_now():
    raise ValueError("nobody waits")


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_failure_that_nothing_waits_for_is_told_when_its_handle_is_dropped(is_awaited, capfd):
    with ir.Launcher(nproc_per_node=1) as launcher:
        handle = launcher.start(fail_now)
    if is_awaited:
        with pytest.raises(ValueError, match="nobody waits"):
            handle.result()
    capfd.readouterr()
    del handle
    gc.collect()
    told = "infini-run: a launch failed, and nothing waited for it: rank 0 on "
    assert capfd.readouterr().err.startswith(told) is not is_awaited


def test_a_wait_that_was_broken_off_is_no_wait(capfd):
    import asyncio

    async def give_up(handle):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.01)

    def fail_late():
        time.sleep(0.5)
        fail_now()

    with ir.Launcher(nproc_per_node=1) as launcher:
        handle = launcher.start(fail_late)
        asyncio.run(give_up(handle))
    capfd.readouterr()
    del handle
    gc.collect()
    assert "a launch failed, and nothing waited for it: " in capfd.readouterr().err


def test_a_failure_that_a_thread_waits_for_at_the_exit_is_not_told_as_well():
    done = run_program(
        """
        import threading, time
        handle = ir.Launcher(nproc_per_node=1).start(divmod, 1, 0)
        def wait():
            threading.main_thread().join()
            while not handle.done():
                time.sleep(0.01)
            try:
                handle.result()
            except ZeroDivisionError:
                print("it is caught")
        threading.Thread(target=wait).start()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "it is caught\n", "")


def test_a_failure_before_the_exit_is_told_once_if_its_handle_is_kept():
    script = HEAD + "with ir.Launcher(nproc_per_node=1) as launcher:\n    handle = launcher.start(divmod, 1, 0)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    (line,) = done.stderr.splitlines()
    assert line.startswith("infini-run: a launch failed, and nothing waited for it: rank 0 on ")


def test_ctrl_c_ends_what_is_pending_at_the_exit(bell, shut, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        HEAD + "import threading\ncrew = ir.Crew(obey, grace=1)\n"
        f"crew.ask(('be slow', {bell.path!r}, {shut!r}))\n"
        "real = crew._supervisor.finish_at_exit\n"
        "crew._supervisor.finish_at_exit = lambda: (print('exiting', flush=True), real())\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        (words,) = bell.hear(1)
        assert program.stdout.readline() == b"exiting\n"
        program.send_signal(signal.SIGINT)
        _, stderr = program.communicate(timeout=LIMIT_S)
    assert b"KeyboardInterrupt" in stderr
    assert not is_alive(int(words.split()[1]))
    assert marked() == {}


INTERRUPTED = {
    "launch": "handle = ir.Launcher(nproc_per_node=1, grace=1).start(obey, None, ('be slow', *sys.argv[1:]))",
    "crew": "crew = ir.Crew(obey, grace=1); crew.ask(('be slow', *sys.argv[1:]))",
}


@pytest.mark.parametrize("start", INTERRUPTED.values(), ids=INTERRUPTED)
def test_ctrl_c_that_ends_the_program_ends_what_is_pending(start, bell, shut):
    """Once: there is no second one while the exit waits."""
    script = f"{HEAD}import signal\n{start}\nsignal.pause()\n"
    words = [sys.executable, "-c", script, bell.path, str(shut)]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as program:
        (words,) = bell.hear(1)
        program.send_signal(signal.SIGINT)
        _, stderr = program.communicate(timeout=LIMIT_S)
    assert program.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in stderr
    assert not is_alive(int(words.split()[1]))
    assert marked() == {}


def test_an_exception_that_ends_the_program_does_not_drop_what_is_pending(bell, gate):
    script = f"{HEAD}{INTERRUPTED['crew']}\nraise ValueError('mine')\n"
    words = [sys.executable, "-c", script, bell.path, str(gate)]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as program:
        bell.hear(1)
        gate.write_text("on")
        _, stderr = program.communicate(timeout=LIMIT_S)
    assert (program.returncode, stderr.splitlines()[-1]) == (1, b"ValueError: mine")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_function_of_a_script_is_launched_from_a_child_of_multiprocessing(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        HEAD + "import multiprocessing\n"
        "def train():\n    return 42\n"
        "def child():\n    print(list(ir.Launcher(nproc_per_node=1).run(train)))\n"
        "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context({method!r}).Process(target=child)\n"
        "    process.start()\n    process.join()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("[42]\n", "")


# ---- nothing refers to it any more


def test_a_dropped_crew_ends_once_its_tasks_are_done(bell, gate):
    with ended_after():
        crew = ir.Crew(obey, nproc=2)
        pids = [worker.pid for worker in crew.status().workers]
        slow, more = crew.worker(0).ask(("be slow", bell.path, str(gate))), crew.worker(0).ask(("square", 5))
        bell.hear(1)
        with pytest.warns(ResourceWarning, match="close it; it finishes the remaining tasks first"):
            del crew
        gc.collect()
        assert is_alive(pids[0])
        gate.write_text("on")
        assert (slow.result(LIMIT_S), more.result(LIMIT_S)) == ("on", 25)


@pytest.mark.parametrize(
    ("drain_s", "told"),
    [(0.3, "the crew was closed, and drain_s=0.3 passed with "), (None, "the crew failed; rank 0 ")],
)
def test_what_a_dropped_crew_could_not_finish_is_told(drain_s, told, capfd):
    with ended_after():
        crew = ir.Crew(obey, drain_s=drain_s, grace=1)
        pid, ask = crew.ask("pid").result(), crew.ask("hangs")
        until(ask.running)
        with pytest.warns(ResourceWarning, match="it finishes the remaining tasks first"):
            del crew
        if drain_s is None:
            os.kill(pid, signal.SIGKILL)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"infini-run: {told}")
    assert isinstance(ask.exception(LIMIT_S), ir.WorkerDied)


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "make", [lambda: ir.Crew(obey, nproc=1), lambda: ir.Pool(nproc_per_node=1, preload=["fractions"])]
)
def test_what_is_dropped_ends_though_its_warning_is_an_error(make):
    with ended_after():
        make()
        gc.collect()


def test_an_ask_without_its_crew_is_answered():
    with ended_after():
        with pytest.warns(ResourceWarning, match="it finishes the remaining tasks first"):
            ask = ir.Crew(obey).ask(("sleep", 0.3))
        gc.collect()
        assert ask.result(LIMIT_S) is None


def test_an_ask_that_is_done_keeps_nothing_of_its_crew():
    with ir.Crew(obey) as crew:
        asks = [crew.ask(("square", 2)), crew.ask(("burst and raise", 0)), crew.ask(("sleep", 600))]
        asks[0].result()
        asks[1].exception()
        asks[2].cancel()
        crew.signal(signal.SIGKILL)
        supervisor = weakref.ref(crew._supervisor)
        crew.close(drain=False)
        crew._supervisor.failure = None
    del crew
    until(lambda: gc.collect() >= 0 and supervisor() is None)
    assert asks[0].result() == 4


def test_four_dropped_pools_leave_no_process():
    with ended_after():
        with pytest.warns(ResourceWarning, match="was dropped while open; close it$"):
            found = [list(ir.Pool(nproc_per_node=1, preload=["fractions"]).run(lambda: 1)) for _ in range(4)]
        assert found == [[1]] * 4
        gc.collect()


def test_a_dropped_pool_ends_with_its_last_launch(bell, gate):
    with ended_after():
        pool = ir.Pool(nproc_per_node=1, preload=["fractions"])
        handle = pool.start(wait_at, bell.path, str(gate))
        bell.hear(1)
        with pytest.warns(ResourceWarning, match="^<Pool: nproc_per_node=1> was dropped while open; close it; its"):
            del pool
        gc.collect()
        gate.write_text("on")
        assert list(handle.result(LIMIT_S)) == ["on"]


def test_a_dropped_handle_leaves_its_launch_to_end(bell, gate):
    handle = ir.Launcher(nproc_per_node=1).start(wait_at, bell.path, str(gate))
    (pid,) = map(int, bell.hear(1))
    with pytest.warns(ResourceWarning, match="was dropped while its launch runs"):
        del handle
    gc.collect()
    assert is_alive(pid)
    gate.write_text("on")
    until(lambda: not is_alive(pid))
    until(lambda: threading.active_count() == 1)  # the end of a launch is its own thread's


def test_the_failure_of_a_dropped_handle_s_launch_is_told(capfd):
    def fail():
        raise ValueError("nobody waits")

    with ended_after(), pytest.warns(ResourceWarning, match="was dropped while its launch runs"):
        ir.Launcher(nproc_per_node=1).start(fail)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("infini-run: a launch failed, and nothing waited for it: rank 0 on ")
    assert line.endswith(": ValueError: nobody waits")
