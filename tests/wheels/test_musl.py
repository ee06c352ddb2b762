"""The core with musl's libc, on this machine and without an interpreter: no package has a Python for musl. The driver
launches ranks in every way that it knows, ends them, their strays and output, and denies every call once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.wheels.conftest import run

pytestmark = pytest.mark.wheels
ZIG = [ROOT / f".venv/wheels-{sys.version_info[0]}.{sys.version_info[1]}/bin/python", "-m", "ziglang", "cc"]
FLAGS = ["-target", "x86_64-linux-musl", "-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-UNDEBUG", "-pthread", "-Icsrc"]
GUARD = ["guard/main.c", "guard/find_leftovers.c", "teardown/fork_chase.c", "sys/clock.c", "sys/procfs.c"]
DENIED = (
    "malloc calloc realloc strdup epoll_create1 epoll_ctl timerfd_create signalfd pipe2 fcntl opendir mmap "
    "pthread_create"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("musl")
    guard, driver = folder / "irun-guard", folder / "driver"
    run(*ZIG, *FLAGS, "-o", guard, *(f"csrc/{name}" for name in GUARD), cwd=ROOT)
    core = [path for path in sorted(Path(ROOT, "csrc").glob("*/*.c")) if path.parent.name not in ("guard", "start")]
    wrapped = [f"-Wl,--wrap={name}" for name in DENIED.split()]
    run(*ZIG, *FLAGS, *wrapped, "-o", driver, "tests/c/core_driver.c", *core, cwd=ROOT)
    return guard, driver


@pytest.mark.parametrize("how", [[], ["nopidfd"]])
def test_every_kind_of_launch_is_right_also_where_a_call_is_refused(programs, how):
    guard, driver = programs
    said = run(driver, "walk", *how, cwd=ROOT, env={"GUARD": str(guard), "PATH": "/usr/bin:/bin"})
    walked = dict(line.split(": ") for line in said.splitlines() if ": " in line)
    assert walked["strays"].endswith("calls, each denied once")
    assert int(walked["strays"].split()[0]) > 50
