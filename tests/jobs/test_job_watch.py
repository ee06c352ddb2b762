"""Who waits for a job hears of its directory at once, and asks its scheduler now and then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pytest

from infini_run.jobs.folder.inotify import Changes
from infini_run.jobs.folder.records import JobResult, Phase
from infini_run.jobs.folder.task import tasks_of
from infini_run.jobs.scheduler import SchedulerJob
from infini_run.jobs.serve import job_cache
from infini_run.jobs.status import follower as module
from infini_run.jobs.status.logs import Reader
from infini_run.jobs.status.watch import JobWatcher
from tests.jobs.test_job_status import ID, Said, begin, made
from tests.support.waiting import LIMIT_S


@pytest.fixture
def slurm():
    said = Said()
    said.seen["ir-0123456789"] = SchedulerJob(id=ID, state="QUEUED", reason="Priority")
    return said


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path, "ir-0123456789")


@pytest.fixture
def job(folder, slurm):
    job = JobWatcher(folder, slurm)
    yield job
    job.close()


def later(what):
    """Done by somebody else while we wait."""
    thread = threading.Thread(target=what)
    thread.start()
    return thread


def test_its_phases_are_heard_of_and_not_asked_for(job, folder, slurm):
    assert job.status.headline == "QUEUED Priority"
    number = begin(folder, "STARTING")
    assert job.poll(60)
    assert job.status.state == "STARTING"
    other = later(lambda: folder.write_phase(number, Phase(state="RUNNING", since_s=2e9, nodes=("n1",), nproc=8)))
    while job.status.state != "RUNNING":
        job.poll(60)
    other.join()
    assert job.status.nodes == ("n1",)
    folder.write_result(JobResult(state="COMPLETED", code=0, end_s=2e9))
    while not job.has_ended:
        job.poll(60)
    assert job.status.headline == "COMPLETED"
    assert len(slurm.asked) == 1


def test_a_phase_that_comes_before_its_directory_is_watched_is_read(job, folder, slurm, monkeypatch):
    add = Changes.add

    def phase_first(changes, path):
        folder.write_phase(0, Phase(state="RUNNING", since_s=2e9, nodes=("n1",), nproc=8))
        add(changes, path)

    os.mkdir(folder.file("0"))
    monkeypatch.setattr(Changes, "add", phase_first)
    job.poll(60)
    assert (job.status.state, len(slurm.asked)) == ("RUNNING", 1)


def test_who_watches_all_jobs_hears_of_one_whose_directory_comes_as_the_watch_begins(tmp_path, monkeypatch):
    """It is no job yet when it is first looked at, and nothing else happens until it is one."""
    add, above = Changes.add, tmp_path / "jobs"
    request = made(tmp_path, "ir-0123456789").file("request.json")

    def directory_first(changes, path, **words):
        (above / "ir-0123456789").mkdir(exist_ok=True)
        add(changes, path, **words)

    async def in_a_thread(call):
        return await asyncio.get_running_loop().run_in_executor(None, call)

    async def until_it_is_seen():
        cache = job_cache.JobCache(str(above), {}, in_a_thread)
        async with contextlib.aclosing(cache.changes()) as changes:
            assert await changes.__anext__() == ({}, "")
            os.rename(request, above / "ir-0123456789" / "request.json")
            seen, _ = await asyncio.wait_for(changes.__anext__(), LIMIT_S)
            cache.end()
        await cache.close()
        return list(seen)

    above.mkdir()
    monkeypatch.setattr(Changes, "add", directory_first)
    assert asyncio.run(until_it_is_seen()) == ["ir-0123456789"]


def test_the_scheduler_is_asked_ever_more_rarely(folder, slurm, monkeypatch):
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    monkeypatch.setattr(module, "LAST_S", 0.04)
    job = JobWatcher(folder, slurm)
    try:
        seen = []
        while len(slurm.asked) < 8:
            count = len(slurm.asked)
            job.poll()
            if len(slurm.asked) > count:
                seen.append(job._follower.interval_s)
        assert seen == sorted(seen)
        assert seen[-1] == 0.04
    finally:
        job.close()
    assert (module.GROWTH, module.REMOTE_S) == (1.5, 5.0)


def test_what_happens_while_a_scheduler_is_asked_is_a_reason_to_ask_again():
    follower = module.Follower()
    try:
        follower.begin_query(100.0)
        follower.begin_query(102.0)
        assert follower.query_at_s == 105.0
        follower.ask_now()
        assert follower.query_at_s == 0.0
        follower.begin_query(103.0)
        assert follower.query_at_s == 107.5
    finally:
        follower.close()


def test_an_end_that_somebody_else_brought_is_asked_about_at_once(job, folder, slurm):
    begin(folder)
    slurm.seen["ir-0123456789"] = SchedulerJob(id=ID, state="PREEMPTED")
    folder.write_result(JobResult(state="CANCELLED", code=143, scheduler_ended_it=True, end_s=2e9))
    while not job.has_ended:
        job.poll(60)
    assert job.status.headline == "PREEMPTED exit 143"
    assert len(slurm.asked) == 2


def test_the_output_of_one_task_asks_nothing_about_another_that_was_told_to_stop(tmp_path, slurm, monkeypatch):
    monkeypatch.setattr(module, "FIRST_S", 1000.0)
    array = made(tmp_path, "ir-00000000aa", array="0-1")
    told, writes = tasks_of(array)
    begin(told)
    begin(writes)
    told.write_result(JobResult(state="CANCELLED", code=143, scheduler_ended_it=True, end_s=2e9))
    slurm.seen[told.name] = SchedulerJob(id=told.id, state="QUEUED", reason="BeginTime")
    slurm.seen[writes.name] = SchedulerJob(id=writes.id, state="RUNNING")
    job = JobWatcher(array, slurm)
    try:
        with open(writes.log(0), "wb", buffering=0) as file:
            for _ in range(3):
                file.write(b"line\n")
                job.poll(60)
        assert len(slurm.asked) == 1
        slurm.seen[writes.name] = SchedulerJob(id=writes.id, state="PREEMPTED")
        writes.write_result(JobResult(state="CANCELLED", code=143, scheduler_ended_it=True, end_s=2e9))
        while not job.status.tasks[1].is_final:
            job.poll(60)
        assert (job.status.tasks[1].state, len(slurm.asked)) == ("PREEMPTED", 2)
    finally:
        job.close()


def test_no_news_keeps_what_was_known(folder, slurm, monkeypatch):
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    job = JobWatcher(folder, slurm)
    try:
        slurm.error = "squeue: no response in time"
        while not job.status.query_error:
            job.poll()
        assert (job.status.headline, job.has_ended) == ("QUEUED Priority", False)
    finally:
        job.close()


def test_one_that_nobody_knows_has_a_minute_to_be_heard_of(folder, slurm, monkeypatch):
    slurm.seen.clear()
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    job = JobWatcher(folder, slurm)
    try:
        assert (job.status.state, job.has_ended) == ("LOST", False)
        slurm.seen["ir-0123456789"] = SchedulerJob(id=ID, state="QUEUED")
        while job.status.state == "LOST":
            job.poll()
        assert job.status.state == "QUEUED"
    finally:
        job.close()


def test_another_descriptor_wakes_who_waits(job, folder):
    other = Changes()
    try:
        other.add(folder.path + "/..")
        with open(folder.file("../x"), "w") as file:
            file.write("x")
        assert job.poll(60, also=(other.fileno(),)) is False
        assert other.clear()
        assert not other.clear()
    finally:
        other.close()
        other.close()


def test_a_log_is_read_in_whole_lines_as_it_grows(tmp_path):
    path = tmp_path / "log"
    reader = Reader(str(path))
    assert list(reader.lines()) == []
    with open(path, "wb", buffering=0) as file:
        file.write(b"one\ntw")
        assert list(reader.lines()) == [b"one\n"]
        file.write(b"o\n\nrest")
        assert list(reader.lines()) == [b"two\n", b"\n"]
    assert reader.end() == b"rest\n"
    assert reader.end() == b""
