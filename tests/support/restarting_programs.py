"""A trainer, and servers on two nodes of which the second fails: one job for the tests of all engines."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.support.command import without_waits
from tests.support.job_case import Jobs

JOB_FLAGS = ("--restart_scope=program", "--restart_delay=0")
NODES = (1, 2)  # of the servers; the trainer is on all
CODE = 3  # of the server that fails
_ATTEMPT = "$TORCHELASTIC_RESTART_COUNT"
_STAY = "sleep 1000"


def programs(folder: Path, fails: int, nodes: int = 4) -> list[str]:
    """The words after the flags of the job, on so many nodes. The servers may restart once, and fail in so many
    attempts, once all ranks have said that they run. The trainer ends, and the job with it, once the servers of the
    second attempt run."""
    at = f"{folder}/$ROLE_NAME.$RANK.{_ATTEMPT}"
    others = [f"{folder}/trainer.{rank}.0" for rank in range(nodes)] + [f"{folder}/server.0.{_ATTEMPT}"]
    again = [f"{folder}/server.{rank}.1" for rank in range(len(NODES))]
    ends = f"exec {_STAY}" if fails > 1 else f"{_wait(again)}; echo ends {_ATTEMPT}"
    trainer = f"echo begins {_ATTEMPT}; touch {at}; {ends}"
    failure = f"test $RANK = 1 && test {_ATTEMPT} -lt {fails} && {{ {_wait(others)}; exit {CODE}; }}"
    server = f"echo serves {_ATTEMPT}; touch {at}; {failure}; exec {_STAY}"
    on_nodes = f"--on_nodes={','.join(map(str, NODES))}"
    servers = ["--program=server", "--max_restarts=1", on_nodes, "--nproc_per_node=1", "sh", "-c", server]
    return ["--program=trainer", "--ends_job", "--nproc_per_node=1", "sh", "-c", trainer, ":", *servers]


def _wait(paths: Iterable[str]) -> str:
    return f"until {' && '.join(f'test -e {path}' for path in paths)}; do sleep 0.02; done"


def check_restarted(code: int, lines: Iterable[str], own_lines: Sequence[str], nodes: int) -> None:
    """The servers ran twice on their nodes, the trainer ran on, and the job ended well."""
    assert code == 0, own_lines
    said = sorted(line.split(":", 1)[1] for line in lines)
    ranks = range(nodes)
    assert said == [
        *[f"server {rank}] serves {attempt}" for rank in range(len(NODES)) for attempt in range(2)],
        *[f"trainer {rank}] {word} 0" for rank in ranks for word in ("begins", "ends")],
    ]
    (line,) = without_waits(own_lines)
    start = r"infini-run: server: restart 1 of 1 in 0 ms: server 1 on \S+ failed: exit code 3 \(pid \d+, "
    assert re.match(start, line), line


def check_exhausted(code: int, lines: Iterable[str], own_lines: Sequence[str], nodes: int) -> None:
    """The failure of the second attempt ended all, and is the job's."""
    assert code == CODE, own_lines
    said = sorted(line.split(":", 1)[1] for line in lines)
    assert said == [
        *[f"server {rank}] serves {attempt}" for rank in range(len(NODES)) for attempt in range(2)],
        *[f"trainer {rank}] begins 0" for rank in range(nodes)],
    ]
    first, last, *_ = without_waits(own_lines)
    assert first.startswith("infini-run: server: restart 1 of 1 in 0 ms: server 1 on ")
    assert re.match(r"infini-run: server 1 on \S+ failed: exit code 3 \(pid \d+, .*; after 1 restart$", last), last


ENDS = [(1, check_restarted), (2, check_exhausted)]  # in how many attempts a server fails, and what follows
IDS = ["restarts", "exhausted"]


def check_job(jobs: Jobs, done: subprocess.CompletedProcess[str], check: Callable[..., None]) -> None:
    """The same of a job that `infini-job submit --wait` has waited for, on four nodes."""
    assert done.stdout.startswith("job "), done.stderr
    name = done.stdout.split()[1]
    own = [line for line in jobs.logs(name).splitlines() if line.startswith("infini-run: ")]
    check(done.returncode, jobs.lines(name), own, nodes=4)
    status = jobs.status(name)
    place = status["program"], status["program_rank"]
    if done.returncode:
        assert (status["headline"], place) == (f"FAILED exit {CODE} on {status['node']}, server 1", ("server", 1))
    else:
        assert (status["headline"], place) == ("COMPLETED", ("", -1))
