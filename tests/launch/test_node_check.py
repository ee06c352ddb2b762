"""Whether a node may take part: the user's command, and what is built in; none of it outlives its time."""

from __future__ import annotations

import os
import select
import shlex
import time
from pathlib import Path

import pytest

from infini_run.errors import UsageError
from infini_run.node.node_check import NodeCheck, check_log_dir
from infini_run.options.options import resolve
from tests.support.nvml import FOUR, UUIDS, driver, stub_folder  # noqa: F401
from tests.support.processes import marked


def reason_of(command="", **settings):
    settings.setdefault("environ", os.environ)
    check = NodeCheck(command, **settings)
    try:
        check.start()
        assert check.poll()
        assert check.ended
        return check.reason
    finally:
        check.close()


@pytest.mark.parametrize("command", ["", "true", "sh -c 'echo all is well'", "sh -c 'echo bad >&2; exit 0'"])
def test_a_node_that_is_well_has_no_reason(command, tmp_path, every_path):
    assert reason_of(command, log_dir=str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sh -c 'echo first; echo ECC errors on GPU 2; exit 3'", "node check exited with 3: ECC errors on GPU 2"),
        ("sh -c 'echo out; echo on stderr >&2; exit 1'", "node check exited with 1: on stderr"),
        ("false", "node check exited with 1"),
        ("sh -c 'printf \"no newline\"; exit 2'", "node check exited with 2: no newline"),
        ("sh -c 'kill -SEGV $$'", "node check was killed by SIGSEGV"),
        (
            "printf-that-is-not-there x",
            "--node_check=printf-that-is-not-there x: printf-that-is-not-there is not on PATH",
        ),
        ("/etc/passwd", "the node check cannot be executed: Permission denied"),
        ("'", "--node_check=': No closing quotation"),
        (
            "sh -c 'printf \"Error: boom\\n    at f (/srv/a.js:1:2)\\n    at g (/srv/a.js:1:2)\\n\" >&2; exit 1'",
            "node check exited with 1: Error: boom",
        ),
        (
            "sh -c 'echo Error: old >&2; echo frame >&2; echo on stdout; exit 1'",
            "node check exited with 1: on stdout",
        ),
        ("sh -c 'printf \"\\033[31mred\\n\"; exit 1'", "node check exited with 1: \\x1b[31mred"),
    ],
)
def test_the_reason_is_one_line(command, reason):
    assert reason_of(command) == reason


def test_a_check_that_hangs_is_killed_with_all_that_it_started(every_path):
    script = "trap '' TERM; echo looking; (setsid sleep 1000 &); sleep 1000"
    for timeout_s in (0.5, 2, 8):  # within which this machine may not have it write
        reason = reason_of(f"sh -c {shlex.quote(script)}", timeout_s=timeout_s)
        assert not marked()
        if reason.endswith("looking"):
            break
    assert reason == f"the node check did not end within {timeout_s} s: looking"


def test_what_a_check_leaves_behind_is_ended():
    assert reason_of("sh -c 'setsid sleep 1000 & exit 0'") == ""
    assert not marked()


def test_it_never_blocks_and_is_waited_for_by_its_descriptor():
    check = NodeCheck("sleep 0.2", environ=os.environ, timeout_s=30)
    check.start()
    try:
        before = time.monotonic()
        assert check.due_s > before + 20
        assert not check.poll(0)
        while not check.poll(0):
            select.select([check.fileno()], [], [], max(0.0, check.due_s - time.monotonic()))
        assert check.reason == ""
    finally:
        check.close()


def test_closing_ends_it():
    check = NodeCheck("sh -c 'setsid sleep 1000 & sleep 1000'", environ=os.environ)
    check.start()
    assert not check.poll(0.1)
    check.close()
    check.close()
    assert check.ended
    assert not marked()


def test_it_runs_where_it_is_told_to_with_the_environment_that_it_is_given(tmp_path):
    script = 'echo "$PWD $SAID"; exit 1'
    environ = {**os.environ, "SAID": "this"}
    reason = reason_of(f"sh -c {shlex.quote(script)}", environ=environ, cwd=str(tmp_path))
    assert reason == f"node check exited with 1: {tmp_path} this"


# ---- the log directory


def test_a_log_directory_that_is_made_later_is_looked_at_where_it_will_be(tmp_path):
    assert reason_of(log_dir=str(tmp_path / "a" / "b")) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_log_directory_that_cannot_be_one_is_a_reason(tmp_path):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "logs")
    assert reason_of(log_dir=folder) == f"the log directory {folder} cannot be written: Not a directory"
    assert reason_of("true", log_dir="/proc/logs").startswith("the log directory /proc/logs cannot be written: ")


def test_little_room_is_a_reason(tmp_path):
    reason = check_log_dir(str(tmp_path), 1 << 62)
    assert reason.startswith(f"the log directory {tmp_path} has ")
    assert reason.endswith(" MiB left; 4398046511104 MiB are needed")


# ---- GPUs


@pytest.fixture
def with_gpus(driver):  # noqa: F811
    def run(count, held="", timeout_s=4.0, **environ):
        variables = {"LD_LIBRARY_PATH": str(driver.folder), "NVML_STUB_HELD": held, **environ}
        return reason_of(gpus=count, environ=os.environ | driver.settings(FOUR) | variables, timeout_s=timeout_s)

    return run


def test_gpus_as_planned_and_free_are_no_reason(with_gpus):
    assert with_gpus(4) == ""
    assert with_gpus(0, held=f"{UUIDS[0]}|1|5000") == ""


def test_fewer_gpus_than_planned_are_a_reason(with_gpus):
    assert with_gpus(5) == "4 GPUs can be used here, of 5 that the plan needs"
    assert with_gpus(2, CUDA_VISIBLE_DEVICES="3") == "1 GPU can be used here, of 2 that the plan needs"


def test_who_holds_a_gpu_is_named_after_a_while(with_gpus):
    name = Path("/proc/self/comm").read_text().strip()
    reason = with_gpus(2, held=f"{UUIDS[1]}|{os.getpid()}|30211", timeout_s=8)
    assert reason.startswith(f"GPUs of this job are already in use: GPU 1: {name} (pid {os.getpid()}, ")
    assert reason.endswith(" has 30211 MiB")


def test_a_machine_without_a_driver_has_no_gpus():
    environ = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    assert reason_of(gpus=1, environ={**environ, "LD_LIBRARY_PATH": "/nowhere"}) != ""


# ---- the flags


def test_a_command_with_a_lone_quote_is_refused():
    with pytest.raises(UsageError, match=r"--node_check=.*expected a command with matching quotes"):
        resolve(["--node_check=sh -c 'x", "true"], {})


def test_the_flags_are_read():
    options = resolve(
        ["--node_check=sh -c 'exit 0'", "--node_check_timeout=2m", "--spares=1", "--hosts=a,b", "true"], {}
    ).options
    assert (options.node_check, options.node_check_timeout_s) == ("sh -c 'exit 0'", 120.0)
