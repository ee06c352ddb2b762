"""The table of --live: when it is drawn, and out of what.

Drawn when something happens, at most five times a second, and once a second besides: what a rank uses changes
without an event, so a display needs a clock. Nothing of this runs without --live.
"""

from __future__ import annotations

import time

from infini_run.record import record
from infini_run.report import signal_name
from infini_run.sample import Sample, Sampler
from infini_run.table import FAILED, HUNG, LIVE, OVER, Painter, Row, plain, up_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.group import Event, Group
    from infini_run.outcome import Outcome
    from infini_run.plan import Plan
    from infini_run.report import Exit
    from infini_run.screen import Screen

_GAP_S = 0.2  # between two frames
_TICK_S = 1.0  # the clock
_NOW = (18, 28)  # SIGCONT, SIGWINCH: what is on the screen is not what we drew


@record
class Scene:
    """A launch to look at. outcome: what became of its ranks so far."""

    plan: Plan
    group: Group
    outcome: Callable[[], Outcome]


class Display:
    """The table on one screen. Of what happens it takes in what it shows; the rest it looks up when it draws."""

    def __init__(self, screen: Screen, environ: Mapping[str, str]) -> None:
        self._screen = screen
        self._painter = Painter(environ)
        self._sampler = Sampler()
        self._samples: dict[int, Sample] = {}
        self._sampled_s = 0.0
        self._scene: Scene | None = None
        self._indexes: dict[int, int] = {}  # by rank
        self._pids: set[int] = set()
        self._lines: dict[int, str] = {}
        self._blamed: dict[int, tuple[str, int]] = {}  # by rank: hung or late, since when
        self._is_stopping = False
        self._begin_s = time.time()
        self._drawn_s = self._due_s = 0.0

    # ---- what happens

    def begin(self, scene: Scene) -> None:
        self._scene = scene
        self._indexes = {worker.rank: index for index, worker in enumerate(scene.plan.workers)}
        self._pids, self._lines, self._blamed = set(), {}, {}
        self._is_stopping = False
        self._due_s = 0.0

    def follow(self, event: Event) -> None:
        """Take one event of the group in."""
        if event.kind == "started":
            self._pids.add(event.pid)
        elif event.kind in ("hung", "late"):
            self._blamed[event.rank] = (event.kind, event.time_ns)
        elif event.kind == "told":
            self.stop()
        elif event.kind == "passed" and event.signal in _NOW:
            if event.signal == _NOW[0]:
                self._screen.forget()  # the shell wrote below it meanwhile
            self._due_s = 0.0

    def stop(self) -> None:
        self._is_stopping = True

    def say(self, text: str) -> bool:
        """Above the table. False: there is none, or nobody sees it."""
        if self._scene is None or self._screen.is_gone or not self._screen.is_ours(self._pids):
            return False
        self._screen.say(text)
        self._due_s = 0.0
        return True

    # ---- when

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Until the next frame, or what was asked for; None: for ever."""
        if self._scene is None or self._screen.is_gone:
            return asked_s
        wait_s = max(0.0, self._due_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def act(self) -> None:
        """Something has happened, or the time is up."""
        now_s = time.monotonic()
        self._due_s = min(self._due_s, self._drawn_s + _GAP_S)
        if self._scene is not None and not self._screen.is_gone and now_s >= self._due_s:
            self._draw(self._scene, now_s)

    def end(self) -> None:
        """The group is about to be closed: the last frame stays."""
        scene, self._scene = self._scene, None
        if scene is not None and self._pids and not self._screen.is_gone:
            self._draw(scene, time.monotonic())
        self._screen.forget()

    def close(self) -> None:
        self._sampler.close()
        self._screen.close()

    # ---- what

    def _draw(self, scene: Scene, now_s: float) -> None:
        self._drawn_s, self._due_s = now_s, now_s + _TICK_S
        if not self._screen.is_ours(self._pids):
            return
        exits = scene.outcome().exits()
        self._sample(scene, exits, now_s)
        columns, lines = self._screen.size()
        width = columns - 1  # in the last column a terminal may wrap already
        rows = [self._row(scene, exit_) for exit_ in exits]
        title = f"infini-run, {len(rows)} rank{'s' if len(rows) != 1 else ''}, {up_text(time.time() - self._begin_s)}"
        frame = self._painter.frame(rows, title, (width, lines - 1), lambda rank: self._last_line(scene, rank))
        if not self._screen.draw(frame, width):
            self._due_s = now_s + _GAP_S

    def _sample(self, scene: Scene, exits: tuple[Exit, ...], now_s: float) -> None:
        if now_s - self._sampled_s < _TICK_S * 0.9:
            return
        self._sampled_s = now_s
        epoch_s = time.time() - now_s
        ranks = {
            e.pid: (scene.plan.workers[self._indexes[e.rank]], e.start_s - epoch_s)
            for e in exits
            if e.pid is not None and e.start_s is not None and e.end_s is None
        }
        self._samples = self._sampler.take(ranks, now_s)

    def _row(self, scene: Scene, exit_: Exit) -> Row:
        is_over = exit_.end_s is not None
        sample = Sample() if is_over else self._samples.get(exit_.pid or 0, Sample())
        if is_over or exit_.start_failure:
            state, kind = _end_state(exit_, scene.outcome().is_interrupted)
        else:
            state, kind = self._state(scene, exit_, sample)
        end_s = exit_.end_s or time.time()
        return Row(
            rank=exit_.rank,
            state=state,
            kind=kind,
            pid=exit_.pid,
            up_s=None if exit_.start_s is None else end_s - exit_.start_s,
            since_s=exit_.end_s or 0.0,
            cpu=sample.cpu,
            memory=sample.memory,
            gpu_memory=sample.gpu_memory,
            gpu=sample.gpu,
        )

    def _state(self, scene: Scene, exit_: Exit, sample: Sample) -> tuple[str, int]:
        """Of one that lives. A rank that was silent too long hangs until it says something."""
        kind, since_ns = self._blamed.get(exit_.rank, ("", 0))
        if exit_.start_s is None:
            return "waiting", LIVE
        if exit_.stuck:
            return "stuck", HUNG
        if self._is_stopping:
            return "stopping", LIVE
        if kind and (kind == "late" or scene.group.activity(self._indexes[exit_.rank])[0] <= since_ns):
            return kind, HUNG
        if sample.is_suspended:
            return "suspended", HUNG
        return ("ready" if exit_.ready_s is not None else "running"), LIVE

    def _last_line(self, scene: Scene, rank: int) -> str:
        """What it wrote last, or last said in STATUS=."""
        index = self._indexes[rank]
        line = plain(scene.group.line(index))
        if line:
            self._lines[rank] = line
        return self._lines.get(rank) or plain(scene.group.status(index))


def _end_state(exit_: Exit, is_interrupted: bool) -> tuple[str, int]:
    """is_interrupted: the user has ended this one himself."""
    if is_interrupted:
        return "interrupted", OVER
    if exit_.start_failure:
        return "not started", FAILED
    if exit_.verdict:
        return "was " + ("hung" if exit_.verdict.startswith("hung") else "late"), FAILED
    if exit_.is_failure:
        return (signal_name(exit_.signal) if exit_.signal else f"exit {exit_.code}"), FAILED
    return ("stopped" if exit_.stopped else "done"), OVER
