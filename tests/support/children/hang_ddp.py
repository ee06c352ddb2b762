"""A real DDP training over gloo in which rank 2 skips an all_reduce: the others wait for it from then on."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))


def save_metrics():
    time.sleep(1000)


def train(step):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    if rank == 2 and step == 3:
        save_metrics()
    else:
        dist.all_reduce(loss.detach())


for step in range(5):
    train(step)
os._exit(0)
