"""Builds what is compiled, as one abi3 wheel: the extension (csrc/build.py), irun-guard and the start programs.

Everything else is in pyproject.toml. IRUN_STATIC_CC is the compiler of the programs, which are static, if it is not
the extension's CC (scripts/wheels.py). IRUN_GUARD_CFLAGS adds flags to irun-guard (those of a sanitizer, say).
"""

import os
import platform
import re
import shlex
import subprocess
import sysconfig
import tempfile
import zipfile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

build_scripts = Distribution().get_command_class("build_scripts")  # setuptools has no module of that name

PROGRAM_FLAGS = ["-std=c11", "-O2", "-D_GNU_SOURCE", "-Icsrc"]
FREESTANDING = ["-fno-stack-protector", "-fno-pie"]
STATIC = ["-static", "-no-pie", "-s"]
GUARD = "irun-guard"
GUARD_SOURCES = [
    "csrc/guard/main.c",
    "csrc/guard/find_leftovers.c",
    "csrc/teardown/fork_chase.c",
    "csrc/sys/clock.c",
    "csrc/sys/procfs.c",
]
GUARD_ENTRY = "csrc/guard/freestanding_start.c"  # waits before libc starts, where nothing else starts it first
START = "csrc/start/main.c"

WHEEL_MACHINES = ("x86_64", "aarch64")  # of the wheels that scripts/wheels.py builds
PACKAGES_OF_A_COMPILER = (
    "Debian: gcc libc6-dev python3-dev; Fedora: gcc python3-devel; Alpine: gcc musl-dev python3-dev"
)


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def make_program(output: str, sources: list[str], compile_flags: list[str], link_flags: list[str]) -> None:
    """Raises OSError, CalledProcessError: the compiler cannot."""
    static = os.environ.get("IRUN_STATIC_CC")
    cc = shlex.split(static) if static else compiler()
    os.makedirs(os.path.dirname(output), exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:  # compiled alone: zig has no headers for a line with -nostdlib
        objects = [os.path.join(folder, f"{i}.o") for i in range(len(sources))]
        for source, target in zip(sources, objects, strict=True):
            subprocess.run([*cc, *PROGRAM_FLAGS, *compile_flags, "-c", source, "-o", target], check=True)
        subprocess.run([*cc, *objects, *link_flags, "-o", output], check=True)


def missing_tool() -> str:
    """What building an extension lacks on this machine, in a few words; "" if nothing."""
    probe = "#include <stdio.h>\n#include <Python.h>\n"
    paths = [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
    try:
        words = [*compiler(), *paths, "-x", "c", "-fsyntax-only", "-"]
        done = subprocess.run(words, input=probe, capture_output=True, text=True, check=False)
    except OSError:
        return f"a C compiler ({compiler()[0]})"
    header = re.search(r"fatal error: '?([\w.]+\.h)", done.stderr)
    return f"the header {header[1]}" if header else ""


def check_compiler(version: str) -> None:
    """Raises SystemExit: pip shows its one line as the last of the build's output."""
    missing = missing_tool()
    if not missing:
        return
    libc = "musllinux_1_2" if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "") else "manylinux_2_17"
    wheel = f"infini_run-{version}-cp310-abi3-{libc}_{platform.machine()}.whl"
    fits = platform.machine() in WHEEL_MACHINES and not sysconfig.get_config_var("Py_GIL_DISABLED")
    other = f", or install the wheel {wheel}, which needs none of it" if fits else ""
    raise SystemExit(f"infini-run: to build it, {missing} is missing: install it ({PACKAGES_OF_A_COMPILER}){other}")


class CheckedBuild(build):
    """`pip install`, `python -m build`: what is missing is said before anything else is."""

    def run(self):
        check_compiler(self.distribution.get_version())
        super().run()


class CoreAndGuard(build_ext):
    """Beside the extension, the small executable that the core starts: package data that has to be compiled."""

    def run(self):
        check_compiler(self.distribution.get_version())
        super().run()
        output = os.path.join("infini_run" if self.inplace else os.path.join(self.build_lib, "infini_run"), GUARD)
        flags = os.environ.get("IRUN_GUARD_CFLAGS", "").split()
        if not flags:  # a sanitizer needs a libc that has started
            try:
                make_program(output, [GUARD_ENTRY, *GUARD_SOURCES], FREESTANDING, [*STATIC, "-Wl,-e,guard_entry"])
                return
            except (OSError, subprocess.CalledProcessError) as error:  # no static libc, or another processor
                print(f"{GUARD} is linked dynamically ({error}): right all the same, and half a millisecond slower")
        make_program(output, GUARD_SOURCES, flags, flags)

    def get_outputs(self):
        return [*super().get_outputs(), os.path.join(self.build_lib, "infini_run", GUARD)]


class ScriptsBehindPrograms(build_scripts):
    """bin/NAME becomes NAME.py, whose first line the installer writes, and csrc/start/main.c becomes NAME: it starts
    that also where the interpreter's path has a space or is too long (docs/decisions/0039)."""

    def run(self):
        self.force = True  # what lies there of an earlier build is no script any more
        super().run()
        program = os.path.join(self.build_dir, "start")
        try:
            make_program(program, [START], FREESTANDING, [*STATIC, "-nostdlib"])
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"infini-run and infini-job are scripts ({error}): right where the path of Python is a plain one")
            return
        for source in self.scripts:
            path = os.path.join(self.build_dir, os.path.basename(source))
            os.replace(path, f"{path}.py")
            self.copy_file(program, path)
            with open(source, "rb") as script, zipfile.ZipFile(path, "a") as archive:
                # `python PATH` runs it, as it runs any script. It has no date of its own.
                archive.writestr(zipfile.ZipInfo("__main__.py"), script.read())
            os.chmod(path, 0o755)
        os.unlink(program)


class Abi3Wheel(bdist_wheel):
    """The extension uses the limited API of 3.10, so one wheel serves every later CPython; a free-threaded one has no
    limited API (PEP 703), so its wheel is its own."""

    def get_tag(self):
        python, abi, machine = super().get_tag()
        is_limited = python.startswith("cp") and not sysconfig.get_config_var("Py_GIL_DISABLED")
        return ("cp310", "abi3", machine) if is_limited else (python, abi, machine)


setup(
    cffi_modules=["csrc/build.py:ffi"],
    cmdclass={
        "bdist_wheel": Abi3Wheel,
        "build": CheckedBuild,
        "build_ext": CoreAndGuard,
        "build_scripts": ScriptsBehindPrograms,
    },
)
