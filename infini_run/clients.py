"""The engine's commands, alive: each in a group of the core of its own, a window of them at a time, tried again where
it failed for a reason that passes. Their stderr is kept for the case that they fail.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import time

from infini_run.errors import ProgramMissing
from infini_run.group import PIPE, Group, Spec, debug_flags
from infini_run.link import Wire
from infini_run.plan import MARK
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.engines import Client, Engine

_TRIES = 5
_RETRY_S = (0.1, 0.5)  # doubled each time: many that were refused together must not come again together
_TERM = 15


@record
class Ended:
    """A command that has ended: its exit code (128 + n for signal n), the last that it wrote to stderr."""

    client: Client
    tries: int
    code: int
    words: str


class _Running:
    def __init__(self, client: Client, tries: int, group: Group) -> None:
        self.client = client
        self.tries = tries
        self.group = group
        self.code = 0
        self.words = ""


class Clients:
    """is_reaching: whether nodes (by index) are still to be heard of: so long their command counts in the window."""

    def __init__(
        self,
        engine: Engine,
        environ: Mapping[str, str],
        launch_id: str,
        is_reaching: Callable[[Sequence[int]], bool],
    ) -> None:
        self._engine = engine
        self._environ = environ
        self._mark = os.fsencode(f"{MARK}={launch_id}-head")
        self._is_reaching = is_reaching
        self._waiting: list[tuple[float, Client, int]] = []  # not before when, tries so far
        self._running: list[_Running] = []
        self.next_start_s = float("inf")

    def add(self, clients: Sequence[Client]) -> None:
        """To be started as the window lets."""
        self._waiting += [(0.0, client, 0) for client in clients]

    def start_due(self) -> list[tuple[Client, Wire]]:
        """Start those whose time has come; the links of those that are links themselves. Raises StartError,
        ProgramMissing."""
        now_s = time.monotonic()
        busy = sum(1 for running in self._running if self._is_reaching(running.client.nodes))
        started = []
        while self._waiting and busy < self._engine.WINDOW and self._waiting[0][0] <= now_s:
            _, client, tries = self._waiting.pop(0)
            wire = self._start(client, tries)
            if wire is not None:
                started.append((client, wire))
            busy += 1
        has_room = bool(self._waiting) and busy < self._engine.WINDOW
        self.next_start_s = self._waiting[0][0] if has_room else float("inf")
        return started

    def _start(self, client: Client, tries: int) -> Wire | None:
        """The mark is left out of its environment: a connection that ssh keeps open for others (ControlPersist) is
        no stray of ours."""
        path = shutil.which(client.argv[0], path=self._environ.get("PATH"))
        if path is None:
            raise ProgramMissing(f"{client.argv[0]} is not on PATH: --engine needs it", client.argv[0])
        env = [os.fsencode(f"{name}={value}") for name, value in client.env]
        spec = Spec(0, os.fsencode(path), [os.fsencode(word) for word in client.argv], env)
        spec.dies_with_us = _is_main_thread()
        base = [os.fsencode(f"{name}={value}") for name, value in self._environ.items() if name != MARK]
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        ours, theirs = socket.socketpair() if self._engine.OVER_STDIO else (None, None)
        group = None
        try:
            stdio = null if theirs is None else theirs.fileno()
            spec.stdio = [stdio, stdio, PIPE]
            group = Group(
                1,
                mark=self._mark,
                grace_s=0.0,
                stop_signal=_TERM,
                stop_scope="group",
                debug=debug_flags(self._environ),
            )
            group.spawn([spec], base)
        except BaseException:
            if group is not None:
                group.close()
            if ours is not None:
                ours.close()
            raise
        finally:
            os.close(null)
            if theirs is not None:
                theirs.close()
        self._running.append(_Running(client, tries, group))
        return None if ours is None else Wire(fd := ours.detach(), fd, awaits_opening=True)

    def fds(self) -> list[int]:
        """Readable when `step` has something to do."""
        return [running.group.fileno() for running in self._running]

    def step(self) -> list[Ended]:
        """Those that have ended since the last call."""
        ended = []
        for running in list(self._running):
            for event in running.group.step():
                if event.kind == "exited":
                    running.code = 128 + event.signal if event.signal else event.code
                elif event.kind == "start_failed":
                    running.code, running.words = 1, os.strerror(event.signal)
            if running.group.ended:
                words = running.words or running.group.tail(0).decode("utf-8", "replace")
                ended.append(Ended(client=running.client, tries=running.tries, code=running.code, words=words))
                self._running.remove(running)
                running.group.close()
        return ended

    def retry(self, ended: Ended) -> bool:
        """Whether it will be tried once more."""
        if ended.tries + 1 >= _TRIES or not self._engine.is_passing(ended.code, ended.words):
            return False
        due_s = time.monotonic() + random.uniform(*_RETRY_S) * 2**ended.tries
        self._waiting.append((due_s, ended.client, ended.tries + 1))
        self._waiting.sort(key=lambda item: item[0])
        self.next_start_s = min(self.next_start_s, due_s)
        return True

    @property
    def are_alive(self) -> bool:
        return bool(self._running)

    def give_up(self) -> None:
        """Start no more, and kill those whose nodes have not been heard of."""
        self._waiting.clear()
        self.next_start_s = float("inf")
        for running in self._running:
            if self._is_reaching(running.client.nodes):
                running.group.kill()

    def close(self) -> None:
        """Kill and reap. Safe twice."""
        self._waiting.clear()
        while self._running:
            self._running.pop().group.close()


def _is_main_thread() -> bool:
    """The parent-death signal is the spawning thread's (prctl(2)): only the main one lives as long as we do."""
    from _thread import get_native_id

    return get_native_id() == os.getpid()
