import os
import time

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

launch = os.environ["INFINI_RUN_ID"]


def train():
    print("step 1", flush=True)
    open(f"{launch}.{rank}", "w").close()
    if rank != {4: 2}.get(world_size, 5):
        time.sleep(600)
    while not all(os.path.exists(f"{launch}.{other}") for other in range(world_size)):
        time.sleep(0.01)


train()
raise RuntimeError("loss is nan")
