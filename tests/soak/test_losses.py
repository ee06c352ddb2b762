"""Losses in a row, at random: of any node, at any moment, two together as well, while a job starts, runs, starts
again or stops. After each, the ranks of one world live and none of another, on nodes that are well, within a bound.

SOAK_LOSSES=N loses N nodes in one job, TEST_SEED=N repeats the losses of a run as far as time can be repeated.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bed import Bed, scratch
from cabled import COUNT, Hosts, cabled_hosts
from elastic import Job, by_ssh, kill, marked
from sample import CommandFailed
from tests.support.rows import SEED

pytestmark = [pytest.mark.slow, pytest.mark.root]

TIMEOUT_S, GRACE_S = 2.0, 1.0
LOSSES, AT_START, AT_STOP = int(os.environ.get("SOAK_LOSSES", "40")), 5, 5
BOUND_S = TIMEOUT_S + GRACE_S + 5.0  # until a world is right
LIMIT_S = 40.0  # after that a job hangs
SURE_S = 0.3  # a world that is right is looked at again after so long
ALONE_S = 70.0  # for which the head does not start an agent where one was told to stop, and that start
BACK_S = 90.0  # for a node to be back: the head tries again after 1 s, 2, 4, ... 60
LOOK_S = 0.02
AGENT = b"infini_run.multinode.agent"
KINDS = ("killed", "told to stop", "suspended", "cut", "cut from it", "cut to it", "host down")
OF_THE_AGENT = ("killed", "told to stop", "suspended")  # the head may start another one there
FLAGS = (
    "--nnodes=2:3", "--spares=1", "--join_window=0.5", f"--node_timeout={TIMEOUT_S:g}", f"--grace={GRACE_S:g}",
    "--max_restarts=1000", "--restart_delay=0", "--max_node_failures=0",
)  # fmt: skip


@dataclass
class Strike:
    """What was done to a host. doomed: the ranks that it had."""

    host: int
    kind: str
    pid: int
    doomed: set[tuple[str, int]]


class Losses:
    def __init__(self, bed: Bed, hosts: Hosts, folder: Path, seed: int) -> None:
        self.bed, self.hosts, self.folder = bed, hosts, folder
        self.chance = random.Random(seed)
        self.took_s: list[float] = []
        self.wrong: list[str] = []
        self.count = self.late_writes = self.left = self.hangs = 0
        self._struck: list[Strike] = []
        self._told_s: dict[int, float] = {}

    # ---- what is done

    def agents(self, job: Job) -> dict[int, int]:
        """The agent of each host that has one."""
        spaces = {os.stat(f"/proc/{self.hosts.init(host)}/ns/pid").st_ino: host for host in self.up()}
        found = {}
        for process in marked(job.hosts.mark):
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            except OSError:
                continue
            if AGENT in words and process.name.startswith(("python", "infini-run")) and process.namespace in spaces:
                found[spaces[process.namespace]] = process.pid
        return found

    def up(self) -> list[int]:
        down = [strike.host for strike in self._struck if strike.kind == "host down"]
        return [host for host in range(1, COUNT + 1) if host not in down]

    def strike(self, job: Job) -> float:
        """Lose a node that is not lost yet; when (monotonic)."""
        agents = self.agents(job)
        struck = [strike.host for strike in self._struck]
        host = self.chance.choice([host for host in range(1, COUNT + 1) if host not in struck])
        kinds = [kind for kind in KINDS if host in agents or kind not in OF_THE_AGENT]
        if len(agents) < COUNT and "told to stop" in kinds:  # the last one that was told is away for a minute
            kinds.remove("told to stop")
        kind = self.chance.choice(kinds)
        doomed = {(start.host, start.pid) for start in job.starts() if start.host == f"host{host}"}
        self._struck.append(Strike(host, kind, agents.get(host, 0), doomed))
        job.mark()
        at_s = time.monotonic()
        if kind in OF_THE_AGENT:
            number = {"killed": signal.SIGKILL, "told to stop": signal.SIGTERM, "suspended": signal.SIGSTOP}[kind]
            kill([agents[host]], number)
        elif kind == "host down":
            self.hosts.tell("host-down", host)
        elif kind == "cut":
            self.hosts.cable(host, is_up=False)
        else:
            self.hosts.cut_one_way(host, "OUTPUT" if kind == "cut from it" else "INPUT")
        return at_s

    def heal(self) -> None:
        """Undo what was done."""
        told = {strike.host: time.monotonic() for strike in self._struck if strike.kind == "told to stop"}
        self._told_s |= told
        for strike in self._struck:
            if strike.kind == "host down":
                self.hosts.tell("host-up", strike.host)
            elif strike.kind == "suspended":
                kill([strike.pid], signal.SIGCONT)
            elif strike.kind not in OF_THE_AGENT:
                self.hosts.heal(strike.host)
        self._struck = []

    # ---- what follows

    def problem(self, job: Job) -> str:
        """Why what runs is not right, or not yet; empty: it is."""
        starts = job.starts()
        if not starts:
            return "nothing has started"
        number = max(start.world for start in starts)
        world = {start.rank: start for start in starts if start.world == number}
        size = starts[-1].size
        alive = sorted((rank.attempt, rank.rank) for rank in job.ranks())
        if sorted(world) != list(range(size)) or not 2 <= size <= 3:
            return f"world {number} has ranks {sorted(world)} of {size}"
        if alive != [(str(number), rank) for rank in range(size)]:
            return f"of world {number} of {size} there live, by world and rank: {alive}"
        if len({start.host for start in world.values()}) != size:
            return f"world {number} has two ranks on one host"
        for strike in self._struck:
            there = {(start.host, start.pid) for start in world.values() if start.host == f"host{strike.host}"}
            if there & strike.doomed or (there and strike.kind not in OF_THE_AGENT):
                return f"world {number} is on host{strike.host}, {strike.kind}"
        return ""

    def wait_right(self, job: Job, since_s: float) -> None:
        """Until the world is right, twice."""
        while True:
            at_s = time.monotonic()
            problem = self.problem(job)
            if not problem:
                time.sleep(SURE_S)
                problem = self.problem(job)
                if not problem:
                    self.took_s.append(at_s - since_s)
                    return
            if at_s - since_s > LIMIT_S:
                self.hangs += 1
                raise CommandFailed(f"after {self.text()}: {problem}; {job.said()[-3000:]}")
            time.sleep(LOOK_S)

    def text(self) -> str:
        return " and ".join(f"host{strike.host} {strike.kind}" for strike in self._struck)

    def wait_back(self, job: Job) -> None:
        """Until all hosts have an agent: the next loss is to find a spare. One that was told to stop is left alone
        for a minute."""
        end_s = time.monotonic() + BACK_S
        while True:
            told = [host for host, at_s in self._told_s.items() if time.monotonic() - at_s < ALONE_S]
            if set(self.agents(job)) | set(told) >= set(range(1, COUNT + 1)):
                return
            if time.monotonic() > end_s:
                self.wrong.append(f"not all nodes are back after {BACK_S:g} s")
                return
            time.sleep(LOOK_S)

    # ---- one after the other

    def job(self) -> Job:
        kind = by_ssh(self.bed, *FLAGS)
        return Job(self.bed, self.hosts, kind, self.folder, "writes")

    def lose_once(self, job: Job) -> None:
        """One loss, or two: after some time, or as soon as a rank of the next world has started; and now and then
        ranks fail just before."""
        if self.chance.random() < 0.25:
            kill([self.chance.choice(job.ranks()).pid], signal.SIGUSR1)
        time.sleep(self.chance.uniform(0.0, 0.5))
        can_lose_two = len(self.agents(job)) == COUNT
        at_s = self.strike(job)
        if can_lose_two and self.chance.random() < 0.4:
            self.wait_moment(job)
            at_s = self.strike(job)
        self.wait_right(job, at_s)

    def wait_moment(self, job: Job) -> None:
        end_s = time.monotonic() + self.chance.uniform(0.0, TIMEOUT_S + 1)
        is_at_start, before = self.chance.random() < 0.5, len(job.starts())
        while time.monotonic() < end_s and not (is_at_start and len(job.starts()) > before):
            time.sleep(LOOK_S / 10)

    def lose_in_one_job(self, until: int) -> None:
        """So many in all, in one job if none of them goes wrong."""
        with self.job() as job:
            try:
                job.first_world()
                while self.count < until:
                    self.count += 1
                    self.lose_once(job)
                    self.heal()
                    self.wait_back(job)
                self.end_well(job)
            finally:
                self.late_writes += job.late_writes
                self.heal()

    def end_well(self, job: Job) -> None:
        """Stop a job whose lost nodes are back, and count what it leaves."""
        self.wait_right(job, time.monotonic())
        self.took_s.pop()
        job.finish(-1)
        self.count_left(job)

    def lose_at_start(self) -> None:
        with self.job() as job:
            try:
                time.sleep(self.chance.uniform(0.0, 0.6))
                self.wait_right(job, self.strike(job))
                self.heal()
                self.wait_back(job)
                self.end_well(job)
            finally:
                self.late_writes += job.late_writes
                self.heal()

    def lose_at_stop(self) -> None:
        with self.job() as job:
            try:
                job.first_world()
                kill([job.head()], signal.SIGTERM)
                time.sleep(self.chance.uniform(0.0, 0.2))
                at_s = self.strike(job)
                job.wait_end(-1)
                self.took_s.append(time.monotonic() - at_s)
            finally:
                self.heal()
            self.count_left(job)

    def count_left(self, job: Job) -> None:
        """What is there still, after the time in which a lease ends."""
        end_s = time.monotonic() + TIMEOUT_S + 1
        while (left := marked(job.hosts.mark)) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        self.left += len(left)
        self.wrong += [f"left: {process}" for process in left]


@pytest.fixture
def losses(bed):
    with scratch() as folder, cabled_hosts(folder) as hosts:
        yield Losses(bed, hosts, folder, SEED)


def check(losses, count):
    """Each was right in time, and nothing was left or written late."""
    assert losses.wrong == []
    assert (len(losses.took_s), losses.hangs, losses.left, losses.late_writes) == (count, 0, 0, 0)
    assert max(losses.took_s) <= BOUND_S


def test_losses_in_one_job(losses):
    losses.lose_in_one_job(LOSSES)
    check(losses, LOSSES)


def test_losses_while_a_job_starts(losses):
    for _ in range(AT_START):
        losses.lose_at_start()
    check(losses, AT_START)


def test_losses_while_a_job_stops(losses):
    for _ in range(AT_STOP):
        losses.lose_at_stop()
    check(losses, AT_STOP)
