"""A clone whose core was not built in place: a program in it has the installed package, or one line that helps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S

FIT = """
import sys
import infini_run as ir
from infini_run import version

def rank():
    import os
    return int(os.environ["RANK"])

if __name__ == "__main__":
    print(version.__file__)
    assert ir.run([sys.executable, "-c", ""], nproc_per_node=2).exit_code == 0
    print(list(ir.Launcher(None, 2).run(rank)))
"""


@pytest.fixture
def clone(tmp_path):
    """The package as git has it."""
    built = shutil.ignore_patterns("*.so", "irun-guard", "__pycache__")
    shutil.copytree(ROOT / "infini_run", tmp_path / "clone" / "infini_run", ignore=built)
    return tmp_path / "clone"


def call(*words, cwd):
    return subprocess.run(
        words, cwd=cwd, env=os.environ | {"COLUMNS": "400"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=LIMIT_S,
    )  # fmt: skip


def test_a_program_in_a_clone_has_the_installed_package_as_a_whole(clone):
    (clone / "fit.py").write_text(FIT)
    done = call(sys.executable, "fit.py", cwd=clone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(ROOT / "infini_run" / "version.py"), "[0, 1]"]


def test_the_module_is_the_command_in_a_clone(clone):
    done = call(sys.executable, "-m", "infini_run", "--nproc_per_node=2", "--report=r", "true", cwd=clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("words", [["-c", "import infini_run.cli"], ["-m", "infini_run", "true"]])
def test_a_core_that_is_nowhere_is_told_in_one_line_that_helps(clone, words):
    """-S: nothing that was installed is found."""
    done = call(sys.executable, "-S", *words, cwd=clone)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"the core of infini-run was not built in {clone}/infini_run" in last
    assert f"try: {sys.executable} -m pip install {clone}" in last
