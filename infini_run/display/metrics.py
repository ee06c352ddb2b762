"""The file of --metrics: the numbers of a launch in Prometheus' text format, for node_exporter's textfile collector.

A thread replaces the file, so a hung file server never delays the job. Others may read it: it is for a daemon of
another user, and has no arguments and no variables.
"""

from __future__ import annotations

import time
from collections import Counter

from infini_run.display.background_writer import CLOSE_S, BackgroundWriter
from infini_run.plan.program import absolute_flag_path
from infini_run.system.secure_files import check_writable, write_atomic
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.display.event_schema import Fact
    from infini_run.options.launch_options import Options

    Sample = tuple[dict[str, str], float]

STATES = ("waiting", "running", "ready", "done", "failed", "stopped", "lost")
PHASES = ("starting", "running", "stopped")
_ALIVE = ("running", "ready")
_MODE = 0o644
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP = {  # name: (type, text)
    "info": ("gauge", "The launch: its program and host."),
    "ranks": ("gauge", "Ranks of the attempt, by state."),
    "nodes": ("gauge", "Nodes on which the attempt runs."),
    "restarts_total": ("counter", "Restarts of all ranks; with several programs, of the ranks of each."),
    "lost_nodes_total": ("counter", "Nodes that were lost."),
    "hangs_total": ("counter", "Reported hangs, and starts that were late."),
    "progress": ("gauge", "The highest PROGRESS= of a rank."),
    "progress_lowest": ("gauge", "The lowest PROGRESS= of the ranks that run and report it."),
    "progress_per_second": ("gauge", "How fast the highest PROGRESS= grew since the file was written before."),
    "silence_seconds": ("gauge", "Time since the last sign of life of the most silent rank whose silence is known."),
    "phase_seconds_total": ("counter", "Time that the launch spent starting, running, and stopped."),
    "ended": ("gauge", "1 after the end of the launch."),
    "exit_code": ("gauge", "The exit code of the launch, after its end."),
    "received_signal": ("gauge", "The signal that asked the launch to stop, or 0, after its end."),
    "written_timestamp_seconds": ("gauge", "When this file was written; an old one: the launcher was killed."),
}


class _ProgramNumbers:
    """One of several programs; or all ranks, where programs have no names."""

    def __init__(self, name: str) -> None:
        self.labels = {"program": name} if name else {}
        self.first = self.count = 0  # of its ranks, in the attempt
        self.restarts = self.hangs = 0  # restarts: of its ranks alone
        self._before: tuple[float, int] | None = None  # when the text was made before, and the progress then
        self.rate: float | None = None

    def has(self, rank: int) -> bool:
        """Return whether a rank belongs to it."""
        return not self.labels or self.first <= rank < self.first + self.count

    def count_rate(self, now_s: float, highest: int | None) -> None:
        """Count how fast the highest PROGRESS= grew since the last call. None: no rank has sent one."""
        if highest is None:
            self._before = self.rate = None
            return
        if self._before is not None and now_s > self._before[0]:
            self.rate = max(0.0, (highest - self._before[1]) / (now_s - self._before[0]))
        self._before = now_s, highest


