"""The end of a job with spares on Slurm, by a node whose agent lost the head, if nobody else can end the job.

    python -m infini_run.jobs.lost_head FOLDER NAME [K] -- AGENT'S WORDS   NAME: in the queue; K: of an array the task

Such a job survives the loss of any node (--no-kill). Slurm may take the node with the job's script and its head from
the job. Then the rest would run nothing until the time limit.

The one rule: the job ends only when Slurm itself says that the head's node has left it. A node without a connection
to the head alone ends nothing.
"""

from __future__ import annotations

import os
import select
import sys
import time

from infini_run.environments.hostlist import expand
from infini_run.errors import InfiniRunError, LinkError
from infini_run.jobs.allocation.job_run import HEAD_NODE, print_line
from infini_run.jobs.allocation.requeue import requeue
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.records import JobResult
from infini_run.jobs.folder.task import task_of
from infini_run.jobs.scheduler import NODE_FAIL
from infini_run.jobs.schedulers.detect_scheduler import find_scheduler
from infini_run.lean_os import drop_coerced_locale
from infini_run.multinode.link.connection import TOKEN
from infini_run.multinode.link.handshake import Handshake
from infini_run.multinode.link.protocol import HANDSHAKE_S
from infini_run.multinode.link.tcp import connect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.multinode.link.connection import Connection

_PAUSES_S = (1.0, 30.0)  # no event reports that another node left its job; doubled each time


def await_loss(folder: JobDir, link: str, environ: Mapping[str, str], name: str = "") -> bool:
    """Wait until the head is reachable, or its node has left the job.

    Args:
        folder: Of the job, or of a task.
        link: Where the head listens, as an agent's `--link`.
        environ: That of the agent.
        name: Slurm's name of the job or the task; "": infini-job's. Not from its directory: the lost node may have
            served it.

    Returns:
        Whether the head is lost.
    """
    pause_s = _PAUSES_S[0]
    token = os.fsencode(environ.get(TOKEN, ""))
    hosts, _, port = link.rpartition(":")
    while not any(_is_head(f"{host}:{port}", token) for host in hosts.split(",")):
        nodes = _nodes(folder, environ, name or folder.name)
        if nodes and environ[HEAD_NODE] not in nodes:
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])
    return False


def _is_head(target: str, token: bytes) -> bool:
    """Return whether the listener proves that it knows the job's token. Another program may have the port: one of the
    addresses is this node's own loopback."""
    try:
        connection = connect(target)
    except LinkError:
        return False
    try:
        return _proves_itself(connection, token)
    except LinkError:
        return False
    finally:
        connection.close()


def _proves_itself(connection: Connection, token: bytes) -> bool:
    """Raises LinkError: it does not know the token, or is no infini-run."""
    handshake, end_s = Handshake(connection, token, is_head=False), time.monotonic() + HANDSHAKE_S
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    while not handshake.is_done and not connection.has_ended:
        if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            return False
        for kind, payload in connection.read():
            handshake.handle_frame(kind, payload)
    return handshake.is_done


def _nodes(folder: JobDir, environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the job's nodes at present; empty: Slurm does not say."""
    try:
        job = find_scheduler("slurm", folder.home, environ).query([name]).get(name)
        return expand(job.nodes, "squeue") if job is not None and job.nodes else ()
    except InfiniRunError:
        return ()


def end_job(folder: JobDir, environ: Mapping[str, str]) -> None:
    """Have Slurm queue the job again if it may, or end it. Raises QueryError if Slurm does not answer."""
    job = folder.read_submission()
    if job.request.restarts and requeue(folder, job, environ, print_line=print_line) is None:
        return
    node = environ[HEAD_NODE]
    ending = JobResult(
        state=NODE_FAIL,
        code=1,
        node=node,
        reason=f"lost {node}, which ran the job's script and its head",
        attempt=max(0, folder.attempts() - 1),
        end_s=time.time(),
    )
    folder.write_result_if_absent(ending)
    find_scheduler("slurm", folder.home, environ).cancel(folder.id)


def main(argv: Sequence[str]) -> int:
    """Do this for the job's directory and the agent's words of a command line. Returns the exit code."""
    drop_coerced_locale()
    own, theirs = list(argv[: argv.index("--")]), argv[argv.index("--") + 1 :]
    link = next((word.partition("=")[2] for word in theirs if word.startswith("--link=")), "")
    if not link or not os.environ.get(HEAD_NODE):
        return 1
    folder, name = JobDir(own[0]), ".".join(own[1:])
    folder = task_of(folder, int(own[2])) if own[2:] else folder
    if await_loss(folder, link, os.environ, name):
        end_job(folder, os.environ)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
