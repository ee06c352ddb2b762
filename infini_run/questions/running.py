"""The launches that run on this machine, for Python programs and for `--list=json`."""

from __future__ import annotations

import os

from infini_run.control.launches import find_launches, own_launches, remove_lost
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.control.launches import FoundLaunch


@record
class RunningLaunch:
    """A launch on this machine, as its control socket describes it. None: unknown, because it doesn't answer.

    Attributes:
        launch_id: The id, which its processes have as INFINI_RUN_ID.
        state: running, restarting (between two attempts), `does not answer`, `does not answer (suspended)`, or lost
            (SIGKILL ended its launcher and guard at once, or its launcher between two attempts).
        uid: The user.
        pid: The launcher.
        start_s: The start of the launch, in seconds since the epoch.
        program: The command line; for functions their name, such as `train() in train.py`.
        nodes: The number of nodes.
        node: The node rank of this part of the launch, if its head is on another machine.
        world_size: The number of ranks on all nodes.
        ranks: The number of ranks in each state: waiting, running, ready (after READY=1), done, failed. At a head,
            of all nodes; else of this node.
        progress: The highest PROGRESS= of a rank. None also if no rank reports it.
        restart_s: Between two attempts, when the next one begins, in seconds since the epoch.
        gpus: The GPUs that --gpus_per_proc gave to the ranks here.
        job: The job of infini-job, Slurm, or PBS in which it runs. None also without a job.
    """

    launch_id: str
    state: str
    uid: int
    pid: int | None = None
    start_s: float | None = None
    program: str | None = None
    nodes: int | None = None
    node: int | None = None
    world_size: int | None = None
    ranks: dict[str, int] | None = None
    progress: int | None = None
    restart_s: float | None = None
    gpus: tuple[str, ...] = ()
    job: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the launch as plain types, as --list=json prints it."""
        return {
            "id": self.launch_id,
            "state": self.state,
            "uid": self.uid,
            "pid": self.pid,
            "start": self.start_s,
            "program": self.program,
            "nodes": self.nodes,
            "node": self.node,
            "world_size": self.world_size,
            "ranks": self.ranks,
            "progress": self.progress,
            "restart": self.restart_s,
            "gpus": list(self.gpus),
            "job": self.job,
        }


def running() -> tuple[RunningLaunch, ...]:
    """Return the launches of this user that run on this machine, the oldest first; for root, of all users.

    It waits at most one second for launches that don't answer. A ProcessLauncher answers only while its program
    waits for it. A lost launch is in the list until its folder is a minute old. Then this list or a later launch of
    the same user removes what is left of it.
    """
    found = find_launches(os.environ)
    remove_lost(found)
    return tuple(describe_launch(each) for each in own_launches(found))


def describe_launch(found: FoundLaunch) -> RunningLaunch:
    """Return a launch for users."""
    facts, pid = found.facts, found.pid or None
    if facts is None:
        return RunningLaunch(launch_id=found.launch_id, state=found.problem, uid=found.uid, pid=pid)
    return RunningLaunch(
        launch_id=found.launch_id,
        state="running" if facts.restart_s is None else "restarting",
        uid=found.uid,
        pid=pid,
        start_s=facts.start_s,
        program=facts.program,
        nodes=facts.nodes,
        node=None if facts.node < 0 or facts.nodes == 1 else facts.node,
        world_size=facts.world,
        ranks=facts.counts,
        progress=facts.progress,
        restart_s=facts.restart_s,
        gpus=facts.devices,
        job=facts.job.partition("=")[2] or None,
    )
