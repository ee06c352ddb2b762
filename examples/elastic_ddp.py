"""Data-parallel training that survives the loss of a node: it goes on from its last checkpoint.

    infini-run --hosts='node[1-4]' --nnodes=3 --spares=1 examples/elastic_ddp.py --checkpoint_dir=/shared/run1
    infini-run --standalone --nproc_per_node=2 --max_restarts=3 examples/elastic_ddp.py
    torchrun --standalone --nproc_per_node=2 examples/elastic_ddp.py

With as many ranks the final loss is the same to the last digit, however often the training was interrupted. The
directory of the checkpoints is one that all nodes share. gloo on CPUs.
"""

import argparse
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ATTEMPT = 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
BATCH = 96
KEPT = 2  # checkpoints


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint_every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--print_every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--checkpoint_dir", type=Path, default=Path("checkpoints"))
    return parser.parse_args()


def make_data():
    """Points in 16 dimensions, and the values there of a function that is to be learnt."""
    made = torch.Generator().manual_seed(0)
    points = torch.randn(4096, 16, generator=made)
    return points, torch.sin(points @ torch.randn(16, 1, generator=made))


def batch_of(step, size):
    """A batch follows from its step alone, so a training that was interrupted goes on with the one that is next."""
    indices = torch.randint(size, (BATCH,), generator=torch.Generator().manual_seed(step))
    return indices[dist.get_rank() :: dist.get_world_size()]


def settle_buckets(model, points):
    """DDP lays out its gradients anew after its first pass, and in which order gloo adds them depends on that. So a
    first pass for nothing: the step after a restart is then computed as it would have been without."""
    model(points).sum().backward()
    model.zero_grad()


def save(folder, step, model, optimizer):
    """Write a checkpoint as a whole or not at all. The attempt is in its name: a rank of the attempt before, on a
    machine that was paused and wakes up, writes over no file of ours."""
    path = folder / f"step_{step:08}.attempt_{ATTEMPT}.pt"
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    for old in sorted(folder.glob("step_*"))[:-KEPT]:
        old.unlink(missing_ok=True)


def resume(folder, model, optimizer):
    """Load the checkpoint that rank 0 finds to be the last one, on all ranks. Returns the steps that it has."""
    last = [max(folder.glob("*.pt"), default=None)]
    dist.broadcast_object_list(last)
    if last[0] is None:
        return 0
    checkpoint = torch.load(last[0], weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]


def tell_progress(step):
    """Tell the launcher what is saved: attempts that get further are not counted as failures in a row."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(f"PROGRESS={step}".encode(), address.replace("@", "\0", 1))


def train(model, optimizer, points, values, args):
    is_first = dist.get_rank() == 0
    start = resume(args.checkpoint_dir, model.module, optimizer)
    if is_first:
        print(f"attempt {ATTEMPT}: {dist.get_world_size()} ranks, from step {start}", flush=True)
    for step in range(start + 1, args.steps + 1):
        mine = batch_of(step, len(points))
        loss = nn.functional.mse_loss(model(points[mine]), values[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_first and (step % args.checkpoint_every == 0 or step == args.steps):
            save(args.checkpoint_dir, step, model.module, optimizer)
            tell_progress(step)
        if is_first and step % args.print_every == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)


def main():
    args = parse_args()
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a network this small gains nothing from more
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    points, values = make_data()
    network = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DistributedDataParallel(network)
    settle_buckets(model, points[:1])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train(model, optimizer, points, values, args)
    with torch.no_grad():
        loss = nn.functional.mse_loss(network(points), values).item()
    if dist.get_rank() == 0:
        print(f"final loss {loss}", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still holds a tensor would abort the end of the interpreter (PyTorch 2.13)


if __name__ == "__main__":
    main()
