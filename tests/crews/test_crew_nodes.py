"""Crews over two real ssh hosts: asks, events, restarts of one worker, and a host that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import SimpleNamespace

import pytest

import infini_run as ir
from infini_run.crews.supervision.worker_death import death_error
from tests.support.hosts import Bed, agents
from tests.support.processes import marked
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them


@pytest.fixture(scope="module")
def bed():
    bed = Bed(hosts=2)
    yield bed
    bed.close()


@pytest.fixture(autouse=True)
def no_agent_left():
    yield
    until(lambda: not agents())


@pytest.fixture
def crew(bed):
    def make(target, nproc=2, **more):
        hosts = more.pop("hosts", ["host1", "host2"])
        return ir.Crew(target, hosts=hosts, nproc=nproc, engine="ssh", ssh_config=str(bed.config), **more)

    return make


def serve(ctx, task):
    """What the tests' workers do; by value, as of a __main__."""
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "wait":
        ctx.emit("here")
        signal.pause()
    if isinstance(task, tuple):
        for i in range(task[1]):
            ctx.emit(i)
    return ctx.rank, ctx.local_rank, ctx.world_size, ctx.restarts, os.uname().nodename, task


def kinds(crew, wanted, rank):
    """Events until one of that kind and rank has come."""
    seen = []
    while not any(event.kind == wanted and event.rank == rank for event in seen):
        seen += crew.events(LIMIT_S)
    return seen


def test_each_worker_can_be_asked_and_knows_its_place(crew):
    with crew(serve) as four:
        asks = [four.worker(rank).ask(f"to {rank}") for rank in range(4)]
        assert [ask.result(LIMIT_S) for ask in asks] == [
            (2 * node + local, local, 4, 0, f"host{node + 1}", f"to {2 * node + local}")
            for node in range(2)
            for local in range(2)
        ]
        assert [worker.host for worker in four.status().workers] == ["host1", "host1", "host2", "host2"]
    assert four.status().problems == ()


def test_joblib_kills_running_calls_on_hosts_after_failure(bed, tmp_path):
    joblib = pytest.importorskip("joblib")
    ir.register_joblib()
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def call(number):
        if number == 2:  # opens once the two others run
            with open(gate):
                raise ZeroDivisionError
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(gate, "w"):
            signal.pause()

    shared = {"hosts": ["host1", "host2"], "engine": "ssh", "ssh_config": str(bed.config)}
    with joblib.parallel_config("infini_run", n_jobs=3, **shared), pytest.raises(ZeroDivisionError):
        joblib.Parallel(batch_size=1)(joblib.delayed(call)(number) for number in range(3))
    assert marked() == {}


def test_hosts_may_have_different_numbers_of_workers(crew):
    with crew(serve, nproc=[1, 2]) as three:
        assert [three.worker(rank).ask(0).result(LIMIT_S)[4] for rank in range(3)] == ["host1", "host2", "host2"]


def test_many_small_tasks_come_back_in_order(crew):
    with crew(serve) as four:
        assert [answer[5] for answer in four.map(range(2000))] == list(range(2000))


def test_what_is_emitted_comes_in_order_with_rank_and_host(crew):
    with crew(serve, nproc=1) as two:
        task = two.worker(1).send(("count", 500))
        events = kinds(two, "done", 1)
    mine = [event for event in events if event.kind == "emitted"]
    assert [event.value for event in mine] == list(range(500))
    assert {(event.rank, event.host, event.task) for event in mine} == {(1, "host2", task)}


def test_events_nobody_reads_hold_the_worker_and_not_the_others(crew):
    size = 1 << 20

    def flood(ctx, task):
        if ctx.rank == 0:
            for _ in range(40):
                ctx.emit(b"x" * size)
        return ctx.rank

    with crew(flood, nproc=1, max_events=4) as two:
        flooding = two.worker(0).ask(0)
        two.worker(1).ask(0)  # its answer, too, is read when there is room
        taken = 0
        while taken < 40:
            taken += sum(event.kind == "emitted" and len(event.value) == size for event in two.events(LIMIT_S))
        assert flooding.result(LIMIT_S) == 0


def test_one_worker_that_dies_is_started_again_on_its_host_and_the_others_go_on(crew):
    with crew(serve, restart=ir.Restart(strategy="one_for_one")) as four:
        before = [worker.pid for worker in four.status().workers]
        dead = four.worker(3).ask("die")
        with pytest.raises(ir.WorkerDied, match=r"rank 3 on host2 died: killed by SIGKILL") as caught:
            dead.result(LIMIT_S)
        assert (caught.value.rank, caught.value.host, caught.value.signal) == (3, "host2", signal.SIGKILL)
        assert four.worker(3).ask("again").result(LIMIT_S) == (3, 1, 4, 1, "host2", "again")
        assert four.worker(0).ask("go on").result(LIMIT_S) == (0, 0, 4, 0, "host1", "go on")
        after = [worker.pid for worker in four.status().workers]
    assert [now == then for now, then in zip(after, before, strict=True)] == [True, True, True, False]
    assert [worker.restarts for worker in four.status().workers] == [0, 0, 0, 1]


