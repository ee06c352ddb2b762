"""The spawn server of a node: it starts the workers of a launcher on another host, and passes on their messages.

Its agent runs it, one on each node; its descriptor 0 is the connection to the NodesThread on the other side
(stream_multiplexer.py). It passes workers' messages on as bytes, and their output goes the way of any rank's. When
the stream ends, or after a signal of the agent, everything here ends; after its SIGKILL, its guard ends its workers.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress

from infini_run.core.signal_pipe import STOP_SIGNALS, SignalPipe
from infini_run.core.write_buffer import write_pending
from infini_run.crews.spawn.exec_spawner import ExecSpawner
from infini_run.crews.spawn.node_messages import DOWN, read
from infini_run.crews.spawn.process_watch import ProcessWatch
from infini_run.crews.spawn.spawner import PING_INTERVAL_S
from infini_run.crews.spawn.stream_multiplexer import Multiplexer
from infini_run.errors import InfiniRunError, StartError, UsageError
from infini_run.lean_os import drop_coerced_locale
from infini_run.multinode.link.record_codec import to_jsonable
from infini_run.node.ports import free_port
from infini_run.plan.model import RankRange
from infini_run.system.io_sizes import BACKLOG_LIMIT, LARGE_CHUNK
from infini_run.system.poller import READ, WRITE, Poller
from infini_run.system.signal_numbers import SIGINT, SIGQUIT
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from infini_run.crews.spawn.worker_group import ExecProcess, WorkerGroup


def main() -> None:
    """Run as the process of a spawn server."""
    drop_coerced_locale()
    stream = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    SpawnServer(stream).run()


class HostedWorker:
    """A worker of this node: its process, whose channel is a stream.

    Args:
        number: its identity on both sides.
        on_change: called when something may have happened to the process.
    """

    def __init__(self, number: int, process: ExecProcess, on_change: Callable[[HostedWorker], None]) -> None:
        self.number = number
        self.process = process
        self.has_exit = self.has_end = False
        self.last_ping_s = 0.0
        self._on_change = on_change

    def check_process(self) -> None:
        """Act on what its group has noted of its process."""
        self._on_change(self)


class SpawnServer:
    """stream: the connection to the agent, and by it to the NodesThread."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._out = bytearray()
        self._poller = Poller()
        self._streams = Multiplexer(self._poller, self._send, self._on_control, takes_broadcasts=True)
        self._workers: dict[int, HostedWorker] = {}
        self._watches: dict[WorkerGroup, ProcessWatch] = {}
        self._stuck_watches: list[Callable[[], None]] = []  # what ends each
        self._spawner: ExecSpawner | None = None
        self._signals: SignalPipe | None = None
        self._has_lost = False  # the other side
        self._is_stopping = False  # nothing is started any more

    def run(self) -> None:
        """Serve until the other side has gone, or nothing is left after a stop signal."""
        try:
            while not self._has_lost and not (self._is_stopping and not self._workers and not self._out):
                self._watch()
                dues = [due_s for group in self._watches if (due_s := group.next_deadline_s()) is not None]
                self._poller.poll(max(0.0, min(dues) - time.monotonic()) if dues else None)
                self._check_due()
        finally:
            for number in list(self._workers):
                self._close(number)
            for unwatch in self._stuck_watches:
                unwatch()
            if self._spawner is not None:
                self._spawner.close()
            self._stream.close()

    def _watch(self) -> None:
        for watch in self._watches.values():
            watch.update()
        self._poller.watch(self._stream.fileno(), READ | (WRITE if self._out else 0), self._on_stream)
        self._streams.set_room(len(self._out) < BACKLOG_LIMIT)

    # ---- the stream

    def _on_stream(self) -> None:
        self._flush()
        try:
            data = self._stream.recv(LARGE_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._streams.feed(data)
        else:
            self._has_lost = True

    def _send(self, data: bytes) -> None:
        self._out += data
        self._flush()

    def _flush(self) -> None:
        if not self._has_lost and not write_pending(self._stream.fileno(), self._out):
            self._has_lost = True

    def _send_control(self, kind: str, /, **value: object) -> None:
        self._streams.send_control({kind: value})

    # ---- control messages of the NodesThread

    def _on_control(self, message: dict[str, Any]) -> None:
        kind, value = read(message, DOWN)
        worker = self._workers.get(value.get("worker", 0))
        if kind == "setup":
            self._set_up(value)
        elif kind == "start":
            self._start(value)
        elif worker is not None and kind == "signal":
            _send_signal(worker, value["number"])
        elif worker is not None and kind == "stop":
            worker.process.group.stop(value["number"])
        elif worker is not None and kind == "kill":
            worker.process.group.kill()
        elif worker is not None and kind == "close":
            self._close(worker.number)
            self._send_control("ended", worker=worker.number, value="")

    def _set_up(self, asked: dict[str, Any]) -> None:
        environ = {**os.environ, **asked["env"]}
        given = {"nproc": asked["nproc"][asked["node"]], "env": environ, **asked["flags"]}
        try:
            spawner = ExecSpawner(**given)
            if asked["preload"] and (spawner.world_size > 1 or not asked["is_silent"]):
                from infini_run.crews.spawn.fork_spawner import ForkSpawner

                timeout_s, is_silent = asked["start_timeout_s"], asked["is_silent"]
                spawner = fork = ForkSpawner(
                    asked["preload"],
                    start_timeout_s=timeout_s,
                    is_silent=is_silent,
                    path=[*asked["path"], *(folder for folder in sys.path if folder not in asked["path"])],
                    argv=asked["argv"],
                    **given,
                )
                self._spawner = fork
                fork.open()
        except InfiniRunError as error:
            self._send_control("refused", error=_error_fields(error))
            return
        self._spawner = spawner
        self._signals = SignalPipe()
        self._poller.watch(self._signals.fd, READ, self._on_signals)
        self._send_control("up", nproc=spawner.world_size, port=free_port(), notices=list(spawner.notices))

    def _start(self, asked: dict[str, Any]) -> None:
        """Start some of this node's ranks, each with its number on the other side."""
        assert self._spawner is not None
        numbers: dict[int, int] = {rank: number for number, rank in asked["workers"]}
        span = RankRange(first=asked["first"], world_size=asked["world_size"])
        problem: dict[str, object] | None = None
        try:
            if self._is_stopping:
                raise StartError("this node is being stopped", "starting", 125)
            rendezvous = asked["address"], asked["port"]
            within = os.environ.get(MARKER_VARIABLE, "")
            self._spawner.become_node(asked["node"], asked["nnodes"], asked["host"], span, rendezvous, within)
            processes = self._spawner.start(list(numbers), asked["restarts"], separate_groups=asked["apart"])
        except InfiniRunError as error:
            problem = _error_fields(error)
        else:
            for process in processes:
                self._adopt(numbers[process.rank], process)
        for number in numbers.values():
            if number in self._workers:
                self._send_control("pid", worker=number, value=self._workers[number].process.pid)
        self._send_control("answer", id=asked["id"], port=free_port(), error=problem)
        for watch in list(self._watches.values()):
            watch.poll()  # something may have happened already

    def _adopt(self, number: int, process: ExecProcess) -> None:
        """Pass its channel's bytes on unchanged: its own ends of it have nothing to do."""
        sock = socket.socket(fileno=os.dup(process.tasks.fileno()))
        process.tasks.close_copy()
        process.events.close_copy()
        self._streams.add(number, sock)
        worker = self._workers[number] = HostedWorker(number, process, self._check_worker)
        if process.group not in self._watches:
            self._watches[process.group] = ProcessWatch(process.group, self._poller)
        self._watches[process.group].workers.append(worker)

    # ---- what happens here

    def _check_due(self) -> None:
        for watch in list(self._watches.values()):
            due_s = watch.group.next_deadline_s()
            if due_s is not None and time.monotonic() >= due_s:
                watch.poll()

    def _check_worker(self, worker: HostedWorker) -> None:
        process = worker.process
        last_ping_s = process.last_ping_s()
        if last_ping_s - worker.last_ping_s >= PING_INTERVAL_S:
            worker.last_ping_s = last_ping_s
            self._send_control("pinged", worker=worker.number)
        if process.exit is not None and not worker.has_exit:
            worker.has_exit = True
            self._when_read(worker, "exit", to_jsonable(process.exit))
        if process.group.ended and not worker.has_end:
            worker.has_end = True
            self._when_read(worker, "ended", process.stuck)

    def _when_read(self, worker: HostedWorker, kind: str, value: object) -> None:
        """Report its end behind the bytes that it has sent before."""
        stream = self._streams.find(worker.number)
        assert stream is not None

        def report() -> None:
            if worker.number in self._workers:
                self._send_control(kind, worker=worker.number, value=value)
                if kind == "ended":
                    if value:
                        self._watch_stuck(worker)
                    self._close(worker.number)

        stream.when_read(report)

    def _watch_stuck(self, worker: HostedWorker) -> None:
        number = worker.number

        def on_end(known: bool) -> None:
            self._send_control("gone", worker=number, value=known)

        self._stuck_watches.append(worker.process.watch_stuck(self._poller, on_end))

    def _close(self, number: int) -> None:
        """Close it: nothing of it is left here. Safe twice."""
        worker = self._workers.pop(number, None)
        if worker is not None:
            group = worker.process.group
            watch = self._watches[group]
            watch.workers.remove(worker)
            if not watch.workers:
                watch.close()
                del self._watches[group]
            worker.process.close()
            self._streams.drop(number)

    def _on_signals(self) -> None:
        """Act on signals of the agent: a stop of the launch from outside, or a signal for all ranks."""
        assert self._signals is not None
        for number in self._signals.read():
            for worker in self._workers.values():
                if number in STOP_SIGNALS:
                    worker.process.group.stop(number if number in (SIGINT, SIGQUIT) else 0)
                else:
                    _send_signal(worker, number)
            self._is_stopping = self._is_stopping or number in STOP_SIGNALS


def _send_signal(worker: HostedWorker, number: int) -> None:
    """Send a signal as far as that is permitted: a process that has become another user's gets none."""
    with suppress(InfiniRunError):
        worker.process.signal(number)


def _error_fields(error: InfiniRunError) -> dict[str, object]:
    return {
        "is_usage": isinstance(error, UsageError),
        "text": str(error),
        "step": getattr(error, "step", "starting"),
        "errno": getattr(error, "errno", 0),
        "rank": getattr(error, "rank", None),
    }