class LaunchNumbers:
    """The numbers of a launch so far. Pure: facts in, text out. Times are time.monotonic().

    Args:
        now_s: When the launch began.
    """

    def __init__(self, now_s: float) -> None:
        self._info: dict[str, str] = {}
        self._launch = ""
        self._states: dict[int, str] = {}  # by rank, in the attempt
        self._signs_s: dict[int, float] = {}  # by rank: its last sign of life in a fact
        self._progress: dict[int, int] = {}  # by rank
        self._programs: dict[str, _ProgramNumbers] = {}
        self._nodes = self._ranks = self._restarts = self._lost_nodes = 0
        self._hung: set[str] = set()  # programs of one hang: its ranks are reported one by one
        self._phase, self._since_s = PHASES[0], now_s
        self._spent_s = dict.fromkeys(PHASES, 0.0)
        self._exit_code: int | None = None
        self._received_signal: int | None = None

    def add(self, fact: Fact, now_s: float) -> None:
        """Take in a fact."""
        handle = getattr(self, f"_on_{fact['kind']}", None)
        if handle is not None:
            handle(fact, now_s)
        if fact["kind"] not in ("hung", "late"):
            self._hung.clear()

    def _on_launched(self, fact: Fact, now_s: float) -> None:
        self._launch = self._launch or fact["launch_id"]
        self._info = {name: str(fact[name]) for name in ("run_id", "program", "host")}
        self._nodes, self._ranks, self._restarts = fact["nodes"], fact["ranks"], fact["restarts"]
        first = 0
        for name, count in fact.get("programs", {"": self._ranks}).items():
            program = self._programs.setdefault(name, _ProgramNumbers(name))
            program.first, program.count = first, count
            first += count
        self._states.clear()
        self._signs_s.clear()
        self._progress.clear()
        self._enter("starting", now_s)

    def _on_started(self, fact: Fact, now_s: float) -> None:
        self._progress.pop(fact["rank"], None)
        self._note(fact, now_s, "running")
        if self._phase == "starting" and len(self._states) >= self._ranks:
            self._enter("running", now_s)

    def _on_ready(self, fact: Fact, now_s: float) -> None:
        self._note(fact, now_s, "ready")

    def _on_progress(self, fact: Fact, now_s: float) -> None:
        self._signs_s[fact["rank"]] = now_s
        self._progress[fact["rank"]] = fact["value"]

    def _on_exited(self, fact: Fact, now_s: float) -> None:
        state = "stopped" if fact["stopped"] else "done" if fact["code"] == 0 else "failed"
        self._note(fact, now_s, state)

    def _on_hung(self, fact: Fact, now_s: float) -> None:
        name = fact.get("program", "")
        self._programs[name].hangs += name not in self._hung
        self._hung.add(name)

    _on_late = _on_hung

    def _on_node_lost(self, fact: Fact, now_s: float) -> None:
        self._lost_nodes += 1
        self._states |= {rank: "lost" for rank in fact["ranks"] if self._states.get(rank, "running") in _ALIVE}

    def _on_restarting(self, fact: Fact, now_s: float) -> None:
        if "program" in fact:  # the others run on
            self._programs[fact["program"]].restarts += 1
            return
        self._restarts = fact["restarts"]
        self._enter("stopped", now_s)

    def _on_ended(self, fact: Fact, now_s: float) -> None:
        self._exit_code, self._received_signal = fact["code"], fact["signal"]
        self._enter("stopped", now_s)

    def _note(self, fact: Fact, now_s: float, state: str) -> None:
        self._states[fact["rank"]] = state
        self._signs_s[fact["rank"]] = now_s

    def stop(self, now_s: float) -> None:
        """Note that the ranks are being stopped."""
        self._enter("stopped", now_s)

    def _enter(self, phase: str, now_s: float) -> None:
        self._spent_s[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s

    def text(self, now_s: float, wall_s: float, last_sign_ns: Callable[[int], int | None]) -> str:
        """Return the file.

        Args:
            now_s: Now, as for `add`.
            wall_s: Now, since the epoch.
            last_sign_ns: Returns when a rank gave its last sign of life, if no fact is later; 0: it gave none. None:
                it may write where the launcher does not read, so its silence is unknown unless it reports progress.
        """
        if self._exit_code is None:
            self._enter(self._phase, now_s)
        lines = []
        values = self._samples(now_s, wall_s, last_sign_ns)
        for name, (kind, help_text) in _HELP.items():
            samples = list(values.get(name, ()))
            if samples:
                lines += [f"# HELP infini_run_{name} {help_text}", f"# TYPE infini_run_{name} {kind}"]
                lines += [_line(name, {"launch": self._launch, **labels}, value) for labels, value in samples]
        return "\n".join([*lines, ""])

    def _samples(
        self, now_s: float, wall_s: float, last_sign_ns: Callable[[int], int | None]
    ) -> dict[str, list[Sample]]:
        single: dict[str, float | None] = {
            "nodes": self._nodes,
            "lost_nodes_total": self._lost_nodes,
            "ended": self._exit_code is not None,
            "exit_code": self._exit_code,
            "received_signal": self._received_signal,
            "written_timestamp_seconds": wall_s,
        }
        samples: dict[str, list[Sample]] = {
            "info": [({**self._info, "version": VERSION}, 1.0)],
            "phase_seconds_total": [({"phase": phase}, self._spent_s[phase]) for phase in PHASES],
            **{name: [({}, value)] for name, value in single.items() if value is not None},
        }
        for program in self._programs.values():
            counts = Counter(state for rank, state in self._states.items() if program.has(rank))
            counts["waiting"] = max(0, program.count - counts.total())
            for state in STATES:
                samples.setdefault("ranks", []).append(({**program.labels, "state": state}, counts[state]))
            for name, value in self._numbers_of(program, now_s, last_sign_ns).items():
                if value is not None:
                    samples.setdefault(name, []).append((program.labels, value))
        return samples

    def _numbers_of(
        self, program: _ProgramNumbers, now_s: float, last_sign_ns: Callable[[int], int | None]
    ) -> dict[str, float | None]:
        """Return the numbers that each program has. None: it is unknown."""
        values = {rank: value for rank, value in self._progress.items() if program.has(rank)}
        highest = max(values.values(), default=None)
        program.count_rate(now_s, highest)
        alive = [rank for rank, state in self._states.items() if program.has(rank) and state in _ALIVE]
        signs_ns = {rank: last_sign_ns(rank) for rank in alive}
        signs_s = [
            max(self._signs_s[rank], (sign_ns or 0) / 1e9)
            for rank, sign_ns in signs_ns.items()
            if sign_ns is not None or rank in values
        ]
        return {
            "restarts_total": self._restarts + program.restarts,
            "hangs_total": program.hangs,
            "progress": highest,
            "progress_lowest": min((values[rank] for rank in alive if rank in values), default=None),
            "progress_per_second": program.rate,
            "silence_seconds": max(0.0, now_s - min(signs_s)) if signs_s else None,
        }


def _line(name: str, labels: dict[str, str], value: float) -> str:
    pairs = ",".join(f'{label}="{_printable(text).translate(_ESCAPES)}"' for label, text in labels.items())
    return f"infini_run_{name}{{{pairs}}} {float(value)!r}"


def _printable(text: str) -> str:
    """Return a text that UTF-8 can hold: a name of a file may be any bytes."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


class MetricsFile:
    """The file of a launch, for all its attempts.

    Args:
        path: Its absolute path.
        interval_s: The least time between two replacements.
    """

    def __init__(self, path: str, interval_s: float) -> None:
        self._path = path
        self._interval_s = interval_s
        self._numbers = LaunchNumbers(time.monotonic())
        self._writer = BackgroundWriter(self._replace, 1, "infini-run: metrics")
        self._due_s = time.monotonic()
        self._has_begun = self._is_over = False
        self._problem = ""  # of the last replacement
        self.last_sign_ns: Callable[[int], int | None] = _never

    def add(self, fact: Fact) -> None:
        """Take in a fact."""
        self._has_begun = self._has_begun or fact["kind"] == "launched"
        self._numbers.add(fact, time.monotonic())

    def stop(self) -> None:
        """Note that the ranks are being stopped."""
        self._numbers.stop(time.monotonic())

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until the file is due, at most `asked_s`. None: there is no limit."""
        if not self._has_begun:
            return asked_s
        wait_s = max(0.0, self._due_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> None:
        """Replace the file, if that is due. While the thread hangs in the last one, the newest waits for it."""
        now_s = time.monotonic()
        if now_s >= self._due_s and self._has_begun:
            self._due_s = now_s + self._interval_s
            self._writer.put(self._text(), is_newest=True)

    def _text(self) -> bytes:
        text = self._numbers.text(time.monotonic(), time.time(), self.last_sign_ns)
        return text.encode("utf-8", "replace")

    def _replace(self, data: bytes) -> None:
        try:
            write_atomic(self._path, data, _MODE)
        except OSError as error:
            self._problem = str(error.strerror)
        else:
            self._problem = ""

    def close(self) -> str:
        """Write the file for the last time, and wait a second for that. Return a sentence if that was not possible,
        else "". Safe twice."""
        if self._is_over or not self._has_begun:
            return ""
        self._is_over = True
        self._writer.put(self._text(), is_newest=True)
        if not self._writer.close(CLOSE_S):
            return f"--metrics={self._path}: the last numbers were not written in time"
        return f"--metrics={self._path} cannot be written: {self._problem}" if self._problem else ""


def _never(rank: int) -> int | None:
    return None


def open_metrics(options: Options) -> MetricsFile:
    """Return the file of --metrics. Raises UsageError: it cannot be written."""
    check_writable("metrics", options.metrics, options.log_dir)
    return MetricsFile(absolute_flag_path("metrics", options.metrics), options.metrics_interval_s)
