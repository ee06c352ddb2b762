"""The same question about many jobs, each alone: a broken one is a separate answer, a hung one holds nobody.

A file server that is gone keeps whoever asks it for a file in the kernel, until it is back (nfs(5), hard). So a
thread that can stay behind looks at jobs; when it is slow, another one takes the next job.

The one rule: a job without an answer is asked about only once, so no job holds two threads.
"""

from __future__ import annotations

import _thread
import time
from collections import deque

from infini_run.crews.capture import capture_exception
from infini_run.errors import InfiniRunError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Thread
    from typing import Any, TypeVar

    T = TypeVar("T")
    R = TypeVar("R")

SLOW_S = 0.5  # without an answer; then one more thread takes the remaining jobs
HUNG_S = 10.0  # since a job was last heard of; then it is left behind
_MOST = 64  # threads at a time, and so the jobs that can hang before the rest is not looked at
_hung: set[str] = set()  # paths of jobs that somebody still waits for
_progress_of: dict[int, Callable[[], None]] = {}  # by thread


class JobHung(InfiniRunError):
    """Nothing was heard of a job's directory."""


def note_progress() -> None:
    """Say that the job which this thread looks at has answered something: one of many tasks is slow, and not hung."""
    if found := _progress_of.get(_thread.get_ident()):
        found()


def for_each(
    items: Sequence[T], call: Callable[[T], R], path_of: Callable[[T], str], hung_s: float = HUNG_S
) -> list[R | InfiniRunError]:
    """Call a function with each item, in threads.

    Args:
        items: The subjects of the question.
        call: The question. It may block, and raise InfiniRunError.
        path_of: Gives the directory that a question is about.
        hung_s: Seconds without a note after which a job stays behind.

    Returns:
        For each item the answer, or the InfiniRunError that came instead of it: `JobHung` of one left behind.
    """
    round_ = _Round(items, call, path_of, hung_s)
    round_.run()
    silent = [JobHung(_silence(path_of(item), hung_s)) for item in items]
    return [_outcome(round_.outcomes.get(at, error)) for at, error in enumerate(silent)]


def ask_one(path: str, call: Callable[[], R]) -> R:
    """Return what a call says about the job in `path`. Raises InfiniRunError: `JobHung`, if it says nothing."""
    return kept(for_each((path,), lambda _: call(), lambda path: path), None)[0]


def kept(outcomes: Sequence[R | InfiniRunError], problem: Callable[[str], None] | None) -> list[R]:
    """Return the answers; `problem` gets a line per other outcome. None: the first of those raises."""
    found = []
    for outcome in outcomes:
        if not isinstance(outcome, InfiniRunError):
            found.append(outcome)
        elif problem is None:
            raise outcome
        else:
            problem(str(outcome))
    return found


def _silence(path: str, hung_s: float) -> str:
    return f"{path} has not responded for {hung_s:.0f} s; check its file server"


def _outcome(outcome: Any) -> Any:
    """Return the outcome of one job; a bug is no job's outcome, and raises."""
    if isinstance(outcome, BaseException) and not isinstance(outcome, InfiniRunError):
        raise outcome
    return outcome


class _Round:
    """Once through all of them. outcomes: by place."""

    def __init__(
        self, items: Sequence[T], call: Callable[[T], R], path_of: Callable[[T], str], hung_s: float
    ) -> None:
        from threading import Condition

        self.outcomes: dict[int, Any] = {}
        self._items = items
        self._call: Callable[[Any], Any] = call
        self._path_of: Callable[[Any], str] = path_of
        self._waiting = deque(at for at, item in enumerate(items) if path_of(item) not in _hung)
        self._hung_s = hung_s
        self._running: dict[int, float] = {}  # when each was last heard of
        self._changed = Condition()

    def run(self) -> None:
        threads: list[Thread] = []
        count = -1
        with self._changed:
            while self._waiting or self._live():
                is_slow = len(self.outcomes) == count or not self._live()
                if self._waiting and is_slow and len(threads) < _MOST:
                    threads += self._start()
                elif not self._live():
                    break  # each thread is held by a job, and none is left for the others
                count = len(self.outcomes)
                self._changed.wait(self._patience_s())
            self._waiting.clear()
            _hung.update(self._path_of(self._items[at]) for at in self._running)
            is_over = not self._running
        for thread in threads if is_over else ():
            thread.join()

    def _live(self) -> list[float]:
        """Return when those that are still waited for were last heard of."""
        now_s = time.monotonic()
        return [last_s for last_s in self._running.values() if now_s - last_s < self._hung_s]

    def _patience_s(self) -> float:
        """Return how long to wait for the end of all, which is an event; that nothing happens is none."""
        if self._waiting or not self._running:
            return SLOW_S
        return max(0.0, max(self._live(), default=0.0) + self._hung_s - time.monotonic()) + 0.01

    def _start(self) -> list[Thread]:
        """Start one more thread; where that fails, look at the jobs here."""
        from threading import Thread

        thread = Thread(target=self._work, daemon=True, name="infini-job-look")
        try:
            thread.start()
        except RuntimeError:  # ulimit -u
            self._work()
            return []
        return [thread]

    def _work(self) -> None:
        while (at := self._next()) >= 0:
            _progress_of[_thread.get_ident()] = lambda at=at: self._note_progress(at)  # type: ignore[misc]
            answer, error = capture_exception(self._call, self._items[at])  # `for_each` raises a bug
            del _progress_of[_thread.get_ident()]
            with self._changed:
                del self._running[at]
                _hung.discard(self._path_of(self._items[at]))
                self.outcomes[at] = answer if error is None else error
                if not self._waiting and not self._running:
                    self._changed.notify_all()

    def _note_progress(self, at: int) -> None:
        self._running[at] = time.monotonic()

    def _next(self) -> int:
        """Return the place of the next job; -1 without one."""
        with self._changed:
            if not self._waiting:
                return -1
            at = self._waiting.popleft()
            self._running[at] = time.monotonic()
            return at
