"""The engine's commands, alive: each in a group of the core of its own, a window of them at a time, tried again where
it failed for a reason that passes. Their stderr is kept for the case that they fail.
"""

from __future__ import annotations

import os
import time
from _functools import partial
from _socket import socketpair  # the C module: `socket` costs 5 ms

from infini_run.core.group import PIPE, Group, SpawnSpec, debug_flags, is_main_thread
from infini_run.errors import ProgramMissing, StartError
from infini_run.multinode.connection import Connection
from infini_run.multinode.engines import EngineCommand
from infini_run.record import record
from infini_run.system.poller import READ
from infini_run.system.resource_limits import explain_command
from infini_run.system.shell import find_program
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.multinode.engines import Engine
    from infini_run.system.poller import Poller

_TRIES = 5
_RETRY_S = (0.1, 0.5)  # doubled each time: many that were refused together must not come again together
_TERM = 15


@record
class Ended:
    """A command that has ended: its exit code (128 + n for signal n; None: somebody else has
    reaped it), the last that it wrote to stderr."""

    client: EngineCommand
    tries: int
    code: int | None
    words: str


class _Running:
    def __init__(self, client: EngineCommand, tries: int, group: Group, nodes: set[int]) -> None:
        self.client = client
        self.unheard = nodes  # its nodes that have not been heard of yet
        self.tries = tries
        self.group = group
        self.pid = 0  # once it is known
        self.code: int | None = 0
        self.words = ""


