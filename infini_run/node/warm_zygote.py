"""The process of --preload: the user's command, held before its script, which forks the ranks of each attempt.

The hook within it is warm/site/sitecustomize.py; decision 66 has the reasons. The launcher starts the process in a
group of the core beside that of the ranks. A user's program could forge its answers. So each answer is a short text,
and a process number counts only if the process is a child of the launcher.
"""

from __future__ import annotations

import array
import marshal
import os
import select
import time
from _socket import AF_UNIX, MSG_DONTWAIT, SCM_RIGHTS, SOCK_SEQPACKET, SOL_SOCKET, socket, socketpair
from contextlib import suppress

from infini_run.core.c_structs import PIPE, TO_CONSOLE, SpawnSpec
from infini_run.core.group import GUARD, Group, debug_flags
from infini_run.errors import InfiniRunError, StartError, UsageError, printable
from infini_run.node.resources import has_descriptors
from infini_run.report.text import duration_text, signal_name
from infini_run.system.signal_numbers import SIGKILL
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.core.c_structs import Event, ProcessState
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan

HOOK_VARIABLE = "INFINI_WARM_HOOK"  # of warm/site/sitecustomize.py
EARLY_S = 10.0  # a failure this soon after a fork may come from the imports
_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "warm", "site")
_OF_ATTEMPT = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_OF_WORLD = ("MASTER_ADDR", "NNODES", "PROC_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
_ANSWER_S = 5.0  # for a fork, or a look at its files
_MOST_ANSWER = 1 << 17  # bytes
_MOST_TEXT = 300  # characters of it that are shown
_MOST_SKIPPED = 100  # modules
_AHEAD = 32  # ranks that may be on their way at once
_DESCRIPTORS = 40  # of the process's group, of the one that waits for it, and of a fork


class CannotFork(InfiniRunError):
    """The ranks of this attempt cannot be forked; the text says why. is_lasting: nor those of any other."""

    def __init__(self, reason: str, *, is_lasting: bool = False) -> None:
        super().__init__(reason)
        self.is_lasting = is_lasting


class _Gone(Exception):
    """The end of the process: it gives no more answers."""


class WarmZygote:
    """The held process, from one attempt to the next.

    Attributes:
        cold_because: Why the ranks of the next attempt are not forked. Empty: they are.
        modules: What was imported.
        wall_s, cpu_s: The time and the CPU time of the imports, in seconds.

    Args:
        plan: The plan of the first attempt.
        options: What the user asked for.
        environ: The environment of the ranks, to which the plan adds.
        entry: The state of this process at its start.
        print_line: Gets a line for the user.
        host: The name of this node, if others belong to the launch and their number is not known yet. Empty: it is
            alone.
        cwd: Where the process starts. None: here.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        environ: Mapping[str, str],
        entry: ProcessState,
        print_line: Callable[[str], None],
        host: str = "",
        cwd: str | None = None,
    ) -> None:
        self._plan = plan
        self._options = options
        self._environ = environ
        self._entry = entry
        self._print_line = print_line
        self._host = host
        self._cwd = cwd
        self._group: Group | None = None
        self._control: socket | None = None
        self._received = bytearray()
        self._env: list[bytes] = []  # of the process, without what the hook needs
        self._start_s = 0.0
        self._is_held = self._is_ready = self._is_hopeless = False
        self._is_first = True  # no attempt has begun so far
        self._exit: Event | None = None
        self._skipped: list[str] = []  # by --preload=auto
        self.modules: tuple[str, ...] = ()
        self.wall_s = self.cpu_s = 0.0
        self._imported_s = 0.0  # when the imports ended, until somebody takes that
        self.cold_because = ""

    # ---- the imports

    def prepare(self) -> Event | None:
        """Wait until the next attempt can be forked, or must start cold.

        Returns:
            The signal that stops the launch meanwhile. None: there was none.

        Raises:
            UsageError: A module cannot be imported, or must not be.
            StartError: The imports take too long, or the process cannot be created.
        """
        if self.cold_because or self._is_hopeless:
            return None
        if not has_descriptors(self._plan.workers, _DESCRIPTORS):
            self._fall_back("the limit on open descriptors is too low (ulimit -n)")
            return None
        try:
            self.start()
            event = None if self.is_settled else self._await_imports()
        except BaseException:
            self.close()
            raise
        if event is not None:
            self.close()
        self._is_first = False
        return event

    def start(self) -> None:
        """Start the process, and send it what to import. Does not wait for it. Safe twice."""
        if self._group is None and not self.is_settled:
            self._start()

    def _start(self) -> None:
        watched = self._watched()
        self._is_held = self._is_ready = False
        self._exit, self._start_s, self._received = None, time.monotonic(), bytearray()
        try:
            self._control, theirs = socketpair()
            try:
                self._spawn(theirs.fileno(), watched)
            finally:
                theirs.close()
        except (OSError, StartError) as error:
            self._fall_back(f"the process of the imports cannot be started: {error}")
            return
        with suppress(OSError):  # it is gone: a read of its socket finds that
            words = {"names": list(self._options.preload), "skipped": self._skipped, "flag": "--preload"}
            self._send({**words, "watched": sorted(watched), "env": self._env})

    def _watched(self) -> set[str]:
        """Return the variables that differ between ranks or attempts, or are not known yet."""
        plan = self._plan
        watched = {name for worker in plan.workers for name, _ in worker.env}
        watched |= {name for name, value in plan.env if name in _OF_ATTEMPT or value == plan.launch_id}
        if self._host:
            watched.update(_OF_WORLD)
        return watched - {MARKER_VARIABLE}

    def _known(self) -> dict[str, str]:
        """Return the variables of the plan that the process has."""
        watched = self._watched()
        return {name: value for name, value in self._plan.env if name not in watched and name != MARKER_VARIABLE}

    def _spawn(self, control: int, watched: set[str]) -> None:
        env = self._plan.common_environ(self._environ)
        mark = f"preload-{self._plan.launch_id}"  # else its group would take ranks for its leftover processes
        path = self._environ.get("PYTHONPATH", "")
        env = {name: value for name, value in env.items() if name not in watched} | {MARKER_VARIABLE: mark}
        self._env = [os.fsencode(f"{name}={value}") for name, value in env.items()]
        env |= {"PYTHONPATH": f"{_FOLDER}:{path}" if path else _FOLDER}
        env[HOOK_VARIABLE] = "set" if "PYTHONPATH" in self._environ else ""
        spec = SpawnSpec(0, os.fsencode(self._plan.workers[0].file), [os.fsencode(word) for word in self.argv])
        spec.stdio = [control, PIPE, PIPE]
        is_shown = self._options.console != "none" and self._options.live != "on"
        spec.output = [TO_CONSOLE if is_shown else 0] * 2
        name = os.fsencode(f"{self._host}:preload" if self._host else "preload")
        spec.label = ((b"[%b] " % name, b"[%b +] " % name),) * 2
        spec.cwd = os.fsencode(self._cwd) if self._cwd else None
        spec.dies_with_us = True
        self._group = Group(
            1,
            mark=os.fsencode(f"{MARKER_VARIABLE}={mark}"),
            grace_s=0.0,
            stop_signal=SIGKILL,
            stop_scope="group",
            console=(1, 2),
            guard=GUARD,
            entry=self._entry,
            beside=True,
            debug=debug_flags(self._environ),
        )
        self._group.spawn([spec], [os.fsencode(f"{name}={value}") for name, value in env.items()])

    @property
    def can_fork(self) -> bool:
        """Whether the ranks of this attempt can be forked."""
        return self._is_ready and not self.cold_because

    @property
    def argv(self) -> tuple[str, ...]:
        """The command of the process, which is that of each rank without what differs."""
        argv = self._plan.workers[0].argv
        return argv[:-2] if self._options.distributed_args else argv

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for: the ranks can be forked, or start cold."""
        return self._is_ready or self._is_hopeless or bool(self.cold_because)

    @property
    def due_s(self) -> float:
        """When `go_on` has something to do even if no descriptor can be read: time.monotonic()."""
        return self._start_s + self._options.preload_timeout_s

    def fds(self) -> list[int]:
        """Return the descriptors to wait for, unless it is settled."""
        ours = (self._group, self._control)
        return [] if self.is_settled else [each.fileno() for each in ours if each is not None]

    def go_on(self) -> None:
        """Handle what is ready while it imports; check `is_settled` after it. Raises as `prepare`."""
        self._pass_output()
        while not self.is_settled and self._read_answer():
            pass
        if not self.is_settled and time.monotonic() >= self.due_s:
            self._fail_late()

    def _await_imports(self) -> Event | None:
        """Wait for the answer. A group of no ranks takes the signals meanwhile, as between two attempts."""
        waiting = Group(
            0,
            mark=b"",
            grace_s=0.0,
            stop_signal=self._options.stop_signal,
            stop_scope=self._options.stop_scope,
            entry=self._entry,
            debug=debug_flags(self._environ),
        )
        try:
            while not self.is_settled:
                waiting.wait(min(max(0.0, self.due_s - time.monotonic()), 3600.0), self.fds())
                self.go_on()  # before the other group may reap it
                for event in waiting.run_once():
                    if event.kind == "signalled":
                        return event
        finally:
            waiting.close()
        return None

    def _fail_late(self) -> None:
        text = duration_text(self._options.preload_timeout_s)
        if not self._is_first:
            self._fall_back(f"the imports took longer than {text}")
            return
        raise StartError(
            f"--preload: the imports took longer than {text}; add --preload_timeout=TIME, or drop a module",
            "preloading",
            110,
        )

    def _pass_output(self) -> None:
        """Pass on what the imports print, and note how the process ended."""
        group = self._group
        if group is None or group.ended:
            return
        for event in group.run_once():
            if event.kind in ("exited", "start_failed"):
                self._exit = event

    def _wait_for_exit(self) -> None:
        """Wait for the end of the process, whose socket is closed. Kill a wrapper around it that does not end."""
        due_s = time.monotonic() + _ANSWER_S
        while self._group is not None and not self._group.ended:
            self._pass_output()
            if time.monotonic() >= due_s:
                self._group.kill()
            self._group.wait(max(0.1, due_s - time.monotonic()))

    def _read_answer(self) -> bool:
        """Read and handle an answer. Return whether there may be another."""
        try:
            answer = self._receive()
        except _Gone:
            self._wait_for_exit()
            self._handle_end()
            return False
        if answer is None:
            return False
        word, text = answer
        if word == "held":
            self._is_held = True
        elif word == "ready":
            cpu, _, names = text.partition(" ")
            self._is_ready, self.modules = True, tuple(names.split(","))
            self._imported_s = time.monotonic()
            self.wall_s, self.cpu_s = self._imported_s - self._start_s, int(cpu) / 1000 if cpu.isdigit() else 0.0
            self._pass_output()
        elif word == "skip":
            self._skip(*text.split(" ", 1))
        elif word == "failed" and self._is_first:
            raise UsageError(_cut(text))
        elif word in ("failed", "cold"):
            self._is_hopeless = word == "cold"
            self._fall_back(_cut(text))
        return word == "held"

    def _skip(self, module: str, reason: str = "") -> None:
        """Repeat the imports without a module that --preload=auto found."""
        if module in self._skipped or len(self._skipped) >= _MOST_SKIPPED:
            self._fall_back(_cut(reason))
            return
        self._skipped.append(module)
        where = f"{self._host}: " if self._host else ""
        self._print_line(f"infini-run: {printable(f'{where}not preloaded: {module}: {_cut(reason)}')}")
        self.close()
        self._start()

    def _handle_end(self) -> None:
        """Handle the end of the process before all imports. If it never was held, Python has run the script."""
        name = self.argv[0]
        has_run = self._exit is not None and not self._exit.signal and self._exit.code not in (126, 127)
        if has_run and not self._is_held and self._is_first:
            raise UsageError(
                f"--preload: {name} does not import sitecustomize from PYTHONPATH; drop --preload, or the wrapper "
                "that removes it"
            )
        self._fall_back(f"the process of the imports {self._describe_end()}")

    def _describe_end(self) -> str:
        if self._exit is None or self._exit.status_lost:
            return "is gone"
        return f"was killed by {signal_name(self._exit.signal)}" if self._exit.signal else "exited"

    def _fall_back(self, reason: str) -> None:
        """Have the next attempt start cold, and report it."""
        self._report_cold(reason)
        self.close()

    def _report_cold(self, reason: str) -> None:
        self.cold_because = reason
        where = f"{self._host}: " if self._host else ""
        self._print_line(f"infini-run: {printable(f'{where}ranks start cold: {reason}')}")

    def give_up(self) -> None:
        """Have the next attempt start cold. It is stopped, and nobody waits for the imports."""
        self.cold_because = "the launch was stopped"
        self.close()

    # ---- between two attempts

    def renew(self, lived_s: float | None, plan: Plan | None = None) -> None:
        """Get ready for another attempt: begin the imports again if what was imported has changed.

        Args:
            lived_s: For how long the last attempt lived after its fork, in seconds. None: it was not forked, or did
                not fail.
            plan: The plan of that attempt, if it may have other variables than the last one. None: it has the same.
        """
        if self._is_hopeless:
            return
        self.cold_because = ""
        known = self._known()
        self._plan = plan or self._plan
        is_importing = self._group is not None and not self._is_ready
        if lived_s is not None and lived_s < EARLY_S:
            self._report_cold(f"the last attempt failed {lived_s:.1f} s after it was forked")
        elif known != self._known() or not (is_importing or (self._is_ready and self._is_unchanged())):
            self.close()
            self._start()

    def _is_unchanged(self) -> bool:
        try:
            self._send({"word": "check"})
            return self._answer()[0] == "same"
        except (_Gone, OSError):
            return False

    # ---- a fork

    def begin_fork(self, count: int, env: Sequence[bytes]) -> Fork:
        """Have a process forked that forks the ranks.

        Args:
            count: How many ranks.
            env: The variables that all of them have, each as `NAME=value`.

        Raises:
            CannotFork: It does not answer.
        """
        try:
            ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
            gate = os.pipe()
        except OSError as error:
            raise CannotFork(f"the fork failed: {os.strerror(error.errno or 0)}") from None
        request = {
            "word": "fork",
            "count": count,
            "env": list(env),
            "launcher": os.getpid(),
        }
        ours.settimeout(_ANSWER_S)
        try:
            self._send(request, [theirs.fileno(), gate[0]])
        except (_Gone, OSError):
            ours.close()
            for fd in gate:
                os.close(fd)
            raise CannotFork(f"the process of the imports {self._describe_end()}") from None
        finally:
            theirs.close()
        return Fork(self, ours, gate, count)

    def check_forked(self) -> None:
        """Wait for the exit of the middle process, which makes its ranks children of the launcher. Raises
        CannotFork."""
        try:
            word, _ = self._answer()
        except (_Gone, OSError):
            word = "gone"
        if word != "forked":
            raise CannotFork("the fork failed")

    def take_import_times(self) -> tuple[int, int]:
        """Return the begin and the end of the last imports, in CLOCK_MONOTONIC's nanoseconds; (0, 0): they were
        returned already, or there were none."""
        end_s, self._imported_s = self._imported_s, 0.0
        return (int(self._start_s * 1e9), int(end_s * 1e9)) if end_s else (0, 0)

    def fall_back(self, error: CannotFork) -> None:
        """Have this attempt start cold, for this reason. Make the process anew for the next attempt if that may
        help."""
        self._is_hopeless = error.is_lasting
        self._fall_back(str(error))

    # ---- the socket

    def _send(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """Send a message, with descriptors. Raises OSError: it is gone, or does not read."""
        if self._control is None:
            raise _Gone
        data = marshal.dumps(dict(message), 2)
        self._control.settimeout(_ANSWER_S)
        rights = [(SOL_SOCKET, SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        self._control.sendmsg([len(data).to_bytes(4, "big")], rights, 0x4000)  # MSG_NOSIGNAL
        self._control.sendall(data, 0x4000)
        self._control.settimeout(None)  # else MSG_DONTWAIT would wait, too

    def _answer(self) -> tuple[str, str]:
        """Wait for an answer. Raises _Gone: there is none."""
        due_s = time.monotonic() + _ANSWER_S
        while (answer := self._receive()) is None:
            assert self._control is not None
            poll = select.poll()
            poll.register(self._control.fileno(), select.POLLIN)
            if not poll.poll(max(0.0, due_s - time.monotonic()) * 1000):
                raise _Gone
        return answer

    def _receive(self) -> tuple[str, str] | None:
        """Return the next answer, or None if none arrived. Raises _Gone: there will be none."""
        while self._control is not None:
            size = int.from_bytes(self._received[:4], "big") if len(self._received) >= 4 else 0
            if size > _MOST_ANSWER:
                raise _Gone
            if len(self._received) >= 4 + size and len(self._received) >= 4:
                data = bytes(self._received[4 : 4 + size])
                del self._received[: 4 + size]
                word, _, text = data.decode("utf-8", "surrogateescape").partition(" ")
                return word, text
            try:
                piece = self._control.recv(1 << 16, MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                piece = b""
            if not piece:
                break
            self._received += piece
        raise _Gone

    def close(self) -> None:
        """Kill the process. Ranks that it has forked keep running. Safe twice."""
        control, self._control = self._control, None
        if control is not None:
            control.close()
        group, self._group = self._group, None
        self._is_ready = False
        if group is not None:
            group.close()


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."


class Fork:
    """The fork of all ranks of one attempt. They wait at a gate until it is opened, and end if it is closed.

    Args:
        zygote: Whose fork it is.
        exchange: The socket to the process that forks them.
        gate: Both ends of their gate: it is written to even if all of them have died.
        count: How many ranks.
    """

    def __init__(self, zygote: WarmZygote, exchange: socket, gate: tuple[int, int], count: int) -> None:
        self._zygote = zygote
        self._exchange = exchange
        self._gate = list(gate)
        self._pids = [0] * count
        self._sent = self._known = 0

    def add(self, env: Sequence[bytes], more: Sequence[bytes], fds: Sequence[int], *, foreground: bool) -> None:
        """Have the next rank forked.

        Args:
            env: Its own variables, each as `NAME=value`.
            more: Its own arguments, behind those of the command.
            fds: Its stdin, stdout and stderr.
            foreground: It takes the terminal that is its stdin.

        Raises:
            CannotFork: The process that forks does not read.
        """
        rank = {"index": self._sent, "env": list(env), "more": list(more), "foreground": foreground}
        rights = (SOL_SOCKET, SCM_RIGHTS, array.array("i", fds).tobytes())
        try:
            self._exchange.sendmsg([marshal.dumps(rank, 2)], [rights], 0x4000)
        except OSError:
            raise self._problem(self._read()) from None
        self._sent += 1
        if self._sent - self._known > _AHEAD:
            self._receive_pid()

    def end(self) -> list[int]:
        """Return the process of each rank, in the order in which they were added. Raises CannotFork."""
        while self._known < self._sent:
            self._receive_pid()
        self._exchange.close()
        self._zygote.check_forked()
        for pid in self._pids:
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                raise CannotFork(
                    "this kernel does not give the ranks to infini-run (PR_SET_CHILD_SUBREAPER)"
                ) from None
        return self._pids

    def _receive_pid(self) -> None:
        """Learn that one more rank waits at the gate."""
        text = self._read()
        words = text.split()
        if len(words) != 2 or not all(word.isdigit() and len(word) < 10 for word in words):
            raise self._problem(text)
        index, pid = map(int, words)
        if index >= self._sent or self._pids[index] or pid < 2:
            raise CannotFork("the fork failed")
        self._pids[index] = pid
        self._known += 1

    def _read(self) -> str:
        try:
            with suppress(ConnectionResetError):  # it did not read everything: this error comes first, and once
                return self._exchange.recv(512).decode("utf-8", "replace")
            return self._exchange.recv(512).decode("utf-8", "replace")
        except OSError:
            return ""

    def _problem(self, text: str) -> CannotFork:
        is_lasting = text.startswith("cold ")
        return CannotFork(text[5:] if is_lasting else "the fork failed", is_lasting=is_lasting)

    def open_gate(self) -> None:
        """Let all ranks run."""
        data = b"+" * len(self._pids)
        while data:
            data = data[os.write(self._gate[1], data) :]
        self.close()

    def close(self) -> None:
        """Close the gate. Safe twice."""
        self._exchange.close()
        while self._gate:
            os.close(self._gate.pop())
