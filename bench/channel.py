"""(i) Channels: the round trip of a small message, and the throughput of large ones, beside multiprocessing.Pipe."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from sample import read_output

ROUNDS = 20
TALK = Path(__file__).parent / "talk.py"


def rows_of(name: str, channel: float, pipe: float) -> list[Row]:
    if name == "1 MiB":
        value = Row(figure="channel 1 MiB bytes, one way", value=channel, unit="MB/s", ratio=channel / pipe)
        beside = Row(figure="- Pipe.send_bytes 1 MiB, one way", value=pipe, unit="MB/s")
        return [with_bar(value, "stream"), beside]
    value = Row(figure=f"channel round trip, 64 B {name}", value=channel, unit="us", ratio=channel / pipe)
    return [with_bar(value, "trip"), Row(figure=f"- Pipe round trip, 64 B {name}", value=pipe, unit="us")]


def with_bar(row: Row, bar: str) -> Row:
    return Row(figure=row.figure, value=row.value, unit=row.unit, ratio=row.ratio, against="Pipe", bar=bar)


def measure(bed: Bed) -> Figure:
    with scratch() as directory:
        argv = [bed.python, str(TALK), "measure", str(bed.rounds(ROUNDS))]
        samples = json.loads(read_output(argv, bed.env, directory / "samples.json"))
    rows = [row for name, of in samples.items() for row in rows_of(name, median(of["channel"]), median(of["pipe"]))]
    return Figure(name="channel", rows=rows, samples=samples)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
