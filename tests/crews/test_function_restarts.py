"""Restarts of a launch of a function: all ranks, fresh processes, the same call, as often as asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest

import infini_run as ir
from tests.support.command import COMMAND
from tests.support.waiting import LIMIT_S, stderr_so_far, until

WAYS = {"exec": (), "fork": ["fractions"]}
NAMES = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "MASTER_PORT", "INFINI_RUN_ID")


@pytest.fixture(params=WAYS)
def preload(request):
    return WAYS[request.param]


def fail_until(restart, folder, data=b""):
    worker = ir.this_worker()
    (folder / f"{worker.restarts}.{worker.rank}").write_text(
        " ".join([str(os.getpid()), *map(os.environ.get, NAMES)])
    )
    if worker.restarts < restart and worker.rank == 1:
        raise ValueError(f"attempt {worker.restarts}")
    return worker.restarts, len(data)


@pytest.mark.parametrize("size", [0, 5_000_000])
def test_all_ranks_are_started_again_after_a_failure(tmp_path, preload, size):
    launcher = ir.Launcher(nproc_per_node=2, preload=preload, max_restarts=2, restart_delay=0)
    result = launcher.run(fail_until, 2, tmp_path, bytes(size))
    assert list(result) == [(2, size)] * 2
    attempts = [(tmp_path / f"{restart}.1").read_text().split() for restart in range(3)]
    assert [words[1:3] for words in attempts] == [["0", "2"], ["1", "2"], ["2", "2"]]
    assert len({words[0] for words in attempts}) == 3
    assert len({words[4] for words in attempts}) == 3


def test_one_failure_too_many_is_raised_with_the_number_of_restarts(tmp_path, capfd):
    with pytest.raises(ValueError, match="attempt 1") as caught:
        ir.Launcher(nproc_per_node=2, preload=(), max_restarts=1, restart_delay=0).run(fail_until, 5, tmp_path)
    assert "after 1 restart of all ranks" in caught.value.__notes__
    assert "infini-run: restart 1 of 1 in 0 ms: rank 1 on" in capfd.readouterr().err


def rows():
    """Those of launches of this process."""
    from tests.launch.test_control import all_listed  # with much that no rank needs

    return [row for row in all_listed() if row["pid"] == os.getpid()]


def fail_at_first():
    if not ir.this_worker().restarts:
        raise ValueError("first")
    time.sleep(1000)


def test_delay_is_listed_and_stopped(preload, capfd):
    launch = ir.Launcher(nproc_per_node=2, preload=preload, max_restarts=1, restart_delay=1000).start(fail_at_first)
    until(lambda: any(row["restart"] for row in rows()))  # in between, there may be none
    (row,) = rows()
    assert row["program"].startswith("fail_at_first()")
    assert (row["world_size"], sum(row["ranks"].values())) == (2, 0)
    stacks = subprocess.run([*COMMAND, "--stacks", row["id"]], capture_output=True, check=False)
    assert stacks.returncode == 2
    assert stacks.stderr.endswith(b": no rank runs: the launch is about to restart; try again\n")
    done = subprocess.run([*COMMAND, "--stop", row["id"]], capture_output=True, check=True)
    assert done.stdout.endswith(b": stopping; SIGKILL in 25 s, or now if repeated\n")
    with pytest.raises(ir.InfiniRunError, match="the launch was stopped before all ranks returned"):
        launch.result(LIMIT_S)
    assert rows() == []
    assert ") asked to stop this launch" in capfd.readouterr().err


def test_folder_of_the_delay_is_gone_when_ranks_run_again():
    launch = ir.Launcher(nproc_per_node=1, preload=(), max_restarts=1, restart_delay=0.5).start(fail_at_first)
    until(lambda: [row["ranks"]["running"] for row in rows() if launch.restarts] == [1])
    launch.stop()
    with pytest.raises(ir.InfiniRunError):
        launch.result(LIMIT_S)


def test_nothing_is_started_beside_what_sigkill_did_not_end(tmp_path, freezer, capfd):
    """Uninterruptible sleep: it may still hold a GPU."""

    def fail_beside(folder):
        worker = ir.this_worker()
        if worker.rank == 1:
            (folder / "part").write_text(str(os.getpid()))
            (folder / "part").rename(folder / "pid")
            time.sleep(1000)
        until(lambda: (folder / "go").exists())
        raise ValueError("rank 0")

    launcher = ir.Launcher(nproc_per_node=2, preload=(), max_restarts=1, restart_delay=0, grace=0.2)
    handle = launcher.start(fail_beside, tmp_path)
    until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    freezer.freeze(pid)
    (tmp_path / "go").touch()
    with pytest.raises(ValueError, match="rank 0") as caught:
        handle.result()
    assert "not restarted: some processes did not end" in caught.value.__notes__
    assert f"SIGKILL did not end process {pid} (" in capfd.readouterr().err
    freezer.thaw()
    os.waitpid(pid, 0)


def test_a_rank_that_is_killed_is_started_again_with_the_others(tmp_path, preload):
    def die_once(folder):
        worker = ir.this_worker()
        if worker.restarts == 0 and worker.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return worker.restarts

    launcher = ir.Launcher(nproc_per_node=2, preload=preload, max_restarts=1, restart_delay=0)
    assert list(launcher.run(die_once, tmp_path)) == [1, 1]


def test_a_pool_restarts_launches(tmp_path):
    with ir.Pool(nproc_per_node=2, preload=["fractions"], max_restarts=1, restart_delay=0) as pool:
        assert list(pool.run(fail_until, 1, tmp_path)) == [(1, 0)] * 2


def test_a_launch_that_is_stopped_while_it_waits_is_not_started_again(tmp_path, capfd):
    launcher = ir.Launcher(nproc_per_node=2, preload=(), max_restarts=1, restart_delay=3600)
    handle = launcher.start(fail_until, 5, tmp_path)
    until(lambda: "restart 1 of 1 in 1 h" in stderr_so_far())
    handle.stop()
    assert handle.wait(LIMIT_S)
    assert handle.restarts == 0, "none has begun"
    with pytest.raises(ir.InfiniRunError, match="stopped before"):
        handle.result()


def test_the_limit_of_the_whole_launch_ends_a_delay_too(tmp_path):
    launcher = ir.Launcher(nproc_per_node=2, preload=(), max_restarts=9, restart_delay=3600, timeout_s=3)
    begin_s = time.monotonic()
    with pytest.raises(ir.LaunchTimeout, match="within 3 s"):
        launcher.run(fail_until, 99, tmp_path)
    assert time.monotonic() - begin_s < 60


def fail_or_hang(folder):
    worker = ir.this_worker()
    (folder / f"{worker.restarts}.{worker.rank}").touch()
    if worker.rank:
        signal.pause()
    raise ValueError("the first failure")


def test_a_launch_whose_time_is_over_is_not_started_again_to_be_stopped_at_once(tmp_path):
    flags = {"max_restarts": 1, "restart_delay": 0, "keep_going": True}
    with pytest.raises(ValueError, match="the first failure"):
        ir.Launcher(nproc_per_node=2, preload=(), timeout_s=3, **flags).run(fail_or_hang, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0.0", "0.1"}


def test_an_interrupt_during_a_delay_ends_the_launch(tmp_path):
    launcher = ir.Launcher(nproc_per_node=2, preload=(), max_restarts=1, restart_delay=3600)

    def interrupt():
        until(lambda: (tmp_path / "0.1").exists())
        time.sleep(0.5)  # into the delay; before it the test holds as well
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launcher.run(fail_until, 5, tmp_path)
    thread.join()


@pytest.mark.parametrize("flag", [{"max_restarts": -1}, {"restart_delay": "soon"}])
def test_flags_of_restarts_that_make_no_sense_are_refused_where_the_launcher_is_made(flag):
    with pytest.raises(ir.UsageError):
        ir.Launcher(**flag)


def test_limits_of_a_year_are_limits(preload):
    year_s = 366 * 86400.0
    launcher = ir.Launcher(preload=preload, timeout_s=year_s, agent_timeout_s=year_s, hang_timeout=year_s)
    assert launcher.run(int)[0] == 0
    with ir.Crew(lambda ctx, n: n, preload=preload, watchdog_s=year_s, ready_timeout_s=year_s) as crew:
        assert crew.ask(1).result(year_s) == 1


# ---- progress


def fail_after(step, *steps):
    """Fail in each attempt, at the step that is listed for it."""
    worker = ir.this_worker()
    if worker.rank == 0 and worker.restarts < len(steps):
        if steps[worker.restarts] >= 0:
            worker.progress(steps[worker.restarts])
        raise ValueError(f"attempt {worker.restarts}")
    return step


def test_progress_renews_the_budget(preload):
    launcher = ir.Launcher(nproc_per_node=2, preload=preload, max_restarts=1, restart_delay=0)
    handle = launcher.start(fail_after, 7, 1, 2, 3, 4)
    assert list(handle.result(60)) == [7, 7]
    assert handle.restarts == 4


@pytest.mark.parametrize(
    ("most", "steps", "restarts", "why"),
    [
        (None, (5, 5, 5, 5, 5), 3, "3 attempts in a row without exceeding PROGRESS=5"),
        (1, (5, 4, 6), 1, "1 attempt without exceeding PROGRESS=5"),
        (2, (-1, -1, -1, 5, 5, 5, 5), 5, "2 attempts in a row without exceeding PROGRESS=5"),
    ],
)
def test_attempts_in_a_row_that_get_no_further_end_the_launch(most, steps, restarts, why):
    launcher = ir.Launcher(preload=(), max_restarts=9, restart_delay=0, max_no_progress=most)
    with pytest.raises(ValueError, match=f"attempt {restarts}") as caught:
        launcher.run(fail_after, 7, *steps)
    assert f"not restarted: {why}" in caught.value.__notes__


def test_what_is_for_a_bar_bounds_no_restarts():
    def fail_with_bar():
        worker = ir.this_worker()
        worker.progress(5, 10)
        worker.progress(0, 0)
        if worker.restarts < 5:
            raise ValueError
        return worker.restarts

    assert ir.Launcher(preload=(), max_restarts=5, restart_delay=0).run(fail_with_bar)[0] == 5


@pytest.mark.parametrize("done", [-1, 1 << 63, 1.5, True, "7", None])
def test_progress_of_a_job_is_a_whole_number(done):
    with pytest.raises(ir.UsageError, match="a whole number from 0"):
        ir.Launcher(preload=()).run(lambda done: ir.this_worker().progress(done), done)


def test_a_restart_that_cannot_start_ends_the_launch(tmp_path):
    """The folder of the logs has become a file."""

    def spoil(logs):
        import shutil

        shutil.rmtree(logs)
        logs.write_text("no folder")
        raise ValueError("the first attempt")

    logs = tmp_path / "logs"
    handle = ir.Launcher(preload=(), max_restarts=3, restart_delay=0, log_dir=logs).start(spoil, logs)
    with pytest.raises(ir.InfiniRunError, match="logs"):
        handle.result(60)
