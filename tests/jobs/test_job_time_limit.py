"""When a job is warned: by Slurm's word, which may change, and whether or not it answers."""

from __future__ import annotations

import os
import select
import signal
import time

import pytest

from infini_run.jobs.allocation.time_limit import NEVER, EndReason, TimeLimitTimer
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.schedulers.scheduler_command import IGNORE_TERM, start
from tests.support.waiting import LIMIT_S

START_S = 1_700_000_000.0
AT_THE_END = "--noheader --states=all --jobs=7 --Format=PreemptTime:32,TimeLeft:32"


def request(scheduler="slurm", time_s=0, warn_s=300):
    return JobRequest(
        name="ir-0123456789", folder="/f", command=("true",), cwd="/", python="python", slots=1, scheduler=scheduler,
        time_s=time_s, warn_s=warn_s,
    )  # fmt: skip


@pytest.fixture
def squeue(tmp_path):
    """Sets what squeue says; "": it never answers."""
    script = tmp_path / "squeue"

    def say(text):
        body = f"echo {text}" if text else "exec sleep 1000"
        is_known = f'[ "$*" = "-h -j 7 -o %e" ] || [ "$*" = "{AT_THE_END}" ]'
        script.write_text(f"#!/bin/sh\n{is_known} || exit 3\n{body}\n")
        script.chmod(0o755)

    say.environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    return say


@pytest.fixture
def arm(squeue):
    alarms = []

    def make(asked, **kwargs):
        alarms.append(TimeLimitTimer(asked, squeue.environ, START_S, is_ours=kwargs.get("is_ours", False)))
        return alarms[-1]

    yield make
    for alarm in alarms:
        alarm.close()


def clock(at_s):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_s))


def answered(alarm, now_s):
    assert select.select([alarm.fd], [], [], LIMIT_S)[0]
    return alarm.check(now_s)


def test_slurm_says_when_and_is_asked_once_more_before_the_warning(squeue, arm):
    squeue(clock(START_S + 3600))
    alarm = arm(request())
    assert answered(alarm, START_S) == (0.0, False)
    assert alarm.due_s == START_S + 3300
    assert alarm.check(START_S + 3300) == (0.0, False)
    assert answered(alarm, START_S + 3300) == (300.0, False)
    assert alarm.check(START_S + 3400) == (0.0, False)
    assert alarm.due_s == NEVER


def test_a_limit_that_was_moved_moves_the_warning(squeue, arm):
    squeue(clock(START_S + 3600))
    alarm = arm(request())
    answered(alarm, START_S)
    squeue(clock(START_S + 7200))
    assert alarm.check(START_S + 3300) == (0.0, False)
    assert answered(alarm, START_S + 3300) == (0.0, False)
    assert alarm.due_s == START_S + 6900


def test_a_controller_that_does_not_answer_holds_nobody(squeue, arm):
    squeue(clock(START_S + 3600))
    alarm = arm(request())
    answered(alarm, START_S)
    squeue("")
    assert alarm.check(START_S + 3300) == (0.0, False)
    assert START_S + 3300 < alarm.due_s < START_S + 3310
    due_s = alarm.due_s
    assert alarm.check(due_s) == (START_S + 3600 - due_s, False)
    assert alarm.due_s == NEVER


def test_a_job_without_a_limit_is_never_warned(squeue, arm):
    squeue("N/A")
    alarm = arm(request())
    assert answered(alarm, START_S) == (0.0, False)
    assert alarm.due_s == NEVER


def test_an_answer_that_says_nothing_changes_nothing(squeue, arm):
    squeue("Invalid job id specified >&2; exit 1")
    squeue.environ["SLURM_JOB_END_TIME"] = str(int(START_S + 600))
    alarm = arm(request())
    answered(alarm, START_S)
    assert alarm.due_s == START_S + 300


