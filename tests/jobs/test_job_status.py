"""What a job is: its own word, its scheduler's, and what happens when they differ or say nothing."""

from __future__ import annotations

import os
import subprocess

import pytest

from infini_run.errors import InfiniRunError, UsageError
from infini_run.jobs.errors import QueryError
from infini_run.jobs.folder.job_store import find_folder, is_name, make_folder, new_name
from infini_run.jobs.folder.records import JobResult, Phase, Submission
from infini_run.jobs.folder.task import make_tasks, tasks_of
from infini_run.jobs.job import Job
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.scheduler import HOPELESS, SchedulerJob
from infini_run.jobs.status.status_query import is_lost_for_good, query_status, read_status
from infini_run.jobs.tables import scheduler_lines
from infini_run.record import replace

NOW_S = 1_700_000_000.0
ID = "48213"


class Said:
    """A scheduler that says what it is told to."""

    name = "slurm"
    has_accounting = False

    def __init__(self) -> None:
        self.seen: dict[str, SchedulerJob] = {}
        self.asked: list[tuple[str, ...]] = []
        self.error = ""
        self.meanwhile = None

    def query(self, names, ids=None):
        self.asked.append(tuple(names))
        if self.meanwhile is not None:
            self.meanwhile()
        if self.error:
            raise QueryError(self.error)
        return {name: seen for name, seen in self.seen.items() if name in names}


@pytest.fixture
def slurm():
    return Said()


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path, "ir-0123456789")


def made(tmp_path, name, scheduler="slurm", submitted_s=NOW_S - 1000, array="", python="p", slots=8):
    request = JobRequest(
        name=name,
        folder=str(tmp_path / name),
        command=("python", "t.py") if python == "p" else ("true",),
        cwd="/",
        python=python,
        slots=slots,
        scheduler=scheduler,
        env=(("A", "1"),),
        options=("-C", "x"),
        array=array,
    )
    folder = make_folder(str(tmp_path), name)
    order = Submission(
        request=request, nodes=2, slots_per_node=min(4, slots), pool="gpu", submitted_s=submitted_s, host="h"
    )
    folder.write_submission(order, {"A": "1"})
    make_tasks(folder)
    folder.write_id(ID)
    return folder


def begin(folder, state="RUNNING"):
    number = folder.begin()
    folder.write_phase(number, Phase(state=state, since_s=NOW_S - 10, nodes=("n1", "n2"), nproc=4))
    return number


def ask(folder, slurm, now_s=NOW_S):
    return query_status([folder], lambda order: slurm, now_s)[0]


def test_what_was_asked_for_comes_back_as_it_was(folder):
    order = folder.read_submission()
    assert order.request.command == ("python", "t.py")
    assert order.request.options == ("-C", "x")
    assert order.request.env == ()  # it is in the file that only we can read
    assert folder.read_env() == {"A": "1"}
    assert order.shape == "2 nodes x 4 gpus"


def test_a_job_that_has_ended_is_asked_about_no_more(folder, slurm):
    begin(folder)
    folder.write_result(JobResult(state="FAILED", code=7, node="n2", rank=5, reason="why", end_s=NOW_S))
    status = ask(folder, slurm)
    assert (status.headline, status.is_final, status.exit_code) == ("FAILED exit 7 on n2, rank 5", True, 7)
    assert slurm.asked == []


@pytest.mark.parametrize(
    ("said", "phase", "state"),
    [
        ("QUEUED", None, "QUEUED"), ("STARTING", None, "STARTING"), ("RUNNING", None, "STARTING"),
        ("RUNNING", "STARTING", "STARTING"), ("RUNNING", "RUNNING", "RUNNING"), ("RUNNING", "WARNED", "WARNED"),
        ("RUNNING", "REQUEUED", "STARTING"), ("QUEUED", "REQUEUED", "QUEUED"), ("QUEUED", "RUNNING", "QUEUED"),
    ],
)  # fmt: skip
def test_the_scheduler_and_the_directory_together_say_how_far_it_is(folder, slurm, said, phase, state):
    if phase:
        begin(folder, phase)
    slurm.seen["ir-0123456789"] = SchedulerJob(id=ID, state=said)
    status = ask(folder, slurm)
    assert (status.state, status.is_final) == (state, False)


def test_why_it_waits_is_told(folder, slurm):
    slurm.seen[folder.name] = SchedulerJob(
        id=ID, state="QUEUED", reason="BadConstraints", hold=HOPELESS, advice="change it"
    )
    status = ask(folder, slurm)
    assert (status.headline, status.hold, status.advice) == ("QUEUED BadConstraints", "hopeless", "change it")