class EngineProcesses:
    """nodes: how many there are. A command counts in the window until all its nodes have been heard of."""

    def __init__(
        self,
        engine: Engine,
        environ: Mapping[str, str],
        nodes: int,
        poller: Poller,
    ) -> None:
        self._engine = engine
        self._poller = poller
        self._ended: list[Ended] = []
        self._killed: list[int] = []
        self._environ = environ
        self._nodes = nodes
        self._waiting: list[tuple[float, EngineCommand, int]] = []  # not before when, tries so far
        self._running: dict[_Running, None] = {}  # a set that keeps its order
        self._reaching: dict[_Running, None] = {}
        self._of_node: dict[int, list[_Running]] = {}
        self.next_start_s = float("inf")

    def add(self, clients: Sequence[EngineCommand]) -> None:
        """To be started as the window lets."""
        self._waiting += [(0.0, client, 0) for client in clients]

    def start_due(self) -> list[tuple[EngineCommand, Connection]]:
        """Start those whose time has come; the links of those that are links themselves. Raises StartError,
        ProgramMissing."""
        now_s = time.monotonic()
        started = []
        while self._waiting and self._has_room and self._waiting[0][0] <= now_s:
            _, client, tries = self._waiting.pop(0)
            wire = self._start(client, tries)
            if wire is not None:
                started.append((client, wire))
        self._schedule()
        return started

    @property
    def _has_room(self) -> bool:
        return len(self._reaching) < self._engine.WINDOW

    def _schedule(self) -> None:
        self.next_start_s = self._waiting[0][0] if self._waiting and self._has_room else float("inf")

    def reached(self, node: int) -> None:
        """That node has been heard of, or will not be: there is room for the next."""
        for running in self._of_node.pop(node, ()):
            running.unheard.discard(node)
            if not running.unheard and self._reaching.pop(running, running) is None:
                self._schedule()

    def _start(self, client: EngineCommand, tries: int) -> Connection | None:
        """Without a mark: a connection that ssh keeps open for others (ControlPersist) is no stray of ours, and to
        look through all processes at the end of each of many clients would take longer than the launch."""
        path = find_program(client.argv[0], self._environ.get("PATH", os.defpath))
        if not path:
            raise ProgramMissing(f"{client.argv[0]} is not on PATH: --engine needs it", client.argv[0])
        try:
            return self._spawn(client, tries, path)
        except StartError as error:
            raise explain_command(error, client.argv[0]) from None
        except OSError as error:
            number = error.errno or 0
            raise explain_command(StartError(os.strerror(number), "a pipe", number), client.argv[0]) from None

    def _spawn(self, client: EngineCommand, tries: int, path: str) -> Connection | None:
        spec = SpawnSpec(0, os.fsencode(path), [os.fsencode(word) for word in client.argv], [])
        spec.dies_with_us = is_main_thread()
        own = dict(client.env)
        rest = {name: value for name, value in self._environ.items() if name not in own and name != MARKER_VARIABLE}
        # ours first: Hydra 4.0 does not pass on the last variable that there is
        base = [os.fsencode(f"{name}={value}") for name, value in (own | rest).items()]
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        ours, theirs = socketpair() if self._engine.OVER_STDIO else (None, None)
        group = None
        try:
            stdio = null if theirs is None else theirs.fileno()
            spec.stdio = [stdio, stdio, PIPE]
            group = Group(
                1,
                mark=b"",
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
        nodes = set(client.nodes or range(self._nodes)) if tries < _TRIES else set()
        running = _Running(client, tries, group, nodes)
        self._running[running] = None
        if nodes:
            self._reaching[running] = None
        for node in nodes:
            self._of_node.setdefault(node, []).append(running)
        self._poller.watch(group.fileno(), READ, partial(self._step, running))
        return None if ours is None else Connection(fd := ours.detach(), fd, awaits_opening=True)

    def add_ending(self, client: EngineCommand) -> None:
        """The engine's command that ends what was left: its own end is waited for as that of all."""
        if find_program(client.argv[0], self._environ.get("PATH", os.defpath)):
            wire = self._start(client, _TRIES)
            if wire is not None:
                wire.close()

    def alive_nodes(self) -> set[int]:
        """Those whose command has not ended."""
        clients = [running.client for running in self._running if running.tries < _TRIES]
        return {node for client in clients for node in client.nodes or range(self._nodes)}

    def kill(self, nodes: set[int]) -> None:
        """The commands of these nodes."""
        for running in self._running:
            if running.tries < _TRIES and nodes.intersection(running.client.nodes):
                running.group.kill()

    def take_killed(self) -> list[int]:
        """Nodes whose agents such a command has killed, since the last call."""
        killed, self._killed = self._killed, []
        return killed

    def words(self) -> str:
        """The last line that a command has written which has not ended: why nobody comes."""
        texts = (running.group.tail(0).decode("utf-8", "replace").split("\n") for running in self._running)
        return next((line.strip() for lines in texts for line in reversed(lines) if line.strip()), "")

    def said(self) -> str:
        """What those commands have written, up to now."""
        for running in list(self._running):
            self._step(running)
        return "\n".join(running.group.tail(0).decode("utf-8", "replace") for running in self._running)

    def take_ended(self) -> list[Ended]:
        """Those that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _step(self, running: _Running) -> None:
        for event in running.group.run_once():
            if event.kind == "started":
                running.pid = event.pid
            elif event.kind == "exited":
                running.code = None if event.status_lost else 128 + event.signal if event.signal else event.code
            elif event.kind == "start_failed":
                running.code, running.words = 1, os.strerror(event.signal)
        if running.group.ended:
            words = running.words or running.group.tail(0).decode("utf-8", "replace")
            if running.tries < _TRIES:  # what ends others (add_ending) has no nodes to tell of
                self._ended.append(Ended(client=running.client, tries=running.tries, code=running.code, words=words))
            elif running.code == 0:
                self._killed += running.client.nodes
            self._close(running)

    def reap_others(self) -> None:
        """We are process 1: take what has died and is none of our commands. Those are their groups' to take."""
        while (died := _next_dead()) is not None:
            for running in [each for each in self._running if each.pid in (0, died)]:
                self._step(running)
            if any(each.pid == died for each in self._running):
                return  # a tracer holds it; SIGCHLD comes again
            if _next_dead() == died:
                os.waitpid(died, 0)

    def _close(self, running: _Running) -> None:
        del self._running[running]
        self._reaching.pop(running, None)
        self._schedule()
        self._poller.unwatch(running.group.fileno())
        running.group.close()

    def retry(self, ended: Ended) -> bool:
        """Whether it will be tried once more."""
        if ended.tries + 1 >= _TRIES or not self._engine.is_passing(ended.code, ended.words):
            return False
        due_s = time.monotonic() + _jitter(*_RETRY_S) * 2**ended.tries
        self._waiting.append((due_s, ended.client, ended.tries + 1))
        self._waiting.sort(key=lambda item: item[0])
        self._schedule()
        return True

    @property
    def are_alive(self) -> bool:
        return bool(self._running)

    def give_up(self) -> None:
        """Start no more, and kill those whose nodes have not been heard of."""
        self._waiting.clear()
        self.next_start_s = float("inf")
        for running in self._reaching:
            running.group.kill()

    def close(self) -> None:
        """Kill and reap. Safe twice."""
        self._waiting.clear()
        for running in list(self._running):
            self._close(running)

    def after_fork_in_child(self) -> None:
        """In a forked child: they are our parent's."""
        for running in self._running:
            running.group.after_fork_in_child()
        self._running.clear()


def _next_dead() -> int | None:
    """A child that has died and has not been taken; None: there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _jitter(low: float, high: float) -> float:
    return low + (high - low) * os.urandom(1)[0] / 255