def test_all_are_started_again_on_both_hosts_where_that_is_asked_for(crew):
    with crew(serve, nproc=1, restart=ir.Restart(strategy="one_for_all")) as two:
        with pytest.raises(ir.WorkerDied):
            two.worker(0).ask("die").result(LIMIT_S)
        kinds(two, "ready", 1)
        assert [two.worker(rank).ask("again").result(LIMIT_S)[3] for rank in range(2)] == [1, 1]


def test_a_host_that_dies_fails_the_crew_and_is_named(bed, crew):
    four = crew(serve, restart=ir.Restart(strategy="one_for_one"), grace=2)
    try:
        ask = four.worker(3).ask("wait")
        kinds(four, "emitted", 3)
        with bed.host_down(2):
            with pytest.raises(ir.WorkerDied, match=r"rank 3 on host2 is gone: lost node 1 \(host2\)") as caught:
                ask.result(LIMIT_S)
            assert isinstance(caught.value.__cause__, ir.NodeLost)
            assert caught.value.__cause__.host == "host2"
            with pytest.raises(ir.CrewFailed, match="host2"):
                list(four)
    finally:
        four.close()
    assert not marked()


def test_a_rank_of_a_lost_node_is_told_so_though_another_of_it_was_the_first():
    """The crew fails with the first, and stops the others."""
    error = ir.NodeLost("lost node 1 (host2)", "host2", 1)
    process = SimpleNamespace(rank=3, local_rank=1, host="host2", pid=5, exit=None, problem=error)
    worker = SimpleNamespace(rank=3, process=process, cause=None, start_error=None, stopped_for="the crew failed")
    told = death_error(worker)
    assert str(told) == "rank 3 on host2 is gone: lost node 1 (host2) (pid 5)"
    assert told.__cause__ is error


class Lingers:
    """Takes for ever to stop on the second host."""

    def __init__(self, bell):
        self.bell = bell

    def task(self, ctx, task):
        return ctx.rank

    def stop(self, ctx):
        if ctx.rank == 3:
            with open(self.bell, "w") as file:
                file.write("stopping\n")
            signal.pause()


def test_a_host_that_dies_while_the_crew_is_closed_is_named_as_a_problem(bed, bell, crew):
    four = crew(Lingers, args=(str(bell.path),), grace=60)
    assert four.worker(3).ask("now").result(LIMIT_S) == 3
    closing = threading.Thread(target=four.close)
    closing.start()
    bell.hear(1)
    with bed.host_down(2):
        closing.join(LIMIT_S)
    told = "rank 3 did not end properly when the crew was closed: lost node 1 (host2)"
    assert any(problem.startswith(told) for problem in four.status().problems)  # rank 2 may not have ended either


def test_a_watchdog_hears_what_is_pinged_to_the_socket_of_the_worker(crew):
    def ping(ctx, task):
        import socket
        import time

        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            for _ in range(8):
                sock.sendto(b"WATCHDOG=1", os.environ["NOTIFY_SOCKET"])
                time.sleep(0.5)
        return "lives"

    with crew(ping, nproc=1, watchdog_s=2) as two:
        assert two.worker(1).ask(0).result(LIMIT_S) == "lives"


def test_it_works_from_asyncio(crew):
    async def talk():
        async with crew(serve, nproc=1) as two:
            answers = await asyncio.gather(*(two.worker(rank).ask(rank) for rank in range(2)))
        return [answer[4] for answer in answers]

    assert asyncio.run(talk()) == ["host1", "host2"]


def test_a_closed_crew_has_let_every_worker_end_in_order(crew, tmp_path):
    class Part:
        def task(self, ctx, task):
            return task

        def stop(self, ctx):
            with open(f"{task_folder}/{ctx.rank}", "w") as file:
                file.write(os.uname().nodename)

    task_folder = str(tmp_path)
    four = crew(Part)
    four.worker(0).ask(1).result(LIMIT_S)
    assert four.close().problems == ()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": "host1", "1": "host1", "2": "host2", "3": "host2"
    }  # fmt: skip


def test_a_wrong_host_is_told_before_any_worker_is_there(crew):
    with pytest.raises(ir.NodeLost, match=r"node 0 \(nowhere\) could not be reached"):
        crew(serve, hosts=["nowhere"])
