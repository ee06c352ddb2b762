"""Ranks as if torch used NCCL: each has the pipe of ProcessGroupNCCL.hpp, and writes a dump as FlightRecorder.hpp has
it when something comes through the pipe. Without torch, and without GPUs.

KIND: skips: rank 2 does not enter #288686. chain: besides, rank 1 waits in another process group for rank 2, so it
does not enter either. silent: nobody writes a dump. evil: the dump of rank 1 would call a function.
"""

import os
import pickle
import sys
import threading
import time

KIND = sys.argv[1]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ALL, PAIR = ("0", "default_pg"), ("1", "tensor_parallel")


class Evil:
    def __reduce__(self):
        return print, ("never",)


def entry(group, number, name, *, is_over, frames=()):
    return {
        "record_id": number, "pg_id": int(group[0]), "process_group": group, "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": name, "is_p2p": False, "input_sizes": [[1024]],
        "state": "completed" if is_over else "started", "retired": is_over, "timeout_ms": 600000,
        "frames": list(frames), "time_created_ns": 1795933919602867854,
    }  # fmt: skip


def entries():
    found = [entry(ALL, number, "nccl:all_reduce", is_over=True) for number in range(288600, 288686)]
    if KIND == "chain" and RANK in (1, 2):
        found.append(entry(PAIR, 41, "nccl:reduce_scatter", is_over=True))
    if KIND == "chain" and RANK == 1:
        found.append(entry(PAIR, 42, "nccl:_all_gather_base", is_over=False))
    elif RANK != 2:
        found.append(entry(ALL, 288686, "nccl:all_gather", is_over=False))
    return found


def dump():
    ranks = str(list(range(WORLD)))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}, "1": {"name": "1", "ranks": "[1, 2]"}}
    content = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries()}
    if KIND == "evil" and RANK == 1:
        content["version"] = Evil()
    return pickle.dumps(content, protocol=2)


def answer(reading):
    while os.read(reading, 128):
        if KIND != "silent":
            with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(RANK), "wb") as file:
                file.write(dump())


def optimizer_step():
    time.sleep(1000)


def main():
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + f"{RANK}.pipe"
    os.mkfifo(pipe, 0o666)
    threading.Thread(target=answer, args=(os.open(pipe, os.O_RDWR),), daemon=True).start()
    print("up", flush=True)
    optimizer_step()


main()
