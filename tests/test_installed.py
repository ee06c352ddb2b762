"""The installed commands start wherever their environment lies: in a path with spaces, or one that is too long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import _cffi_backend
import pytest
from conftest import LIMIT_S

import infini_run

SCRIPTS = Path(sys.executable).parent
LONG = "/".join(["x" * 100] * 4)


@pytest.fixture(params=["two words", LONG, "\xfc"], ids=["space", "long", "unicode"])
def environment(request, tmp_path):
    """As an installer makes it: a venv, and in the first line of each script the path of its Python, as it is."""
    base = tmp_path / request.param / "venv"
    for name in ("bin", "lib"):
        (base / name).mkdir(parents=True)
    shutil.copy(SCRIPTS.parent / "pyvenv.cfg", base)
    (base / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (base / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}").symlink_to(
        SCRIPTS.parent / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    )
    for name in ("infini-run", "infini-job"):
        shutil.copy(SCRIPTS / name, base / "bin")
        rest = (SCRIPTS / f"{name}.py").read_text().partition("\n")[2]
        (base / "bin" / f"{name}.py").write_text(f"#!{base / 'bin' / 'python'}\n{rest}")
        (base / "bin" / f"{name}.py").chmod(0o755)
    return base / "bin"


def call(*words, **kwargs):
    return subprocess.run(
        [*map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        **kwargs,
    )  # fmt: skip


def test_the_commands_start_and_their_ranks_have_the_same_python(environment, tmp_path):
    (tmp_path / "ask.py").write_text("import sys\nprint(sys.executable, sys.argv[1:])\n")
    done = call(environment / "infini-run", "--console=inherit", tmp_path / "ask.py", "a b", "", "c")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{environment / 'python'} ['a b', '', 'c']\n"
    done = call(environment / "infini-job", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: infini-job")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_isolate_starts_the_same_command_again(environment):
    done = call(environment / "infini-run", "--isolate", "sh", "-c", "echo $RANK")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_agents_are_started_from_there(environment, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift $(($# - 1))\nexec sh -c "$1"\n')
    ssh.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = call(environment / "infini-run", "--hosts=one", "--engine=ssh", "sh", "-c", "echo $RANK", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "0"


def test_a_link_to_a_command_starts_it(environment, tmp_path):
    (tmp_path / "link").symlink_to(environment / "infini-run")
    assert call(tmp_path / "link", "echo", "here").stdout == "here\n"
    assert (
        call("link", "echo", "here", env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}).stdout
        == "here\n"
    )


IMPORTS = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}


def imported(done):
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_where_an_installer_puts_us_nothing_but_us_is_imported(tmp_path):
    """No site, no .pth files: a twentieth of the start."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = tmp_path / "lib" / version / "site-packages"
    shutil.copytree(Path(infini_run.__file__).parent, packages / "infini_run")
    shutil.copy(_cffi_backend.__file__, packages)
    (packages / "noise.pth").write_text("import this\n")
    shutil.copytree(SCRIPTS, tmp_path / "bin", symlinks=True)
    done = call(tmp_path / "bin" / "infini-run", "sh", "-c", "echo $RANK", env=IMPORTS)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert {"infini_run.cli", "infini_run.node"} <= imported(done)
    assert not {"site", "this", "importlib"} & imported(done)


def test_a_module_that_is_elsewhere_is_found_as_by_any_python(tmp_path):
    """An installation of another layout: our script is where it was, and a .pth file tells where we are."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = tmp_path / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    found = {Path(infini_run.__file__).parent.parent, Path(_cffi_backend.__file__).parent}
    (packages / "elsewhere.pth").write_text("".join(f"{path}\n" for path in found))
    shutil.copy(SCRIPTS.parent / "pyvenv.cfg", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    shutil.copy(SCRIPTS / "infini-run", tmp_path / "bin")
    rest = (SCRIPTS / "infini-run.py").read_text().partition("\n")[2]
    (tmp_path / "bin" / "infini-run.py").write_text(f"#!{tmp_path / 'bin' / 'python'}\n{rest}")
    done = call(tmp_path / "bin" / "infini-run", "sh", "-c", "echo $RANK", env=IMPORTS)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert "site" in imported(done)


def test_the_process_is_called_as_the_command():
    done = call(SCRIPTS / "infini-run", "sh", "-c", "cat /proc/$PPID/comm")
    assert (done.returncode, done.stdout) == (0, "infini-run\n")


def test_python_runs_a_command_as_it_runs_a_script():
    done = call(sys.executable, SCRIPTS / "infini-run", "sh", "-c", "echo $RANK")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_command_without_its_script_says_so(tmp_path):
    shutil.copy(SCRIPTS / "infini-run", tmp_path)
    done = call(tmp_path / "infini-run", "true")
    assert done.returncode == 127
    assert done.stderr == "infini-run: the script beside this program, or its interpreter, cannot be started\n"
