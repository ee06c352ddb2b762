"""A worker on another host, as its supervisor has it: a Runner as any (spawner.py). Its channel is a socket here with
a lane behind it; what happens to it is told by the bridge's thread, and taken in by whoever polls it."""

from __future__ import annotations

import os
import signal
import socket
import time
from _functools import partial

from infini_run.channel import connect
from infini_run.report.report import Exit, Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.crews.node_link import NodeLink, RemoteNode
    from infini_run.errors import InfiniRunError

_END_S = 15.0  # that a node may take to end a worker by SIGKILL; the core gives up after 5


class RemoteWorkerProcess:
    """A Runner of a RemoteSpawner. number: what it is known by on both sides."""

    def __init__(self, bridge: NodeLink, node: RemoteNode, number: int, rank: int, local_rank: int) -> None:
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

    def after_fork_in_child(self) -> None:
        self.tasks.forget()
        self.events.forget()
        self.ended = True
        if self._bell >= 0:
            self._close_bell()
