"""--preload=torch: seeds, threads, DataLoader and training are as without it."""

from __future__ import annotations

import os

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.xdist_group("torch")]

DDP = """
import torch
import torch.distributed as dist

torch.manual_seed(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
torch.manual_seed(rank)
for _ in range(20):
    loss = (model(torch.randn(8, 16)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(rank, [p.detach().flatten()[:4].tolist() for p in model.parameters()], loss.item().hex(), flush=True)
dist.destroy_process_group()
__import__("os")._exit(0)  # a thread of gloo that holds a tensor may abort the end of Python
"""  # noqa: E501

LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, at):
        return torch.tensor(at * at)


if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=METHOD)
    print([batch.tolist() for batch in loader], flush=True)
"""

STATE = """
import os
import torch
print(os.environ["RANK"], torch.get_num_threads(), torch.get_num_interop_threads(), flush=True)
print("drawn", torch.initial_seed(), torch.rand(1).item(), flush=True)
torch.ones(512, 512) @ torch.ones(512, 512)
"""


@pytest.fixture
def outputs(infini_run, tmp_path):
    """The lines of a script, sorted, cold and warm."""

    def run(source, *flags, env=None):
        script = tmp_path / "script.py"
        script.write_text(source)
        found = []
        for more in ([], ["--preload=torch"]):
            command = infini_run("--standalone", *flags, *more, script, env={**os.environ, **(env or {})})
            assert command.wait() == 0, command.err
            assert b"cold" not in command.err
            found.append(sorted(command.out.decode().splitlines()))
        return found

    return run


def test_ddp_steps_are_bit_for_bit_the_same(outputs):
    cold, warm = outputs(DDP, "--nproc_per_node=2")
    assert cold == warm
    assert len(warm) == 2


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_dataloader_works_in_warm_ranks(outputs, method):
    cold, warm = outputs(LOADER.replace("METHOD", repr(method)), "--nproc_per_node=2")
    assert cold == warm


@pytest.mark.parametrize("threads", ["", "1", "2"])
def test_torch_has_same_threads_and_other_numbers(outputs, threads):
    env = {"OMP_NUM_THREADS": threads} if threads else {}
    cold, warm = outputs(STATE, "--nproc_per_node=2", env=env)
    assert [line for line in cold if "drawn" not in line] == [line for line in warm if "drawn" not in line]
    drawn = [line for line in cold + warm if "drawn" in line]
    assert len(set(drawn)) == len(drawn) == 4
