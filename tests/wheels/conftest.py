"""Beds: places in which a wheel is installed and run. Each is made once, in .cache/beds, and kept.

glibc    a virtual environment of each CPython of this machine, 3.10 and later
aarch64  Debian's own Python for arm64, in a root of its own, under qemu's user-mode emulation
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BEDS = ROOT / "tests" / "support" / "beds"
CACHE = ROOT / ".cache" / "beds"
DIST = ROOT / "dist"
GLIBC, ARM = "manylinux_2_17_x86_64", "manylinux_2_17_aarch64"
PLATFORMS = {  # what pip may take there of other packages
    GLIBC: [f"manylinux_2_{minor}_x86_64" for minor in (36, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"],
    ARM: [f"manylinux_2_{minor}_aarch64" for minor in (36, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_aarch64"],
}
TOOLS = ["pip", "setuptools", "pytest>=8", "hypothesis>=6.100"]  # of our tests there
OF_3_10 = ["exceptiongroup", "tomli", "typing_extensions"]  # pip asks for what its own Python needs, not that one

# Registers the emulator for the programs that this namespace starts (binfmt_misc, one for each user namespace since
# Linux 6.7), opens it once and for all (F), and goes into the root.
ENTER = r"""
root=$1; shift
if ! [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; then
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    cat /usr/lib/binfmt.d/qemu-aarch64.conf >/proc/sys/fs/binfmt_misc/register
fi
mount --bind "$root" "$root" # a root that is a mount, as that of any machine is
for place in /proc /sys /dev; do mount --rbind $place "$root$place"; done
mount -t tmpfs tmp "$root/tmp"
exec chroot "$root" env -C /work "$@"
"""


def run(*words, **kwargs):
    done = subprocess.run(
        [*map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, **kwargs,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout[-8000:]}"
    return done.stdout


def wheel_of(tag: str) -> Path:
    (wheel,) = DIST.glob(f"*-{tag}.whl")
    return wheel


def is_newer(folder: Path, wheel: Path) -> bool:
    """Whether that wheel was installed there."""
    return (folder / "made").exists() and (folder / "made").stat().st_mtime > wheel.stat().st_mtime


def download(tag: str, version: str) -> Path:
    """The wheel, and from the index what it and our tests need on that platform."""
    folder = CACHE / f"wheels-{tag}-{version}"
    words = [word for name in PLATFORMS[tag] for word in ("--platform", name)]
    words += ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}", f"--dest={folder}"]
    run(sys.executable, "-m", "pip", "download", "-q", *words, wheel_of(tag), *TOOLS, *OF_3_10)
    return folder


def install(python: list[str], environment: Path, packages: Path) -> None:
    """By the pip of that Python, without an index."""
    words = [
        "install",
        "-q",
        "--no-index",
        f"--find-links={packages}",
        "--upgrade",
        "--force-reinstall",
        "infini-run",
        *TOOLS,
    ]
    run(*python, "-m", "venv", environment)
    run(*python[:-1], environment / "bin" / "python", "-m", "pip", *words)


def make(name: str, tag: str, python: str) -> Path:
    """An environment of a Python of this machine; its own python."""
    folder = CACHE / name
    if not is_newer(folder, wheel_of(tag)):
        shutil.rmtree(folder, ignore_errors=True)
        version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        install([python], folder, download(tag, version))
        (folder / "made").touch()
    return folder / "bin" / "python"


def pythons() -> dict[str, str]:
    """Of this machine: on PATH, or under pyenv's versions."""
    found = {}
    for minor in (10, 11, 12, 13, 14):
        folders = sorted(
            Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/3.{minor}.*/bin/python")
        )
        for candidate in (shutil.which(f"python3.{minor}"), *map(str, folders)):
            if (
                candidate
                and subprocess.run(
                    [candidate, "-c", "import venv, ensurepip"], capture_output=True, check=False
                ).returncode
                == 0
            ):
                found[f"3.{minor}"] = candidate
                break
    return found


@pytest.fixture(scope="session", params=list(pythons()))
def glibc(request) -> Path:
    return make(f"glibc-{request.param}", GLIBC, pythons()[request.param])


@pytest.fixture(scope="session")
def aarch64(tree) -> list[str]:
    """The words before a command that runs there, with the sdist's tree as its working directory."""
    root = CACHE / "aarch64"
    run(BEDS / "root.sh", root, "arm64", "python3", "python3-venv", "procps", "util-linux", "strace")
    for place in ("proc", "sys", "dev", "tmp", "work"):
        (root / place).mkdir(exist_ok=True)
    user = ["unshare", "--user", "--map-root-user", "--mount", "--propagation=private"]
    enter = [*user, "sh", "-euc", ENTER, "sh", str(root)]
    if not is_newer(root, wheel_of(ARM)):
        packages = root / "wheels"
        shutil.rmtree(packages, ignore_errors=True)
        shutil.copytree(download(ARM, version_of_debian(root)), packages)
        install([*enter, "/usr/bin/python3"], Path("/environment"), Path("/wheels"))
        (root / "made").touch()
    shutil.rmtree(root / "work")
    shutil.copytree(tree, root / "work")
    return enter


def version_of_debian(root: Path) -> str:
    return os.readlink(root / "usr" / "bin" / "python3").removeprefix("python")


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """The unpacked sdist: our tests run from what it holds."""
    folder = tmp_path_factory.mktemp("sdist")
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    (tree,) = folder.iterdir()
    return tree
