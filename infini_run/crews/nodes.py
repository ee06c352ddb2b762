"""Workers on other hosts, seen from their supervisor: Runners and a Spawner as any (runner.py).

The head reaches each host and runs one outpost there, by its agent; the bridge's thread holds the streams. A channel
is a socket here as on one machine; what it says, and how it ends, comes from its outpost in that order. A node
that is lost ends all others: a launch raises NodeLost, a crew fails with it.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from _functools import partial
from _thread import RLock
from itertools import accumulate
from weakref import WeakSet

from infini_run.channel import connect
from infini_run.crews.bridge import Bridge
from infini_run.crews.runner import MEETING, python_command
from infini_run.errors import InfiniRunError, UsageError
from infini_run.launch import read_flags
from infini_run.muster import meeting
from infini_run.outbox import bytes_frame
from infini_run.record import replace
from infini_run.report import Exit, Report
from infini_run.roster import ENGINES
from infini_run.site import BATCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.crews.bridge import Outpost
    from infini_run.crews.runner import Runner
    from infini_run.options import Options
    from infini_run.parcel import Buffer
    from infini_run.roster import Roster

# What is said to the head; all other flags are the workers'.
_REACH = (
    *("engine", "hosts", "hostfile", "nnodes", "ssh_config", "remote_python", "export"),
    *("join_timeout", "node_timeout", "link_port", *MEETING),
)
_LIMIT = 1 << 34  # bytes of a frame, as a channel has it
_SPARE_S = 5.0  # that an outpost has beyond its workers' grace
_END_S = 15.0  # that a node may take to end a worker by SIGKILL; the core gives up after 5


class NodeSpawner:
    """Workers on several hosts. `open` reaches them, and holds them until `close`.

    hosts: names, as --hosts has them. nproc: workers on each: a number, auto, gpu, cpu, or one number for each host.
    env: what is added to the environment that a login gives there. cwd: where workers start, on every host (None:
    the name of the directory that we are in). preload, is_silent, start_timeout_s: as for a ForkSpawner; silent: only
    where there are several workers. flags: as for an ExecSpawner, and engine, ssh_config, remote_python, nnodes,
    node_timeout and what else the command has for many nodes.
    """

    def __init__(
        self,
        hosts: Sequence[str] = (),
        *,
        nproc: int | str | Sequence[int] = 1,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        preload: Sequence[str] = (),
        is_silent: bool = False,
        start_timeout_s: float | None = None,
        **flags: object,
    ) -> None:
        given = {name: _plain(value) for name, value in flags.items() if value is not None}
        reach = {name: value for name, value in given.items() if name in _REACH}
        self._flags = {name: value for name, value in given.items() if name not in _REACH}
        if hosts:
            reach["hosts"] = ",".join(hosts)
        self._options, self._roster = _read_reach(reach, self._flags, nproc)
        self._nprocs = _read_counts(nproc, self._roster)
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._setup = {
            "path": list(sys.path),
            "argv": list(sys.argv),
            "env": dict(env or {}),
            "nproc": self._nprocs,
            "preload": list(preload),
            "is_silent": is_silent,
            "start_timeout_s": start_timeout_s,
            "flags": self._flags,
        }
        self._lock = RLock()
        self._bridge: Bridge | None = None
        self._numbers = 0  # given to lives, gifts and questions
        self._meeting = ("", 0)
        self._is_closed = False

    # ---- the nodes

    def open(self) -> None:
        """Reach all hosts, and wait until each is ready to start workers. Once. Raises NodeLost: one cannot be
        reached; UsageError, StartError, InfiniRunError: one cannot do what was asked."""
        with self._lock:
            if self._is_closed:
                raise UsageError("this was closed: no worker can be started by it any more")
            if self._bridge is None:
                self._bridge = Bridge(self._options, self._roster, self._cwd, self._setup)
                _live.add(self)
                self._bridge.start()
            bridge = self._bridge
            bridge.wait(lambda: all(o.nproc for o in bridge.outposts) or self._has_problem())
            if bridge.is_over or self._has_problem():
                raise bridge.error()

    def _has_problem(self) -> bool:
        return self._bridge is not None and any(o.problem is not None for o in self._bridge.outposts)

    @property
    def world_size(self) -> int:
        """How many ranks there are: where that is for the hosts to say, they are reached now."""
        return sum(self._counts())

    def _counts(self) -> list[int]:
        """Ranks on each node."""
        if not all(isinstance(count, int) for count in self._nprocs):
            self.open()
        if self._bridge is None:
            return [int(count) for count in self._nprocs]
        return [
            outpost.nproc or int(count) for outpost, count in zip(self._bridge.outposts, self._nprocs, strict=True)
        ]

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user is to be told of the hosts."""
        outposts = () if self._bridge is None else self._bridge.outposts
        return tuple(f"{outpost.name}: {text}" for outpost in outposts for text in outpost.notices)

    # ---- workers

    def start(self, ranks: Sequence[int], restarts: int = 0, *, apart: bool = False) -> list[NodeRunner]:
        """As Spawner.start; raises what `open` does, too."""
        with self._lock:
            self.open()
            assert self._bridge is not None
            counts = self._counts()
            firsts = [0, *accumulate(counts)][:-1]
            if len(ranks) == sum(counts) or not self._meeting[1]:
                self._meeting = self._meet(self._bridge)
            runners: list[NodeRunner] = []
            answers: list[tuple[Outpost, int]] = []
            try:
                for outpost, first, count in zip(self._bridge.outposts, firsts, counts, strict=True):
                    mine = [rank for rank in ranks if first <= rank < first + count]
                    if mine:
                        some = [self._runner(outpost, rank, rank - first) for rank in mine]
                        runners += some
                        answers.append((outpost, self._ask_start(outpost, some, first, restarts, apart)))
                self._await(answers)
            except BaseException:  # KeyboardInterrupt may come between any two steps
                for runner in runners:
                    runner.close()
                raise
        by_rank = {runner.rank: runner for runner in runners}
        return [by_rank[rank] for rank in ranks]

    def _meet(self, bridge: Bridge) -> tuple[str, int]:
        """Where rank 0 listens: a port for each launch, unless one was given."""
        address, port = meeting(self._options, bridge.head.peers)
        return address, port if self._options.rdzv_explicit else bridge.outposts[0].port

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _runner(self, outpost: Outpost, rank: int, local_rank: int) -> NodeRunner:
        assert self._bridge is not None
        return NodeRunner(self._bridge, outpost, self._number(), rank, local_rank)

    def _ask_start(
        self, outpost: Outpost, runners: Sequence[NodeRunner], first: int, restarts: int, apart: bool
    ) -> int:
        assert self._bridge is not None
        question = self._number()
        asked = {
            "id": question,
            "lives": [[runner.number, runner.rank] for runner in runners],
            "restarts": restarts,
            "apart": apart,
            "first": first,
            "world_size": self.world_size,
            "node": outpost.index,
            "nnodes": len(self._roster.hosts),
            "host": outpost.name,
            "address": self._meeting[0],
            "port": self._meeting[1],
        }
        self._bridge.call(partial(outpost.say, {"start": asked}))
        return question

    def _await(self, answers: Sequence[tuple[Outpost, int]]) -> None:
        """Raises what any of them says."""
        bridge = self._bridge
        assert bridge is not None
        bridge.wait(lambda: all(question in outpost.answers or outpost.problem for outpost, question in answers))
        for outpost, question in answers:
            error = outpost.answers.pop(question, None) or outpost.problem
            if isinstance(error, InfiniRunError):
                raise error

    def spread(self, runners: Sequence[Runner], frame: list[Buffer]) -> None:
        """As Spawner.spread: once to each node."""
        lives = [runner for runner in runners if isinstance(runner, NodeRunner)]
        if self._bridge is not None and lives:
            self._bridge.spread(self._number(), lives, bytes_frame(frame, _LIMIT).pieces)

    # ---- the end

    def close(self) -> None:
        """End the outposts, and whatever runs there; wait until nothing is left. Safe twice."""
        self._is_closed = True
        if self._bridge is not None:
            self._bridge.stop()
            self._bridge.join()
        _live.discard(self)

    def forget(self) -> None:
        """In a forked child: all of it is our parent's."""
        self._lock, self._is_closed = RLock(), True
        _live.discard(self)
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.forget()


