"""The commands of an engine as processes, each in a group of the core. A few connect at a time, and a passing failure
leads to a retry. Their last output on stderr remains, to explain a failure.
"""

from __future__ import annotations

import os
import time
from _functools import partial
from _socket import socket, socketpair  # the C module: `socket` costs 5 ms

from infini_run.core.c_structs import PIPE, SpawnSpec
from infini_run.core.group import GUARD, Group, debug_flags, is_main_thread
from infini_run.errors import InfiniRunError, ProgramMissing, StartError
from infini_run.multinode.engines import EngineCommand
from infini_run.multinode.link.connection import Connection
from infini_run.record import record
from infini_run.system.fork_hooks import close_link
from infini_run.system.poller import READ
from infini_run.system.resource_limits import explain_command
from infini_run.system.shell import find_program, missing_text
from infini_run.system.signal_numbers import SIGTERM
from infini_run.system.stdio import above_stdio
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infini_run.multinode.engines import Engine
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.system.poller import Poller

_TRIES = 5
_MOST_AGAIN = 8  # commands for lost nodes at a time, where the engine has one for all
_RETRY_S = (0.1, 0.5)  # doubled each time: those rejected together must not retry together


@record
class EngineExit:
    """The end of a command.

    Args:
        command: that ended.
        tries: how many retries came before.
        code: exit code; 128 + n for signal n; None if another part of the host program has reaped it.
        is_signalled: a signal ended it here: that proves nothing about the other side.
        stderr: its last output.
    """

    command: EngineCommand
    tries: int
    code: int | None
    is_signalled: bool
    stderr: str


class _Running:
    def __init__(
        self,
        command: EngineCommand,
        tries: int,
        group: Group,
        nodes: set[int],
        cleans_up: tuple[RemoteAgent, ...],
    ) -> None:
        self.command = command
        self.unreached = nodes  # its nodes that are not ready yet
        self.cleans_up = cleans_up  # agents that it ends
        self.tries = tries
        self.group = group
        self.pid = 0  # until it has started
        self.code: int | None = 0
        self.is_signalled = False
        self.start_error = ""


