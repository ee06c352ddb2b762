"""A real DDP training over gloo: rank 2 loads its batches slowly, and backward() waits for it on all ranks."""

import time

import torch
import torch.distributed as dist

import infini_run

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def load_batch():
    time.sleep(0.4 if rank == 2 else 0.1)
    return torch.randn(8, 4)


for step in range(1, 31):
    loss = model(load_batch()).square().mean()
    infini_run.progress(step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
