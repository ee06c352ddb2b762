"""--check_gpus: who already holds the GPUs is told, or the launch refused, before anything starts."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from infini_run.devices.gpu import Accelerator
from infini_run.devices.in_use import check_gpus
from infini_run.devices.visible import VENDORS, VisibleGpus
from infini_run.errors import DeviceError
from tests.support.nvml import FOUR, MIG, UNEQUAL, UUIDS, Driver

US = pwd.getpwuid(os.geteuid()).pw_name
NAME = Path("/proc/self/comm").read_text().strip()
HERE = f"(pid {os.getpid()}, {US})"
BUSY = f"{UUIDS[1]}|{os.getpid()}|30211"


@pytest.fixture
def check(infini_run, driver: Driver):
    """Run infini-run with the stand-in driver: its exit code, output and what it said."""

    def run(*words, boards=FOUR, held="", fail="", env=()):
        variables = {"LD_LIBRARY_PATH": str(driver.folder), "NVML_STUB_HELD": held, **dict(env)}
        command = infini_run(*words, env=os.environ | driver.settings(boards, fail) | variables)
        code = command.wait()
        return code, command.out.decode(), command.err.decode()

    return run


ECHO = ("sh", "-c", 'echo "$RANK ${CUDA_VISIBLE_DEVICES-all}"')


def test_free_gpus_are_nothing_to_tell(check):
    assert check("--gpus_per_proc=1", "--check_gpus=refuse", *ECHO) == (0, "0 0\n", "")


def test_it_is_off_unless_it_is_asked_for(check):
    assert check("--gpus_per_proc=2", *ECHO, held=BUSY) == (0, "0 0,1\n", "")
    assert check("--gpus_per_proc=2", "--nocheck_gpus", *ECHO, held=BUSY) == (0, "0 0,1\n", "")


@pytest.mark.parametrize("flag", ["--check_gpus", "--check_gpus=warn", "--check_gpus=true"])
def test_a_warning_names_process_user_and_memory_and_the_job_starts(check, flag):
    code, out, err = check("--gpus_per_proc=2", flag, *ECHO, held=BUSY)
    assert (code, out) == (0, "0 0,1\n")
    assert err.startswith("infini-run: GPUs of this job are already in use: GPU 1: ")
    assert f" {HERE} has 30211 MiB; ranks may run out of memory there\n" in err
    assert err.count("\n") == 1


def test_a_refusal_starts_nothing_and_says_what_to_do(check, tmp_path):
    made = tmp_path / "made"
    code, out, err = check("--gpus_per_proc=2", "--check_gpus=refuse", "touch", made, held=BUSY)
    assert (code, out) == (2, "")
    assert f"GPU 1: {NAME} {HERE} has 30211 MiB" in err
    assert "set CUDA_VISIBLE_DEVICES to other GPUs, or use --check_gpus=warn" in err
    assert err.count("\n") == 1
    assert not made.exists()


def test_only_gpus_that_ranks_get_are_looked_at(check):
    words = ("--gpus_per_proc=1", "--check_gpus=refuse", *ECHO)
    assert check(*words, held=BUSY)[0] == 0
    assert check("--nproc_per_node=2", *words, held=BUSY)[0] == 2
    assert check("--nproc_per_node=2", *words, held=BUSY, env={"CUDA_VISIBLE_DEVICES": "0,2"}.items())[0] == 0


def test_without_gpus_per_proc_those_of_the_local_ranks_are_meant_or_all(check):
    words = ("--check_gpus=refuse", *ECHO)
    assert check(*words, held=BUSY)[0] == 0
    assert check("--nproc_per_node=2", *words, held=BUSY)[0] == 2
    assert check("--nproc_per_node=5", *words, held=f"{UUIDS[3]}|{os.getpid()}|1")[0] == 2


def test_a_dry_run_looks_too(check):
    code, out, err = check("--gpus_per_proc=2", "--check_gpus", "--dry_run", "true", held=BUSY)
    assert code == 0
    assert "rank 0" in out
    assert "30211 MiB" in err
    assert check("--gpus_per_proc=2", "--check_gpus=refuse", "--dry_run", "true", held=BUSY)[0] == 2


def test_memory_that_the_driver_does_not_tell_is_said_as_such(check):
    _, _, err = check("--gpus_per_proc=1", "--check_gpus", "true", held=f"{UUIDS[0]}|{os.getpid()}|-")
    assert f"{HERE} has memory;" in err


def test_a_process_of_another_container_is_seen_by_its_memory(check):
    _, _, err = check("--gpus_per_proc=1", "--check_gpus", "true", held=f"{UUIDS[0]}|0|70000")
    assert "GPU 0: 70000 MiB, of a process that is hidden here" in err
    assert check("--gpus_per_proc=1", "--check_gpus", "true", held=f"{UUIDS[0]}|0|200") == (0, "", "")


def test_a_process_that_is_not_in_our_proc_is_told_by_its_number(check):
    _, _, err = check("--gpus_per_proc=1", "--check_gpus", "true", held=f"{UUIDS[0]}|4194305|3")
    assert "a process of another container (pid 4194305, user not known) has 3 MiB" in err


def test_many_holders_are_counted_not_listed(check):
    held = "\n".join(f"{UUIDS[0]}|{4194305 + n}|3" for n in range(20))
    _, _, err = check("--gpus_per_proc=1", "--check_gpus", "true", held=held)
    assert err.count("(pid ") == 8
    assert "; and 12 more; ranks" in err


def test_a_mig_instance_has_holders_of_its_own(check):
    held = f"MIG-bbbb|{os.getpid()}|9"
    words = ("--gpus_per_proc=1", "--check_gpus=refuse", "true")
    assert check(*words, boards=MIG, held=held, env={"CUDA_VISIBLE_DEVICES": "MIG-aaaa"}.items())[0] == 0
    code, _, err = check(*words, boards=MIG, held=held, env={"CUDA_VISIBLE_DEVICES": "MIG-bbbb"}.items())
    assert code == 2
    assert "GPU MIG-bbbb: " in err


def test_gpus_that_cannot_be_told_apart_are_an_error_with_a_way_out(check):
    words = ("--gpus_per_proc=1", "--check_gpus", "true")
    code, _, err = check(*words, boards=UNEQUAL, env={"CUDA_VISIBLE_DEVICES": "1"}.items())
    assert code == 2
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in err
    environ = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert check(*words, boards=UNEQUAL, env=environ.items())[0] == 0


def test_a_driver_before_r510_is_asked_in_its_own_way(check):
    old = "nvmlDeviceGetComputeRunningProcesses_v3=13 nvmlDeviceGetMemoryInfo_v2=13"
    code, _, err = check("--gpus_per_proc=2", "--check_gpus=refuse", "true", held=BUSY, fail=old)
    assert code == 2
    assert "30211 MiB" in err
    assert check("--gpus_per_proc=1", "--check_gpus=refuse", "true", held=BUSY, fail=old)[0] == 0


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses_v3"])
def test_a_driver_that_does_not_answer_is_one_error(check, function, driver):
    code, _, err = check("--gpus_per_proc=1", "--check_gpus", "true", fail=f"{function}=999")
    assert code == 2
    assert "does not respond" in err
    assert err.count("\n") == 1
    log = driver.log.read_text().split()
    assert log.count("init") == log.count("shutdown") > 0


def test_a_machine_without_gpus_cannot_be_checked(infini_run, tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_text("no library\n")
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = infini_run("--check_gpus=refuse", "true", env=environ)
    assert command.wait() == 2
    assert b"libnvidia-ml.so.1 cannot be loaded" in command.err
    assert b"/dev/kfd" in command.err
    command = infini_run("--check_gpus", "--bind=numa", "echo", "started", env=environ)
    assert command.wait() == 0
    assert command.out == b"started\n"
    assert b"infini-run: --check_gpus: checked nothing: " in command.err


def test_the_python_api_warns_or_raises(driver):
    code = (
        "import warnings, infini_run as ir\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    ir.run(['true'], gpus_per_proc=2, check_gpus='warn')\n"
        "print([(str(one.message), one.filename) for one in seen])\n"
        "try: ir.run(['true'], gpus_per_proc=2, check_gpus='refuse')\n"
        "except ir.DeviceError as error: print(error)\n"
    )
    environ = os.environ | driver.settings(FOUR) | {"LD_LIBRARY_PATH": str(driver.folder), "NVML_STUB_HELD": BUSY}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    warned, refused = done.stdout.splitlines()
    assert "30211 MiB; ranks may run out" in warned
    assert 'or use check_gpus="warn"' in refused


# ---- AMD, from files


def test_amds_holders_are_told_with_name_and_user(machine):
    found = VisibleGpus(
        vendor=VENDORS[1], variable="ROCR_VISIBLE_DEVICES", inherited=None, gpus=(Accelerator(name="0", kfd_id=7),)
    )
    assert check_gpus(found, found.gpus, "refuse", machine.root) == ""
    machine.write({"/sys/class/kfd/kfd/proc/77/vram_7": str(3 << 30), "/proc/77/comm": "tr\x1bain"})
    text = check_gpus(found, found.gpus, "warn", machine.root)
    assert text.startswith(f"GPUs of this job are already in use: GPU 0: tr\\x1bain (pid 77, {US}) has 3072 MiB;")
    with pytest.raises(DeviceError, match="set ROCR_VISIBLE_DEVICES to other GPUs"):
        check_gpus(found, found.gpus, "refuse", machine.root)
