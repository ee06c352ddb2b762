"""A worker's process on another host, as a WorkerProcess and a separate ProcessGroup (spawner.py).

Its channel is a socket of this process, whose other end is a stream of the multiplexer to its node. The thread of the
NodesThread notes what happens to it (`note`), and `poll` takes that in.
"""

from __future__ import annotations

import signal
import socket
import time
from _functools import partial
from _thread import RLock
from _weakref import ref

from infini_run.channel import connect
from infini_run.core.group import forking
from infini_run.crews.spawn.spawner import KILL_ANSWER_S
from infini_run.report.exit import Exit
from infini_run.system.fork_hooks import call_in_forked_children, close_link
from infini_run.system.wakeup import Wakeup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.crews.spawn.nodes_thread import NodesThread
    from infini_run.crews.spawn.remote_node import RemoteNode
    from infini_run.errors import InfiniRunError
    from infini_run.system.poller import Poller


class RemoteWorkerProcess:
    """A process of a RemoteSpawner. number: its identity on both sides of the link."""

    def __init__(self, link: NodesThread, node: RemoteNode, number: int, rank: int, local_rank: int) -> None:
        self._link = link
        self.node = node
        self.number = number
        self.rank = rank
        self.local_rank = local_rank
        self.host = node.name
        self.pid = 0
        self.exit: Exit | None = None
        self._problem: InfiniRunError | None = None
        self.ended = False
        self.stuck = ""
        self._has_ended_there = False  # as the NodesThread knows
        self._stuck_end: bool | None = True  # as for `on_end` of `watch_stuck`; None: it has not come
        self._on_stuck_end: Callable[[bool], None] | None = None
        self._lock = RLock()  # for these two, which both threads use
        self._pending: list[tuple[str, Any]] = []
        self._last_ping_s = 0.0
        self._start_s = time.time()
        self._wakeup = Wakeup()
        with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
            ours, theirs = socket.socketpair()
            self._theirs = ref(theirs)  # it is the link's thread's
            self.tasks, self.events = connect(ours.detach())
            call_in_forked_children(self)
        link.call(partial(self._begin, theirs))

    def _begin(self, theirs: socket.socket) -> None:
        """Begin, in the link's thread."""
        if self.node.problem is not None:
            close_link(theirs)
            self.note("lost", self.node.problem)
            return
        self.node.workers[self.number] = self
        self.node.streams.add(self.number, theirs)

    @property
    def clock_s(self) -> float:
        return self.node.clock_s

    # ---- from the link's thread

    def note(self, kind: str, value: object) -> None:
        """Note what happened to it, for `poll`. kind: as RemoteWorker.note."""
        if kind == "pid" and isinstance(value, int):
            self.pid = value
        elif kind == "pinged":
            self._last_ping_s = time.monotonic()
        elif kind == "gone":
            self._end_stuck(bool(value))
        else:
            if kind == "ended" and value:
                self._stuck_end = None
            self._pending.append((kind, value))
            self._has_ended_there = self._has_ended_there or kind in ("ended", "lost")
            self._wakeup.wake()
            if kind == "lost":
                self._end_stuck(True)  # nobody there can answer; when it starts elsewhere its node's fence says

    def _end_stuck(self, known: bool) -> None:
        with self._lock:
            self._stuck_end = known
            on_end, self._on_stuck_end = self._on_stuck_end, None
        if on_end is not None:
            on_end(known)

    # ---- as a ProcessGroup

    @property
    def group(self) -> RemoteWorkerProcess:
        return self

    @property
    def problem(self) -> InfiniRunError | None:
        """The problem, as of a WorkerProcess. The processes of a lost node learn of it one after the other; who asks
        before this one did gets the same answer."""
        return self._problem or (None if self.ended or self.exit is not None else self.node.problem)

    def fds(self) -> Sequence[int]:
        return () if self.ended else (self._wakeup.fileno(),)

    def next_deadline_s(self) -> float | None:
        return None

    def poll(self) -> None:
        if self.ended or not self._wakeup.clear():
            return
        while self._pending:
            kind, value = self._pending.pop(0)
            if kind == "exit":
                self.exit = value
            elif kind == "lost":
                self._problem = value
                self.exit = self.exit or self._unknown()
            elif kind == "ended":
                self.stuck = value or ""
            self.ended = self.ended or kind in ("ended", "lost")

    def _unknown(self) -> Exit:
        """Return the Exit of a process on a lost node: how it ended is unknown, and so is when. Its time is the last
        one at which its node was certainly alive. A rank elsewhere may fail because of the loss before anybody
        notices it."""
        return Exit(
            rank=self.rank,
            local_rank=self.local_rank,
            host=self.host,
            pid=self.pid or None,
            status_lost=True,
            start_s=self._start_s,
            end_s=max(self._start_s, self.node.peer.alive_wall_s),
        )

    # ---- as a WorkerProcess

    def last_ping_s(self) -> float:
        return self._last_ping_s

    def signal(self, number: int) -> int:
        """Send a signal as WorkerProcess.signal does; a process whose exit is still on its way here counts as
        reached."""
        if number and number not in signal.valid_signals():
            raise OSError(22, f"unknown signal {number}")
        if self.exit is not None:
            return 0
        self._request("signal", number=number)
        return 1

    def stop(self, number: int = 0) -> None:
        self._request("stop", number=number)

    def kill(self) -> None:
        self._request("kill")

    def _request(self, kind: str, **value: object) -> None:
        self._link.call(lambda: self.node.send_control({kind: {"worker": self.number, **value}}))

    def watch_stuck(self, poller: Poller, on_end: Callable[[bool], None]) -> Callable[[], None]:
        with self._lock:
            known = self._stuck_end
            if known is None:
                self._on_stuck_end = on_end
        if known is not None:
            on_end(known)
        return self._forget_stuck

    def _forget_stuck(self) -> None:
        """Forget what is stuck, without the lock: a forked child calls this, too, where another thread may have had
        it."""
        self._on_stuck_end = None

    def close(self) -> None:
        if self._wakeup.fileno() < 0:
            return
        self.tasks.close(0.0)
        self.events.close()
        if not self._has_ended_there:
            self._request("close")
            if not self._link.wait(lambda: self._has_ended_there, KILL_ANSWER_S) and not self._link.is_over:
                self._link.kill()  # the node does not obey
                self._link.join()
        self._link.call(partial(self.node.streams.drop, self.number))
        self.ended = True
        self._wakeup.close()

    def after_fork_in_child(self) -> None:
        self._lock = RLock()  # another thread may have had it
        self.ended = True  # the channel's copies are closed by its own module
        theirs = self._theirs()
        if theirs is not None:
            theirs.close()
        self._wakeup.after_fork_in_child()
