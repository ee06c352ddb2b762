"""Podman, a real container runtime, with storage of its own in a folder of the test run: not the machine's.

podman      fixture: Podman, with IMAGE

The image is an archive with a marker, /etc/image, and links; the system, this Python and the package are bound into
it, so that no registry is asked.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from tests.support.cluster import need
from tests.support.paths import ROOT

IMAGE = "localhost/infini-run-test"
SYSTEM = ("usr", "bin", "sbin", "lib", "lib64")


def binds() -> list[str]:
    """The system, this Python and the package."""
    places = [
        "/usr",
        *(f"/{name}" for name in SYSTEM[1:] if not os.path.islink(f"/{name}") and os.path.exists(f"/{name}")),
    ]
    places += [f"{sys.prefix}", f"{sys.base_prefix}", f"{ROOT}"]
    return [f"{place}:{place}:ro" for place in dict.fromkeys(places)]


def limits() -> list[str]:
    """Root in a sandbox may not raise its limits as podman does for root (no CAP_SYS_RESOURCE)."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    pids = min(resource.getrlimit(resource.RLIMIT_NPROC)[1], int(Path("/proc/sys/kernel/pid_max").read_text()))
    return [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={pids}:{pids}"]


# crun takes no machine whose controllers are in both versions of cgroups: it gets to see the second one alone
HYBRID = "unshare -m sh -c 'mount -t cgroup2 none /sys/fs/cgroup && exec \"$@\"' sh"


def _is_hybrid() -> bool:
    controllers = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    return controllers.exists() and controllers.read_text().strip() != ""


class Podman:
    """env: podman with storage of its own."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="pod-")
        self.env = {name: f"{self.folder}/{name}" for name in ("CONTAINERS_STORAGE_CONF", "CONTAINERS_CONF")}
        Path(self.env["CONTAINERS_STORAGE_CONF"]).write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{self.folder}/graph"\nrunroot = "{self.folder}/run"\n'
        )
        Path(self.env["CONTAINERS_CONF"]).write_text(
            f'[engine]\ntmp_dir = "{self.folder}/tmp"\nvolume_path = "{self.folder}/volumes"\nlock_type = "file"\n'
            'cgroup_manager = "cgroupfs"\nevents_logger = "none"\nruntime = "crun"\n'
            f'[engine.runtimes]\ncrun = ["{self.folder}/crun"]\n'
        )
        Path(self.folder, "crun").write_text(
            f'#!/bin/sh\nexec {HYBRID if _is_hybrid() else ""} /usr/bin/crun --root={self.folder}/containers "$@"\n'
        )
        Path(self.folder, "crun").chmod(0o755)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["podman", *words], env={**os.environ, **self.env}, capture_output=True, text=True,
                              check=True)  # fmt: skip

    def load(self, name: str) -> None:
        with tarfile.open(f"{self.folder}/image.tar", "w") as archive:
            for folder in (*SYSTEM, "tmp", "proc", "sys", "dev", "etc"):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                if folder in SYSTEM and os.path.islink(f"/{folder}"):
                    entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{folder}")
                archive.addfile(entry)
            entry = tarfile.TarInfo("etc/image")
            entry.size = len(b"the image\n")
            archive.addfile(entry, BytesIO(b"the image\n"))
        self.call("import", "--quiet", f"{self.folder}/image.tar", name)

    def containers(self) -> list[str]:
        return self.call("ps", "--all", "--quiet").stdout.split()

    def close(self) -> None:
        for name in self.containers():
            self.call("rm", "--force", name)
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    need("podman", "crun")
    podman = Podman()
    podman.load(IMAGE)
    yield podman
    podman.close()