class NodeRunner:
    """A Runner of a NodeSpawner. number: what it is known by on both sides."""

    def __init__(self, bridge: Bridge, node: Outpost, number: int, rank: int, local_rank: int) -> None:
        self._bridge = bridge
        self.node = node
        self.number = number
        self.rank = rank
        self.local_rank = local_rank
        self.host = node.name
        self.pid = 0
        self.exit: Exit | None = None
        self.problem: InfiniRunError | None = None
        self.ended = False
        self._is_gone = False  # the bridge knows that it has ended, and it need not be told to
        self._told: list[tuple[str, Any]] = []
        self._pinged_s = 0.0
        self._start_s = time.time()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        ours, theirs = socket.socketpair()
        self.tasks, self.events = connect(ours.detach())
        bridge.call(partial(self._begin, theirs))

    def _begin(self, theirs: socket.socket) -> None:
        """In the bridge's thread."""
        if self.node.problem is not None:
            theirs.close()
            self.tell("lost", self.node.problem)
            return
        self.node.lives[self.number] = self
        self.node.lanes.add(self.number, theirs)

    @property
    def clock_s(self) -> float:
        return self.node.clock_s

    # ---- from the bridge's thread

    def tell(self, kind: str, value: object) -> None:
        """Something happened to it; `poll` takes it in."""
        if kind == "pid" and isinstance(value, int):
            self.pid = value
        elif kind == "pinged":
            self._pinged_s = time.monotonic()
        else:
            self._told.append((kind, value))
            self._is_gone = self._is_gone or kind in ("ended", "lost")
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    # ---- as a Runner

    def fds(self) -> Sequence[int]:
        return () if self.ended else (self._bell,)

    def due_s(self) -> float | None:
        return None

    def poll(self) -> None:
        if self.ended or self._bell < 0:
            return
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        while self._told:
            kind, value = self._told.pop(0)
            if kind == "exit":
                self.exit = value
            elif kind == "lost":
                self.problem = value
                self.exit = self.exit or self._unknown()
            self.ended = self.ended or kind in ("ended", "lost")

    def _unknown(self) -> Exit:
        """Its node is gone, and with it how it ended."""
        return Exit(
            rank=self.rank,
            local_rank=self.local_rank,
            host=self.host,
            pid=self.pid or None,
            status_lost=True,
            start_s=self._start_s,
            end_s=time.time(),
        )

    def pinged_s(self) -> float:
        return self._pinged_s

    def signal(self, number: int) -> int:
        """One whose end is just on its way to us counts as reached."""
        if number and number not in signal.valid_signals():
            raise OSError(22, f"there is no signal {number}")
        if self.exit is not None:
            return 0
        self._say("signal", number=number)
        return 1

    def stop(self, number: int = 0) -> None:
        self._say("stop", number=number)

    def kill(self) -> None:
        self._say("kill")

    def _say(self, kind: str, **value: object) -> None:
        self._bridge.call(lambda: self.node.say({kind: {"life": self.number, **value}}))

    def report(self) -> Report:
        """Of this one alone."""
        exit_ = self.exit or Exit(rank=self.rank, local_rank=self.local_rank, host=self.host, pid=self.pid or None)
        return Report(
            launch_id=self._bridge.head.launch_id,
            run_id="",
            host=self.host,
            world_size=1,
            start_s=self._start_s,
            end_s=exit_.end_s or time.time(),
            exits=(exit_,),
            first_failure=exit_ if exit_.is_failure else None,
        )

    def close(self) -> None:
        if self._bell < 0:
            return
        self.tasks.close(0.0)
        self.events.close()
        if not self._is_gone:
            self._say("close")
            if not self._bridge.wait(lambda: self._is_gone, _END_S) and not self._bridge.is_over:
                self._bridge.kill()  # the node does not do what it is told
                self._bridge.join()
        self._bridge.call(partial(self.node.lanes.drop, self.number))
        self.ended = True
        self._close_bell()

    def _close_bell(self) -> None:
        bell, self._bell = self._bell, -1
        os.close(bell)

    def forget(self) -> None:
        self.tasks.forget()
        self.events.forget()
        self.ended = True
        if self._bell >= 0:
            self._close_bell()


