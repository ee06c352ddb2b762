"""An outpost: what a launcher on another host has here. It starts workers, and passes on what they and it say.

Its agent runs it, one on each node; its descriptor 0 is a stream to the bridge on the other side
(stream_multiplexer.py). Workers' messages are passed on as bytes, their output goes the way of any rank's. When the
stream ends, or the agent says so by a signal, everything here ends; when it is killed itself, its guard ends its
workers.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from infini_run.crews.exec_spawner import ExecSpawner
from infini_run.crews.stream_multiplexer import Multiplexer
from infini_run.errors import InfiniRunError, StartError, UsageError
from infini_run.multinode.record_codec import to_jsonable
from infini_run.node.ports import free_port
from infini_run.plan.model import RankRange
from infini_run.system.poller import READ, WRITE, Poller
from infini_run.system.signal_pipe import STOP_SIGNALS, SignalPipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.crews.worker_group import ExecProcess

_HELD = 1 << 20  # bytes that our agent has not taken: then our workers wait
_PIECE = 1 << 18
_INT, _QUIT = 2, 3
_PING_S = 0.1  # signs of life (WATCHDOG=1) that come faster are told once


def main() -> None:
    """The process of an outpost."""
    stream = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    SpawnServer(stream).run()


class HostedWorker:
    """A worker here: its runner, whose channel is a lane."""

    def __init__(self, number: int, runner: ExecProcess) -> None:
        self.number = number
        self.runner = runner
        self.fds: set[int] = set()  # that are watched for it
        self.has_exit = self.has_end = False
        self.pinged_s = 0.0


class SpawnServer:
    """stream: to the agent, and by it to the bridge."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._out = bytearray()
        self._poller = Poller()
        self._lanes = Multiplexer(self._poller, self._send, self._take, takes_gifts=True)
        self._lives: dict[int, HostedWorker] = {}
        self._watched: set[int] = set()
        self._spawner: ExecSpawner | None = None
        self._signals: SignalPipe | None = None
        self._has_lost = False  # the other side
        self._is_stopping = False  # nothing is started any more

    def run(self) -> None:
        """Until the other side has gone, or nothing is left after we were told to stop."""
        try:
            while not self._has_lost and not (self._is_stopping and not self._lives and not self._out):
                self._watch()
                due_s = min(filter(None, (life.runner.group.due_s() for life in self._lives.values())), default=None)
                self._poller.poll(None if due_s is None else max(0.0, due_s - time.monotonic()))
                self._follow()
        finally:
            for number in list(self._lives):
                self._close(number)
            if self._spawner is not None:
                self._spawner.close()
            self._stream.close()

    def _watch(self) -> None:
        for life in self._lives.values():
            life.fds = set(life.runner.group.fds())
        wanted = {fd for life in self._lives.values() for fd in life.fds}
        for fd in self._watched - wanted:
            self._poller.unwatch(fd)
        for fd in wanted:
            self._poller.watch(fd, READ, _nothing)
        self._watched = wanted
        self._poller.watch(self._stream.fileno(), READ | (WRITE if self._out else 0), self._turn)
        self._lanes.set_room(len(self._out) < _HELD)

    # ---- the stream

    def _turn(self) -> None:
        self._flush()
        try:
            data = self._stream.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._lanes.feed(data)
        else:
            self._has_lost = True

    def _send(self, data: bytes) -> None:
        self._out += data
        self._flush()

    def _flush(self) -> None:
        while self._out and not self._has_lost:
            try:
                sent = self._stream.send(memoryview(self._out)[:_PIECE], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._has_lost = True
                return
            del self._out[:sent]

    def _say(self, kind: str, /, **value: object) -> None:
        self._lanes.say({kind: value})

    # ---- what the other side says

    def _take(self, word: dict[str, Any]) -> None:
        kind, value = word.popitem()
        life = self._lives.get(value["life"]) if "life" in value else None
        if kind == "setup":
            self._set_up(value)
        elif kind == "start":
            self._start(value)
        elif life is not None and kind == "signal":
            life.runner.signal(value["number"])
        elif life is not None and kind == "stop":
            life.runner.group.stop(value["number"])
        elif life is not None and kind == "kill":
            life.runner.group.kill()
        elif life is not None and kind == "close":
            self._close(life.number)
            self._say("ended", life=life.number)

    def _set_up(self, asked: dict[str, Any]) -> None:
        environ = {**os.environ, **asked["env"]}
        given = {"nproc": asked["nproc"][asked["node"]], "env": environ, **asked["flags"]}
        try:
            spawner = ExecSpawner(**given)
            if asked["preload"] and (spawner.world_size > 1 or not asked["is_silent"]):
                from infini_run.crews.fork_spawner import ForkSpawner

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
            self._say("refused", **_words_of(error))
            return
        self._spawner = spawner
        self._signals = SignalPipe()
        self._poller.watch(self._signals.fd, READ, self._hear_signals)
        self._say("up", nproc=spawner.world_size, port=free_port(), notices=list(spawner.notices))

    def _start(self, asked: dict[str, Any]) -> None:
        """Some of our ranks, each with the number that it is known by on the other side."""
        assert self._spawner is not None
        numbers: dict[int, int] = {rank: number for number, rank in asked["lives"]}
        span = RankRange(first=asked["first"], world_size=asked["world_size"])
        answer: dict[str, object] = {}
        try:
            if self._is_stopping:
                raise StartError("this node is being stopped", "starting", 125)
            meeting = str(asked["address"]), int(asked["port"])
            self._spawner.join(asked["node"], asked["nnodes"], asked["host"], span, meeting)
            runners = self._spawner.start(list(numbers), asked["restarts"], apart=asked["apart"])
        except InfiniRunError as error:
            answer = _words_of(error)
        else:
            for runner in runners:
                self._adopt(numbers[runner.rank], runner)
        for number in numbers.values():
            if number in self._lives:
                self._say("pid", life=number, value=self._lives[number].runner.pid)
        self._say("answer", id=asked["id"], port=free_port(), **answer)

    def _adopt(self, number: int, runner: ExecProcess) -> None:
        """Its channel's bytes are passed on as they are: its own ends of it have nothing to do."""
        sock = socket.socket(fileno=os.dup(runner.tasks.fileno()))
        runner.tasks.forget()
        runner.events.forget()
        self._lives[number] = HostedWorker(number, runner)
        self._lanes.add(number, sock)

    # ---- what happens here

    def _follow(self) -> None:
        for life in self._lives.values():
            life.runner.group.poll()  # all of them first: what one of a group takes in is the others', too
        for life in list(self._lives.values()):
            runner = life.runner
            pinged_s = runner.last_ping_s()
            if pinged_s - life.pinged_s >= _PING_S:
                life.pinged_s = pinged_s
                self._say("pinged", life=life.number)
            if runner.exit is not None and not life.has_exit:
                life.has_exit = True
                self._when_read(life, "exit", to_jsonable(runner.exit))
            if runner.group.ended and not life.has_end:
                life.has_end = True
                self._when_read(life, "ended", None)

    def _when_read(self, life: HostedWorker, kind: str, value: object) -> None:
        """Tell of its end after what it has said before."""
        lane = self._lanes.find(life.number)
        assert lane is not None

        def tell() -> None:
            if life.number in self._lives:
                self._say(kind, life=life.number, value=value)
                if kind == "ended":
                    self._close(life.number)

        lane.when_read(tell)

    def _close(self, number: int) -> None:
        """Nothing of it is left here. Safe twice."""
        life = self._lives.pop(number, None)
        if life is not None:
            for fd in life.fds:  # others of its group have them watched again
                self._poller.unwatch(fd)
                self._watched.discard(fd)
            life.runner.close()
            self._lanes.drop(number)

    def _hear_signals(self) -> None:
        """Told by our agent: the launch is stopped from outside, or a signal is for all ranks."""
        assert self._signals is not None
        for number in self._signals.read():
            for life in self._lives.values():
                if number in STOP_SIGNALS:
                    life.runner.group.stop(number if number in (_INT, _QUIT) else 0)
                else:
                    life.runner.signal(number)
            self._is_stopping = self._is_stopping or number in STOP_SIGNALS


def _words_of(error: InfiniRunError) -> dict[str, object]:
    is_usage = isinstance(error, UsageError)
    words: dict[str, object] = {"kind": "usage" if is_usage else "start", "text": str(error)}
    return words | {
        "step": getattr(error, "step", "starting"),
        "errno": getattr(error, "errno", 0),
        "rank": getattr(error, "rank", None),
    }


def _nothing() -> None:
    """What happened to workers is looked at after each wait."""
