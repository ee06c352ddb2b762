"""One measurement of bench/functions.py, in a fresh process: `function_trial.py WHAT SYSTEM N`; prints JSON.

Importing the launcher's own library is not counted, for nobody; what its run() takes is.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

SIZE = 200_000_000


def plain():
    return int(os.environ.get("RANK", 0))


def needs_torch():
    import torch

    return torch.ones(1).item()


def large():
    return bytes(SIZE)


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise ValueError(time.monotonic())
    time.sleep(600)


def spawned(index, function):
    function()


def by_infini_run(n, function):
    import infini_run as ir

    launcher = ir.Launcher(nproc_per_node=n)
    return lambda: launcher.run(function)


def by_torchrunx(n, function):
    os.environ["TORCHRUNX_LOG_DIR"] = ""
    import torchrunx

    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=n, backend=None)
    launcher.set_logging_handlers(None)
    return lambda: launcher.run(function)


def by_spawn(n, function):
    import torch.multiprocessing

    return lambda: torch.multiprocessing.spawn(spawned, args=(function,), nprocs=n)


def by_loky(n, function):
    import loky

    def run():
        with loky.ProcessPoolExecutor(max_workers=n) as executor:
            return [future.result() for future in [executor.submit(function) for _ in range(n)]]

    return run


SYSTEMS = {"infini-run": by_infini_run, "torchrunx": by_torchrunx, "spawn": by_spawn, "loky": by_loky}
FUNCTIONS = {"plain": plain, "torch": needs_torch, "large": large}


def warm(n):
    import infini_run as ir

    with ir.Pool(nproc_per_node=n, preload=["torch"]) as pool:
        took = []
        for _ in range(12):
            start = time.perf_counter()
            pool.run(needs_torch)
            took.append(time.perf_counter() - start)
    return {"samples": took[2:]}


def failure(n):
    import infini_run as ir

    launcher = ir.Launcher(nproc_per_node=n)
    took = []
    for _ in range(5):
        try:
            launcher.run(fail_on_one)
        except ValueError as error:
            took.append(time.monotonic() - error.args[0])
    return {"samples": took}


def main():
    what, system, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if what == "warm":
        answer = warm(n)
    elif what == "failure":
        answer = failure(n)
    else:
        run = SYSTEMS[system](n, FUNCTIONS[what])
        start = time.perf_counter()
        result = run()
        took = time.perf_counter() - start
        if what == "large":
            assert len(next(iter(result)) if system == "infini-run" else result.rank(0)) == SIZE
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = {"samples": [took], "peak": peak / SIZE}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # torchrunx leaves threads and processes that would be waited for


if __name__ == "__main__":
    main()
