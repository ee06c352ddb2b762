"""Events that nobody reads: no answer waits for them, they are bounded, and what is dropped is counted."""

from __future__ import annotations

import sys
import threading

import pytest

import infini_run as ir
from infini_run.crews.supervision.event_queue import CrewEvent, EventQueue
from tests.support.command import CHILDREN
from tests.support.waiting import LIMIT_S, until

sys.path.insert(0, str(CHILDREN))
from crew_parts import obey

MOST = 10


@pytest.fixture
def crew():
    with ir.Crew(obey, nproc=2, max_events=MOST, grace=1) as crew:
        yield crew


def emitted(events):
    return [event.value for event in events if event.kind == "emitted"]


def test_a_map_whose_tasks_emit_ends_though_nobody_reads(crew):
    assert list(crew.map([("emit", 1000)] * 6)) == [1000] * 6


def test_asks_whose_tasks_emit_end_though_nobody_reads(crew):
    asks = [crew.worker(rank).ask(("emit", 1000)) for rank in (0, 1, 0)]
    assert [ask.result(LIMIT_S) for ask in asks] == [1000] * 3


def test_the_latest_events_are_kept_and_what_was_dropped_is_counted(crew):
    crew.worker(1).ask(("emit", 1000)).result()
    events = [event for event in crew.events() if event.rank == 1]
    assert [event.kind for event in events] == ["started", "ready", "dropped", *["emitted"] * MOST]
    assert events[2].count == 1000 - MOST
    assert emitted(events) == list(range(1000 - MOST, 1000))
    assert [worker.dropped for worker in crew.status().workers] == [0, 1000 - MOST]
    crew.worker(1).ask(("emit", MOST + 3)).result()
    again = [event for event in crew.events() if event.rank == 1]
    assert [event.kind for event in again] == ["dropped", *["emitted"] * MOST]
    assert again[0].count == 3
    assert crew.status().workers[1].dropped == 1000 - MOST + 3


def test_results_of_send_that_nobody_reads_are_bounded_too(crew):
    for n in range(100):
        crew.worker(0).send(("square", n))
    crew.worker(0).ask("pid").result()
    events = crew.events()
    assert [event.value for event in events if event.kind == "done"] == [n * n for n in range(100 - MOST, 100)]
    assert sum(event.count for event in events) == 100 - MOST


def test_events_about_the_processes_of_a_worker_are_bounded_too():
    """A worker that is replaced again and again (max_tasks_per_child) has some for each process."""
    queue = EventQueue(MOST, lambda: None)
    for pid in range(5000):
        for kind in ("started", "ready", "stopped"):
            queue.add(CrewEvent(kind=kind, rank=0, pid=pid))
    queue.add(CrewEvent(kind="started", rank=1))
    gap, *events, other = queue.get(0)
    assert (gap.kind, gap.rank, gap.count + len(events)) == ("dropped", 0, 15_000)
    assert len(events) < 2000
    assert [(event.kind, event.pid) for event in events[-2:]] == [("ready", 4999), ("stopped", 4999)]
    assert (other.kind, other.rank) == ("started", 1)
    assert dict(queue.drops) == {0: gap.count}
    queue.add(CrewEvent(kind="started", rank=0))
    assert [event.kind for event in queue.get(0)] == ["started"]


def test_a_reader_gets_every_event_however_slow_it_is(crew):
    crew.events()
    task = crew.worker(0).send(("emit", 2000))
    found = []
    while not (found and found[-1].kind == "done"):
        found += [event for event in crew.events() if event.task == task]
    assert emitted(found) == list(range(2000))
    assert crew.status().workers[0].dropped == 0


def test_a_worker_whose_events_a_reader_leaves_waiting_holds_no_other_worker(crew):
    crew.events()
    flooding = crew.worker(0).ask(("emit", 2000))
    found = []
    thread = threading.Thread(target=lambda: found.append(crew.worker(1).ask(("square", 3)).result()))
    thread.start()
    thread.join(LIMIT_S)
    assert found == [9]
    assert not flooding.done()
    assert flooding.result(LIMIT_S) == 2000  # the reader itself waits now, so it cannot read


def test_a_reader_that_ends_is_no_reader_any_more(crew):
    thread = threading.Thread(target=crew.events)
    thread.start()
    thread.join()
    asks = [crew.worker(0).ask(("emit", 1000)), crew.worker(0).ask(("square", 2))]
    done = threading.Event()
    asks[1].add_done_callback(lambda ask: done.set())
    assert done.wait(LIMIT_S)
    assert crew.status().workers[0].dropped == 1000 - MOST


def test_leaving_the_block_does_not_wait_for_events_to_be_read():
    with ir.Crew(obey, max_events=MOST) as crew:
        crew.events()
        ask = crew.ask(("emit", 1000))
    assert ask.result() == 1000


def test_a_coroutine_that_reads_gets_all_and_one_that_waits_for_an_answer_is_no_reader():
    import asyncio

    async def main():
        async with ir.Crew(obey, max_events=MOST) as crew:
            values = []
            task = crew.worker(0).send(("emit", 500))
            async for event in crew:
                if event.task == task:
                    await asyncio.sleep(0)
                    if event.kind == "done":
                        break
                    values.append(event.value)
            assert await crew.ask(("emit", 500)) == 500
            return values, crew.status().workers[0].dropped

    values, dropped = asyncio.run(main())
    assert values[-1] == 499
    assert (values == list(range(500))) or dropped  # what came before the first read may have been dropped
    assert dropped >= 500 - MOST


def test_of_status_and_progress_the_latest_is_kept():
    def serve(ctx, task):
        for i in range(task):
            ctx.status(f"step {i}")
            ctx.progress(i, task)
        ctx.emit("last")
        return task

    with ir.Crew(serve, nproc=2) as crew:
        for rank in (0, 1):
            assert crew.worker(rank).ask(5000).result() == 5000
        events = crew.events()
        assert [event.text for event in events if event.kind == "status"] == ["step 4999"] * 2
        assert [event.done for event in events if event.kind == "progress"] == [4999] * 2
        assert [event.kind for event in events if event.rank == 0][-3:] == ["status", "progress", "emitted"]
        until(lambda: crew.status().workers[1].text == "step 4999")
