"""How a crew ends: in phases, whatever its workers do, whenever it is told to, and whatever was said meanwhile."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading

import pytest

import infini_run as ir
from infini_run.crews.protocol import TaskStarted, encode
from tests.support.command import CHILDREN, Command
from tests.support.processes import is_alive, marked
from tests.support.waiting import LIMIT_S, ended_after, interrupt_main, until

sys.path.insert(0, str(CHILDREN))
from crew_parts import obey

ROOT = os.path.dirname(os.path.dirname(ir.__file__))


def test_close_does_what_was_accepted_first():
    crew = ir.Crew(obey, nproc=2)
    asks = [crew.ask(("square", n)) for n in range(1000)] + [crew.worker(0).ask(("square", n)) for n in range(300)]
    status = crew.close()
    assert [ask.result() for ask in asks] == [n * n for n in range(1000)] + [n * n for n in range(300)]
    assert (status.phase, status.waiting, status.problems) == ("CLOSED", 0, ())
    assert [worker.state for worker in status.workers] == ["stopped"] * 2


def test_tasks_see_that_the_crew_closes(bell):
    """Those that run, and those that wait, here or in a worker."""
    crew = ir.Crew(obey, nproc=2, drain_s=LIMIT_S)
    runs = [crew.worker(rank).ask(("until closing", bell.path)) for rank in range(2)]
    bell.hear(2)
    waiting = [crew.worker(0).ask("until closing") for _ in range(3)] + [crew.ask("until closing") for _ in range(40)]
    assert crew.close().waiting == 0
    assert {ask.result() for ask in runs + waiting} == {"closing"}


def test_worker_that_restarts_later_sees_that_the_crew_closes(bell):
    crew = ir.Crew(obey, restart=ir.Restart(), drain_s=LIMIT_S)
    dies = crew.ask(("until closing", bell.path, 1))
    bell.hear(1)
    later = crew.ask("until closing")
    crew.close()
    assert isinstance(dies.exception(), ir.WorkerDied)
    assert later.result() == "closing"


def test_close_of_a_crew_that_has_only_just_begun():
    for _ in range(5):
        crew = ir.Crew(obey, nproc=3)
        ask = crew.ask(("square", 3))
        assert crew.close().problems == ()
        assert ask.result() == 9


def test_close_without_draining_waits_for_nobody(bell, shut):
    crew = ir.Crew(obey, grace=1)
    begun = crew.ask(("be slow", bell.path, shut))
    bell.hear(1)
    waiting = [crew.ask("pid"), crew.worker(0).ask("pid")]
    assert crew.close(drain=False).problems == ()
    for ask in (begun, *waiting):
        with pytest.raises(ir.CrewClosed):
            ask.result()


def test_what_is_not_done_in_time_is_stopped_and_told(bell, shut):
    crew = ir.Crew(obey, nproc=2, drain_s=2, grace=1)  # time enough for the other one
    slow = crew.worker(0).ask(("be slow", bell.path, shut))
    later = crew.worker(0).ask("pid")
    bell.hear(1)
    status = crew.close()
    assert len(status.problems) == 1
    assert "rank 0 did not end properly when the crew was closed: killed by SIGTERM" in status.problems[0]
    for ask in (slow, later):
        with pytest.raises(ir.WorkerDied, match="rank 0 was stopped"):
            ask.result()


def test_a_worker_that_asks_for_more_time_to_stop_gets_it():
    class Slow:
        def task(self, ctx, task):
            return task

        def stop(self, ctx):
            import time

            ctx.extend(60)
            time.sleep(2.5)

    crew = ir.Crew(Slow, drain_s=2)
    crew.ask(1).result()
    assert crew.close().problems == ()


def test_a_worker_that_ignores_the_stop_signal_is_killed():
    def serve(ctx, task):
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctx.emit("deaf")
        signal.pause()

    crew = ir.Crew(serve, drain_s=0.2, grace=0.2)
    crew.worker(0).send(0)
    while not any(event.kind == "emitted" for event in crew.events()):
        pass
    assert "SIGKILL" in crew.close().problems[0]


def test_close_twice_and_from_several_threads(bell, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    crew = ir.Crew(obey)
    slow = crew.ask(("be slow", bell.path, str(gate)))
    bell.hear(1)
    found = []
    threads = [threading.Thread(target=lambda: found.append(crew.close().phase)) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.write_text("on")
    for thread in threads:
        thread.join()
    assert found == ["CLOSED"] * 4
    assert slow.result() == "on"
    assert crew.close().phase == crew.close(drain=False).phase == "CLOSED"


def test_a_close_that_was_interrupted_is_resumed(bell, tmp_path, raised):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    crew = ir.Crew(obey)
    slow = crew.ask(("be slow", bell.path, str(gate)))
    bell.hear(1)

    def interrupt():
        until(lambda: crew.status().phase == "DRAINING")
        interrupt_main(raised)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        crew.close()
    interrupting.join()
    assert crew.status().phase == "DRAINING"
    gate.write_text("on")
    assert crew.close().phase == "CLOSED"
    assert slow.result() == "on"


def test_a_second_close_that_does_not_drain_hurries_the_first(bell, shut):
    crew = ir.Crew(obey, drain_s=3600, grace=1)
    crew.ask(("be slow", bell.path, shut))
    bell.hear(1)
    thread = threading.Thread(target=crew.close)
    thread.start()
    until(lambda: crew.status().phase == "DRAINING")
    crew.close(drain=False)
    thread.join()


def test_a_crew_that_is_dropped_takes_its_workers_with_it(bell):
    with ended_after():
        crews = [ir.Crew(obey)]
        crews[0].ask("pid").result()
        with pytest.warns(ResourceWarning, match="was dropped while its workers ran; close it"):
            crews.clear()
        gc.collect()


def test_a_fork_of_the_caller_leaves_the_crew_to_it():
    with ir.Crew(obey) as crew:
        assert crew.ask(("square", 2)).result() == 4
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(round(LIMIT_S))
                events = [*crew.events(), *crew]  # none come, and nothing waits for any
                crew.close()
                os._exit(0 if crew.status().phase == "CLOSED" and not events else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert crew.ask(("square", 3)).result() == 9


def test_a_fork_that_lives_on_keeps_no_worker_from_seeing_the_end(bell):
    with ir.Crew(obey) as crew:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        assert crew.close().problems == ()
        os.close(writer)
        os.close(reader)
        os.waitpid(pid, 0)


def test_a_program_that_just_ends_ends_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{ROOT!r}, {str(CHILDREN)!r}]\n"
        "import infini_run as ir\nfrom crew_parts import obey\n"
        "crew = ir.Crew(obey, nproc=2)\nprint(crew.worker(0).ask('pid').result(), flush=True)\n"
        "crew.worker(1).ask(('sleep', 0.1))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_alive(int(done.stdout))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_grandchildren_go_with_the_caller(number, bell, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{ROOT!r}, {str(CHILDREN)!r}]\n"
        "import infini_run as ir\nfrom crew_parts import obey\n"
        "with ir.Crew(obey, nproc=2, grace=0.3) as crew:\n"
        f"    crew.worker(0).ask(('children', {bell.path!r})).result()\n"
        "    crew.worker(1).ask('hangs').result()\n"
    )
    program = Command([sys.executable, str(script)])
    try:
        pids = list(map(int, bell.hear(1)[0].split()[1:]))
        program.signal(number)
        program.wait()
        until(lambda: not any(map(is_alive, pids)))
        until(lambda: marked() == {})
    finally:
        program.close()


def test_a_worker_that_speaks_nonsense_about_tasks_is_not_believed():
    def serve(ctx, task):
        from infini_run.crews.protocol import Body, TaskDone

        for number in (-7, task + 1, 1 << 40):
            ctx._sender.send_bytes(encode(TaskDone(task=number, body=Body(parts=(b"?",)))))
        ctx._sender.send_bytes(encode(TaskStarted(task=99)))
        return "mine"

    with ir.Crew(serve) as crew:
        assert crew.ask(5).result() == "mine"


# ---- schedules


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_in_whatever_order_nothing_is_lost_or_hangs(seed):
    """Every ask is answered once, by its own result or by a word for why there is none; a close always ends."""
    dice = random.Random(seed)
    strategy = dice.choice(["one_for_one", "one_for_all", "rest_for_one"])
    restart = ir.Restart(strategy=strategy, max_restarts=dice.choice([0, 2, 100]), delay_s=dice.choice([0, 0.02]))
    crew = ir.Crew(obey, nproc=dice.randint(1, 3), restart=restart, grace=0.3, drain_s=LIMIT_S, max_events=20)
    asked, sent = [], []
    reader = threading.Thread(target=lambda: _read_all(crew))
    reader.start()
    for step in range(dice.randint(1, 60)):
        rank = dice.randrange(crew.nproc)
        what = dice.choice(["square"] * 8 + ["burst and raise", "emit", "killed", "segv", "exited 0", "half a frame"])
        task = (what, step) if what in ("square", "burst and raise", "emit") else (what,)
        try:
            if dice.random() < 0.2:
                sent.append(crew.worker(rank).send(task))
            else:
                asked.append((task, (crew if dice.random() < 0.5 else crew.worker(rank)).ask(task)))
        except ir.CrewFailed:
            break
        if asked and dice.random() < 0.1:
            dice.choice(asked)[1].cancel()
        if dice.random() < 0.05:
            crew.signal(dice.choice([signal.SIGCONT, signal.SIGKILL]), rank)
    status = crew.close(drain=dice.random() < 0.7)
    reader.join()
    assert status.phase == "CLOSED"
    for (what, *more), ask in asked:
        assert ask.done()
        if ask.cancelled():
            continue
        error = ask.exception()
        if error is None:
            assert ask.result() == {"square": more and more[0] ** 2, "emit": more and more[0]}[what]
        else:
            assert isinstance(error, (ir.InfiniRunError, ValueError))
            assert what == "burst and raise" or not isinstance(error, ValueError)


def _read_all(crew):
    try:
        for _ in crew:
            pass
    except ir.CrewFailed:
        return
