"""Every ending of a worker in every state of it, with the caller alive, interrupted and killed.

What an ending means depends on the state: here it is written down for all of them, and run.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

import infini_run as ir
from tests.support.command import CHILDREN, Command
from tests.support.processes import is_alive, marked
from tests.support.waiting import stderr_so_far, until

sys.path.insert(0, str(CHILDREN))
from crew_parts import ENDINGS, ender

SOON_S = 0.3  # how long a worker may keep silent here
HOW = {  # what an error says of it, and its code and signal
    "exited": ("exit code 3", 3, 0),
    "exited 0": ("exit code 0", 0, 0),
    "segv": ("SIGSEGV", None, 11),
    "killed": ("SIGKILL", None, 9),
    "half a frame": ("SIGKILL", None, 9),
    "closes": ("closed its channel", None, 0),
    "no message": ("closed its channel", None, 0),
}
SILENT = ("stopped", "hangs", "loops")  # nothing tells of these but the time


def crew_of(where, how, bell="", **more):
    silent = {"starting": "ready_timeout_s", "busy": "watchdog_s", "ready": "watchdog_s"} if how in SILENT else {}
    given = {"grace": 0.2} | ({silent[where]: SOON_S} if where in silent else {})
    return ir.Crew(ender(where, how, bell), **{**given, "drain_s": 60, "max_events": 100, **more})


def pid_of(ctx, task):
    return os.getpid()


def check_death(error, how):
    words, code, number = HOW.get(how, ("", None, 0))
    assert words in str(error)
    assert (error.exit.code, error.signal) == (code, number)
    assert error.rank == 0


# ---- SIGKILL does not end it


@pytest.mark.parametrize("way", ["exec", "fork"])
def test_a_worker_starts_again_only_once_its_last_process_has_ended(freezer, capfd, way):
    """Uninterruptible sleep: it may still hold a GPU."""
    restart = ir.Restart(strategy="one_for_all")
    with ir.Crew(pid_of, nproc=2, restart=restart, grace=0.2, preload=() if way == "exec" else ["fractions"]) as crew:
        pids = [crew.worker(rank).ask("pid").result() for rank in range(2)]
        freezer.freeze(pids[1])
        os.kill(pids[0], signal.SIGKILL)
        words = f"SIGKILL did not end process {pids[1]} ("
        until(lambda: words in (said := stderr_so_far()) and "restarting it once that process is gone" in said)
        assert [worker.restarts for worker in crew.status().workers] == [0, 0]
        freezer.thaw()
        assert crew.worker(1).ask("pid").result() != pids[1]
    until(lambda: not os.path.exists(f"/proc/{pids[1]}"))  # nor as a zombie of ours


def test_the_time_of_a_crew_ends_although_a_worker_waits_for_what_is_left(freezer, capfd):
    """Its tasks wait, too."""
    crew = ir.Crew(pid_of, nproc=2, restart=ir.Restart(strategy="one_for_all"), grace=0.2, drain_s=1)
    pids = [crew.worker(rank).ask("pid").result() for rank in range(2)]
    freezer.freeze(pids[1])
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: "restarting it once that process is gone" in stderr_so_far())
    waiting = [crew.worker(1).ask("pid"), crew.ask("pid")]
    with pytest.raises(ir.DrainTimeout):
        crew.__exit__(None, None, None)
    assert all(isinstance(ask.exception(), ir.CrewClosed) for ask in waiting)
    assert any(f"SIGKILL did not end process {pids[1]} (" in problem for problem in crew.close(drain=False).problems)
    freezer.thaw()
    os.waitpid(pids[1], 0)


def test_a_crew_that_is_closed_names_what_is_left(freezer, capfd):
    crew = ir.Crew(pid_of, nproc=1, grace=0.2)
    pid = crew.ask("pid").result()
    freezer.freeze(pid)
    crew.close(drain=False)
    assert any(f"SIGKILL did not end process {pid} (" in problem for problem in crew.close().problems)
    freezer.thaw()
    os.waitpid(pid, 0)


# ---- the caller is alive


@pytest.mark.parametrize("how", [how for how in ENDINGS if how not in ("returned", "floods")])
@pytest.mark.rows(5)
def test_while_starting_it_is_a_failure(how):
    with pytest.raises(ir.CrewFailed) as caught, crew_of("starting", how) as crew:
        crew.ask("never begun").result()
    (cause,) = caught.value.causes
    if how == "raised":
        assert "could not start: IndexError: list index out of range" in str(cause)
        assert isinstance(cause.__cause__, ir.RemoteError)
        assert "[][0]" in cause.__cause__.trace
    elif how in SILENT:
        assert "was not ready after" in str(cause)
    else:
        check_death(cause, how)


def test_who_floods_while_starting_waits_for_a_reader():
    crew = crew_of("starting", "floods")
    read = 0
    while read < 1000:
        read += sum(event.kind == "emitted" for event in crew.events())
    assert crew.status().workers[0].state == "starting"
    assert crew.close(drain=False).workers[0].state == "stopped"


@pytest.mark.parametrize("how", [how for how in ENDINGS if how not in (*SILENT, "returned", "floods")])
@pytest.mark.rows(4)
def test_while_ready_it_is_a_failure(how):
    crew = crew_of("ready", how)
    assert crew.ask("anything").result() == "not yet"
    crew.signal(signal.SIGUSR1, 0)
    with pytest.raises(ir.CrewFailed) as caught:
        list(crew)
    crew.close()
    (cause,) = caught.value.causes
    if how == "raised":
        assert "exit code 1" in str(cause)
        assert "IndexError: list index out of range" in cause.last_lines[-1]
    else:
        check_death(cause, how)


@pytest.mark.parametrize("how", SILENT)
def test_while_ready_silence_is_no_failure_until_there_is_something_to_do(how, bell):
    crew = crew_of("ready", how, bell=bell.path)
    crew.ask("anything").result()
    crew.signal(signal.SIGUSR1, 0)
    assert bell.hear(1)[0].startswith("ending")
    with pytest.raises(ir.WorkerDied, match="no sign of life"):
        crew.worker(0).ask("that is never done").result()
    assert "no sign of life" in str(crew.close().failure)


@pytest.mark.parametrize("how", [how for how in ENDINGS if how not in ("returned", "raised", "floods")])
@pytest.mark.rows(5)
def test_while_busy_its_task_fails_with_it(how):
    crew = crew_of("busy", how)
    with pytest.raises(ir.WorkerDied) as caught:
        crew.ask("end").result()
    assert crew.close().failure.causes
    if how in SILENT:
        assert "hung: no sign of life for" in str(caught.value)
    else:
        check_death(caught.value, how)


@pytest.mark.parametrize(("how", "fails"), [("returned", False), ("raised", True)])
def test_while_busy_the_end_of_a_task_is_not_the_worker_s(how, fails):
    with crew_of("busy", how) as crew:
        pid = crew.status().workers[0].pid
        for _ in range(2):
            ask = crew.ask("end")
            if fails:
                with pytest.raises(IndexError, match="list index out of range"):
                    ask.result()
            else:
                assert ask.result() == "fine"
        assert crew.status().workers[0].pid == pid


def test_who_floods_while_busy_waits_for_a_reader():
    crew = crew_of("busy", "floods")
    ask = crew.ask("end")
    read = 0
    while read < 1000:
        read += sum(event.kind == "emitted" for event in crew.events())
    assert crew.close(drain=False).workers[0].state == "stopped"
    with pytest.raises(ir.CrewClosed, match="the crew was closed"):
        ask.result()


@pytest.mark.parametrize("how", list(ENDINGS))
@pytest.mark.rows(5)
def test_while_stopping_the_shutdown_is_finished_and_told(how):
    crew = crew_of("stopping", how, drain_s=60 if how not in (*SILENT, "closes", "floods", "no message") else SOON_S)
    assert crew.ask("anything").result() == "not yet"
    status = crew.close()
    assert (status.phase, status.workers[0].state, status.failure) == ("CLOSED", "stopped", None)
    if how == "returned":
        assert status.problems == ()
    else:
        (problem,) = status.problems
        assert problem.startswith("rank 0 did not end properly when the crew was closed: ")
        assert HOW.get(how, ("",))[0].replace("closed its channel", "") in problem
        assert how != "raised" or "IndexError: list index out of range" in problem


# ---- the caller is interrupted, or killed

SCRIPT = """
import sys, time
sys.path[:0] = [{children!r}, {root!r}]
import infini_run as ir
from crew_parts import ender
def main(where, how, bell):
    grace = 2 if where == "stopping" else 0.2  # the signal comes while it stops, on a busy machine too
    with ir.Crew(ender(where, how, bell), nproc=2, grace=grace, drain_s=600, max_events=100) as crew:
        crew.worker(0).ask("first").result()
        if where == "ready":
            crew.signal(10, 0)
            for _ in crew:
                pass
        if where == "busy":
            crew.worker(0).ask("second").result()
    while True:
        time.sleep(0.1)  # the crew may be closed before the signal; one that comes just before a wait does not end it
main(*sys.argv[1:])
"""
STAYING = ("stopped", "hangs", "loops", "floods", "closes")


@pytest.fixture
def caller(bell, tmp_path):
    """A program with a crew of two, the first of which is in that state and ends in that way."""
    started = []

    def start(where, how):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(children=str(CHILDREN), root=os.path.dirname(os.path.dirname(ir.__file__))))
        started.append(Command([sys.executable, str(script), where, how, bell.path]))
        words = bell.hear(1)[0].split()
        assert words[0] == "ending"
        return started[-1]

    yield start
    for command in started:
        command.close()


@pytest.mark.parametrize("where", ["starting", "ready", "busy", "stopping"])
@pytest.mark.parametrize("how", STAYING)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
@pytest.mark.rows(16)
def test_nothing_is_left_when_the_caller_is_told_to_end(where, how, number, caller):
    program = caller(where, how)
    pids = list(marked())
    program.signal(number)
    code = program.wait()
    assert code != 0
    if number != signal.SIGINT:
        assert code == -number
    until(lambda: not any(is_alive(pid) for pid in pids))
    until(lambda: marked() == {})
