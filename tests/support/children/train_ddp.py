"""A real PyTorch DDP run over gloo: every rank trains on its own numbers, all end with the same weights."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
weights = model.module.weight.detach().clone()
everyone = [torch.zeros_like(weights) for _ in range(size)]
dist.all_gather(everyone, weights)
print(f"same {all(torch.equal(weights, other) for other in everyone)} of {size}", flush=True)
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that holds a tensor would abort the end of Python (docs/start/workstation.md)
