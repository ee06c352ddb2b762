"""Where a benchmark runs: the venv, the compiled programs, the environment of its children, a place for
files.

Every script starts with `bed_from_args`, so all of them take the same flags when run singly: `python
bench/launch.py --venv DIR [--torch-venv DIR] [--quick]`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from provision import RESULTS, compile_programs

# What the shell may carry that would change a start-up (no byte code, unbuffered output) or a plan.
DROPPED = ("PYTHON", "VIRTUAL_ENV", "INFINI_", "PET_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "TORCH_ELASTIC_")


@dataclass(frozen=True, kw_only=True)
class Bed:
    """`venv` has infini-run installed; `torch_venv` has torchrun; `quick` asks for fewer rounds, `whole` for every
    flood in its full length."""

    venv: Path
    programs: Path
    env: Mapping[str, str]
    torch_venv: Path | None = None
    quick: bool = False
    whole: bool = False

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    @property
    def infini_run(self) -> str:
        return str(self.venv / "bin" / "infini-run")

    def program(self, name: str) -> str:
        return str(self.programs / name)

    def rounds(self, full: int) -> int:
        """How often to measure what deserves `full` rounds in a full run."""
        return min(full, max(3, full // 4)) if self.quick else full


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment that timed commands get."""
    return {name: value for name, value in env.items() if not name.startswith(DROPPED)}


def add_bed_flags(parser: argparse.ArgumentParser, venv_required: bool) -> None:
    parser.add_argument("--venv", type=Path, required=venv_required, help="a venv with infini-run installed")
    parser.add_argument("--torch-venv", type=Path, help="a venv with torchrun, to run beside it")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--whole", action="store_true", help="every one of 20 jobs is flooded for 30 s: 11 minutes")


def make_bed(args: argparse.Namespace, venv: Path) -> Bed:
    programs = RESULTS / "build"
    compile_programs(programs)
    # absolute(), not resolve(): bin/python is a link, and through its end it would be another environment.
    torch_venv = args.torch_venv.absolute() if args.torch_venv else None
    return Bed(
        venv=venv.absolute(),
        programs=programs,
        env=child_env(os.environ),
        torch_venv=torch_venv,
        quick=args.quick,
        whole=args.whole,
    )


def bed_from_args(description: str | None) -> Bed:
    """Reads the command line of a script that is run singly."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    add_bed_flags(parser, venv_required=True)
    args = parser.parse_args()
    return make_bed(args, args.venv)


@contextmanager
def scratch(need_bytes: int = 0) -> Iterator[Path]:
    """A directory that goes away: in memory where there is room, so that no disk is measured."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * need_bytes
    with tempfile.TemporaryDirectory(prefix="infini-bench-", dir=memory if roomy else None) as name:
        yield Path(name)
