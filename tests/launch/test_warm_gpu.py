"""--preload=torch on GPUs: forks make contexts of their own, meet by NCCL, and leave nothing on the GPU.

Each test is run on the CPU, too, with the same script: so the scripts are known to work before there is a GPU.
`make gpu` runs those that are marked `gpu`.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.support.gpus import find_holders, require_gpus
from tests.support.nvml import FOUR, driver, stub_folder  # noqa: F401
from tests.support.waiting import until

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.xdist_group("torch")]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GROUPS = [  # of which each has the device, the backend, and the number of ranks; 0: one per GPU
    pytest.param("cpu", "gloo", 2, id="cpu-gloo-2"),
    pytest.param("cuda", "nccl", 0, id="cuda-nccl-all", marks=pytest.mark.gpu),
    pytest.param("cuda", "nccl", 2, id="cuda-nccl-2", marks=pytest.mark.gpu),
    pytest.param("cuda", "gloo", 2, id="cuda-gloo-2", marks=pytest.mark.gpu),
]
SLACK_MIB = 64  # that a driver may keep, of 500 MiB for each context

HEAD = """
import os, sys
held = "torch" in sys.modules
import torch
device, rank = DEVICE, int(os.environ["RANK"])
if device == "cuda":
    assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
"""

COMPUTES = """
ones = torch.full((256, 256), float(rank + 1), device=device)
print(rank, held, (ones @ ones).sum().item(), flush=True)
"""

ALL_REDUCE = """
import torch.distributed as dist
dist.init_process_group(BACKEND)
numbers = torch.full((1024,), float(rank + 1), device=device)
dist.all_reduce(numbers)
print(rank, held, numbers.sum().item(), flush=True)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a thread of gloo that holds a tensor may abort the end of Python
"""

RESTARTS = (
    COMPUTES
    + """
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
imports = sys.modules.get("importer")
print("attempt", count, rank, getattr(imports, "PID", 0), flush=True)
sys.exit(3 if count != "2" and rank == 0 else 0)
"""
)

SEES = """
seen = os.environ["CUDA_VISIBLE_DEVICES"]
if device == "cuda":
    assert torch.cuda.device_count() == 1
    torch.ones(8, device=device).sum().item()
    seen = "GPU-" + str(torch.cuda.get_device_properties(0).uuid)
print("sees", rank, seen, flush=True)
"""

THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"

WORKS = """
import infini_run
ones = torch.ones((2048, 2048), device=device)
infini_run.progress(1)
while True:
    ones = (ones @ ones).clamp(max=1.0)
    ones.sum().item()
"""

RECORDS = """
import time
import infini_run
import torch.distributed as dist
dist.init_process_group(BACKEND)
numbers = torch.ones(8, device=device)
for _ in range(3):
    dist.all_reduce(numbers)
