"""Why a node could not be reached, out of what its command said: the agent's own last line, not the engine's talk."""

from __future__ import annotations

import os

import pytest

from infini_run.multinode.engines import find_engine
from tests.multinode.test_many_ssh import bed, many, no_agent_left, refused  # noqa: F401

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
REMOTE = "--remote_python"
CPU_BIND = "srun: cluster configuration lacks support for cpu binding\n"
EXITED = "srun: error: n2: task 1: Exited with exit code 1\n"
TRACE = (
    "Traceback (most recent call last):\n  File x\nImportError: libssl.so.3: cannot open: No such file or directory\n"
)
BANNER = "-" * 70 + "\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code.\n" + "-" * 70
DETECTED = "-" * 70 + "\nmpirun detected that\n  Process name: [[1,1],0]\n  Exit code:    1\n" + "-" * 70
HYDRA = "=" * 70 + "\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 1\n" + "=" * 70
NO_MODULE = "/usr/bin/python3: Error while finding module: No module named infini_run\n"


@pytest.mark.parametrize(
    ("engine", "code", "words", "shown", "hints"),
    [
        ("slurm", 1, f"{CPU_BIND}{TRACE}{EXITED}", "ImportError: libssl.so.3", False),
        ("slurm", 1, f"{TRACE}{EXITED}{CPU_BIND}", "ImportError: libssl.so.3", False),
        ("slurm", 1, f"{CPU_BIND}{EXITED}", "n2: task 1: Exited with exit code 1", False),
        ("slurm", 1, f"{EXITED}{CPU_BIND}", "n2: task 1: Exited with exit code 1", False),
        ("slurm", 1, f"ModuleNotFoundError: No module named 'torch'\n{EXITED}", "No module named 'torch'", False),
        ("slurm", 1, f"{NO_MODULE}{EXITED}", "No module named infini_run", True),
        ("slurm", 2, f"slurmstepd: error: execve(): /no/such: No such file\n{EXITED}", "execve(): /no/such", True),
        ("slurm", 1, "srun: error: Unable to create step: Invalid node name\n", "Invalid node name", False),
        ("ssh", 255, "Can't open user config file /x: No such file or directory\n", "Can't open user config", False),
        ("ssh", 1, TRACE, "ImportError: libssl.so.3", False),
        ("ssh", 1, "ModuleNotFoundError: No module named 'torch'\n", "No module named 'torch'", False),
        ("ssh", 1, NO_MODULE, "No module named infini_run", True),
        ("ssh", 127, "bash: line 1: exec: /no/such: not found\n", "/no/such: not found", True),
        ("ssh", 1, "/no/such: Command not found.\n", "Command not found", True),
        ("mpi", 1, f"{TRACE}{BANNER}\n{DETECTED}\n", "ImportError: libssl.so.3", False),
        ("mpi", 1, f"{BANNER}\n{TRACE}{DETECTED}\n", "ImportError: libssl.so.3", False),
        ("mpi", 1, f"{TRACE}\n{HYDRA}\n[proxy:0:1@n2] HYD_pmcd: x\n", "ImportError: libssl.so.3", False),
        ("mpi", 213, f"{'-' * 70}\nAll nodes which are allocated for this job are already filled.\n{'-' * 70}",
         "All nodes which are allocated", False),
    ],
)  # fmt: skip
def test_the_agents_own_last_line_is_the_reason(engine, code, words, shown, hints):
    text = find_engine(engine).explain_exit("", code, words)
    assert shown in text
    assert "cpu binding" not in text
    assert (REMOTE in text) == hints, text


def test_of_a_node_that_was_lost_the_line_with_its_name_is_the_reason():
    words = f"{CPU_BIND}srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited\n"
    assert (
        find_engine("slurm").explain_exit("n2", 137, words) == "srun exited with 137: srun: error: n2: task 1: Killed"
    )


CONFIRM = "srun: error: Unable to confirm allocation for job 7:"
CHECK = "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 7\n"


@pytest.mark.parametrize(
    ("words", "is_over"),
    [
        (f"srun: error: Slurm job 7 has expired\n{CHECK}", True),
        (f"{CONFIRM} Invalid job id specified\n{CHECK}", True),
        ("srun: error: Unable to create step for job 7: Job/step already completing or completed\n", True),
        (f"{CONFIRM} Unable to contact slurm controller (connect failure)\n{CHECK}", False),
        (f"{CONFIRM} Socket timed out on send/recv operation\n{CHECK}", False),
        ("srun: error: n1: task 0: Killed\nthe token of srun has expired\n", False),
    ],
)
def test_an_allocation_is_over_only_if_slurm_says_so_of_the_job(words, is_over):
    """A controller that does not answer ends no job."""
    assert find_engine("slurm").is_allocation_over(CPU_BIND + words) == is_over


@pytest.mark.parametrize(
    ("words", "was_cancelled"),
    [
        ("slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-24T02:38:16 ***\n", True),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-24T02:38:16 DUE TO TIME LIMIT ***\n", True),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-24T02:38:16 DUE TO NODE FAILURE ***\n", False),
        ("srun: error: n1: task 0: Killed\n", False),
    ],
)
def test_who_has_cancelled_a_step_has_asked_for_its_end(words, was_cancelled):
    assert find_engine("slurm").was_cancelled(words) == was_cancelled


def test_a_config_of_ssh_that_is_not_there(many):  # noqa: F811
    refused(many("true", hosts="host1", config="/no/such/config"), "/no/such/config", "--ssh_config")


def test_an_agent_that_ends_before_it_is_one_says_why(many, tmp_path):  # noqa: F811
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Welcome\necho 'licence.dat: No such file or directory' >&2\nexit 3\n")
    python.chmod(0o755)
    command = many(f"--remote_python={python}", "true", hosts="host1")
    refused(command, "node 0 (host1)", "ssh exited with 3: licence.dat: No such file or directory")
    assert b"add --remote_python" not in command.err


def test_an_ssh_that_leaves_its_end_of_the_link_to_another_process_is_told_of_all_the_same(infini_run, tmp_path):
    """As one with ControlPersist may: there is no end of the link to wait for."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec 3<&0\nsetsid cat <&3 >/dev/null 2>&1 &\nexit 3\n")
    ssh.chmod(0o755)
    command = infini_run("--hosts=a", "true", env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert command.wait() == 1
    assert b"node 0 (a) did not join: ssh exited with 3" in command.err
