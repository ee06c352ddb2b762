"""examples/elastic_ddp.py while nodes are lost: at random steps, and what it says in the end."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

from tests.support.command import Command
from tests.support.paths import ROOT
from tests.support.processes import OURS, is_alive, processes
from tests.support.rows import SEED

EXAMPLE = str(ROOT / "examples" / "elastic_ddp.py")
NODES = 3
LOSSES = 10
LIMIT_S = 300.0  # importing torch takes its time on a busy machine
_STEPS = 2000
_SAVED_EVERY = 20
_PRINTED_EVERY = 5


def training(folder: Path) -> list[str]:
    """The program, with its checkpoints there."""
    steps = (f"--steps={_STEPS}", f"--checkpoint_every={_SAVED_EVERY}", f"--print_every={_PRINTED_EVERY}")
    return [EXAMPLE, *steps, f"--checkpoint_dir={folder}"]


def final_loss(command: Command) -> str:
    """Every digit of it, when the training has ended well."""
    assert command.wait(LIMIT_S) == 0, command.err
    found = re.findall(rb"final loss (\S+)", command.out)
    assert len(found) == 1, command.out
    return found[0].decode()


def lose_nodes(command: Command, launcher_of: Callable[..., int], losses: int = LOSSES) -> None:
    """So many times: when the training has reached a random step, SIGKILL to the launcher on a random node. Every
    attempt saves something new before: otherwise --max_no_progress would end the job.

    Args:
        launcher_of: tells the pid of the launcher of a rank, in an attempt.
    """
    chosen = random.Random(SEED)
    for attempt in range(losses):
        start = await_start(command, attempt)
        await_step(command, attempt, start + chosen.randint(_SAVED_EVERY, 3 * _SAVED_EVERY))
        os.kill(launcher_of(chosen.randrange(NODES), world=attempt), signal.SIGKILL)


def kill_rank(number: int) -> None:
    """SIGKILL to that rank of the first attempt."""
    wanted = {f"RANK={number}", "TORCHELASTIC_RESTART_COUNT=0", "=".join(OURS)}
    (pid,) = [pid for pid in processes() if is_alive(pid) and wanted <= environ_of(pid)]
    os.kill(pid, signal.SIGKILL)


def environ_of(pid: int) -> set[str]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return set()


def await_start(command: Command, attempt: int) -> int:
    """The step from which that attempt goes on."""
    first = re.compile(rb"attempt %d: \d ranks, from step (\d+)\n" % (attempt + 1))
    while not (found := first.search(command.out)):
        command.read_more(LIMIT_S)
    return int(found[1])


def await_step(command: Command, attempt: int, wanted: int) -> None:
    """Read until that attempt has printed that step, or one after it."""
    while True:
        said = command.out.partition(b"attempt %d: " % (attempt + 1))[2]
        if any(int(step) >= wanted for step in re.findall(rb"step (\d+): loss", said)):
            return
        command.read_more(LIMIT_S)