_live: WeakSet[NodeSpawner] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that just ends: what it holds on other hosts ends with it."""
    for spawner in list(_live):
        spawner.close()


def _forget_all() -> None:
    for spawner in list(_live):
        spawner.forget()


os.register_at_fork(after_in_child=_forget_all)


def _read_reach(reach: Mapping[str, object], flags: Mapping[str, object], nproc: object) -> tuple[Options, Roster]:
    """What the head is to do: one outpost on each host. Raises UsageError, for the workers' flags, too."""
    count = nproc if isinstance(nproc, (int, str)) else 1
    read_flags({"console": "prefix", **flags, "nproc_per_node": count, "stdin": "none"}, ("true",), {})
    words = python_command("outpost")
    words[0] = str(reach.get("remote_python") or words[0])
    reach = {**reach, "engine": _engine(reach), "nproc_per_node": count}
    if "grace" in flags:
        reach["grace"] = flags["grace"]
    request = read_flags(reach, tuple(words), os.environ)
    if request.roster is None:
        raise UsageError(f"engine={reach['engine']!r}: functions are run on hosts by {', '.join(ENGINES)}")
    assert request.options is not None
    options = replace(request.options, nproc_per_node=1, grace_s=request.options.grace_s + _SPARE_S)
    return options, request.roster


def _engine(reach: Mapping[str, Any]) -> str:
    """As asked; auto, or nothing: the allocation's own, where the hosts are in one, else ssh."""
    asked = str(reach.get("engine") or "auto")
    if asked != "auto":
        return asked
    from infini_run.auto import read_file
    from infini_run.hostlist import parse_hosts
    from infini_run.sites import detect

    site = detect(os.environ, read_file)
    if site is None or site.engine not in ENGINES or site.form != BATCH:
        return "ssh"
    hosts = parse_hosts(reach["hosts"], "hosts") if reach.get("hosts") else ()
    return site.engine if {host.name for host in hosts} <= {host.name for host in site.hosts} else "ssh"


def _read_counts(nproc: int | str | Sequence[int], roster: Roster) -> list[int | str]:
    """For each host. Raises UsageError: one has no room for so many."""
    hosts = roster.hosts
    counts: list[int | str] = [nproc] * len(hosts) if isinstance(nproc, (int, str)) else list(nproc)
    if len(counts) != len(hosts):
        raise UsageError(f"nproc_per_node={nproc!r}: {len(counts)} numbers for {len(hosts)} hosts")
    for host, count in zip(hosts, counts, strict=True):
        if host.slots and isinstance(count, int) and count > host.slots:
            raise UsageError(f"nproc_per_node={nproc!r}, but hosts has room for {host.slots} on {host.name}")
    return counts


def _plain(value: object) -> Any:
    """A flag as it can be said to another host."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    return value
