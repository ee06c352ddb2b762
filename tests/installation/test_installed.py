"""The installed commands start wherever their environment lies: in a path with spaces, or one that is too long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import _cffi_backend
import pytest

import infini_run
from tests.support.waiting import LIMIT_S

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


@pytest.fixture
def place(tmp_path):
    """An environment with our command in it, and its site-packages, which are empty."""
    packages = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    shutil.copy(SCRIPTS.parent / "pyvenv.cfg", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    shutil.copy(SCRIPTS / "infini-run", tmp_path / "bin")
    rest = (SCRIPTS / "infini-run.py").read_text().partition("\n")[2]
    (tmp_path / "bin" / "infini-run.py").write_text(f"#!{tmp_path / 'bin' / 'python'}\n{rest}")
    return packages


def test_where_an_installer_puts_us_nothing_but_us_is_imported(place, tmp_path):
    """No site, no .pth files: a twentieth of the start. Nor with --live, which asks for modules of other systems."""
    shutil.copytree(Path(infini_run.__file__).parent, place / "infini_run")
    shutil.copy(_cffi_backend.__file__, place)
    (place / "noise.pth").write_text("import this\n")
    for flags in ((), ("--live",)):
        done = call(tmp_path / "bin" / "infini-run", *flags, "sh", "-c", "echo $RANK", env=IMPORTS)
        assert (done.returncode, done.stdout) == (0, "0\n")
        assert {"infini_run.cli", "infini_run.node.launch"} <= imported(done)
        assert not {"site", "this"} & imported(done)


@pytest.mark.parametrize("linked", [False, True])
def test_a_module_that_is_elsewhere_is_found_as_by_any_python(place, tmp_path, linked):
    """A .pth file tells where we are; of us before there is a folder left. linked: as uv may install the program."""
    found = {Path(infini_run.__file__).parent.parent, Path(_cffi_backend.__file__).parent}
    (place / "elsewhere.pth").write_text("".join(f"{path}\n" for path in found))
    (place / "infini_run" / "__pycache__").mkdir(parents=True)
    if linked:
        (tmp_path / "cache").mkdir()
        (tmp_path / "bin" / "infini-run").rename(tmp_path / "cache" / "infini-run")
        (tmp_path / "bin" / "infini-run").symlink_to(tmp_path / "cache" / "infini-run")
    done = call(tmp_path / "bin" / "infini-run", "sh", "-c", "echo $RANK", env=IMPORTS)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert "site" in imported(done)


@pytest.mark.parametrize("entry", ["", "here", "."])
def test_what_is_relative_in_pythonpath_is_no_place_for_our_modules(tmp_path, entry):
    """`export PYTHONPATH=/x:$PYTHONPATH` makes an empty entry where it was not set: the working directory."""
    for folder in (tmp_path, tmp_path / "here"):
        folder.mkdir(exist_ok=True)
        for name in ("_cffi_backend.py", "infini_run.py", "types.py"):
            (folder / name).write_text("import os; os.write(2, b'shadow'); os._exit(99)")
    env = {**os.environ, "PYTHONPATH": f"/x:{entry}"}
    done = call(SCRIPTS / "infini-run", "sh", "-c", "echo $RANK", env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_module_beside_the_command_is_none_of_ours(place, tmp_path):
    """Also where site, which imports os and stat before the script begins, is not started."""
    for name in ("os.py", "stat.py", "posixpath.py", "genericpath.py", "_collections_abc.py"):
        (tmp_path / "bin" / name).write_text("raise SystemExit(99)")
    shutil.copytree(Path(infini_run.__file__).parent, place / "infini_run")
    shutil.copy(_cffi_backend.__file__, place)
    done = call(tmp_path / "bin" / "infini-run", "sh", "-c", "echo $RANK")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


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
    said = "infini-run.py cannot be started: it, or the Python in its first line, does not exist\n"
    assert done.stderr == f"{tmp_path}/{said}"


def test_a_script_that_may_not_be_executed_is_126(tmp_path):
    shutil.copy(SCRIPTS / "infini-run", tmp_path)
    (tmp_path / "infini-run.py").write_text("#!/bin/sh\n")  # without its run bit
    done = call(tmp_path / "infini-run", "true")
    assert done.returncode == 126
    said = "infini-run.py cannot be started: you may not execute it, or the Python in its first line\n"
    assert done.stderr == f"{tmp_path}/{said}"
