"""--progress_timeout: ranks that are busy and get no further."""

from __future__ import annotations

import json
import signal
import sys

import infini_run as ir
from tests.launch.test_waited_rank import HOST, PYSPY
from tests.support.command import play
from tests.support.waiting import LIMIT_S

SPINS = """
import infini_run, os
infini_run.progress(7)
def load_batch():
    while True: pass
def all_reduce():
    while True: pass
load_batch() if os.environ["RANK"] == "1" else all_reduce()
"""


@PYSPY
def test_ranks_that_spin_without_progress_hang(infini_run, tmp_path):
    """No other sign is missing: they use CPU."""
    (tmp_path / "train.py").write_text(SPINS)
    flags = ("--nproc_per_node=3", "--progress_timeout=1", "--hang_timeout=1h", "--on_hang=stop", "--grace=1")
    command = infini_run(*flags, f"--report={tmp_path}/report", sys.executable, tmp_path / "train.py")
    assert command.wait() == 1, command.err
    lines = command.err.decode().splitlines()
    assert lines[1].startswith("infini-run: no progress for 1.")
    assert ": 2 of 3 ranks wait for rank 1; 2 others were stopped" in lines[1]
    assert lines[2].startswith(f"  rank 1 on {HOST} ")
    assert "load_batch (train.py" in lines[2]
    report = json.loads((tmp_path / "report").read_text())
    assert [rank["progress"] for rank in report["ranks"]] == [7, 7, 7]
    assert report["ranks"][1]["watchdog_reason"].startswith("hung: no progress for ")


def test_time_counts_from_the_first_progress(infini_run):
    command = infini_run("--progress_timeout=100ms", "--on_hang=stop", "sh", "-c", "sleep 1")
    assert command.wait() == 0, command.err


def test_any_rank_that_gets_further_puts_the_hang_off(infini_run):
    steps = "import infini_run, time\nfor step in range(12): infini_run.progress(step); time.sleep(0.2)"
    words = ["sh", "-c", f'[ $RANK = 1 ] && exec sleep 2; exec {sys.executable} -c "$0"', steps]
    command = infini_run("--nproc_per_node=2", "--progress_timeout=2", "--on_hang=stop", *words)
    assert command.wait() == 0, command.err


def test_progress_that_is_not_higher_is_none(infini_run):
    steps = "import infini_run, time\nwhile True: infini_run.progress(3); time.sleep(0.1)"
    command = infini_run("--progress_timeout=1", "--on_hang=stop", sys.executable, "-c", steps)
    assert command.wait() == 1
    assert f"infini-run: rank 0 on {HOST} hung: no progress for 1.".encode() in command.err


def test_standstill_is_an_event_and_the_job_continues():
    words = play("notify=PROGRESS=1", "wait")
    with ir.ProcessLauncher(words, progress_timeout=0.3) as launcher:
        launcher.launch()
        hung = []
        while not hung:
            hung = [event for event in launcher.events(LIMIT_S) if event.kind == "hung"]
        assert [shot.why.partition(" for ")[0] for shot in launcher.report().snapshots] == ["no progress"]
        launcher.terminate()
        launcher.wait()
    assert len(hung) == 1


def test_rank_that_catches_sigtstp_hangs_as_any():
    """It was sent the signal, and runs on."""
    catch = "signal.signal(signal.SIGTSTP, lambda *_: infini_run.progress(1))"
    steps = f"import infini_run, signal, time\n{catch}\ninfini_run.ready()\nwhile True: time.sleep(1)"
    with ir.ProcessLauncher([sys.executable, "-c", steps], progress_timeout=0.5, on_hang="stop") as launcher:
        launcher.launch()
        while not any(event.kind == "ready" for event in launcher.events(LIMIT_S)):
            pass
        launcher.signal(signal.SIGTSTP)
        assert launcher.wait(LIMIT_S)
    [rank] = launcher.report().exits
    assert rank.watchdog_reason.startswith("hung: no progress for ")


def test_ranks_that_their_launcher_suspends_are_no_standstill():
    words = play("notify=PROGRESS=1", "say=up", "wait")
    with ir.ProcessLauncher(words, progress_timeout=1.5, on_hang="stop") as launcher:
        launcher.launch()
        launcher.signal(signal.SIGSTOP)
        assert not launcher.wait(3.0)
        launcher.signal(signal.SIGCONT)
        launcher.terminate()
        assert launcher.wait()
    assert launcher.report().snapshots == ()