@pytest.mark.parametrize("phase", ["RUNNING", "REQUEUED"])
@pytest.mark.parametrize(
    ("state", "reason"),
    [("OOM", ""), ("NODE_FAIL", ""), ("FAILED", ""), ("PREEMPTED", "it was preempted"),
     ("TIMEOUT", "its time limit was reached"), ("CANCELLED", "it was canceled")],
)  # fmt: skip
def test_what_the_scheduler_says_of_one_that_left_no_word_is_written_down(folder, slurm, state, reason, phase):
    begin(folder, phase)
    slurm.seen[folder.name] = SchedulerJob(id=ID, state=state, code=9)
    status = ask(folder, slurm)
    assert (status.state, status.is_final, status.code) == (state, True, 9)
    assert status.reason == (reason or f"reason unknown; run infini-job logs {folder.name}")
    slurm.seen.clear()
    assert ask(folder, slurm).state == state
    assert len(slurm.asked) == 1


def test_one_that_never_began_says_where_to_look(folder, slurm):
    slurm.seen[folder.name] = SchedulerJob(id=ID, state="FAILED")
    assert f"check that its nodes share {folder.path}" in ask(folder, slurm).reason


def test_the_scripts_own_last_words_are_the_reason(folder, slurm):
    with open(folder.scheduler_logs[0], "w") as file:
        file.write("first\n/opt/python: not found\n\n")
    slurm.seen[folder.name] = SchedulerJob(id=ID, state="FAILED", code=127)
    assert ask(folder, slurm).reason == "/opt/python: not found"


def test_its_own_word_wins_over_the_schedulers(folder, slurm):
    """It was written while the scheduler was asked."""
    begin(folder)
    slurm.seen[folder.name] = SchedulerJob(id=ID, state="FAILED", code=143)
    slurm.meanwhile = lambda: folder.write_result(JobResult(state="FAILED", code=7, node="n2", rank=5, end_s=NOW_S))
    assert ask(folder, slurm).headline == "FAILED exit 7 on n2, rank 5"


def test_nobody_writes_over_its_own_word(folder):
    folder.write_result(JobResult(state="COMPLETED", code=0, end_s=0.0))
    assert folder.write_result_if_absent(JobResult(state="OOM", code=9, end_s=0.0)) is False
    assert folder.result().state == "COMPLETED"
    assert sorted(os.listdir(folder.path)) == ["env", "exit", "id", "request.json"]


@pytest.mark.parametrize(
    ("said", "state", "reason"),
    [("PREEMPTED", "PREEMPTED", "it was preempted"), ("TIMEOUT", "TIMEOUT", "its time limit was reached"),
     ("NODE_FAIL", "NODE_FAIL", "told"), ("FAILED", "CANCELLED", "told"), ("CANCELLED", "CANCELLED", "told"),
     ("COMPLETED", "CANCELLED", "told")],
)  # fmt: skip
def test_the_scheduler_may_know_why_it_was_told_to_stop(folder, slurm, said, state, reason):
    begin(folder)
    folder.write_result(JobResult(state="CANCELLED", code=143, reason="told", scheduler_ended_it=True, end_s=NOW_S))
    slurm.seen[folder.name] = SchedulerJob(id=ID, state=said)
    status = ask(folder, slurm)
    assert (status.state, status.is_final, status.code, status.reason) == (state, True, 143, reason)
    ask(folder, slurm)
    assert len(slurm.asked) == 1


def test_one_that_was_told_to_stop_may_be_run_again(folder, slurm):
    begin(folder)
    folder.write_result(JobResult(state="CANCELLED", code=143, scheduler_ended_it=True, end_s=NOW_S))
    slurm.seen[folder.name] = SchedulerJob(id=ID, state="QUEUED", reason="BeginTime")
    status = ask(folder, slurm)
    assert (status.headline, status.is_final, status.code) == ("QUEUED BeginTime", False, -1)
    assert folder.begin() == 1
    assert (folder.result(), folder.result(0).state) == (None, "CANCELLED")


def test_an_answer_about_a_job_that_has_been_queued_again_meanwhile_is_no_end(folder, slurm):
    """PBS knows the run that is over and the one that is to follow by two ids."""
    begin(folder, "REQUEUED")
    slurm.seen[folder.name] = SchedulerJob(id=ID, state="FAILED", code=4)
    slurm.meanwhile = lambda: folder.write_id("48214")
    status = ask(folder, slurm)
    assert (status.state, status.is_final, status.id) == ("QUEUED", False, "48214")
    assert folder.result() is None


