"""Real NVIDIA GPUs: which there are, and who holds memory on them, as nvidia-smi reports it."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import subprocess

import pytest

from tests.support.processes import marked


def list_gpus() -> tuple[list[str], str]:
    """Return the lines of `nvidia-smi -L` about GPUs and MIG instances; none, and why."""
    if shutil.which("nvidia-smi") is None:
        return [], "no nvidia-smi on PATH: no NVIDIA driver here"
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    lines = [line.strip() for line in listing.stdout.splitlines() if "UUID: " in line]
    if listing.returncode or not lines:
        return [], f"nvidia-smi lists no GPU: {listing.stdout.strip() or listing.stderr.strip()}"
    return lines, ""


def find_problem(*, with_torch: bool) -> str:
    """Return why tests of GPUs cannot run here; "" if they can."""
    _, problem = list_gpus()
    if problem or not with_torch:
        return problem
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "torch is not installed: make torch-env"
    cuda = runpy.run_path(os.path.join(os.path.dirname(found.origin), "version.py")).get("cuda")
    return "" if cuda else "torch was built without CUDA: pip install torch, from the index of its CUDA builds"


def require_gpus(count: int = 1, *, for_what: str = "this test") -> list[str]:
    """Return the UUIDs of the GPUs. Skip with fewer than `count`, or with MIG, where CUDA shows a process one
    instance."""
    lines, problem = list_gpus()
    if problem:
        pytest.skip(problem)
    if any(line.startswith("MIG") for line in lines):
        pytest.skip("MIG: CUDA shows a process only some of the instances")
    if len(lines) < count:
        pytest.skip(f"{for_what} needs {count} GPUs; nvidia-smi lists {len(lines)}")
    return [line.partition("UUID: ")[2].rstrip(")") for line in lines]


def find_holders(device: str) -> tuple[int, int]:
    """Return how many processes hold memory of the device, and how much they all hold in MiB. "cpu": the processes of
    launches, without their memory.

    nvidia-smi may show pids of another PID namespace, or none in a container: so the numbers count, not the pids.
    """
    if device == "cpu":
        return len(marked()), 0
    query = ["nvidia-smi", "--format=csv,noheader,nounits"]
    apps = subprocess.check_output([*query, "--query-compute-apps=pid"], text=True).split()
    used = subprocess.check_output([*query, "--query-gpu=memory.used"], text=True).split()
    return sum(map(str.isdecimal, apps)), sum(int(word) for word in used if word.isdecimal())
