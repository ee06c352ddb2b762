"""Which signs of life of a rank stopped when: output, CPU, progress, and its GPU."""

from __future__ import annotations

import json
import os
import re
import sys

from tests.support.command import play
from tests.support.nvml import UUIDS, busy_gpus  # noqa: F401

STOPS = """
import infini_run, time
print("step 7", flush=True)
time.sleep(0.5)
infini_run.progress(7)
time.sleep(1000)
"""


def snapshots(command, path):
    assert command.wait() == 1, command.err
    return json.loads(path.read_text())["snapshots"]


def test_report_says_when_each_sign_stopped(infini_run, tmp_path):
    report, logs = tmp_path / "report", tmp_path / "logs"
    flags = ("--hang_timeout=1", "--on_hang=stop", "--grace=1", f"--report={report}", f"--log_dir={logs}")
    (shot,) = snapshots(infini_run(*flags, sys.executable, "-c", STOPS), report)
    signs = shot["signs"]
    assert signs["progress_value"] == 7
    assert shot["time"] - 60 < signs["progress"] <= signs["output"] < shot["time"] - 1, "PROGRESS= is a message, too"
    assert signs["cpu"] < shot["time"] - 1
    assert signs["gpu"] is None
    text = (logs / "hang_0.txt").read_text()
    (reason,) = re.findall(r" hung: no output and no CPU used for ([0-9.]+) s\n", text)
    (later, output), *_ = re.findall(r"\nlast signs, ([0-9.]+) s later: output ([0-9.]+) s ago", text)
    assert abs(float(reason) + float(later) - float(output)) < 0.3, "each is rounded to 0.1 s"
    assert " ago, PROGRESS=7 " in text


def test_rank_that_spins_has_no_time_at_which_its_cpu_stopped(infini_run, tmp_path):
    report = tmp_path / "report"
    flags = ("--hang_timeout=1h", "--progress_timeout=1", "--on_hang=stop", "--grace=1", f"--report={report}")
    spins = "import infini_run\ninfini_run.progress(1)\nwhile True: pass"
    (shot,) = snapshots(infini_run(*flags, sys.executable, "-c", spins), report)
    assert shot["signs"]["cpu"] is None
    assert shot["signs"]["progress_value"] == 1


def test_use_of_the_gpus_of_a_rank_is_a_sign(infini_run, busy_gpus, tmp_path):  # noqa: F811
    """On a busy machine the reader may take longer than both looks at the ranks: then there are more tries."""
    report, gpus = tmp_path / "report", tmp_path / "gpus"
    gpus.write_text(f"{UUIDS[0]} 100 9 \n{UUIDS[1]} 0 9 \n")
    environ = {**os.environ, "LD_LIBRARY_PATH": busy_gpus, "BUSY_GPUS": str(gpus), "CUDA_VISIBLE_DEVICES": "0,1"}
    flags = ("--nproc_per_node=2", "--gpus_per_proc=1", "--hang_timeout=1", "--on_hang=stop", "--grace=1")
    for _ in range(5):
        command = infini_run(*flags, f"--report={report}", *play("wait"), env=environ)
        found = {shot["rank"]: shot["signs"]["gpu"] for shot in snapshots(command, report)}
        if None not in found.values():
            break
    assert found == {0: 1.0, 1: 0.0}
    assert b"0% CPU, GPU 50%" in command.err, "both are in one place: the mean"


def test_driver_that_hangs_delays_nothing(infini_run, busy_gpus, tmp_path):  # noqa: F811
    """The reader waits in NVML; the report comes without it."""
    report, gpus = tmp_path / "report", tmp_path / "gpus"
    gpus.write_text(f"{UUIDS[0]} 100 9 \n")
    environ = {**os.environ, "LD_LIBRARY_PATH": busy_gpus, "BUSY_GPUS": str(gpus), "CUDA_VISIBLE_DEVICES": "0"}
    flags = ("--gpus_per_proc=1", "--hang_timeout=1", "--on_hang=stop", "--grace=1")
    hangs = f"import os\nos.remove({str(gpus)!r}); os.mkfifo({str(gpus)!r})\nimport time; time.sleep(1000)"
    command = infini_run(*flags, f"--report={report}", sys.executable, "-c", hangs, env=environ)
    (shot,) = snapshots(command, report)
    assert shot["signs"]["gpu"] is None
