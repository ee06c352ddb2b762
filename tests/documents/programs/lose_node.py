import os
import signal
import time

rank, size, restarts = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
print(f"rank {rank} of {size}, TORCHELASTIC_RESTART_COUNT={restarts}", flush=True)
if restarts != "0":
    time.sleep(4)  # host2 returns in this time
elif rank != "1":
    time.sleep(600)
else:
    time.sleep(1)  # the line above reaches the head
    os.kill(os.getppid(), signal.SIGKILL)  # the agent of host2
