"""Builds the sdist and every wheel of it on this machine, whatever its libc and architecture: one wheel for each of
TARGETS, for CPython 3.10 and later.

python scripts/wheels.py [FOLDER]       FOLDER is dist/; `make wheels` runs it where the packages that it needs are

The C compiler is zig's clang (the package ziglang), which has the headers and the symbols of every glibc and of musl
for every architecture, so that the libc of this machine has no part in a wheel (docs/decisions/0053). The programs
irun-guard and infini-run are static, with musl's libc in every wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import ziglang

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {  # the platform tag of the wheel: zig's name for what it is compiled for
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "musllinux_1_2_x86_64": "x86_64-linux-musl",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("infini_run-*"):
        old.unlink()
    os.environ["SOURCE_DATE_EPOCH"] = date_of_commit()  # of every file in the archives
    build("--sdist", ROOT, folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as temporary:
        headers = copy_headers(Path(temporary))
        for platform, target in TARGETS.items():
            build_wheel(sdist, platform, target, headers, folder)
    for path in sorted(folder.glob("infini_run-*")):
        print(f"{path.stat().st_size:>9,}  {path.name}")


def build_wheel(sdist: Path, platform: str, target: str, headers: Path, folder: Path) -> None:
    """From what the sdist holds and nothing else, in a folder of its own."""
    machine = target.partition("-")[0]
    zig = f"{Path(ziglang.__file__).parent / 'zig'} cc -target"
    cc = f"{zig} {target} -I{headers}"
    libc = ""
    if platform.startswith("musllinux"):
        libc = f"-nostdlib -Wl,--no-as-needed {name_of_musl(machine, zig, headers.parent)}"
    environ = {
        "CC": cc,
        "LDSHARED": f"{cc} -shared -s {libc}",
        "CFLAGS": "-g0",
        "IRUN_STATIC_CC": f"{zig} {machine}-linux-musl",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # what sysconfig.get_platform() says: names of build folders
        "ZIG_GLOBAL_CACHE_DIR": str(ROOT / ".cache" / "zig"),
    }
    with tempfile.TemporaryDirectory() as source:
        with tarfile.open(sdist) as archive:
            archive.extractall(source, filter="data")
        (tree,) = Path(source).iterdir()
        build("--wheel", tree, folder, f"-C--build-option=--plat-name={platform}", **environ)


def name_of_musl(machine: str, zig: str, folder: Path) -> Path:
    """An empty library with the name that musl's libc has in a musllinux wheel (PEP 656); zig's own is libc.so."""
    path = folder / f"libc.musl-{machine}.so.1"
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-x", "c", "/dev/null", "-o", str(path)]
    subprocess.run([*zig.split(), f"{machine}-linux-musl", *flags], check=True)
    return path


def build(what: str, tree: Path, folder: Path, *flags: str, **environ: str) -> None:
    words = [sys.executable, "-m", "build", "--no-isolation", what, "--outdir", str(folder), *flags, str(tree)]
    done = subprocess.run(
        words, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(words)}: exit code {done.returncode}")


def copy_headers(folder: Path) -> Path:
    """Python's own, without what a distribution puts around pyconfig.h to choose by architecture. The sizes in it,
    and all that the limited API depends on, are the same on every 64-bit Linux."""
    headers = folder / "python"
    shutil.copytree(sysconfig.get_path("include"), headers)
    shutil.copy(sysconfig.get_config_h_filename(), headers / "pyconfig.h")
    return headers


def date_of_commit() -> str:
    given = os.environ.get("SOURCE_DATE_EPOCH")
    words = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return given or subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
