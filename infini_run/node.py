"""One node's part of a plan, live: open what it names, start the group, follow its events.

The one place that acts on a plan, for the command and for the Python API alike. What is needed only once
the workers run is imported while they start.
"""

from __future__ import annotations

import os
from _thread import RLock

from infini_run.errors import StartError, UsageError
from infini_run.group import INHERIT, PIPE, TO_CONSOLE, TO_LOG, Group, Spec, debug_flags
from infini_run.plan import MARK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.group import Entry, Event
    from infini_run.options import Options
    from infini_run.outcome import Outcome
    from infini_run.plan import Output, Plan, Worker

_SHORT_S = 0.02  # a launch that is over by then is not looked at any closer
_LAST_LINES = 20  # kept in the report; its text shows fewer


class NodeRun:
    """A plan's workers on this node, alive: start, poll until `ended`, close.

    entry: given where the process is ours (the command). say: gets a line for the user, where there is one
    to tell while the job runs. cwd: where the workers start; None: where we are.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        environ: Mapping[str, str],
        entry: Entry | None = None,
        cwd: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.plan = plan
        self.options = options
        self._environ = environ
        self._entry = entry
        self._cwd = cwd
        self._say = say
        self._lock = RLock()  # the group has its own; this one keeps events and what they tell in one order
        self._group: Group | None = None
        self._logs: dict[int, int] = {}
        self._error_folder = ""
        self._null = -1
        self._argvs: dict[tuple[str, ...], list[bytes]] = {}
        self._has_terminal = False
        self._history: list[Event] = []  # until there is an outcome that knows them
        self._outcome: Outcome | None = None
        self._oom_kills = -1  # not counted yet
        self._ended = False
        self._is_labelled = any(o.piped and o.console for w in plan.workers for o in (w.stdout, w.stderr))

    # ---- starting

    def start(self) -> None:
        """Start every worker. Raises UsageError for a file that cannot be made and StartError where a worker
        could not be created: then none is left."""
        try:
            self._open()
            specs = [self._spec(worker) for worker in self.plan.workers]
            base = self.plan.base(self._environ) | dict(self.plan.env)
            started = self.group.spawn(specs, [os.fsencode(f"{name}={value}") for name, value in base.items()])
        except StartError as error:
            self.close()
            raise self._explained(error) from None
        except BaseException:
            self.close()
            raise
        finally:
            self._close_null()
        if self.options.verbose:
            self._tell(f"started {started} of {len(specs)} workers of {self.plan.launch_id}")

    def _explained(self, error: StartError) -> StartError:
        from infini_run.shortage import explain

        return explain(error)

    @property
    def group(self) -> Group:
        """The live workers. Only between start and close."""
        assert self._group is not None, "not started, or closed"
        return self._group

    @property
    def ended(self) -> bool:
        return self._group is None or self._ended

    def _open(self) -> None:
        """Everything that can fail, before the first worker."""
        if self.options.report or self.options.log_dir:
            from infini_run.files import check_report, open_logs

            check_report(self.options.report)
            open_logs(self.options.log_dir, self.plan.workers, self._logs)
        if not self.options.log_dir:
            self._make_error_folder()
        self._open_null()
        self._group = Group(
            len(self.plan.workers),
            mark=os.fsencode(f"{MARK}={self.plan.launch_id}"),
            grace_s=self.options.grace_s,
            stop_signal=self.options.stop_signal,
            stop_scope=self.options.stop_scope,
            console=(1, 2) if self._is_labelled else (-1, -1),
            stdin_fd=0 if any(worker.stdin == "pipe" for worker in self.plan.workers) else -1,
            entry=self._entry,
            debug=debug_flags(self._environ),
        )

    def _open_null(self) -> None:
        try:
            self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            if self._null < 3:  # the host program has closed its stdio
                low, self._null = self._null, _above_stdio(self._null)
                os.close(low)
        except OSError as error:
            raise StartError(str(error.strerror), "opening /dev/null", error.errno or 0) from None

    def _make_error_folder(self) -> None:
        folder = os.path.dirname(self.plan.workers[0].error_file)
        if not folder:
            return
        try:
            os.mkdir(folder, 0o700)
            self._error_folder = folder
        except OSError:
            return  # a read-only container: an error file is a convenience, and its writer says so itself

    def _spec(self, worker: Worker) -> Spec:
        env = [os.fsencode(f"{name}={value}") for name, value in worker.env]
        spec = Spec(worker.rank, os.fsencode(self.plan.file), self._argv(worker.argv), env)
        spec.cwd = os.fsencode(self._cwd) if self._cwd else None
        spec.dies_with_us = self._entry is not None or _is_main_thread()
        spec.stdio[0] = {"inherit": INHERIT, "pipe": PIPE, "null": self._null}[worker.stdin]
        if worker.stdin == "inherit" and len(self.plan.workers) == 1 and self._entry is not None:
            spec.foreground = self._has_terminal = os.isatty(0)
        for i, output in enumerate((worker.stdout, worker.stderr)):
            spec.stdio[i + 1] = self._target(output)
            spec.output[i] = (TO_CONSOLE if output.console else 0) | (TO_LOG if output.log else 0)
        if self.options.console == "prefix":
            spec.label = (_labels(worker.label), _labels(f"{worker.label} ERROR"))
        spec.log_fd = self._logs.get(worker.rank, -1)
        return spec

    def _argv(self, argv: tuple[str, ...]) -> list[bytes]:
        """The same list for the same arguments: the core copies it once."""
        if argv not in self._argvs:
            self._argvs[argv] = [os.fsencode(word) for word in argv]
        return self._argvs[argv]

    def _target(self, output: Output) -> int:
        if output.piped:
            return PIPE
        return INHERIT if output.console else self._null

    # ---- following

    def poll(self, timeout_s: float | None = None) -> list[Event]:
        """The events that have come up, waiting for the first one at most `timeout_s` (None: for ever)."""
        group, events = self._group, self._step()  # another thread may close us meanwhile; a closed group is safe
        if not events and group is not None and not self.ended and self._wait(group, timeout_s):
            events = self._step()
        return events

    def _wait(self, group: Group, timeout_s: float | None) -> bool:
        """Before a long wait, note what the kernel has killed for memory so far: a later SIGKILL may be its own."""
        if self._oom_kills < 0 and (timeout_s is None or timeout_s > _SHORT_S):
            if group.wait(_SHORT_S):
                return True
            from infini_run.cgroup import oom_kills

            self._oom_kills = oom_kills()
        return group.wait(timeout_s)

    def _step(self) -> list[Event]:
        with self._lock:
            if self._group is None:
                return []
            events = self._group.step()
            for event in events:
                self._follow(event)
        return events

    def _follow(self, event: Event) -> None:
        self._ended = self._ended or event.kind == "ended"
        if event.is_failure and not self.options.keep_going:
            self.group.stop()
        if self._outcome is None and event.is_plain and not self.options.verbose:
            self._history.append(event)
            return
        text = self.outcome.note(event)
        if text or self.options.verbose:
            self._tell(text or self._described(event))

    @property
    def outcome(self) -> Outcome:
        """What became of the workers so far. Made when there is something to say: a good launch needs none."""
        with self._lock:
            if self._outcome is None:
                from infini_run.outcome import Outcome

                self._outcome = Outcome(
                    self.plan, self.options, has_terminal=self._has_terminal, oom_kills=self._oom_kills
                )
                for event in self._history:
                    self._outcome.note(event)
            return self._outcome

    @property
    def went_well(self) -> bool:
        """It has ended, every worker with exit code 0, and there is nothing else to tell."""
        return self._ended and self._outcome is None

    def _described(self, event: Event) -> str:
        from infini_run.outcome import describe_event

        return describe_event(event)

    def _tell(self, text: str) -> None:
        if self._say is None or not text:
            return
        if self._is_labelled and not self.ended:
            self.group.say(f"infini-run: {text}")
        else:
            self._say(f"infini-run: {text}")

    # ---- acting

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal to one rank's process, or to every rank's; return how many it reached."""
        group, index = self._group, -1 if rank is None else self._index(rank)
        return 0 if group is None else group.signal(index, number)

    def stop(self) -> None:
        """Begin to stop, where something still runs."""
        group = self._group
        if group is not None:
            group.stop()

    def kill(self) -> None:
        """SIGKILL to everything that is left."""
        group = self._group
        if group is not None:
            group.kill()

    def _index(self, rank: int) -> int:
        for index, worker in enumerate(self.plan.workers):
            if worker.rank == rank:
                return index
        raise UsageError(f"there is no rank {rank} on this node")

    def words_of(self, rank: int) -> tuple[str, tuple[str, ...]]:
        """What a rank said: the message in its error file, its last lines of stderr (where they came to us)."""
        from infini_run.error_file import read_error_file

        index = self._index(rank)
        path = self.plan.workers[index].error_file
        text = self.group.tail(index).decode("utf-8", "replace")
        lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
        return read_error_file(path) if path else "", tuple(line for line in lines if line)[-_LAST_LINES:]

    # ---- the end

    def close(self) -> None:
        """Kill and reap what is left, close and remove what is ours. Safe twice, and on a half-made run."""
        with self._lock:
            if self._group is not None:
                if self._outcome is not None and self._outcome.first is not None:
                    self._outcome.add_words(*self.words_of(self._outcome.first))
                self._group.close()
                self._group = None
            self._close_null()
            while self._logs:
                os.close(self._logs.popitem()[1])
            self._remove_error_folder()

    def _remove_error_folder(self) -> None:
        """With all that ranks made in it."""
        folder, self._error_folder = self._error_folder, ""
        if not folder:
            return
        try:
            os.rmdir(folder)
        except OSError:
            from infini_run.files import remove_folder

            remove_folder(folder)

    def _close_null(self) -> None:
        null, self._null = self._null, -1  # first forgotten, then closed: never closed twice
        if null >= 0:
            os.close(null)


def _labels(name: str) -> tuple[bytes, bytes]:
    return os.fsencode(f"[{name}] "), os.fsencode(f"[{name} +] ")


def _above_stdio(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _is_main_thread() -> bool:
    """The parent-death signal is the spawning thread's (prctl(2)): only the main one lives as long as we do."""
    from _thread import get_native_id

    return get_native_id() == os.getpid()