# as squeue of 22.05.8 wrote it while the job was COMPLETING, where EndTime was the time of the question
ENDS = [
    ("N/A                             1:59:58                         ", False, False),  # scancel
    ("N/A                             UNLIMITED                       ", False, False),  # scancel, without a limit
    ("N/A                             0:00                            ", True, False),
    ("N/A                             INVALID                         ", True, False),  # up to a minute later
    ("2026-11-22T12:09:32             1:59                            ", False, True),  # PreemptMode=CANCEL
    ("2026-11-22T12:05:48             UNLIMITED                       ", False, True),  # REQUEUE, and its grace time
]


@pytest.mark.parametrize(("said", "is_late", "is_preempted"), ENDS)
def test_why_a_job_is_ended_is_asked_when_it_is(squeue, arm, said, is_late, is_preempted):
    squeue(f"'{said}'")
    alarm = arm(request(warn_s=0, time_s=60))
    assert alarm.end_reason() == EndReason(is_late=is_late, is_preempted=is_preempted)


def test_a_shell_that_ignores_sigterm_is_not_ended_by_one_that_comes_before_its_first_line():
    read_fd, write_fd = os.pipe()
    for _ in range(20):
        pid = start(("/bin/sh", "-c", IGNORE_TERM + "echo yes"), {}, (0, write_fd), blocks_term=True)
        os.kill(pid, signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(read_fd, 16) == b"yes\n"
    os.close(read_fd)
    os.close(write_fd)


def test_the_signal_that_ends_the_job_ends_no_question_about_it(squeue, arm):
    squeue("$(kill -TERM 0) 2026-11-22T12:05:48 UNLIMITED")
    assert arm(request(warn_s=0)).end_reason() == EndReason(is_preempted=True)
    squeue(f"$(kill -TERM 0) {clock(START_S + 600)}")
    alarm = arm(request())
    answered(alarm, START_S)
    assert alarm.due_s == START_S + 300


def test_a_controller_that_says_nothing_leaves_the_clock(squeue, arm):
    squeue("Invalid job id specified >&2; exit 1")
    squeue.environ["SLURM_JOB_END_TIME"] = str(int(time.time() + 600))
    assert arm(request()).end_reason() == EndReason()
    squeue.environ["SLURM_JOB_END_TIME"] = str(int(time.time()))
    assert arm(request()).end_reason() == EndReason(is_late=True)


def test_pbs_counts_from_the_start(arm):
    alarm = arm(request("pbs", time_s=1000))
    assert alarm.due_s == START_S + 700
    assert alarm.check(START_S + 700) == (300.0, False)
    assert alarm.due_s == NEVER


def test_pbs_is_asked_for_the_limit_that_its_queue_has_or_that_was_moved(tmp_path, squeue, arm):
    def say(text):
        (tmp_path / "qstat").write_text(
            f'#!/bin/sh\n[ "$*" = "-f -F dsv 7.head" ] || exit 3\necho "Job Id: 7.head|comment=a\\|b|{text}x=1"\n'
        )
        (tmp_path / "qstat").chmod(0o755)

    squeue.environ["PBS_JOBID"] = "7.head"
    say("Resource_List.walltime=01:00:00|")
    alarm = arm(request("pbs"))
    assert answered(alarm, START_S) == (0.0, False)
    assert alarm.due_s == START_S + 3300
    say("Resource_List.walltime=02:00:00|")
    assert alarm.check(START_S + 3300) == (0.0, False)
    assert answered(alarm, START_S + 3300) == (0.0, False)
    assert alarm.due_s == START_S + 6900
    say("")
    alarm = arm(request("pbs"))
    assert answered(alarm, START_S) == (0.0, False)
    assert alarm.due_s == NEVER


def test_a_limit_that_nobody_else_keeps_is_ours(arm):
    alarm = arm(request("local", time_s=1000, warn_s=0), is_ours=True)
    assert alarm.due_s == START_S + 1000
    assert alarm.check(START_S + 999) == (0.0, False)
    assert alarm.check(START_S + 1000) == (0.0, True)
    assert alarm.due_s == NEVER
