"""(h) A hang: from the moment at which a rank reports it to the sentence that names whom the others wait for.

64 Python ranks on this machine, and 16 on each of four hosts of it by ssh. Two looks, 2 s apart, are in that time.
One rank computes meanwhile, and notes for how long it was held: py-spy suspends it while it reads its stack.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import time
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from gate import Gate
from many import HOSTS, hosts
from sample import CommandFailed, finish, start

RANKS = 64
ROUNDS = 3
LIMIT_S = 60.0
SETTLE_S = 5.0  # for 64 interpreters to come to rest
_SENTENCE = re.compile(rb"\d+ of 64 ranks wait for rank|64 ranks are in \d+ places")


def read_sentence(fd: int) -> int:
    """Waits for the sentence on stderr, and returns when it came, in ns."""
    seen, end = b"", time.monotonic() + LIMIT_S
    while not _SENTENCE.search(seen):
        if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
            raise CommandFailed(f"nobody was named; stderr:\n{seen.decode(errors='replace')}")
        seen += os.read(fd, 65536)
    return time.monotonic_ns()


def time_hang(bed: Bed, flags: list[str], directory: Path) -> dict[str, float]:
    """One job that hangs: seconds to the sentence, and ms for which the rank that computes was held."""
    stamp, gaps = directory / "stamp", directory / "gaps"
    stamp.unlink(missing_ok=True)
    reading, writing = os.pipe()
    try:
        with Gate(directory) as gate:
            rank = [str(Path(__file__).parent / "hung_rank.py"), str(gate.up_path), str(gate.go_path)]
            pid = start([bed.infini_run, *flags, bed.python, *rank, str(stamp), str(gaps)], bed.env, {2: writing})
            try:
                gate.wait_up(RANKS)
                time.sleep(SETTLE_S)
                gate.go()
                named = read_sentence(reading)
            finally:
                os.kill(pid, signal.SIGTERM)
                finish(pid)
    finally:
        os.close(reading)
        os.close(writing)
    before, since = map(int, gaps.read_text().split())
    seconds = (named - int(stamp.read_text())) / 1e9
    return {"seconds": seconds, "before_ms": before / 1e6, "since_ms": since / 1e6}


def rows_of(name: str, samples: list[dict[str, float]]) -> list[Row]:
    def middle(what: str) -> float:
        return sorted(sample[what] for sample in samples)[len(samples) // 2]

    return [
        Row(figure=f"hang of 64 ranks named, {name}", value=middle("seconds"), unit="s", bar="hang_named"),
        Row(figure=f"- less the 2 s between looks, {name}", value=middle("seconds") - 2.0, unit="s"),
        Row(figure=f"a rank that computes was held, {name}", value=middle("since_ms"), unit="ms", bar="held"),
        Row(figure=f"- before anybody looked, {name}", value=middle("before_ms"), unit="ms"),
    ]


def measure(bed: Bed) -> Figure:
    flags = ["--console=none", "--grace=1"]
    samples = {}
    with scratch() as directory:
        one = partial(time_hang, bed, ["--nproc_per_node=64", *flags], directory)
        samples["one node"] = [one() for _ in range(bed.rounds(ROUNDS))]
        with hosts(directory) as folder:
            where = [f"--hosts={','.join(HOSTS)}", f"--ssh_config={folder}/ssh_config", "--nproc_per_node=16"]
            four = partial(time_hang, bed, [*where, *flags], directory)
            samples["4 x 16 over ssh"] = [four() for _ in range(bed.rounds(ROUNDS))]
    rows = [row for name, found in samples.items() for row in rows_of(name, found)]
    folders = f"{Path(bed.python).parent}:{bed.env.get('PATH', '')}"
    remarks = [] if shutil.which("py-spy", path=folders) else ["py-spy is not installed: no Python stacks"]
    return Figure(name="hang", rows=rows, samples=samples, remarks=remarks)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