def test_one_that_was_told_to_stop_and_is_forgotten_has_its_own_word(folder, slurm):
    begin(folder)
    folder.write_result(JobResult(state="CANCELLED", code=143, scheduler_ended_it=True, end_s=NOW_S))
    status = ask(folder, slurm)
    assert (status.state, status.is_final, status.code) == ("CANCELLED", True, 143)
    ask(folder, slurm)
    assert len(slurm.asked) == 1


def test_what_was_written_late_of_an_earlier_run_is_not_the_end_of_this_one(folder, slurm):
    begin(folder)
    begin(folder)
    folder.write_result(JobResult(state="CANCELLED", code=143, attempt=0, end_s=NOW_S))
    slurm.seen[folder.name] = SchedulerJob(id=ID, state="RUNNING")
    assert (ask(folder, slurm).state, ask(folder, slurm).is_final) == ("RUNNING", False)
    slurm.seen[folder.name] = SchedulerJob(id=ID, state="OOM", code=137)
    assert (ask(folder, slurm).headline, ask(folder, slurm).is_final) == ("OOM exit 137", True)


def test_one_that_is_missing_is_lost_and_not_finished(folder, slurm):
    begin(folder)
    status = ask(folder, slurm)
    assert (status.state, status.is_final) == ("LOST", False)
    assert status.reason.startswith("slurm no longer knows it")
    assert not is_lost_for_good(status, missing_since_s=100.0, now_s=150.0)
    assert is_lost_for_good(status, missing_since_s=100.0, now_s=161.0)
    slurm.seen[folder.name] = SchedulerJob(id=ID, state="RUNNING")
    assert ask(folder, slurm).state == "RUNNING"


def test_one_that_is_missing_and_was_cancelled_is_cancelled(folder, slurm):
    folder.mark_cancelled()
    status = ask(folder, slurm)
    assert (status.headline, status.is_final) == ("CANCELLED", True)


@pytest.mark.parametrize("array_id", [ID, "48300"])
def test_a_task_that_slurm_leaves_out_is_not_settled(tmp_path, slurm, array_id):
    """It was cancelled while it waited, or has ended and is forgotten; another id is that of another task, which was
    submitted once more by itself."""
    array = made(tmp_path, "ir-00000000aa", array="0-1")
    task = tasks_of(array)[1]
    slurm.seen[array.name] = SchedulerJob(id=array_id, state="QUEUED")
    slurm.query = lambda names, ids=None: dict(slurm.seen)  # as Slurm, which is asked by the array's name
    status = ask(task, slurm)
    assert (status.state, status.is_final) == ("LOST", False)
    assert ("its array has no such task: it was canceled while" in status.reason) is (array_id == ID)
    assert task.result() is None
    slurm.seen[task.name] = SchedulerJob(id=task.id, state="FAILED", code=1)
    assert (ask(task, slurm).headline, ask(task, slurm).is_final) == ("FAILED exit 1", True)


@pytest.mark.parametrize("array", ["", "0-2"])
def test_one_whose_id_came_after_the_question_is_not_lost(tmp_path, slurm, array):
    """It is submitted just now: the scheduler was asked when it did not know it yet."""
    folder = made(tmp_path, "ir-0123456789", scheduler="local", array=array)
    os.unlink(f"{folder.path}/id")
    slurm.meanwhile = lambda: folder.write_id("1.1@h")
    status = ask(folder, slurm)
    assert (status.state, status.is_final, folder.result()) == ("QUEUED", False, None)
    assert [(task.state, task.is_final) for task in status.tasks] == [("QUEUED", False)] * (3 if array else 0)


def test_a_task_of_which_neither_slurm_nor_its_accounting_knows_was_cancelled(tmp_path, slurm):
    """Slurm's accounting has every task that ended, and none that was cancelled while it waited."""
    array = made(tmp_path, "ir-00000000aa", array="0-1")
    task = tasks_of(array)[1]
    slurm.seen[array.name] = SchedulerJob(id=ID, state="QUEUED")
    slurm.query = lambda names, ids=None: dict(slurm.seen)
    slurm.has_accounting = True
    assert (ask(task, slurm).headline, ask(task, slurm).is_final) == ("CANCELLED", True)
    assert task.result().reason == "its array has no such task: it was canceled while it waited"


def test_a_task_that_was_cancelled_by_its_name_is_cancelled(tmp_path, slurm):
    array = made(tmp_path, "ir-00000000aa", array="0-1")
    task = tasks_of(array)[1]
    slurm.seen[array.name] = SchedulerJob(id=ID, state="QUEUED")
    task.mark_cancelled()
    assert (ask(task, slurm).headline, ask(task, slurm).is_final) == ("CANCELLED", True)


