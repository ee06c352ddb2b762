"""A rank that uses torch: it meets the others by its environment, and says what it and its libraries found there.

torch_rank.py meet      init_process_group, one all_reduce, what torch says
torch_rank.py detect    what Accelerate and Lightning make of the environment
torch_rank.py fail      rank 1 raises under @record
"""

import json
import os
import sys

import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import record

INFINI_TRAIN = ("NNODES", "NPROC_PER_NODE", "GLOBAL_PROC_RANK", "LOCAL_PROC_RANK", "PROC_WORLD_SIZE")


def say(**found):
    """In one write: print under -u makes two, and another rank's may come between."""
    sys.stdout.write(json.dumps(found) + "\n")


def meet():
    distributed.init_process_group("gloo")
    total = torch.tensor([distributed.get_rank() + 1])
    distributed.all_reduce(total)
    say(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        total=total.item(),
        is_launched=distributed.is_torchelastic_launched(),
        port=int(os.environ["MASTER_PORT"]),
        infini_train=[int(os.environ[name]) for name in INFINI_TRAIN],
    )
    distributed.barrier()
    distributed.destroy_process_group()


def detect():
    from accelerate import PartialState
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    state, theirs = PartialState(cpu=True), TorchElasticEnvironment()
    say(
        accelerate=[state.process_index, state.local_process_index, state.num_processes, state.backend],
        is_lightnings=TorchElasticEnvironment.detect(),
        lightning=[theirs.global_rank(), theirs.local_rank(), theirs.node_rank(), theirs.world_size()],
        creates_processes=not theirs.creates_processes_externally,
        endpoint=[theirs.main_address, theirs.main_port],
    )
    state.wait_for_everyone()  # gloo may still connect on another rank
    state.destroy_process_group()


@record
def fail():
    if os.environ["RANK"] == "1":
        raise RuntimeError("loss is nan")
    distributed.init_process_group("gloo")  # waits for rank 1, until it is stopped


{"meet": meet, "detect": detect, "fail": fail}[sys.argv[1]]()
