"""What an MPI launcher told its own process alone, variables and descriptors, is not handed on to ranks."""

from __future__ import annotations

import os
import shutil

import pytest

from infini_run.environments.launcher_variables import close_inherited_on_exec, strip_launcher_environment
from tests.support.command import COMMAND, run_mpi


@pytest.fixture
def fd():
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    yield reader
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("name", ["PMI_FD", "PMI2_FD", "SLURM_PMI_FD"])
def test_the_descriptor_that_it_names_goes_with_the_variable(fd, name):
    assert strip_launcher_environment({name: str(fd), "PMI_RANK": "1", "A": "b"}) == {"A": "b"}
    assert not os.get_inheritable(fd)


def test_what_is_kept_is_inherited(fd):
    assert strip_launcher_environment({"PMI_FD": str(fd)}, keep=("PMI_FD",)) == {"PMI_FD": str(fd)}
    assert os.get_inheritable(fd)


def test_other_variables_name_nothing_of_ours(fd):
    environ = {"MY_FD": str(fd)}
    assert strip_launcher_environment({**environ, "PMI_SIZE": str(fd)}) == environ
    assert os.get_inheritable(fd)


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "2", "1048577", "9" * 40, "9" * 5000, "\u0664", "3.0"], ids=lambda text: ascii(text[:50])
)
def test_what_is_no_open_descriptor_harms_nobody(text):
    before = [os.get_inheritable(number) for number in range(3)]
    assert strip_launcher_environment({"PMI_FD": text}) == {}
    assert [os.get_inheritable(number) for number in range(3)] == before


def test_all_but_stdio_can_be_withheld(fd):
    before = [os.get_inheritable(number) for number in range(3)]
    close_inherited_on_exec()
    assert not os.get_inheritable(fd)
    assert [os.get_inheritable(number) for number in range(3)] == before


def test_ranks_under_a_real_mpiexec_have_no_connection_to_it():
    show = 'ls -l /proc/$$/fd; echo "${PMI_FD-none}"'
    words = ["mpiexec.hydra", "-n", "1"]
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]}")
    for launcher, expected in (
        ([*words, "sh", "-c", show], True),
        ([*words, *COMMAND, "--engine=auto", "sh", "-c", show], False),
    ):
        done = run_mpi(launcher)
        fds = {line.split()[8] for line in done.stdout.splitlines() if " -> socket:" in line}
        assert (len(fds) > 1) == expected, done.stdout  # one is a leak of Hydra's own, that no variable names
    assert done.stdout.splitlines()[-1] == "none"
