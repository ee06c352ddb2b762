"""Builds the C core as one abi3 extension; everything else is in pyproject.toml."""

import os
import shlex
import subprocess
import sysconfig
import zipfile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

build_scripts = Distribution().get_command_class("build_scripts")  # setuptools has no module of that name

GUARD = "irun-guard"
GUARD_SOURCES = [
    "csrc/guard/main.c",
    "csrc/guard/find_leftovers.c",
    "csrc/teardown/fork_chase.c",
    "csrc/sys/clock.c",
    "csrc/sys/procfs.c",
]
GUARD_ENTRY = "csrc/guard/freestanding_start.c"  # waits before libc starts, where nothing else starts it first


class CoreAndGuard(build_ext):
    """Beside the extension, the small executable that the core starts: package data that has to be compiled."""

    def run(self):
        super().run()
        flags = os.environ.get("IRUN_GUARD_CFLAGS", "").split()  # a sanitizer, say: it needs a libc that has started
        try:
            if flags:
                raise LinkError("not with extra flags")
            quick = ["-static", "-no-pie", "-s", "-Wl,-e,guard_entry"]
            self._make_guard([*GUARD_SOURCES, GUARD_ENTRY], ["-fno-stack-protector", "-fno-pie"], quick)
        except (CompileError, LinkError) as error:  # no static libc, or another processor
            print(f"{GUARD} is linked dynamically ({error}): right all the same, and half a millisecond slower")
            self._make_guard(GUARD_SOURCES, flags, flags)

    def _make_guard(self, sources, compile_flags, link_flags):
        objects = self.compiler.compile(
            sources,
            output_dir=os.path.join(self.build_temp, "guard"),
            macros=[("_GNU_SOURCE", None)],
            include_dirs=["csrc"],
            extra_postargs=["-std=c11", "-O2", *compile_flags],
        )
        folder = "infini_run" if self.inplace else os.path.join(self.build_lib, "infini_run")
        self.compiler.link_executable(objects, GUARD, output_dir=folder, extra_postargs=link_flags)

    def get_outputs(self):
        return [*super().get_outputs(), os.path.join(self.build_lib, "infini_run", GUARD)]


START_FLAGS = ["-std=c11", "-O2", "-D_GNU_SOURCE", "-Icsrc", "-fno-stack-protector", "-fno-pie"]
START_LINK = ["-static", "-no-pie", "-nostdlib", "-s"]


class ScriptsBehindPrograms(build_scripts):
    """bin/NAME becomes NAME.py, whose first line the installer writes, and csrc/start/main.c becomes NAME: it starts
    that also where the interpreter's path has a space or is too long (docs/decisions/0039)."""

    def run(self):
        self.force = True  # what lies there of an earlier build is no script any more
        super().run()
        program = os.path.join(self.build_dir, "start")
        words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        try:
            subprocess.run([*words, *START_FLAGS, *START_LINK, "-o", program, "csrc/start/main.c"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"infini-run and infini-job are scripts ({error}): right where the path of Python is a plain one")
            return
        for source in self.scripts:
            path = os.path.join(self.build_dir, os.path.basename(source))
            os.replace(path, f"{path}.py")
            self.copy_file(program, path)
            with zipfile.ZipFile(path, "a") as archive:  # `python PATH` runs it, as it runs any script
                archive.write(source, "__main__.py")
            os.chmod(path, 0o755)
        os.unlink(program)


class Abi3Wheel(bdist_wheel):
    """The extension uses the limited API of 3.10, so one wheel serves every later CPython."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return ("cp310", "abi3", platform) if python.startswith("cp") else (python, abi, platform)


setup(
    cffi_modules=["csrc/build.py:ffi"],
    cmdclass={
        "bdist_wheel": Abi3Wheel,
        "build_ext": CoreAndGuard,
        "build_scripts": ScriptsBehindPrograms,
    },
)