numbers.sum().item()
print("waits", rank, flush=True)
infini_run.progress(3)
time.sleep(1000)
"""


def line_of(rank, text):
    return f"{rank} {text}".split()


class Runs:
    """Runs a script with --preload=torch."""

    def __init__(self, infini_run, folder):
        self._infini_run = infini_run
        self.folder = folder
        self.report = {}

    def __call__(self, device, source, *flags, preload="torch", backend="", env=None, code=0):
        """Return the words of each line of its ranks, sorted, once nothing of it is left on the device."""
        script = self.folder / "script.py"
        script.write_text(f"DEVICE, BACKEND = {device!r}, {backend!r}\n{HEAD}{source}")
        before = find_holders(device)
        flags = ("--standalone", f"--report={self.folder}/report", "--console=lines", "--grace=5", *flags)
        command = self._infini_run(*flags, f"--preload={preload}", script, env={**os.environ, **(env or {})})
        assert command.wait() == code, command.err
        self.err = command.err.decode()
        self.report = json.loads((self.folder / "report").read_text())

        def is_free():
            count, mib = find_holders(device)
            return count <= before[0] and mib <= before[1] + SLACK_MIB

        until(is_free)
        return sorted(line.split() for line in command.out.decode().splitlines())

    @property
    def starts(self):
        return {rank["start_method"] for rank in self.report["ranks"]}


@pytest.fixture
def runs(infini_run, tmp_path):
    return Runs(infini_run, tmp_path)


@pytest.mark.parametrize("device", DEVICES)
def test_eight_forks_compute_and_leave_nothing(runs, device):
    lines = runs(device, COMPUTES, "--nproc_per_node=8")
    assert lines == [line_of(rank, f"True {256.0**3 * (rank + 1) ** 2}") for rank in range(8)]
    assert (runs.starts, runs.report["notices"]) == ({"fork"}, [])
    assert runs.report["preload"][0]["cold_because"] is None


@pytest.mark.parametrize(("device", "backend", "count"), GROUPS)
def test_all_reduce_of_forks(runs, device, backend, count):
    """NCCL refuses two ranks on one GPU; gloo does not."""
    if backend == "nccl":
        count = count or len(require_gpus())
        require_gpus(count, for_what="NCCL with a GPU for each rank")
    lines = runs(device, ALL_REDUCE, f"--nproc_per_node={count}", backend=backend)
    total = 1024.0 * count * (count + 1) / 2
    assert lines == sorted(line_of(rank, f"True {total}") for rank in range(count))
    assert runs.starts == {"fork"}


@pytest.mark.parametrize("device", DEVICES)
def test_restart_makes_contexts_in_forks_of_same_imports(runs, device, tmp_path):
    """The attempt after an early failure starts cold, and the next one is forked again (docs/warm.md)."""
    (tmp_path / "importer.py").write_text("import os\nimport torch\nPID = os.getpid()\n")
    flags = ("--nproc_per_node=2", "--max_restarts=2", "--restart_delay=0")
    lines = runs(device, RESTARTS, *flags, preload="importer")
    imports = {line[1]: line[3] for line in lines if line[0] == "attempt" and line[2] == "0"}
    assert imports["0"] == imports["2"] != "0"
    assert imports["1"] == "0", "it was started cold"
    assert [line for line in lines if line[0] != "attempt"].count(line_of(0, f"True {256.0**3}")) == 2
    assert (runs.starts, runs.report["restarts"]) == ({"fork"}, 2)


@pytest.mark.parametrize(
    ("device", "source"),
    [
        pytest.param("cpu", THREAD, id="cpu"),
        pytest.param("cuda", "torch.cuda.init()", id="cuda-init", marks=pytest.mark.gpu),
        pytest.param("cuda", "ones = torch.ones(8, device='cuda')", id="cuda-tensor", marks=pytest.mark.gpu),
    ],
)
def test_ranks_start_cold_after_imports_that_open_the_device(runs, device, source, tmp_path):
    """CUDA starts a thread, too: whichever is seen first is the reason."""
    (tmp_path / "opener.py").write_text(f"import torch\n{source}\n")
    lines = runs(device, COMPUTES, "--nproc_per_node=2", preload="opener")
    assert lines == [line_of(rank, f"False {256.0**3 * (rank + 1) ** 2}") for rank in range(2)]
    (notice,) = runs.report["notices"]
    assert notice.startswith("ranks start cold: ")
    reasons = ("thread", "the imports opened /dev/nvidia", "the imports used torch.cuda")
    assert any(reason in notice for reason in reasons), notice
    assert runs.err.count("ranks start cold: ") == 1
    assert runs.starts == {"exec"}


@pytest.mark.gpu
def test_ranks_compute_after_imports_that_count_the_devices(runs, tmp_path):
    """torch may count them without a context. Whether or not forks then can have one, ranks compute."""
    (tmp_path / "counter.py").write_text("import torch\ntorch.cuda.is_available()\ntorch.cuda.device_count()\n")
    lines = runs("cuda", COMPUTES, "--nproc_per_node=2", preload="counter")
    assert [line[2] for line in lines] == [str(256.0**3 * (rank + 1) ** 2) for rank in range(2)]
    assert (runs.starts == {"exec"}) == bool(runs.report["notices"])


@pytest.mark.parametrize("device", DEVICES)
def test_each_fork_sees_its_gpu_alone(runs, device, request):
    """CUDA_VISIBLE_DEVICES is set after the import of torch."""
    if device == "cpu":
        driver = request.getfixturevalue("driver")
        env = {**driver.settings(FOUR), "LD_LIBRARY_PATH": str(driver.folder)}
        expected = driver.names(FOUR)
    else:
        env, expected = {}, require_gpus()
    lines = runs(device, SEES, f"--nproc_per_node={len(expected)}", "--gpus_per_proc=1", env=env)
    assert lines == sorted(["sees", str(rank), name] for rank, name in enumerate(expected))
    assert runs.starts == {"fork"}


@pytest.mark.parametrize("device", DEVICES)
def test_hang_report_has_use_of_the_gpu(runs, device):
    """The reader of NVML may be late on a busy machine: then there are more tries."""
    flags = ("--progress_timeout=3", "--hang_timeout=1h", "--on_hang=stop")
    flags += ("--gpus_per_proc=1",) if device == "cuda" else ()
    for _ in range(5):
        runs(device, WORKS, *flags, code=1)
        (shot,) = runs.report["snapshots"]
        use = shot["signs"]["gpu"]
        if (use is None) == (device == "cpu"):
            break
    assert (use is None) if device == "cpu" else use > 0.5
    assert shot["signs"]["progress_value"] == 1


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)]
)
def test_hang_report_has_records_of_nccl(runs, device, backend):
    """One rank on one GPU is enough: torch writes its records when it is asked for them."""
    flags = ("--nproc_per_node=1", "--progress_timeout=5", "--hang_timeout=1h", "--on_hang=stop")
    lines = runs(device, RECORDS, *flags, backend=backend, code=1)
    assert lines == [["waits", "0"]]
    (shot,) = runs.report["snapshots"]
    names = [name for each in shot["collectives"] for name in each["names"]]
    if backend == "gloo":
        assert not any(name.startswith("nccl:") for name in names)
    else:
        assert "nccl:all_reduce" in names
        assert {tuple(each["members"]) for each in shot["collectives"]} == {(0,)}
