"""(l) Link: 64 KiB frames over loopback TCP, sealed, beside the same unsealed and the time of the hash itself."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from sample import read_output

ROUNDS = 40
FRAMES = Path(__file__).parent / "frames.py"
FRAME_BYTES = 1 << 16


def measure(bed: Bed) -> Figure:
    with scratch() as directory:
        argv = [bed.python, str(FRAMES), str(bed.rounds(ROUNDS))]
        samples = json.loads(read_output(argv, bed.env, directory / "samples.json"))
    # of each round by itself: what a busy machine does to one round it does to all three of it
    seals = [sealed - bare for sealed, bare in zip(samples["sealed"], samples["bare"], strict=True)]
    ratio = median(seal / alone for seal, alone in zip(seals, samples["hash"], strict=True))
    rates = {name: FRAME_BYTES * 1000 / median(taken) for name, taken in samples.items()}
    rows = [
        Row(figure="link, 64 KiB frames, sealed", value=rates["sealed"], unit="MB/s"),
        Row(figure="- the same, not sealed", value=rates["bare"], unit="MB/s"),
        Row(
            figure="a frame's seal, both ends",
            value=median(seals) / 1000,
            unit="us",
            ratio=ratio,
            against="the hash itself",
            bar="seal",
        ),
        Row(figure="- the hash of it, both ends", value=median(samples["hash"]) / 1000, unit="us"),
    ]
    return Figure(name="link", rows=rows, samples=samples)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