class EngineProcesses:
    """Starts, watches, repeats and ends the commands.

    Args:
        environ: environment of the commands, beside their own variables.
        nodes: how many there are.

    A command is connecting until all its nodes are ready, or will never be; the engine limits how many are.
    """

    def __init__(
        self,
        engine: Engine,
        environ: Mapping[str, str],
        nodes: int,
        poller: Poller,
    ) -> None:
        self._engine = engine
        self._poller = poller
        self._ended: list[EngineExit] = []
        self._killed: list[RemoteAgent] = []
        self._environ = environ
        self._nodes = nodes
        self._waiting: list[tuple[float, EngineCommand, int]] = []  # not before that time; tries so far
        self._running: dict[_Running, None] = {}  # a set that keeps its order
        self._connecting: dict[_Running, None] = {}
        self._of_node: dict[int, list[_Running]] = {}
        self.next_start_s = float("inf")
        self._most_connecting = engine.MAX_CONCURRENT

    def add(self, commands: Sequence[EngineCommand], due_s: float = 0.0) -> None:
        """Start these as soon as there is room, but not before `due_s` (monotonic)."""
        self._waiting += [(due_s, command, 0) for command in commands]
        self._waiting.sort(key=lambda item: item[0])
        self._schedule()

    def start_due(self) -> Iterator[tuple[EngineCommand, Connection]]:
        """Start the commands that are due. Yield each whose stdio is a connection, with that connection, before the
        next one starts, or fails to. Raises StartError, ProgramMissing."""
        now_s = time.monotonic()
        while self._waiting and self._has_room and self._waiting[0][0] <= now_s:
            _, command, tries = self._waiting.pop(0)
            connection = self._start(command, tries)
            if connection is not None:
                yield command, connection
        self._schedule()

    @property
    def _has_room(self) -> bool:
        return len(self._connecting) < self._most_connecting

    def let_others_start(self) -> None:
        """Let the commands of other nodes start: the job began without nodes that have not joined. The one command
        for all of them, which may still wait for some, blocks no command for a lost node from its start."""
        self._most_connecting = max(self._engine.MAX_CONCURRENT, _MOST_AGAIN)
        for running in [running for running in self._connecting if not running.command.nodes]:
            del self._connecting[running]
        self._schedule()

    def _schedule(self) -> None:
        self.next_start_s = self._waiting[0][0] if self._waiting and self._has_room else float("inf")

    def on_reached(self, node: int) -> None:
        """Note that a node is ready, or will never be: there may be room for the next command."""
        for running in self._of_node.pop(node, ()):
            running.unreached.discard(node)
            if not running.unreached and self._connecting.pop(running, running) is None:
                self._schedule()

    def _start(
        self, command: EngineCommand, tries: int, cleans_up: tuple[RemoteAgent, ...] = ()
    ) -> Connection | None:
        """Start a command, without the launch marker variable. A connection that ssh keeps open for others
        (ControlPersist) is no leftover process. A search of all processes at the end of each of many commands would
        take longer than the launch."""
        path = find_program(command.argv[0], self._environ.get("PATH", os.defpath))
        if not path:
            raise ProgramMissing(missing_text(command.argv[0]), command.argv[0])
        try:
            return self._spawn(command, tries, path, cleans_up)
        except StartError as error:
            raise explain_command(error, command.argv[0]) from None
        except OSError as error:
            number = error.errno or 0
            raise explain_command(StartError(os.strerror(number), "a pipe", number), command.argv[0]) from None

    def _spawn(
        self, command: EngineCommand, tries: int, path: str, cleans_up: tuple[RemoteAgent, ...]
    ) -> Connection | None:
        spec = SpawnSpec(0, os.fsencode(path), [os.fsencode(word) for word in command.argv])
        outlives_s = self._engine.OUTLIVES_HEAD_S
        spec.dies_with_us = is_main_thread() and not outlives_s
        own = dict(command.env)
        rest = {name: value for name, value in self._environ.items() if name not in own and name != MARKER_VARIABLE}
        # infini-run's first: Hydra 4.0 does not pass on the last variable that there is
        base = [os.fsencode(f"{name}={value}") for name, value in (own | rest).items()]
        ours, theirs = socketpair() if self._engine.USES_STDIO else (None, None)
        null, group = -1, None
        try:
            if theirs is None:
                null = above_stdio(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
            elif theirs.fileno() < 3:  # the host program has closed its stdio
                theirs = socket(fileno=above_stdio(theirs.detach()))
            stdio = null if theirs is None else theirs.fileno()
            spec.stdio = [stdio, stdio, PIPE]
            group = Group(
                1,
                mark=b"",
                grace_s=0.0,
                stop_signal=SIGTERM,
                stop_scope="group",
                guard=GUARD if outlives_s else None,
                guard_wait_s=outlives_s,
                debug=debug_flags(self._environ),
            )
            group.spawn([spec], base)
        except BaseException:
            if group is not None:
                group.close()
            if ours is not None:
                close_link(ours)
            raise
        finally:
            if null >= 0:
                os.close(null)
            if theirs is not None:
                close_link(theirs)
        nodes = set(command.nodes or range(self._nodes)) if tries < _TRIES else set()
        running = _Running(command, tries, group, nodes, cleans_up)
        self._running[running] = None
        if nodes:
            self._connecting[running] = None
        for node in nodes:
            self._of_node.setdefault(node, []).append(running)
        self._poller.watch(group.fileno(), READ, partial(self._read_events, running))
        return None if ours is None else Connection(fd := ours.detach(), fd, awaits_magic=True)

    def start_cleanup(self, command: EngineCommand, agents: Sequence[RemoteAgent]) -> str:
        """Start a command that ends what these agents have left; the launch waits for its end as for that of any
        command.

        Returns:
            A sentence if it cannot start, as at a limit of this process: the launch itself continues.
        """
        if not find_program(command.argv[0], self._environ.get("PATH", os.defpath)):
            return ""
        of_command = tuple(agent for agent in agents if agent.index in command.nodes)
        try:
            connection = self._start(command, _TRIES, of_command)
        except InfiniRunError as error:
            where = ", ".join(agent.title for agent in of_command)
            return f"{where + ': ' if where else ''}cannot end what is left there: {error}"
        if connection is not None:
            connection.close()
        return ""

    def alive_nodes(self) -> set[int]:
        """Return the nodes whose command has not ended."""
        commands = [running.command for running in self._running if running.tries < _TRIES]
        return {node for command in commands for node in command.nodes or range(self._nodes)}

    def has_own_command(self, node: int) -> bool:
        """Return whether there is a command for this node alone: it waits for its start, runs, or is gone and not
        taken yet."""
        commands = [running.command for running in self._running if running.tries < _TRIES]
        commands += [command for _, command, _ in self._waiting] + [ended.command for ended in self._ended]
        return any(command.nodes == (node,) for command in commands)

    def kill(self, nodes: set[int]) -> None:
        """Kill the commands of these nodes."""
        for running in self._running:
            if running.tries < _TRIES and nodes.intersection(running.command.nodes):
                running.group.kill()

    def take_killed(self) -> list[RemoteAgent]:
        """Return the agents that a clean-up command has killed since the last call."""
        killed, self._killed = self._killed, []
        return killed

    def last_stderr_line(self) -> str:
        """Return the last line of a command that has not ended: it may say why no agent connects."""
        texts = (running.group.tail(0).decode("utf-8", "replace").split("\n") for running in self._running)
        return next((line.strip() for lines in texts for line in reversed(lines) if line.strip()), "")

    def stderr(self) -> str:
        """Return the last output of the commands that run, or whose end nobody has taken yet."""
        for running in list(self._running):
            self._read_events(running)
        texts = [running.group.tail(0).decode("utf-8", "replace") for running in self._running]
        return "\n".join([*texts, *(ended.stderr for ended in self._ended)])

    def take_ended(self) -> Iterator[EngineExit]:
        """Yield the commands that ended since the last call. The end of each is taken when the caller asks for the
        next."""
        while self._ended:
            yield self._ended[0]
            del self._ended[0]

    def _read_events(self, running: _Running) -> None:
        for event in running.group.run_once():
            if event.kind == "started":
                running.pid = event.pid
            elif event.kind == "exited":
                running.is_signalled = bool(event.signal)
                running.code = None if event.status_lost else 128 + event.signal if event.signal else event.code
            elif event.kind == "start_failed":
                running.code, running.start_error = 1, os.strerror(event.signal)
        if running.group.ended:
            stderr = running.start_error or running.group.tail(0).decode("utf-8", "replace")
            if running.tries < _TRIES:  # a clean-up command has no nodes
                self._ended.append(
                    EngineExit(
                        command=running.command,
                        tries=running.tries,
                        code=running.code,
                        is_signalled=running.is_signalled,
                        stderr=stderr,
                    )
                )
            elif running.code == 0:
                self._killed += running.cleans_up
            self._close(running)

    def reap_others(self) -> None:
        """Reap the dead children of process 1 that are none of these commands; their groups reap those."""
        while (died := _next_dead()) is not None:
            for running in [each for each in self._running if each.pid in (0, died)]:
                self._read_events(running)
            if any(each.pid == died for each in self._running):
                return  # a tracer holds it; SIGCHLD will come later
            if _next_dead() == died:
                os.waitpid(died, 0)

    def _close(self, running: _Running) -> None:
        del self._running[running]
        self._connecting.pop(running, None)
        self._schedule()
        self._poller.unwatch(running.group.fileno())
        running.group.close()

    def retry(self, ended: EngineExit) -> bool:
        """Return whether the command will be repeated."""
        if ended.tries + 1 >= _TRIES or not self._engine.is_transient(ended.code, ended.stderr):
            return False
        due_s = time.monotonic() + _jitter(*_RETRY_S) * 2**ended.tries
        self._waiting.append((due_s, ended.command, ended.tries + 1))
        self._waiting.sort(key=lambda item: item[0])
        self._schedule()
        return True

    @property
    def are_alive(self) -> bool:
        return bool(self._running)

    def give_up(self) -> None:
        """Start no more, and kill the commands that are still connecting."""
        self._waiting.clear()
        self.next_start_s = float("inf")
        for running in self._connecting:
            running.group.kill()

    def close(self) -> None:
        """Kill and reap all commands. Safe twice."""
        self._waiting.clear()
        for running in list(self._running):
            self._close(running)

    def after_fork_in_child(self) -> None:
        """Forget the commands in a forked child: they are the parent's."""
        for running in self._running:
            running.group.after_fork_in_child()
        self._running.clear()


def _next_dead() -> int | None:
    """Return a dead child that nobody has reaped yet, or None."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _jitter(low: float, high: float) -> float:
    return low + (high - low) * os.urandom(1)[0] / 255
