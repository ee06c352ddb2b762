"""What ranks use, as it is shown: of real processes, and of GPUs as NVML tells of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from infini_run.display.resource_usage import GpuUsage, Sampler, gpu_share
from infini_run.plan.model import Output, Worker
from infini_run.system.procfs import ProcessTable
from tests.support.nvml import MIG, UUIDS, environment
from tests.support.waiting import until

OUTPUT = Output(console=False, log=False, piped=True)
WORKER = Worker(
    rank=0, local_rank=0, node=0, program="", program_rank=0, name="rank 0", file="x", cwd="", argv=("x",), env=(),
    devices=(), cpu_binding=None, stdin="null",
    stdout=OUTPUT, stderr=OUTPUT,
    label="", log="", error_log="", error_file="", notify="",
)  # fmt: skip


def test_cpu_and_memory_are_those_of_a_rank_and_its_children():
    hold = "b = bytearray(80 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nprint('held', flush=True)\n"
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {hold + 'while True: pass'!r}]))"
    start_s = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            sampler = Sampler()
            ranks = {process.pid: (WORKER, start_s)}
            early = sampler.sample(ranks, start_s + 0.001)[process.pid]
            assert early.memory > 80 << 20
            assert early.cpu is None  # ticks of 10 ms in 1 ms are nonsense
            until(lambda: time.monotonic() > start_s + 0.2)
            first = sampler.sample(ranks, time.monotonic())[process.pid]
            assert 0 < first.cpu < 1.5  # since the start: the early sample took nothing away
            table_s = ProcessTable().cpu_s(process.pid)
            until(lambda: ProcessTable().cpu_s(process.pid) > table_s + 0.3)  # which takes as long at least
            second = sampler.sample(ranks, time.monotonic())[process.pid]
            assert 0 < second.cpu < 1.5
            assert second.gpu is None
            assert not second.is_suspended
            sampler.close()
        finally:
            os.killpg(process.pid, 9)


def test_a_process_that_is_gone_has_no_sample():
    process = subprocess.Popen(["true"])
    process.wait()
    sample = Sampler().sample({process.pid: (WORKER, 0.0)}, 10.0)[process.pid]
    assert (sample.cpu, sample.memory) == (None, None)


CARDS = [
    GpuUsage(uuid="GPU-aa11", use=0.5, memory=1000, held={10: 400, 11: 100}),
    GpuUsage(uuid="GPU-bb22", use=0.7, memory=3000, held={12: 700}),
    GpuUsage(uuid="MIG-cc33", use=None, memory=50, held={}),
]


def test_the_gpus_of_a_rank_are_those_given_to_it_or_those_it_holds():
    assert gpu_share(CARDS, (), {10, 11}) == {"gpu_memory": 500, "gpu": 0.5}
    assert gpu_share(CARDS, (), {10, 12}) == {"gpu_memory": 1100, "gpu": 0.6}
    assert gpu_share(CARDS, (), {99}) == {}
    assert gpu_share(CARDS, ("GPU-bb22",), {12}) == {"gpu_memory": 700, "gpu": 0.7}
    assert gpu_share(CARDS, ("GPU-bb22",), {99}) == {"gpu_memory": 3000, "gpu": 0.7}  # no pid of ours is told
    assert gpu_share(CARDS, ("MIG-cc33",), {99}) == {"gpu_memory": 50, "gpu": None}
    assert gpu_share(CARDS, ("0", "GPU-bb"), {99}) == {}  # what is no UUID stands for nothing
    assert gpu_share([], ("GPU-aa11",), {1}) == {}


def test_each_mig_instance_is_a_gpu_of_its_own_and_a_board_that_is_closed_to_us_is_none(driver):
    code = "from infini_run.display.resource_usage import open_meter; "
    code += "m = open_meter(); print(*m.read(), sep='\\n'); m.close()"
    boards = [*MIG, f"{UUIDS[3]}|NVIDIA H100|81559|off|4"]
    held = {"NVML_STUB_HELD": f"MIG-bbbb|12|30\n{UUIDS[0]}|13|-\n{UUIDS[1]}|14|7"}
    environ = environment(LD_LIBRARY_PATH=str(driver.folder), **driver.settings(boards), **held)
    child = subprocess.run([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found = [(UUIDS[0], {13: 0}), ("MIG-aaaa", {}), ("MIG-bbbb", {12: 30 << 20}), ("MIG-cccc", {})]
    cards = [GpuUsage(uuid=uuid, use=None, memory=0, held=held) for uuid, held in found]
    assert child.stdout.splitlines() == [repr(card) for card in cards]
