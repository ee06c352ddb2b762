"""(j) Crews: how soon the death of a worker is known, and what a task costs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from sample import read_output

ROUNDS = 20
LIMIT_S = 300  # a machine with other work takes a minute
SERVE = Path(__file__).parent / "serve.py"


def measure(bed: Bed) -> Figure:
    with scratch() as directory:
        argv = [bed.python, str(SERVE), "measure", str(bed.rounds(ROUNDS))]
        samples = json.loads(read_output(argv, bed.env, directory / "samples.json", LIMIT_S))
    found = {name: median(values) for name, values in samples.items()}
    rows = [
        Row(figure="a worker is killed -> its ask fails", value=found["own"], unit="ms", bar="told"),
        Row(figure="a worker is killed -> the others' asks fail", value=found["others"], unit="ms", bar="told"),
        Row(figure="a task of a crew, there and back", value=found["trip"], unit="us"),
        Row(
            figure="a task of a map of 2000",
            value=found["map"],
            unit="us",
            ratio=found["map"] / found["executor"],
            against="ProcessPoolExecutor",
        ),
        Row(figure="- ProcessPoolExecutor.map of 2000", value=found["executor"], unit="us"),
        Row(
            figure="CPU of a task of a map of 20000",
            value=found["map_cpu"],
            unit="us",
            ratio=found["map_cpu"] / found["executor_cpu"],
            against="ProcessPoolExecutor",
            bar="tiny",
        ),
        Row(figure="- ProcessPoolExecutor.map of 20000", value=found["executor_cpu"], unit="us"),
        Row(
            figure="100 MiB there and back",
            value=found["large"],
            unit="ms",
            ratio=found["executor_large"] / found["large"],
            against="faster than ProcessPoolExecutor",
            bar="large",
        ),
        Row(figure="- ProcessPoolExecutor, 100 MiB", value=found["executor_large"], unit="ms"),
        Row(figure="a crew of 2 starts, answers and ends", value=found["whole"], unit="ms"),
    ]
    return Figure(name="crew", rows=rows, samples=samples)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
