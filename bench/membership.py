"""(h) The loss of a node: three nodes run, one waits, and each trial loses one; torchrun and NVIDIA's ft_launcher
lose theirs on the same hosts in the same run.

All times are from what is done to a node until every rank of the next world has been exec'ed; medians. The agents of
the rows of a crowd are simulated (crowd.py). What has no figure but right or wrong is in tests/soak: random losses in
a row, late writes of infini-run's ranks, short cuts.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import crowd
from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from cabled import Hosts, cabled_hosts
from elastic import Job, Kind, Start, by_hand, by_ssh, kill, torch_like
from sample import Case, CommandFailed, failures, interleave, raw

GRACE_S, TIMEOUT_S = 2.0, 3.0
ROUNDS = 3  # waits of the timeout are nearly all of their time, and of one length
WITHIN_S = 30.0
PEER_S = 100.0  # for a peer's next world
CUT_PEER_S = 60.0
AFTER_S = 1.0  # in which writes of the old world are looked for, after the next one has begun
LOST = 1  # the node rank that is lost; in a manual launch 0 is the head's


def ours(bed: Bed, *flags: str) -> list[Kind]:
    common = ["--spares=1", f"--grace={GRACE_S:g}", *flags]
    return [by_ssh(bed, *common), by_hand(bed, "--nnodes=3", *common)]


def peers(bed: Bed) -> tuple[list[Kind], list[str]]:
    """torchrun and ft_launcher, as far as they are here, and a remark for each that is not."""
    found, remarks = [], []
    flags = {"torchrun": [], "ft_launcher": ["--ignore-missing-fault-tol-cfg"]}
    for name, own in flags.items():
        path = bed.torch_venv / "bin" / name if bed.torch_venv else None
        at = str(path) if path and path.exists() else shutil.which(name, path=bed.env.get("PATH"))
        if at:
            found.append(torch_like(name, at, *own))
        else:
            remarks.append(f"{name} left out: not installed")
    return found, remarks


# ---- what is done to a node, until `heal`

Loss = Callable[[Job, Start], int]


def host_of(start: Start) -> int:
    return int(start.host.removeprefix("host"))


def killed(job: Job, start: Start) -> int:
    return job.kill_node(start)


def killed_and_started(job: Job, start: Start) -> int:
    """Somebody (a pod's restart policy, systemd) starts the launcher again."""
    at_ns = job.kill_node(start)
    job.start_on(host_of(start))
    return at_ns


def cut(job: Job, start: Start) -> int:
    at_ns = time.monotonic_ns()
    job.hosts.cable(host_of(start), is_up=False)
    return at_ns


def one_way(chain: str, job: Job, start: Start) -> int:
    at_ns = time.monotonic_ns()
    job.hosts.cut_one_way(host_of(start), chain)
    return at_ns


def suspended(job: Job, start: Start) -> int:
    pid = job.agent_of(start)
    at_ns = time.monotonic_ns()
    kill([pid], signal.SIGSTOP)
    return at_ns


@contextmanager
def healed(hosts: Hosts, start: Start) -> Iterator[None]:
    """Afterwards the node's network is as it was."""
    try:
        yield
    finally:
        hosts.heal(host_of(start))


# ---- trials


class Lab:
    def __init__(self, bed: Bed, hosts: Hosts, folder: Path) -> None:
        self.bed, self.hosts, self.folder = bed, hosts, folder

    def job(self, kind: Kind, *words: str) -> Job:
        return Job(self.bed, self.hosts, kind, self.folder, *words)

    def time_loss(self, kind: Kind, loss: Loss, limit_s: float, *words: str) -> float:
        """Seconds until every rank of the next world has been exec'ed."""
        with self.job(kind, *words) as job:
            lost = job.first_world()[LOST]
            since = job.mark()
            with healed(self.hosts, lost):
                at_ns = loss(job, lost)
                world = job.world(since, limit_s)
            if world is None:
                raise CommandFailed(f"no next world within {limit_s:g} s: {job.said()[-600:]}")
            if kind.is_ours:
                check_end(job, host_of(lost))
            return (max(rank.at_ns for rank in world) - at_ns) / 1e9

    def count_late_writes(self, kind: Kind, loss: Loss, limit_s: float) -> int:
        """Lines that ranks of the old world have written after the first line of the next one. Until the end the
        node stays as it is."""
        with self.job(kind, "writes") as job:
            world = job.first_world()
            since = job.mark()
            with healed(self.hosts, world[LOST]):
                loss(job, world[LOST])
                if job.world(since, limit_s) is None:
                    raise CommandFailed(f"no next world within {limit_s:g} s")
                time.sleep(AFTER_S)
                job.starts()
                return job.late_writes


def check_end(job: Job, lost: int = -1) -> None:
    left = job.finish(lost)
    if left:
        raise CommandFailed(f"{left} processes left: {job.said()[-600:]}")


# ---- rows


def loss_cases(lab: Lab) -> dict[str, tuple[Case, str]]:
    """By the row's name: the case and its bar."""
    bed, found = lab.bed, {}
    for kind in ours(bed, f"--node_timeout={TIMEOUT_S:g}"):
        loss = killed_and_started if kind.is_by_hand else killed
        rows: list[tuple[str, Loss, str, tuple[str, ...]]] = [
            ("agent killed", loss, "node_lost", ()),
            ("agent killed, ranks ignore TERM", loss, "lost_deaf", ("deaf",)),
            ("cable cut", cut, "lost_cut", ()),
        ]
        if kind.is_by_hand:
            rows.append(("agent killed, and nobody restarts it", killed, "lost_cut", ()))
        for what, how, bar, words in rows:
            name, measure = f"{what}, {kind.name}", partial(lab.time_loss, kind, how, WITHIN_S, *words)
            found[name] = Case(name=name, measure=measure, rounds=bed.rounds(ROUNDS)), bar
    return found


def unreached() -> dict[str, Loss]:
    return {
        "agent suspended": suspended,
        "cut from the node": partial(one_way, "OUTPUT"),
        "cut to the node": partial(one_way, "INPUT"),
    }


def peer_rows(lab: Lab, kind: Kind, times: dict[str, float]) -> tuple[list[Row], dict[str, Any], list[str]]:
    """The same losses, once each; a loss after which no next world comes is a remark."""
    timed: dict[str, tuple[Loss, float, tuple[str, ...]]] = {
        "agent killed": (killed, PEER_S, ()),
        "agent killed, ranks ignore TERM": (killed, PEER_S, ("deaf",)),
        "cable cut": (cut, CUT_PEER_S, ()),
    }
    rows, samples, remarks = [], {}, []
    for name, (loss, limit_s, words) in timed.items():
        try:
            took_s = samples[name] = lab.time_loss(kind, loss, limit_s, *words)
        except CommandFailed as error:
            remarks.append(f"{kind.name}, {name}: {' '.join(str(error).split())[:200]}")
            rows.append(Row(figure=f"- {kind.name}: {name}: none within", value=limit_s, unit="s"))
            continue
        ratio = took_s / times[f"{name}, ssh"]
        rows.append(Row(figure=f"- {kind.name}: {name}", value=took_s, unit="s", ratio=ratio, against="ours by ssh"))
    for name, loss in unreached().items():
        try:
            late = samples[f"{name}: late writes"] = lab.count_late_writes(kind, loss, CUT_PEER_S)
        except CommandFailed as error:
            remarks.append(f"{kind.name}, {name}: {' '.join(str(error).split())[:200]}")
            rows.append(Row(figure=f"- {kind.name}: {name}: no next world within", value=CUT_PEER_S, unit="s"))
            continue
        rows.append(Row(figure=f"- {kind.name}: {name}: late writes", value=late, unit=""))
    return rows, samples, remarks


def measure_losses(lab: Lab) -> Figure:
    found = loss_cases(lab)
    cases = [case for case, _ in found.values()]
    interleave(cases)
    samples: dict[str, Any] = raw(cases)
    times = {name: case.median for name, (case, _) in found.items()}
    rows = [Row(figure=name, value=times[name], unit="s", bar=bar) for name, (_, bar) in found.items()]
    kinds, remarks = peers(lab.bed)
    for kind in kinds:
        more, samples[kind.name], why = peer_rows(lab, kind, times)
        rows += more
        remarks += why
    remarks += failures(cases)
    return Figure(name="membership", rows=rows, samples=samples, remarks=remarks)


def measure(bed: Bed) -> Figure:
    figures = []
    with scratch() as folder, cabled_hosts(folder) as hosts:
        figures.append(measure_losses(Lab(bed, hosts, folder)))
    figures.append(crowd.measure(bed))
    return Figure(
        name="membership",
        rows=[row for figure in figures for row in figure.rows],
        samples={figure.name: figure.samples for figure in figures},
        remarks=[remark for figure in figures for remark in figure.remarks],
    )


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
