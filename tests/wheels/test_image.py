"""examples/Dockerfile, built without a daemon: a root of unpacked Debian packages in place of its FROM, its COPY, its
wheel, its variables and its user; and its ENTRYPOINT is process 1 there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import LIMIT_S
from tests.wheels.conftest import BEDS, CACHE, GLIBC, download, install, is_newer, run, version_of_debian, wheel_of

pytestmark = [pytest.mark.wheels, pytest.mark.skipif(os.geteuid() != 0, reason="a root of its own needs root")]

# What a container runtime does; the shell is process 1 and becomes the command.
MAKE = r"""
root=$1 user=$2; shift 2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 dev "$root/dev"
for name in null zero full random urandom tty; do
    : >"$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
exec chroot "$root" setpriv --reuid="$user" --regid="$user" --clear-groups --inh-caps=-all env -C /job "$@"
"""


def dockerfile() -> dict[str, str]:
    """Its instructions; a later one replaces an earlier one."""
    text = (ROOT / "examples/Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {word: rest for word, _, rest in (line.partition(" ") for line in lines)}


@pytest.fixture(scope="module")
def image() -> Path:
    root = CACHE / "image"
    run(BEDS / "root.sh", root, "amd64", "python3", "python3-venv", "bash", "util-linux")
    binds = f"for place in dev proc; do mount --rbind /$place {root}/$place; done"
    enter = ["unshare", "--mount", "--propagation=private", "sh", "-euc", f'{binds}; exec chroot {root} "$@"', "sh"]
    if not is_newer(root, wheel_of(GLIBC)):
        packages = root / "wheels"
        shutil.rmtree(packages, ignore_errors=True)
        shutil.copytree(download(GLIBC, version_of_debian(root)), packages)
        install([*enter, "/usr/bin/python3"], Path("/usr/local"), Path("/wheels"))
        (root / "made").touch()
    source = re.fullmatch(r"(\S+) /job/train.py", dockerfile()["COPY"])[1]
    (root / "job").mkdir(exist_ok=True)
    shutil.copy(ROOT / source, root / "job" / "train.py")
    return root


@pytest.fixture
def docker_run(image):
    """`docker run IMAGE WORDS...`, where none are given with the CMD."""

    def start(*words):
        steps = dockerfile()
        name, _, value = steps["ENV"].partition("=")
        user = steps["USER"].partition(":")[0]
        namespaces = [
            "unshare",
            "--pid",
            "--fork",
            "--mount",
            "--uts",
            "--ipc",
            "--kill-child",
            "--propagation=private",
        ]
        command = ["env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", f"{name}={value}"]
        command += [*json.loads(steps["ENTRYPOINT"]), *(words or json.loads(steps["CMD"]))]
        return subprocess.run(
            [*namespaces, "sh", "-euc", MAKE, "sh", str(image), user, *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip

    return start


def test_its_command_trains(docker_run):
    done = docker_run()
    assert done.returncode == 0, done.stderr
    assert "[rank 0] model: " in done.stdout


def test_it_is_process_1_and_a_user_without_a_name(docker_run):
    user = dockerfile()["USER"].partition(":")[0]
    done = docker_run("--nproc_per_node=2", "sh", "-c", 'echo "$PPID $(cat /proc/1/comm) $(id -u)"')
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"1 infini-run {user}"] * 2


def test_a_failure_is_named_and_its_code_is_the_containers(docker_run):
    done = docker_run("--nproc_per_node=3", "sh", "-c", '[ "$RANK" != 1 ] || exit 7; sleep 1000')
    assert done.returncode == 7
    assert "rank 1 on " in done.stderr


def test_what_the_ranks_leave_behind_ends_with_the_container(docker_run):
    done = docker_run("sh", "-c", "setsid sleep 1000 & sleep 0.2; exit 0")
    assert done.returncode == 0, done.stderr
    assert "stopped 1 process left behind: sleep (" in done.stderr
