"""Each wheel, installed by pip where it is made for, and our tests of a launch against it, run from the sdist.

They go through the ways in which the core can start and wait for processes: clone and fork, with pidfds and, as on
Linux 4.18, without (INFINI_RUN_DEBUG, every_path).
"""

from __future__ import annotations

import os

import pytest

from tests.wheels.conftest import run

pytestmark = pytest.mark.wheels
# exit codes and failures, strays, the guard; the commands wherever they lie; the Python API
TESTS = [f"tests/launch/test_{name}.py" for name in ("exit_code", "orphan", "guard")]
TESTS += ["tests/installation/test_installed.py", "tests/api/test_launch.py"]
# Under emulation all takes ten times as long, and each start of an interpreter a second.
EMULATED = [*TESTS[:3], "-k", "exit_code or daemons_are_gone or guard"]
NOT_BY_QEMU = (  # of qemu-user 7.2 (docs/architecture/tested.md): what it does instead, measured with QEMU_STRACE=1
    "error_folder_of_a_killed_launcher_is_removed[flags1]",  # --isolate: clone(CLONE_NEWPID) is EINVAL
    "an_isolated_launch_without_a_folder_needs_no_guard",  # the same
    "a_program_with_a_pid_namespace_for_its_children_has_them_run_as_without_us",  # qemu_thread_create: EINVAL
    "process_1_has_no_guard",  # its own threads take numbers: the first rank is 4, not 2
    "a_killed_outer_launcher_takes_the_inner_one_with_all_that_it_started",  # /proc/PID/exe is qemu
)
EMULATED += [f"--deselect=tests/launch/test_guard.py::test_{name}" for name in NOT_BY_QEMU]
FLAGS = ["-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]


def check(*python, cwd=None, tests=TESTS):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_", "INFINI_"))}
    said = run(*python, "-m", "pytest", *FLAGS, *tests, cwd=cwd, env=env)
    print(said.splitlines()[-1])


def test_on_glibc(glibc, tree):
    check(glibc, cwd=tree)


def test_on_aarch64(aarch64):
    """qemu lets no process adopt orphans and has no clone that shares memory, so the fallbacks are what runs here."""
    said = run(*aarch64, "/environment/bin/python", "-c", "import platform; print(platform.machine())")
    assert said.split()[-1] == "aarch64"
    check(*aarch64, "/environment/bin/python", tests=EMULATED)
