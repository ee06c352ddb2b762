"""`make near`: the tests of what a change touches, without beds, within a minute on two cores.

It is a program, which chooses folders by the table TESTS, and the plugin of the pytest that it becomes: tests that
are changed or that import a changed module run first, then the others in an order by TEST_SEED, until the budget is
spent.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.rows import SEED

# From the end of collecting, which takes up to 10 s. The rest of the minute is for tests that have begun by then:
# what takes longer has the mark `slow`.
BUDGET_S = 35.0
LEFT_OUT = "not slow and not torch and not pbs and not wheels"

# What stands for a path is the entry with the longest beginning in common. A test compares it with the folders.
TESTS: dict[str, tuple[str, ...]] = {
    "": (),
    "infini_run/": ("tests/unit", "tests/api", "tests/launch/test_start.py", "tests/installation/test_shadows.py"),
    "infini_run/cli.py": ("tests/unit/options", "tests/launch"),
    "infini_run/channel/": ("tests/channel", "tests/crews"),
    "infini_run/control/": ("tests/launch/test_control.py",),
    "infini_run/core/": ("tests/launch", "tests/api"),
    "infini_run/crews/": ("tests/crews",),
    "infini_run/devices/": ("tests/unit/devices", "tests/unit/plan"),
    "infini_run/display/": ("tests/display",),
    "infini_run/doctor/": ("tests/doctor",),
    "infini_run/environments/": ("tests/unit/environments", "tests/unit/options", "tests/unit/plan"),
    "infini_run/jobs/": ("tests/jobs",),
    "infini_run/multinode/": ("tests/multinode",),
    "infini_run/node/": ("tests/launch", "tests/unit/plan", "tests/unit/report"),
    "infini_run/options/": ("tests/unit/options", "tests/unit/plan", "tests/documents/test_reference.py"),
    "infini_run/plan/": ("tests/unit/plan", "tests/launch"),
    "infini_run/questions/": ("tests/launch/test_control.py",),
    "infini_run/report/": ("tests/unit/report", "tests/launch"),
    "infini_run/system/": ("tests/unit/system", "tests/launch", "tests/crews"),
    "infini_run/warm/": ("tests/launch/test_warm.py", "tests/launch/test_warm_ends.py", "tests/crews/test_zygote.py"),
    "infini_run/watchdog/": (
        "tests/launch/test_hang.py",
        "tests/launch/test_stalled.py",
        "tests/launch/test_ready.py",
        "tests/api/test_launch.py",
    ),
    "csrc/": ("tests/launch", "tests/api/test_host_program.py", "tests/api/test_launch.py", "tests/unit/system"),
    "docs/": ("tests/documents", "tests/unit/test_names.py"),
    "README.md": ("tests/documents",),
    "mkdocs.yml": ("tests/documents/test_site.py",),
    "examples/": ("tests/documents/test_examples.py", "tests/crews/test_example_inference.py"),
    "share/": ("tests/unit/options", "tests/jobs/test_job_manpage.py", "tests/documents/test_reference.py"),
    **dict.fromkeys(("bin/", "setup.py", "pyproject.toml", "MANIFEST.in", "Makefile"), ("tests/installation",)),
}
# Words and messages may be anywhere in the product.
WORDS = ("tests/unit/test_names.py", "tests/documents/test_troubleshooting.py")


def changed(base: str) -> list[str]:
    """Return the paths that differ from `base`: of commits, uncommitted and untracked, also those that are gone.

    Raises subprocess.CalledProcessError: git does not know such a base.
    """
    return sorted(
        {*_git("diff", "--name-only", "--no-renames", "-z", base, "--"),
         *_git("ls-files", "--others", "--exclude-standard", "-z")}
    )  # fmt: skip


def base_of_change() -> str:
    """Return NEAR_BASE; without it, where origin/main was left, or HEAD if there is no origin/main."""
    if asked := os.environ.get("NEAR_BASE"):
        return asked
    try:
        return _git("merge-base", "HEAD", "origin/main")[0].strip()
    except subprocess.CalledProcessError:
        return "HEAD"


def _git(*words: str) -> list[str]:
    made = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
    return [path for path in made.stdout.split("\0") if path]


def chosen(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return what to run for changed paths: the files of tests that run first, and all, files and folders."""
    first, near = set(), set()
    for path in paths:
        if path.startswith("tests/"):
            first |= _touched_tests(path)
        else:
            near |= set(TESTS[max((start for start in TESTS if path.startswith(start)), key=len)])
            first |= _files_with(_import_of(path), "test_*.py") if path.startswith("infini_run/") else set()
        near |= set(WORDS if path.startswith("infini_run/") else ())
    return sorted(first), sorted(first | near)


def _touched_tests(path: str) -> set[str]:
    """A test is itself, a conftest.py its folder, and anything else all files that name it."""
    here = Path(path)
    if here.name.startswith("test_"):
        return {path} if (ROOT / path).exists() else set()
    if here.name in ("conftest.py", "__init__.py"):
        return {str(here.parent)} if (ROOT / here.parent).exists() else set()
    word = _import_of(path) if here.parent.name == "support" else rf"\b{re.escape(here.stem)}\b"
    return _files_with(word, "test_*.py") | {str(Path(name).parent) for name in _files_with(word, "conftest.py")}


def _import_of(path: str) -> str:
    """A pattern of the lines that import a module."""
    *package, name = Path(path).with_suffix("").parts
    return rf"\b{re.escape('.'.join(package))}(\.| import .*\b){re.escape(name)}\b"


def _files_with(pattern: str, glob: str) -> set[str]:
    return {
        str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob(glob) if re.search(pattern, file.read_text())
    }


def main(*words: str) -> None:
    """Become pytest, or say that there is nothing to test."""
    base = base_of_change()
    try:
        paths = changed(base)
    except subprocess.CalledProcessError as error:
        sys.exit(f"make near: NEAR_BASE={base}: {error.stderr.strip().splitlines()[0]}")
    first, near = chosen(paths)
    if not near:
        print(f"make near: nothing to test in {len(paths)} changed files since {base[:12]}")
        return
    print(f"make near: {len(paths)} changed files since {base[:12]}: {' '.join(near)}", flush=True)
    os.environ |= {"TEST_BEDS": "none", "NEAR_FIRST": " ".join(first)}
    argv = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "tests.support.near", "-m", LEFT_OUT, *words, *near]
    os.execv(sys.executable, argv)


# ---- the plugin; workers of pytest-xdist load it, too, and order the tests alike

_END: pytest.StashKey[float] = pytest.StashKey()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first = tuple(os.environ["NEAR_FIRST"].split())
    random.Random(SEED).shuffle(items)
    items.sort(key=lambda item: not item.nodeid.startswith(first))
    config.stash[_END] = time.monotonic() + float(os.environ.get("NEAR_BUDGET_S", BUDGET_S))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out what is over the budget: a test that a plugin has taken care of is not run by pytest."""
    return time.monotonic() >= item.config.stash[_END] or None


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # they have marks of LEFT_OUT
        session.exitstatus = pytest.ExitCode.OK
    if reporter is not None:  # no worker has one
        ran = sum(len(reporter.stats.get(how, ())) for how in ("passed", "failed", "error"))
        reporter.write_line(f"\nmake near: ran {ran} of {session.testscollected} tests; TEST_SEED={SEED} chose them")


if __name__ == "__main__":
    main(*sys.argv[1:])
