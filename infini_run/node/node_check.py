"""Whether this node may take part: the built-in checks, and a command of the user's.

Both run at once, as processes in a group of the core. A driver or a file system that does not answer dies at the
timeout like a command that hangs, and nothing of either is left. NodeCheck never blocks, so an agent waits for it
beside its link. While it runs, no launch may run in this process: the launch would take its processes for its own.
"""

from __future__ import annotations

import os
import sys
import time

from infini_run.core.c_structs import PIPE, SpawnSpec
from infini_run.core.group import GUARD, Group, debug_flags, is_main_thread
from infini_run.errors import DeviceError, StartError, counted, printable
from infini_run.system.interpreter import own_python
from infini_run.system.shell import find_program
from infini_run.system.signal_numbers import SIGTERM
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.core.c_structs import Event, ProcessState

LEAST_FREE_BYTES = 100 << 20  # in the log directory: a share of a large file system would be terabytes
_RELEASE_PART = 0.5  # of the timeout, in which the memory of ranks that were killed may be given back
_LOOK_S = 0.5  # between two looks at it: no driver reports it
_SHOWN = 512  # bytes of its last line
_BUILT_IN, _COMMAND = 0, 1  # workers of the group


class NodeCheck:
    """One check of this node: start, poll until `ended`, close.

    Attributes:
        ended: It is complete.
        reason: Why the node may not take part, in one line; empty: it may. Only after its end.

    Args:
        command: Words as a shell reads them; empty: only the built-in checks.
        environ: The environment of the command.
        cwd: Where it runs. None: here.
        timeout_s: Seconds until SIGKILL for all of it.
        gpus: How many GPUs the node has to have, which nobody may hold; 0: do not look at GPUs.
        log_dir: Must be writable, with 100 MB left; empty: there is none.
        entry: Given where this process is the launcher's own.
    """

    def __init__(
        self,
        command: str,
        *,
        environ: Mapping[str, str],
        cwd: str | None = None,
        timeout_s: float = 60.0,
        gpus: int = 0,
        log_dir: str = "",
        entry: ProcessState | None = None,
    ) -> None:
        self._command = command
        self._environ = dict(environ)
        self._cwd = cwd
        self._timeout_s = timeout_s
        self._built_in = [str(gpus), log_dir, str(timeout_s * _RELEASE_PART)]
        self._entry = entry
        self._group: Group | None = None
        self._is_late = False
        self._reasons: dict[int, str] = {}
        self.due_s = float("inf")
        self.ended = False

    @property
    def reason(self) -> str:
        """The first reason there is: of the built-in checks, then of the command."""
        return next((self._reasons[worker] for worker in sorted(self._reasons)), "")

    def start(self) -> None:
        """Start it. One that cannot start is complete, with the reason."""
        try:
            specs = [self._spec(own_python("infini_run.node.node_check.main") + self._built_in, self._environ)]
            words = _split(self._command)
            if words:
                specs.append(self._spec(words, self._environ))
            mark = f"{MARKER_VARIABLE}=check-{os.urandom(6).hex()}"
            environ = {name: value for name, value in self._environ.items() if name != MARKER_VARIABLE}
            self._group = Group(
                len(specs),
                mark=os.fsencode(mark),
                grace_s=0.0,
                stop_signal=SIGTERM,
                stop_scope="group",
                guard=GUARD,
                entry=self._entry,
                beside=self._entry is not None,
                debug=debug_flags(self._environ),
            )
            self._group.spawn(specs, [os.fsencode(mark), *(os.fsencode(f"{k}={v}") for k, v in environ.items())])
            self.due_s = time.monotonic() + self._timeout_s
        except StartError as error:
            self._fail(f"the node check could not be started: {error}")
        except ValueError as error:
            self._fail(f"--node_check={self._command}: {error}")

    def _spec(self, words: list[str], environ: Mapping[str, str]) -> SpawnSpec:
        path = words[0] if "/" in words[0] else find_program(words[0], environ.get("PATH", os.defpath))
        if not path:
            raise ValueError(f"{words[0]} is not on PATH")
        spec = SpawnSpec(0, os.fsencode(path), [os.fsencode(word) for word in words])
        spec.cwd = os.fsencode(self._cwd) if self._cwd else None
        spec.dies_with_us = is_main_thread()
        spec.stdio[1] = spec.stdio[2] = PIPE
        return spec

    def _fail(self, reason: str) -> None:
        self._reasons[_BUILT_IN] = printable(reason)
        self.close()

    def fileno(self) -> int:
        """Return the descriptor to wait for. Only while it runs."""
        assert self._group is not None
        return self._group.fileno()

    def poll(self, timeout_s: float | None = None) -> bool:
        """Continue the check, and wait for something to do at most `timeout_s` seconds (None: until it ends).

        Wait for `fileno` and until `due_s` (monotonic) elsewhere, and call it with 0.

        Returns:
            Whether it is complete.
        """
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self.ended:
            self._run_once()
            now_s = time.monotonic()
            if self.ended or now_s >= end_s:
                break
            until_s = min(end_s, float("inf") if self._is_late else self.due_s)
            assert self._group is not None
            self._group.wait(None if until_s == float("inf") else max(0.0, until_s - now_s))
        return self.ended

    def _run_once(self) -> None:
        group = self._group
        assert group is not None
        for event in group.run_once():
            self._handle_event(group, event)
        if group.ended:
            self.close()
        elif not self._is_late and time.monotonic() >= self.due_s:
            self._is_late = True
            group.kill()

    def _handle_event(self, group: Group, event: Event) -> None:
        if event.kind == "start_failed":
            self._reasons[event.worker] = f"the node check cannot be executed: {os.strerror(event.signal)}"
        elif event.kind == "stuck":
            self._reasons.setdefault(_COMMAND, "a process of the node check survived SIGKILL")
        elif event.kind == "exited" and (event.code or event.signal or event.status_lost):
            self._reasons.setdefault(event.worker, self._describe(event, _last_line(group, event.worker)))

    def _describe(self, event: Event, last: str) -> str:
        if self._is_late:
            what = "the checks of GPUs and log directory" if event.worker == _BUILT_IN else "the node check"
            return f"{what} did not end within {self._timeout_s:g} s" + (f": {last}" if last else "")
        if event.worker == _BUILT_IN and event.code == 1 and last:
            return last
        from infini_run.report.text import signal_name

        how = f"was killed by {signal_name(event.signal)}" if event.signal else f"exited with {event.code}"
        return f"node check {how}" + (f": {last}" if last else "")

    def close(self) -> None:
        """Kill what is left of it. Safe twice."""
        self.ended = True
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def after_fork_in_child(self) -> None:
        """Forget its processes in a forked child: they are the parent's."""
        group, self._group, self.ended = self._group, None, True
        if group is not None:
            group.after_fork_in_child()


