"""Ranks of a real gloo job, one of which leaves a collective out; and torch's pipe, as only NCCL's backend has it.

A thread makes the pipe that ProcessGroupNCCL.hpp describes, and writes the dump of torch's own Flight Recorder.
KIND: skips: rank 2 does not enter the last all_reduce. other: it waits in one of another process group.
"""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

KIND = sys.argv[1]
RANK = int(os.environ["RANK"])


def answer(reading):
    while True:
        if os.read(reading, 128):
            path = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{RANK}"
            with open(path, "wb") as file:
                file.write(_dump_fr_trace(True, False, False))  # with stacks it waits for the main thread
        time.sleep(0.1)


def main():
    pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{RANK}.pipe"
    os.mkfifo(pipe, 0o666)
    threading.Thread(target=answer, args=(os.open(pipe, os.O_RDWR),), daemon=True).start()
    dist.init_process_group("gloo")
    tensor = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(tensor)
    if KIND == "skips" and RANK == 2:
        time.sleep(1000)
    work = dist.all_gather([torch.ones(4) for _ in range(dist.get_world_size())], tensor, async_op=True)
    wait_elsewhere(work)


def wait_elsewhere(work):
    """As with NCCL, whose collectives run while Python is somewhere else."""
    time.sleep(1000)


main()
