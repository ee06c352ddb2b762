"""The head of a crowd: 1,024 nodes of which 8 are lost together, all of which reconnect, and 500 launchers that join
within a second. The agents are simulated by one process beside the head (crowd_agents.py), which is the real command
with a rank of its own.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args
from many import free_port
from sample import CommandFailed, expect, finish, start

SIMULATED, SPARES, LOST, JOINING = 1024, 8, 8, 500
TIMEOUT_S = 3.0  # less than by default, so that a heartbeat is late sooner
ROUNDS = 3
LIMIT_S = 60.0


class Crowd:
    """Simulated agents, and the head that they join."""

    def __init__(self, bed: Bed, least: int, most: int, spares: int) -> None:
        port, env = free_port(), {**bed.env, "INFINI_RUN_TOKEN": os.urandom(16).hex()}
        shape = [f"--nnodes={least}:{most}", f"--spares={spares}", "--nproc_per_node=1", f"--link_port={port + 1}"]
        flags = [f"--rdzv_endpoint=127.0.0.1:{port}", f"--node_timeout={TIMEOUT_S:g}", "--join_window=60"]
        self.head = start([bed.infini_run, *shape, *flags, "/bin/sleep", "1000"], env)
        self._heard = b""
        end_s = time.monotonic() + LIMIT_S
        while socket.socket().connect_ex(("127.0.0.1", port + 1)):
            if time.monotonic() > end_s:
                raise CommandFailed("the head does not listen")
            time.sleep(0.005)
        words = [bed.python, str(Path(__file__).parent / "crowd_agents.py"), f"127.0.0.1:{port + 1}"]
        self.agents = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, *lines: str) -> None:
        assert self.agents.stdin is not None
        self.agents.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.agents.stdin.flush()

    def hear(self, word: str) -> list[str]:
        """The rest of the next line that begins so; others are dropped."""
        assert self.agents.stdout is not None
        end_s = time.monotonic() + LIMIT_S
        fd = self.agents.stdout.fileno()
        while True:
            while b"\n" in self._heard:
                line, _, self._heard = self._heard.partition(b"\n")
                if line.startswith(word.encode()):
                    return line.decode().split()[1:]
            if not select.select([fd], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise CommandFailed(f"a crowd: no {word!r} within {LIMIT_S:.0f} s")
            data = os.read(fd, 65536)
            if not data:
                raise CommandFailed("the agents have ended")
            self._heard += data

    def gaps(self) -> tuple[float, int]:
        """How long the head said nothing to one of them, in seconds, and how many heard nothing for too long."""
        self.tell("gaps")
        longest_s, late = self.hear("gaps")
        return float(longest_s), int(late)

    def close(self) -> None:
        os.kill(self.head, 15)
        try:
            expect(["head"], finish(self.head), 143)
        finally:
            self.agents.kill()
            self.agents.communicate()


@contextmanager
def crowd(bed: Bed, least: int, most: int, spares: int) -> Iterator[Crowd]:
    it = Crowd(bed, least, most, spares)
    try:
        yield it
    finally:
        it.close()


def measure_losses(bed: Bed) -> dict[str, float]:
    """Of one job: 8 lost together, which come again, and then all."""
    active = SIMULATED - SPARES - 1  # beside the head's own node
    found: dict[str, float] = {}
    with crowd(bed, active - 100, active + 1, SPARES) as it:
        it.tell(f"expect {active}", f"join 1 {SIMULATED - 1} 0")
        it.hear("launched")
        time.sleep(TIMEOUT_S)
        it.gaps()
        for name, first, last in (("lost", 101, 100 + LOST), ("again", 1, SIMULATED - 1)):
            it.tell(f"expect {active}", f"lose {first} {last}")
            lost_ns, joined_ns, launched_ns = (int(it.hear(word)[0]) for word in ("lost", "joined", "launched"))
            found[f"{name}_s"] = (launched_ns - lost_ns) / 1e9
            found[f"{name}_joined_s"] = (joined_ns - lost_ns) / 1e9
            time.sleep(TIMEOUT_S)
            found[f"{name}_gap_s"], found[f"{name}_late"] = it.gaps()
    return found


def measure_joins(bed: Bed) -> dict[str, float]:
    """Launchers that join within a second, beside as many that are there."""
    here = SIMULATED - JOINING - 1
    with crowd(bed, 2, here + 1, JOINING) as it:
        it.tell(f"expect {here}", f"join 1 {here} 0")
        it.hear("joined")
        begin_ns = time.monotonic_ns()
        it.tell(f"join {here + 1} {SIMULATED - 1} 1000")
        joined_ns = int(it.hear("joined")[0])
        it.hear("launched")
        time.sleep(TIMEOUT_S)
        longest_s, late = it.gaps()
    return {"join_s": (joined_ns - begin_ns) / 1e9, "join_gap_s": longest_s, "join_late": late}


def measure(bed: Bed) -> Figure:
    samples = [measure_losses(bed) | measure_joins(bed) for _ in range(bed.rounds(ROUNDS))]

    def middle(name: str) -> float:
        return median(sample[name] for sample in samples)

    late = max(sample[f"{name}_late"] for sample in samples for name in ("lost", "again", "join"))
    gap_s = max(sample[f"{name}_gap_s"] for sample in samples for name in ("lost", "again", "join"))
    lost, again = f"{SIMULATED} agents, {LOST} lost together", f"{SIMULATED} agents reconnect"
    joined, silence = f"{JOINING} launchers within 1 s: all have joined", "- the longest silence of the head"
    rows = [
        Row(figure=f"{lost}: all have the new plan", value=middle("lost_s"), unit="s", bar="crowd_plan"),
        Row(figure=f"{again}: all have a plan", value=middle("again_s"), unit="s", bar="crowd_again"),
        Row(figure=joined, value=middle("join_s"), unit="s", bar="crowd_join"),
        Row(figure="agents of a crowd to which a heartbeat came late", value=late, unit="", bar="lost_none"),
        Row(figure=silence, value=gap_s, unit="s", ratio=gap_s / TIMEOUT_S, against="the timeout"),
    ]
    return Figure(name="crowd", rows=rows, samples={"rounds": samples})


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