def _last_line(group: Group, worker: int) -> str:
    """Return its last output, printable; of stderr not the stack behind the message."""
    last = group.line(worker).decode("utf-8", "replace").strip()
    lines = [line.rstrip() for line in group.tail(worker).decode("utf-8", "replace").splitlines() if line.strip()]
    if lines and lines[-1].endswith(last):
        from infini_run.report.last_lines import choose_line

        last = choose_line(lines).strip()
    return printable(last[-_SHOWN:])


def _split(command: str) -> list[str]:
    """Raises ValueError: its quotes do not match."""
    import shlex

    return shlex.split(command)


# ---- in the process that looks


def main() -> None:
    """Look at GPUs and at the log directory. Print the first reason, and exit with 1."""
    gpus, log_dir, release_s = int(sys.argv[-3]), sys.argv[-2], float(sys.argv[-1])
    reason = check_log_dir(log_dir) or check_gpus(gpus, os.environ, release_s)
    if reason:
        print(reason, flush=True)
        sys.exit(1)


def check_log_dir(log_dir: str, least_bytes: int = LEAST_FREE_BYTES) -> str:
    """Return why logs there are not writable; empty: they are. The launch may create the directory later."""
    if not log_dir:
        return ""
    folder = os.path.abspath(log_dir)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    probe = os.path.join(folder, f".infini-run-check-{os.uname().nodename}-{os.getpid()}")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(probe)
        status = os.statvfs(folder)
    except OSError as error:
        return f"the log directory {log_dir} cannot be written: {error.strerror}"
    free = status.f_bavail * status.f_frsize
    if free < least_bytes:
        return f"the log directory {log_dir} has {free >> 20} MiB left; {least_bytes >> 20} MiB are needed"
    if status.f_files and not status.f_favail:
        return f"the log directory {log_dir} has no room for another file"
    return ""


def check_gpus(count: int, environ: Mapping[str, str], release_s: float) -> str:
    """Return why `count` GPUs are not available; empty: they are, or none is needed.

    The driver frees the memory of killed processes some seconds later, so this waits for holders.

    Args:
        count: How many there are to be.
        environ: Whose variables say which of them are visible.
        release_s: Seconds to wait for those who hold memory on one.
    """
    if not count:
        return ""
    from infini_run.devices.in_use import describe_holders
    from infini_run.devices.visible import find, module_of

    end_s = time.monotonic() + release_s
    try:
        found = find(environ)
        if len(found.gpus) < count:
            return f"{counted(len(found.gpus), 'GPU')} can be used here, of {count} that the plan needs"
        while holders := module_of(found.vendor).find_holders(found.gpus[:count]):
            if time.monotonic() >= end_s:
                return describe_holders(holders)
            time.sleep(_LOOK_S)
        return ""
    except DeviceError as error:
        return str(error)
