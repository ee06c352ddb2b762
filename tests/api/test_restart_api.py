"""Restarts in the Python API: the same attempts, moved on by whoever waits; nobody is held up by a delay."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import infini_run as ir
from tests.support.command import play
from tests.support.processes import marked
from tests.support.waiting import until

THIRD_TIME = ["sh", "-c", "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 3"]
NEVER = {"max_restarts": 1, "restart_delay": 1000}


def in_the_delay(launcher):
    launcher.launch()
    events = []
    while "restarting" not in [event.kind for event in events]:
        events += launcher.events()
    return launcher


def test_run_returns_the_last_attempt_and_each_earlier_failure():
    report = ir.run(THIRD_TIME, nproc_per_node=3, max_restarts=2, restart_delay=0)
    assert (report.exit_code, report.restarts, report.first_failure) == (0, 2, None)
    assert [e.code for e in report.earlier_failures] == [3, 3]
    assert [e.code for e in report.exits] == [0, 0, 0]


def test_run_raises_the_last_failure_when_the_budget_is_used_up():
    with pytest.raises(ir.WorkerError) as caught:
        ir.run(["sh", "-c", "exit $((5 + TORCHELASTIC_RESTART_COUNT))"], max_restarts=2, restart_delay=0)
    assert caught.value.exit_code == 7
    assert "; after 2 restarts" in str(caught.value)
    assert caught.value.report.restarts == 2


def test_events_tell_of_every_attempt_and_end_once():
    with ir.ProcessLauncher(THIRD_TIME, max_restarts=2, restart_delay=0) as launcher:
        launcher.launch()
        events = []
        while launcher.running():
            events += launcher.events()
        events += launcher.events()
    one = ["started", "exited"]
    assert [event.kind for event in events] == [*one, "restarting", *one, "restarting", *one, "ended"]
    assert [event.code for event in events if event.kind == "restarting"] == [1, 2]


def test_nobody_is_held_up_by_the_delay():
    with in_the_delay(ir.ProcessLauncher(["false"], **NEVER)) as launcher:
        assert launcher.running()
        assert launcher.events(timeout_s=0.01) == []
        assert not launcher.wait(timeout_s=0.01)
        assert launcher.exit_code(0) == 1
        assert launcher.first_failure().rank == 0
        assert launcher.signal(signal.SIGUSR1) == 0
        assert (launcher.report().restarts, launcher.report().exit_code) == (0, 1)
        assert not marked()
    assert not launcher.running()


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_who_waits_for_the_delay_is_woken_by_the_stop_of_another_thread(how):
    with in_the_delay(ir.ProcessLauncher(["false"], **NEVER)) as launcher:
        ended = []
        thread = threading.Thread(target=lambda: ended.append(launcher.wait()))
        thread.start()
        until(lambda: "poll" in Path(f"/proc/self/task/{thread.native_id}/wchan").read_text())
        getattr(launcher, how)()
        thread.join()
        assert ended == [True]
        assert (launcher.report().exit_code, launcher.report().restarts) == (1, 0)


def test_timeout_in_the_delay_is_a_timeout():
    with pytest.raises(ir.LaunchTimeout):
        ir.run(["false"], timeout_s=0.2, **NEVER)


def test_job_that_the_caller_stopped_is_not_started_again():
    with ir.ProcessLauncher(
        play("end=TERM:3", "wait"), nproc_per_node=2, max_restarts=3, restart_delay=0
    ) as launcher:
        launcher.launch()
        launcher.terminate()
        assert launcher.wait()
        assert launcher.report().restarts == 0


def test_ranks_that_come_back_may_still_become_ready():
    words = play("+0", "exit=3", "+1", "notify=READY=1", "wait")
    with ir.ProcessLauncher(words, nproc_per_node=2, max_restarts=1, restart_delay=0) as launcher:
        launcher.launch()
        assert launcher.wait_ready()
    with ir.ProcessLauncher(["false"], max_restarts=1, restart_delay=0) as launcher:
        launcher.launch()
        assert not launcher.wait_ready()


def test_ranks_start_and_log_where_the_first_ones_did_wherever_the_host_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "pwd; [ $TORCHELASTIC_RESTART_COUNT = 1 ]"
    flags = {"log_dir": "logs", "console": "none", "max_restarts": 1, "restart_delay": 0.2}
    with in_the_delay(ir.ProcessLauncher(["sh", "-c", script], **flags)) as launcher:
        os.chdir("/")
        assert launcher.wait()
    lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    assert [lines[0], lines[2]] == [str(tmp_path)] * 2
    assert lines[1].startswith("infini-run: restart 1 of 1: rank 0 ")


def test_two_threads_that_wait_see_one_story():
    with ir.ProcessLauncher(THIRD_TIME, nproc_per_node=2, max_restarts=2, restart_delay=0.05) as launcher:
        launcher.launch()
        threads = [threading.Thread(target=launcher.wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kinds = [event.kind for event in launcher.events(timeout_s=0)]
        assert (kinds.count("restarting"), kinds.count("started")) == (2, 6)
        assert launcher.report().exit_code == 0


def test_forked_child_in_the_delay_touches_nothing():
    with in_the_delay(ir.ProcessLauncher(["sh", "-c", "[ $TORCHELASTIC_RESTART_COUNT = 1 ]"], **NEVER)) as launcher:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if not launcher.running() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert launcher.running()


def test_a_second_launch_has_all_its_restarts():
    with ir.ProcessLauncher(THIRD_TIME, max_restarts=2, restart_delay=0) as launcher:
        for _ in range(2):
            launcher.launch()
            assert launcher.wait()
            assert (launcher.report().exit_code, launcher.report().restarts) == (0, 2)