def test_one_that_is_being_submitted_is_not_lost(tmp_path, slurm):
    folder = made(tmp_path, "ir-00000000aa", submitted_s=NOW_S - 1)
    os.unlink(folder.file("id"))
    assert ask(folder, slurm).state == "QUEUED"
    assert ask(folder, slurm, NOW_S + 100).reason.startswith("it was never submitted")


def test_no_news_changes_nothing(folder, slurm):
    begin(folder)
    slurm.error = "squeue: no response in time"
    status = ask(folder, slurm)
    assert (status.state, status.is_final, status.query_error) == ("RUNNING", False, "squeue: no response in time")


def test_a_scheduler_that_is_not_here_hides_no_other_job(tmp_path, slurm):
    folders = [made(tmp_path, "ir-00000000aa"), made(tmp_path, "ir-00000000bb", scheduler="pbs")]
    slurm.seen["ir-00000000aa"] = SchedulerJob(id=ID, state="RUNNING")

    def find(order):
        if order.request.scheduler == "pbs":
            raise UsageError("qsub is not on PATH")
        return slurm

    first, second = query_status(folders, find, NOW_S)
    assert (first.state, first.query_error) == ("STARTING", "")
    assert (second.state, second.query_error) == ("QUEUED", "qsub is not on PATH")


def test_all_jobs_of_a_scheduler_are_one_query_and_those_that_ended_are_none(tmp_path, slurm):
    folders = [made(tmp_path, f"ir-{number:010x}") for number in range(100)]
    folders[3].write_result(JobResult(state="COMPLETED", code=0, end_s=0.0))
    slurm.seen = {folder.name: SchedulerJob(id=ID, state="QUEUED") for folder in folders}
    found = query_status(folders, lambda order: slurm, NOW_S)
    assert [status.name for status in found] == [folder.name for folder in folders]
    assert len(slurm.asked) == 1
    assert len(slurm.asked[0]) == 99


def test_a_new_attempt_begins_beside_the_earlier_ones(folder):
    assert [folder.begin(), folder.begin()] == [0, 1]
    assert folder.attempts() == 2
    assert read_status(folder).attempt == 1


def test_names_are_ours_alone():
    assert is_name(new_name())
    assert len({new_name() for _ in range(100)}) == 100
    for text in ("ir-", "ir-012345678", "ir-012345678g", "../ir-0123456789", "IR-0123456789", "ir-0123456789/"):
        assert not is_name(text)


def test_a_link_is_no_job(folder, tmp_path):
    os.symlink(folder.path, tmp_path / "ir-00000000ff")
    with pytest.raises(UsageError, match="not a job directory"):
        find_folder(str(tmp_path), "ir-00000000ff")


def test_a_file_that_somebody_has_changed_is_told(folder):
    begin(folder)
    with open(folder.file("exit"), "w") as file:
        file.write("[]")
    with pytest.raises(InfiniRunError, match=": not as infini-job wrote it"):
        read_status(folder)


def test_a_job_that_its_scheduler_does_not_know_can_be_forgotten(folder, slurm):
    """LOST is no end, so nothing else would ever take it away; a scheduler that does not answer knows of none."""
    begin(folder)
    job = Job(folder, slurm)
    slurm.error = "squeue: no response in time"
    with pytest.raises(
        UsageError, match=r"is RUNNING as far as is known .squeue: no response in time.; run infini-job cancel"
    ):
        job.forget()
    slurm.error = ""
    assert job.status().state == "LOST"
    job.forget()
    assert not os.path.exists(folder.path)


def test_a_directory_that_cannot_be_removed_is_told(folder, slurm):
    begin(folder)
    if subprocess.run(["chattr", "+i", folder.file("id")], capture_output=True, check=False).returncode:
        pytest.skip("no file can be made immutable here")
    try:
        with pytest.raises(InfiniRunError, match="job ir-0123456789: cannot remove all of "):
            Job(folder, slurm).forget()
    finally:
        subprocess.run(["chattr", "-i", folder.file("id")], check=True)


def test_script_stack_does_not_hide_its_message(folder, slurm):
    frames = [f"frame #{n}: c10::f() + {n} (0x7f0c in libc10.so)" for n in range(9)]
    with open(folder.scheduler_logs[0], "w") as log:
        log.write("\n".join(["hello", "  what():  boom", *frames]))
    status = replace(read_status(folder), state="FAILED", is_final=True, code=134)
    assert scheduler_lines(status) == ["slurm: hello", "slurm: what():  boom"]
