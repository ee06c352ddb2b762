"""Functions with the real PyTorch: process groups, what is loaded where, and forks that have it already."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

import infini_run as ir
from tests.support.launch_shapes import with_strace
from tests.support.paths import ROOT
from tests.support.processes import marked

IS_MISSING = importlib.util.find_spec("torch") is None and os.environ.get("TEST_TORCH") != "required"
pytestmark = [pytest.mark.torch, pytest.mark.skipif(IS_MISSING, reason="torch is not installed: make torch")]
EXAMPLES = ROOT / "examples"
LIMIT_S = 300.0


def total():
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    return value.item(), dist.get_backend(), torch.get_num_threads()


@pytest.mark.parametrize("preload", [(), ["torch"]], ids=["exec", "fork"])
def test_a_backend_gives_the_function_a_process_group(preload, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    result = ir.Launcher(nproc_per_node=3, backend="gloo", preload=preload).run(total)
    assert list(result) == [(6.0, "gloo", 2)] * 3


class SlowToConnect:
    """Unpickled in the last rank, it delays the connections that gloo makes."""

    def __reduce__(self):
        return delay_connections, ()


def delay_connections():
    import os
    import subprocess
    from pathlib import Path

    if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
        words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "signal=none", "-e", "trace=epoll_ctl"]
        tracer = subprocess.Popen([*words, "-e", "inject=epoll_ctl:delay_exit=200000", "-p", str(os.getpid())])
        while tracer.poll() is None and "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
            os.sched_yield()
    return "connected"


@with_strace
def test_rank_that_returns_at_once_does_not_fail_one_that_is_slow_to_connect():
    """Of two ranks, the one with the higher port connects: among eight the slow one nearly always does."""
    launcher = ir.Launcher(nproc_per_node=8, backend="gloo", preload=["torch"])
    assert list(launcher.run(lambda slow: slow, SlowToConnect())) == ["connected"] * 8


def test_a_rank_that_raises_is_told_and_not_the_timeout_of_the_others():
    def work():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(ValueError, match="the cause"):
        ir.Launcher(nproc_per_node=2, backend="gloo").run(work)


def test_the_launcher_never_imports_torch():
    code = """
        import sys, infini_run as ir
        def work():
            import torch
            return torch.ones(2).sum().item()
        print(list(ir.Launcher(nproc_per_node=2, backend="gloo").run(work)), "torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", __import__("textwrap").dedent(code)], capture_output=True, text=True)
    assert done.stdout == "[2.0, 2.0] False\n", done.stderr


def test_tensors_and_arrays_come_back_and_can_be_written_to():
    def work():
        import numpy
        import torch

        return torch.arange(1000.0), numpy.arange(1_000_000.0)

    tensor, array = ir.Launcher(preload=()).run(work)[0]
    tensor += 1
    array += 1
    assert (float(tensor[-1]), float(array[-1])) == (1000.0, 1_000_000.0)


def test_random_numbers_of_numpy_differ_and_blas_has_its_threads():
    def work():
        import numpy

        return float(numpy.random.rand()), len(os.listdir("/proc/self/task"))

    with ir.Pool(nproc_per_node=2, preload=["torch", "numpy.random"], omp_num_threads=2) as pool:
        seen = list(pool.run(work))
        assert len({number for number, _ in seen} | {number for number, _ in pool.run(work)}) == 4
        assert {threads for _, threads in seen} == {2}


def drawn():
    import random

    import numpy
    import torch

    return (
        torch.rand(1).item(),
        torch.nn.Linear(1, 1).weight.item(),
        torch.initial_seed(),
        float(numpy.random.rand()),
        random.random(),
    )


def test_random_numbers_of_torch_differ_in_each_fork_and_launch():
    found = list(ir.Launcher(nproc_per_node=3).run(drawn))  # torch is preloaded, since the function needs it
    with ir.Pool(nproc_per_node=2, preload=["torch", "numpy.random"]) as pool:
        found += [*pool.run(drawn), *pool.run(drawn)]
    for numbers in zip(*found, strict=True):
        assert len(set(numbers)) == 7


def test_generators_that_an_import_has_seeded_go_on_as_in_fresh_process(tmp_path, monkeypatch):
    (tmp_path / "seeding.py").write_text(
        "import random, numpy, torch\ntorch.manual_seed(1)\nnumpy.random.seed(2)\nrandom.seed(3)\n"
        "torch.rand(3), numpy.random.rand(2000), [random.random() for _ in range(2000)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def function():
        import seeding

        return drawn() if seeding else None

    fresh = ir.Launcher(preload=()).run(function)[0]
    with ir.Pool(nproc_per_node=2, preload=["seeding"]) as pool:
        assert {*pool.run(function), *pool.run(function)} == {fresh}


def test_fork_sets_exit_flag_of_data_loaders_at_its_end():
    def function():
        import atexit

        from torch.utils.data import _utils

        before = _utils.python_exit_status
        atexit._run_exitfuncs()
        return before, _utils.python_exit_status

    with ir.Pool(nproc_per_node=1, preload=["torch"]) as pool:
        assert pool.run(function)[0] == (False, True)


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_module_that_reads_its_rank_while_imported_is_refused(name):
    pytest.importorskip(name)
    text = rf"^preload={name}: [\w.]+ reads (LOCAL_)?RANK during its import; drop {name}$"
    with pytest.raises(ir.UsageError, match=text):
        ir.Pool(nproc_per_node=2, preload=["torch", name])
    assert marked() == {}


@pytest.mark.parametrize("name", ["torch.distributed", "accelerate", "transformers.trainer"])
def test_module_that_reads_its_rank_later_is_preloaded(name):
    pytest.importorskip(name.partition(".")[0])
    with ir.Pool(nproc_per_node=2, preload=["torch", name]) as pool:
        found = list(pool.run(lambda: (os.environ["RANK"], os.getppid())))
    assert [rank for rank, _ in found] == ["0", "1"]
    assert os.getpid() not in {parent for _, parent in found}


def test_several_workers_that_need_torch_are_forks_of_one_that_has_it():
    def work():
        import torch

        return bool(torch.__version__), os.getppid()

    launcher = ir.Launcher(nproc_per_node=2)
    assert {parent for _, parent in launcher.run(work)} != {os.getpid()}
    assert {parent for _, parent in ir.Launcher(nproc_per_node=2, preload=()).run(work)} == {os.getpid()}
    assert {parent for _, parent in ir.Launcher(nproc_per_node=1).run(work)} == {os.getpid()}


@pytest.mark.parametrize("name", ["function_ddp.py", "function_accelerate.py", "function_lightning.py"])
def test_the_examples_train(name, capfd):
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("loss "), done.stdout
    assert marked() == {}
