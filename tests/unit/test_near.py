"""`make near`: what it runs for which change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import needs
from tests.support.near import TESTS, WORDS, changed, chosen
from tests.support.paths import ROOT

TEXT = "tests/unit/system/test_json_codec.py"


def test_near_knows_every_package_and_test_folder():
    packages = {file.parent.relative_to(ROOT) for file in ROOT.glob("infini_run/*/**/__init__.py")}
    known = {start for start in TESTS if start != "infini_run/"}
    assert [str(one) for one in packages if not any(f"{one}/".startswith(start) for start in known if start)] == []
    folders = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("tests/*/**/test_*.py")}
    covered = [path for paths in TESTS.values() for path in paths]
    left = [one for one in folders if not any(f"{path}/".startswith(f"{one}/") or f"{one}/".startswith(f"{path}/")
                                              for path in covered)]  # fmt: skip
    assert set(left) == {"tests/soak", "tests/wheels"}  # targets of their own


def test_near_names_only_paths_that_exist():
    paths = {*TESTS, *WORDS, *(path for paths in TESTS.values() for path in paths)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("path", "first", "near"),
    [
        ("infini_run/jobs/status/watch.py", "tests/jobs/test_job_watch.py", "tests/jobs"),
        ("infini_run/crews/api/launcher.py", None, "tests/crews"),
        ("infini_run/system/json_codec.py", TEXT, "tests/unit/system"),
        ("infini_run/new.py", None, "tests/unit"),
        ("csrc/io/output_pump.c", None, "tests/launch"),
        (TEXT, TEXT, TEXT),
        ("tests/jobs/conftest.py", "tests/jobs", "tests/jobs"),
        ("tests/support/nvml.py", None, "tests/documents"),
        ("tests/support/job_case.py", "tests/jobs", "tests/jobs"),
        ("tests/support/children/hold_lease.py", "tests/launch/test_lease.py", "tests/launch/test_lease.py"),
    ],
)
def test_near_chooses_tests_of_changed_path(path, first, near):
    now, later = chosen([path])
    assert first is None or first in now
    assert near in later
    assert set(now) <= set(later)
    assert (WORDS[0] in later) == path.startswith("infini_run/")


@pytest.mark.parametrize("path", ["tests/unit/test_gone.py", "LICENSE", "bench/run.py"])
def test_near_has_nothing_for_other_paths(path):
    assert chosen([path]) == ([], [])


@needs("git")
def test_near_sees_commits_and_uncommitted_and_untracked_files(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # a hook of git's has some
        monkeypatch.delenv(name)
    git("init")
    for name in ("same", "gone", "edited", "committed", "moved"):
        Path(name).write_text(name * 100)
    Path(".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "-m", "base")
    Path("committed").write_text("other")
    git("commit", "-am", "second")
    Path("edited").write_text("other")
    Path("gone").unlink()
    git("mv", "moved", "to")
    for name in ("ignored", "new ü\n"):
        Path(name).write_text("")
    assert changed("HEAD~1") == ["committed", "edited", "gone", "moved", "new ü\n", "to"]
    assert changed("HEAD") == ["edited", "gone", "moved", "new ü\n", "to"]
    with pytest.raises(subprocess.CalledProcessError):
        changed("nonsense")


def run(*words, **env):
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.near", "-p", "no:cacheprovider", *words]
    env = {**os.environ, "NEAR_FIRST": "", **env}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_near_runs_named_tests_first_and_others_by_seed():
    words = ("--collect-only", "tests/unit/system/test_poller.py", TEXT)
    orders = [run(*words, TEST_SEED=seed, NEAR_FIRST=TEXT).stdout.split("\n\n")[0].splitlines() for seed in "112"]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    of_first = [one.startswith(TEXT) for one in orders[0]]
    assert of_first == sorted(of_first, reverse=True)


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadgroup")], ids=["alone", "xdist"])
def test_near_leaves_out_what_is_over_its_budget(workers):
    made = run(*workers, TEXT, NEAR_BUDGET_S="0")
    assert made.returncode == 0
    assert "make near: ran 0 of " in made.stdout
    assert "passed" not in made.stdout
    within = run(*workers, TEXT)
    assert int(within.stdout.split(" passed")[0].split()[-1]) > 0
    count = within.stdout.split("make near: ran ")[1].split(" tests")[0]
    assert len(set(count.split(" of "))) == 1


def test_near_is_content_where_all_tests_need_beds():
    assert run("-m", "wheels", TEXT).returncode == 0


@needs("git")
def test_near_refuses_unknown_base_in_one_line():
    made = subprocess.run(
        [sys.executable, "-m", "tests.support.near"],
        cwd=ROOT, env={**os.environ, "NEAR_BASE": "nonsense"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 1
    assert len(made.stderr.splitlines()) == 1
    assert "NEAR_BASE=nonsense" in made.stderr
