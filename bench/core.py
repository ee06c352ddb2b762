"""(b) Core: spawn and reap through `infini_run.core.group`, in one process that is already up, against floor.c.

The floor gets the same memory, the same count and the same environment. Both take turns; each turn is a few
rounds in a fresh process. The functions up to `time_exec` are all that know the interface of the group.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from launchers import TRUE
from sample import Case, CommandFailed, interleave, raw, read_output

COUNTS = (64, 256)
TURNS = 20
ROUNDS_A_TURN = 5
INSIDE = "--inside"


def make_group(n: int) -> tuple[Any, list[Any]]:
    """A group as a library makes it, and what its workers are."""
    from infini_run.core import c_structs, group

    made = group.Group(n, mark=b"INFINI_RUN_ID=bench", grace_s=10.0, stop_signal=15, stop_scope="group")
    program = TRUE.encode()
    ranks = [b"RANK=%d\0LOCAL_RANK=%d" % (rank, rank) for rank in range(n)]
    return made, [c_structs.SpawnSpec(rank, program, [program], env) for rank, env in enumerate(ranks)]


def run_out(group: Any) -> list[Any]:
    """Steps a group until nothing is left of it; returns its events."""
    events: list[Any] = []
    while not group.ended:
        group.wait()
        events += group.run_once()
    failed = [event for event in events if event.kind == "exited" and (event.code or event.signal)]
    if failed:
        raise CommandFailed(f"{len(failed)} of the group's workers failed, the first with {failed[0]}")
    return events


def time_total(n: int) -> int:
    """ns from before the spawn (with all that the border costs) to the group's end."""
    group, specs = make_group(n)
    base_env = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
    begin = time.monotonic_ns()
    group.spawn(specs, base_env)
    run_out(group)
    took = time.monotonic_ns() - begin
    group.close()
    return took


def time_exec(n: int) -> int:
    """ns from the first clone to the last exec: the end of a close-on-exec pipe, as in floor.c."""
    group, specs = make_group(n)
    base_env = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
    reading, writing = os.pipe()
    group.spawn(specs, base_env)
    os.close(writing)
    os.read(reading, 1)
    end = time.monotonic_ns()
    os.close(reading)
    first = next(event for event in run_out(group) if event.kind == "started")
    group.close()
    return end - int(first.time_ns)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def run_inside(n: int, rounds: int) -> dict[str, Any]:
    """What the process in the venv does: a round to warm up, then those that count."""
    time_total(n)
    turns = [(time_total(n), time_exec(n)) for _ in range(rounds)]
    return {
        "total_ns": [total for total, _ in turns],
        "exec_ns": [to_exec for _, to_exec in turns],
        "resident": resident_bytes(),
    }


def sample_core(bed: Bed, n: int, directory: Path) -> dict[str, Any]:
    argv = [bed.python, __file__, INSIDE, str(n), str(ROUNDS_A_TURN)]
    answer: dict[str, Any] = json.loads(read_output(argv, bed.env, directory / "core.json"))
    return answer


def sample_floor(bed: Bed, n: int, grow: int, directory: Path) -> dict[str, Any]:
    argv = [bed.program("floor"), "-x", "-n", str(n), "-r", str(ROUNDS_A_TURN), "-b", str(grow), TRUE]
    answer = json.loads(read_output(argv, bed.env, directory / "floor.json"))
    return {name: answer[name]["samples"] for name in ("exec_ns", "total_ns")}


def all_ns(case: Case, what: str) -> float:
    """The median over all rounds of all turns."""
    samples: list[int] = [ns for turn in case.samples for ns in turn[what]]
    return median(samples)


def rows_at(done: dict[str, Case], n: int) -> list[Row]:
    core, bare = done[f"core N={n}"], done[f"floor N={n}"]
    rows = []
    for what, figure in (("total_ns", "spawn+reap"), ("exec_ns", "first to last exec")):
        ours, floor_ns = all_ns(core, what), all_ns(bare, what)
        rows.append(
            Row(
                figure=f"core {figure} N={n}",
                value=ours / 1e6,
                unit="ms",
                ratio=ours / floor_ns,
                against="floor",
                bar="core" if what == "total_ns" else None,
            )
        )
    per_process = all_ns(core, "total_ns") / n / 1e3
    rows.append(Row(figure=f"core per process N={n}", value=per_process, unit="µs"))
    return rows


def measure(bed: Bed) -> Figure:
    with scratch() as directory:
        grow = sample_core(bed, min(COUNTS), directory)["resident"]
        cases = []
        for n in COUNTS:
            runs = {
                f"core N={n}": partial(sample_core, bed, n, directory),
                f"floor N={n}": partial(sample_floor, bed, n, grow, directory),
            }
            cases += [Case(name=name, measure=run, rounds=bed.rounds(TURNS)) for name, run in runs.items()]
        done = interleave(cases)
    rows = [row for n in COUNTS for row in rows_at(done, n)]
    return Figure(name="core", rows=rows, samples=raw(cases))


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        print(json.dumps(run_inside(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        print_figure(measure(bed_from_args(__doc__)))
