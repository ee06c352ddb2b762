"""Data-parallel training with PyTorch: a small network learns scikit-learn's handwritten digits.

    infini-run --standalone --nproc_per_node=2 examples/ddp.py
    torchrun --standalone --nproc_per_node=2 examples/ddp.py

gloo on CPUs, nccl where every rank has a GPU. Each rank takes its share of every batch; with the same seed and
as many ranks the result is the same to the last digit, whoever started it. Fails where the accuracy on digits
that it has not seen stays below TARGET.
"""

import argparse
import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import (
    all_reduce,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

TARGET = 0.95
BATCH = 128


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU for each rank")
    return parser.parse_args()


def choose_device(asked):
    """A rank that is shown one GPU only (--gpus_per_proc=1) finds it as number 0."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.cuda.device_count()
    if asked == "cuda" or (asked is None and count >= local_size):
        return torch.device("cuda", local_rank % count)
    return torch.device("cpu")


def load_split(device):
    """Images and labels to learn from, and every fifth one to be tested with."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(labels, device=device)
    held_out = torch.arange(len(labels), device=device) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def make_model(device):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    device_ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids)


def train(model, images, labels, args):
    rank, world_size = get_rank(), get_world_size()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    order = torch.Generator().manual_seed(args.seed)
    for epoch in range(args.epochs):
        batches = torch.randperm(len(labels), generator=order).split(BATCH)
        total = torch.zeros(1, device=images.device)
        for step, batch in enumerate(batches):
            mine = batch[rank::world_size].to(images.device)
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if rank == epoch == step == 0:
                print("first step done", flush=True)
        all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / len(batches) / world_size:.9f}", flush=True)


@record
def main():
    args = parse_args()
    device = choose_device(args.device)
    torch.set_num_threads(1)  # a network this small gains nothing from more
    torch.manual_seed(args.seed)
    init_process_group("nccl" if device.type == "cuda" else "gloo")
    (images, labels), (new_images, new_labels) = load_split(device)
    model = make_model(device)
    train(model, images, labels, args)
    with torch.no_grad():
        right = (model.module(new_images).argmax(dim=1) == new_labels).float().mean().item()
    if get_rank() == 0:
        print(f"accuracy {right:.4f} on {len(new_labels)} digits that were not trained on", flush=True)
    destroy_process_group()
    if right < TARGET:
        sys.exit(f"the accuracy is below {TARGET}")
    os._exit(0)  # a thread of gloo that still holds a tensor may abort or hang the end of Python (PyTorch 2.13)


if __name__ == "__main__":
    main()
