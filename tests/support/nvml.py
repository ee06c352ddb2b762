"""A stand-in NVIDIA driver for tests (nvml_stub.c), which the real pynvml loads in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SUPPORT, C

UUIDS = ("GPU-5a88edbe-90c4", "GPU-5a88ffff-0001", "GPU-7d1a2244-0002", "GPU-c08d91cb-e324")
FOUR = [f"{uuid}|NVIDIA H200|143771|off" for uuid in UUIDS]
UNEQUAL = [f"{UUIDS[0]}|NVIDIA T4|15360|-", f"{UUIDS[1]}|NVIDIA H200|143771|off"]
MIG = [  # a whole board; one of two GPU instances, the first cut in two, with a gap; one not cut yet
    f"{UUIDS[0]}|NVIDIA H100|81559|off",
    f"{UUIDS[1]}|NVIDIA H100|81559|on:MIG-aaaa;1;0;40000,,MIG-bbbb;1;1;40000,MIG-cccc;2;0;20000",
    f"{UUIDS[2]}|NVIDIA H100|81559|on:",
]


def environment(**extra: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "NVML_STUB_"))}
    return ours | {"PYTHONPATH": str(ROOT)} | extra


def ask_all(library_path: Path | None, questions: list[dict]) -> list[dict]:
    """The answers of one child: a process loads libnvidia-ml.so.1 once, and pytest's should not."""
    extra = {"LD_LIBRARY_PATH": str(library_path)} if library_path else {}
    child = subprocess.run(
        [sys.executable, SUPPORT / "children" / "ask_devices.py"],
        input="".join(json.dumps({"set": {}, **question}) + "\n" for question in questions),
        env=environment(**extra),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in child.stdout.splitlines()]


class Driver:
    """The stand-in driver: boards as lines of NVML_STUB_GPUS, see nvml_stub.c."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder = folder
        self.log = log

    def settings(self, boards: list[str], fail: str = "", cuda: int = 12080) -> dict[str, str]:
        return {
            "NVML_STUB_GPUS": "\n".join(boards),
            "NVML_STUB_FAIL": fail,
            "NVML_STUB_CUDA": str(cuda),
            "NVML_STUB_LOG": str(self.log),
        }

    def ask(self, boards: list[str], call: str, *args: object, fail: str = "", cuda: int = 12080) -> dict:
        question = {"set": self.settings(boards, fail, cuda), "call": call, "args": args}
        return ask_all(self.folder, [question])[0]

    def names(self, boards: list[str], **environ: str) -> list[str]:
        return [gpu["name"] for gpu in self.ask(boards, "find_gpus", environ)["is"]]


def _built(source: str, folder: Path) -> Path:
    """Compile a stand-in for NVML into a folder."""
    compiler = os.environ.get("CC", "cc").split()
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, "-o", folder / "libnvidia-ml.so.1", C / source], check=True)
    return folder


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built("nvml_stub.c", tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def busy_gpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a driver whose GPUs are as busy as $BUSY_GPUS says, see nvml_busy.c."""
    return str(_built("nvml_busy.c", tmp_path_factory.mktemp("busy")))


@pytest.fixture
def driver(stub_folder: Path, tmp_path: Path) -> Driver:
    return Driver(stub_folder, tmp_path / "nvml.log")
