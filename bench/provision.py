"""Makes what a benchmark needs: the small C programs, and a venv with infini-run installed as a user would.

The venv is always fresh, the install is not editable, and byte code is compiled: a start-up that is
measured is the one that a user sees. The install runs from a copy, so that nothing is written into the
source tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PROGRAMS = ("floor", "lines", "rank", "peak", "keeper", "fault", "member")
CFLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wshadow")
NOT_PACKAGED = shutil.ignore_patterns(
    ".git", "bench", "tests", "build", "dist", "results", ".*", "*.egg-info", "*.so", "*.o", "__pycache__"
)


def compile_programs(into: Path) -> None:
    """Compiles every C program that is older than its source."""
    into.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        source, program = HERE / f"{name}.c", into / name
        if program.exists() and program.stat().st_mtime >= source.stat().st_mtime:
            continue
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, *CFLAGS, "-o", str(program), str(source)], check=True)


def make_venv(at: Path, env: dict[str, str]) -> Path:
    """Makes a venv at `at`, replacing any that is there, and installs the package of this tree into it."""
    shutil.rmtree(at, ignore_errors=True)
    source = at.parent / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT, source, ignore=NOT_PACKAGED)
    subprocess.run([sys.executable, "-m", "venv", str(at)], check=True, env=env)
    pip = [str(at / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--compile", str(source)], check=True, env=env)
    shutil.rmtree(source)
    return at
