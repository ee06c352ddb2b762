"""`%load_ext infini_run`: cells of a notebook on the ranks of a crew that stays. A front of Crew.

A thread follows the crew's events while the shell's own thread waits for it, so that an interrupt of the notebook
comes between two of its steps and loses no event.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import copy_context
from functools import partial
from threading import Event, Lock, Thread

from infini_run.crews.api.crew import Crew
from infini_run.crews.capture import capture_foreign
from infini_run.crews.errors import CrewClosed
from infini_run.crews.remote_exception import unreadable_result
from infini_run.crews.supervision.progress import open_show
from infini_run.crews.supervision.restart_policy import Restart
from infini_run.crews.worker.cell_runner import NO_VARIABLES, Cell, CellEnd, CellRunner
from infini_run.errors import InfiniRunError, RemoteError, UsageError, counted
from infini_run.node.host_stderr import print_line
from infini_run.number_arguments import read_seconds
from infini_run.report.failures import WorkerDied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn, TypeVar

    from infini_run.crews.supervision.event_queue import CrewEvent
    from infini_run.crews.supervision.progress import ProgressDisplay

    T = TypeVar("T")

_GRACE_S = 10.0
_QUIET_S = 1.0  # after a failure, until the user reads what the cell still waits for
_OF_CREW = ("-n", "--hosts", "--preload")  # options that make a crew
_RESTARTS = Restart(max_restarts=100)  # within a minute: cells may end workers, a worker that cannot start ends this
_shells: dict[object, RankCells] = {}


def load(shell: Any) -> None:
    """Add the magics to an IPython shell."""
    if shell in _shells:
        return
    cells = _shells[shell] = RankCells(shell)
    for kind, name, call in (
        ("cell", "ranks", cells.on_every_rank),
        ("line", "ranks", cells.crew_line),
        ("cell", "rank", cells.on_one_rank),
        ("line", "rank", cells.value_of_rank),
    ):
        shell.register_magic_function(_shown(call), magic_kind=kind, magic_name=name)


def unload(shell: Any) -> None:
    """Close the shell's crew, and remove the magics."""
    cells = _shells.pop(shell, None)
    if cells is None:
        return
    cells.close()
    for magics in shell.magics_manager.magics.values():
        for name in ("ranks", "rank"):
            magics.pop(name, None)


def _shown(call: Callable[..., T]) -> Callable[..., T]:
    """Return the magic, whose errors show no frames of the shell or of this package."""

    def magic(*args: str) -> T:
        try:
            return call(*args)
        except (InfiniRunError, KeyboardInterrupt) as error:  # an interrupt while the crew starts
            lines = _lines_of(error)
            vars(error)["_render_traceback_"] = lambda: lines  # IPython asks the object for it
            raise

    magic.__doc__ = call.__doc__
    return magic


def _lines_of(error: InfiniRunError | KeyboardInterrupt) -> list[str]:
    if isinstance(error, KeyboardInterrupt):
        return ["KeyboardInterrupt"]
    trace = error.trace.rstrip() if isinstance(error, RemoteError) else ""
    head = "" if isinstance(error, RemoteError) else f"{type(error).__name__}: "
    return [trace or f"{head}{error}", *getattr(error, "__notes__", ())]


class _Parser(argparse.ArgumentParser):
    """The options of a magic."""

    def __init__(self, name: str) -> None:
        super().__init__(prog=name, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see %{self.prog.lstrip('%')}?")

    def read(self, line: str) -> argparse.Namespace:
        """Return the values. Raises UsageError."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.error(f"{line!r}: {error}")
        return self.parse_args(words)


class RankCells:
    """The magics of one shell, and the crew that they share."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._crew: Crew[Cell, CellEnd] | None = None
        self._asked: dict[str, str] = {}  # what the crew was made of
        self._lost: set[tuple[int, int]] = set()  # rank and number of each process whose loss was printed

    def on_every_rank(self, line: str, cell: str) -> None:
        """%%ranks [-n N] [--hosts HOSTS] [--preload MODULES] [--push NAMES] [--grace TIME] [--progress]

        Run the cell on every rank.

        The first cell starts a crew with -n ranks per host: a number, auto, gpu, or cpu. Its workers stay, and keep
        their variables for the next cells. --hosts, --preload, and --push are lists with commas. --push gives every
        rank these variables of the notebook before the cell. An interrupt stops the cell. A new worker replaces a
        rank that does not return within --grace seconds (10). --progress shows a bar of what ranks report by
        this_worker().progress(done, of).
        """
        parser = _Parser("%%ranks")
        for name in _OF_CREW:
            parser.add_argument(name)
        parser.add_argument("--grace", default=_GRACE_S, type=float)
        parser.add_argument("--push", default="")
        parser.add_argument("--progress", action="store_true")
        given = parser.read(line)
        pushed = self._variables(given.push)
        grace_s = read_seconds("--grace", given.grace)
        crew = self._crew_for(given)
        display = open_show("tqdm" if given.progress else False, "ranks", crew.nproc)
        self._run(crew, range(crew.nproc), cell, grace_s, pushed=pushed, display=display)

    def crew_line(self, line: str) -> Crew[Cell, CellEnd] | None:
        """%ranks [--close]

        Return the crew of %%ranks, or end it. Its workers' variables are lost then.
        """
        parser = _Parser("%ranks")
        parser.add_argument("--close", action="store_true")
        if not parser.read(line).close:
            return self._running()
        self.close()
        return None

    def on_one_rank(self, line: str, cell: str) -> None:
        """%%rank RANK

        Run the cell on one rank.
        """
        crew = self._running()
        rank = self._read_rank("%%rank", line, crew)
        self._run(crew, [rank], cell, _GRACE_S)

    def value_of_rank(self, line: str) -> object:
        """%rank RANK [CODE]

        Run the code on one rank, and return the value of its last expression. Without code, return the rank's status.
        """
        crew = self._running()
        word, _, code = line.strip().partition(" ")
        rank = self._read_rank("%rank", word, crew)
        if not code.strip():
            return crew.worker(rank).status()
        return self._run(crew, [rank], code.strip(), _GRACE_S, returns_value=True)

    def close(self) -> None:
        """End the crew, if there is one."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close(drain=False)

    # ---- its parts

    def _variables(self, names: str) -> dict[str, object]:
        """Return the notebook's variables of these names, a list with commas."""
        found = [name.strip() for name in names.split(",") if name.strip()]
        unknown = [name for name in found if name not in self._shell.user_ns]
        if unknown:
            text = f"unknown variable {unknown[0]!r}; use names of the notebook's variables"
            raise UsageError(f"%%ranks --push: {text}")
        return {name: self._shell.user_ns[name] for name in found}

    def _read_rank(self, name: str, word: str, crew: Crew[Cell, CellEnd]) -> int:
        word = word.strip()
        if not (word.isascii() and word.isdigit()) or int(word[:9]) >= crew.nproc:
            raise UsageError(f"{name} {word}: unknown rank; use 0 to {crew.nproc - 1}")
        return int(word)

    def _running(self) -> Crew[Cell, CellEnd]:
        if self._crew is not None and self._crew.failure is not None:
            failure = self._crew.failure
            self.close()
            raise failure
        if self._crew is None:
            raise UsageError("no ranks are running; use %%ranks -n N first")
        return self._crew

    def _crew_for(self, given: argparse.Namespace) -> Crew[Cell, CellEnd]:
        """Return the crew, a new one if there is none."""
        if self._crew is not None and self._crew.failure is not None and given.n is not None:
            print_line("the ranks failed, and new ones start: their state is lost")
            self.close()
        asked = {name: value for name in _OF_CREW if (value := getattr(given, name.lstrip("-"))) is not None}
        if self._crew is None and asked:
            count = asked.get("-n", "")
            preload = asked.get("--preload", "")
            made: Any = {"nproc_per_node": int(count) if count.isdecimal() else count or None}
            made["preload"] = preload.split(",") if preload else ()
            self._crew = Crew(CellRunner, hosts=asked.get("--hosts"), restart=_RESTARTS, **made)
            self._asked = asked
            self._lost.clear()
        crew = self._running()
        other = [f"{name} {value}" for name, value in asked.items() if self._asked.get(name) != value]
        if other:
            started = " ".join(f"{name} {value}" for name, value in self._asked.items())
            text = f"{' '.join(other)}: already started with {started}; drop it, or run %ranks --close first"
            raise UsageError(f"%%ranks: {text}")
        return crew

    def _run(
        self,
        crew: Crew[Cell, CellEnd],
        ranks: Sequence[int],
        source: str,
        grace_s: float,
        *,
        returns_value: bool = False,
        pushed: Mapping[str, object] = NO_VARIABLES,
        display: ProgressDisplay | None = None,
    ) -> object:
        above = "" if returns_value else "\n"  # the magic's own line
        name = f"In[{len(self._shell.history_manager.input_hist_parsed) - 1}]"  # IPython 9 counts on at the start
        cell = Cell(source=above + source, name=name, returns_value=returns_value, pushed=pushed)
        run = CellRun(crew, ranks, cell, self._lost, display)
        try:
            run.wait(grace_s)
        finally:
            if display is not None:
                display.close()
        return run.outcome()


class CellRun:
    """One cell on some ranks of a crew, from its start to the last rank's end.

    Args:
        lost: rank and number of the processes whose loss was printed, which this adds to.
        display: shows the progress that ranks report; None: nothing does.
    """

    def __init__(
        self,
        crew: Crew[Cell, CellEnd],
        ranks: Sequence[int],
        cell: Cell,
        lost: set[tuple[int, int]],
        display: ProgressDisplay | None,
    ) -> None:
        self._crew = crew
        self._lost = lost
        self._display = display
        self._ranks = ranks
        self._cell = cell
        self._waiting: dict[int, int] = {}  # the ranks that run it, with its task
        self._is_followed = Lock()  # the thread that has it follows the cell
        self._ended: Future[None] = Future()
        self._is_sent = Event()
        self._interrupted: set[int] = set()
        self._errors: list[InfiniRunError] = []
        self._value: object = None
        self._has_hint = False

    def wait(self, grace_s: float) -> None:
        """Wait for all ranks. An interrupt stops the cell, and a second one, or the end of the grace, replaces the
        ranks that have not returned."""
        asked = done = 0  # interrupts; one that comes between any two steps is done in the next turn
        while True:
            try:
                self._begin()
                while asked > done:
                    self._replace("was interrupted again") if done else self._interrupt()
                    done += 1
                if _has_ended(self._ended, grace_s if done == 1 else None):
                    return self._ended.result()
                self._replace(f"did not return within {grace_s:g} s")
                asked = done = 2
            except KeyboardInterrupt:
                asked += 1

    def _begin(self) -> None:
        """Start a thread that follows the cell, unless one does. An interrupt in here leaves open whether it started:
        the next turn starts another, which finds the lock taken and ends."""
        if not self._is_followed.locked():
            Thread(target=copy_context().run, args=(self._run_to_end,), name="infini-run-cell", daemon=True).start()

    def _interrupt(self) -> None:
        self._is_sent.wait()
        for rank, task in list(self._waiting.items()):
            if rank in self._interrupted:  # another interrupt came in the middle of this
                continue
            self._interrupted.add(rank)
            self._crew.worker(rank).cancel(task)  # where it has not begun, it never does
            self._crew._supervisor.call(partial(self._interrupt_worker, rank))

    def _interrupt_worker(self, rank: int) -> None:
        """Interrupt the worker, in the supervisor's thread: then it has got the task and its cancellation, in order,
        and takes one of both for the end of the cell."""
        if self._crew._supervisor.workers[rank].state == "busy":  # not one that starts: it would die
            self._crew.signal(signal.SIGINT, rank)

    def _replace(self, why: str) -> None:
        for rank in list(self._waiting):
            now = self._crew.worker(rank).status()
            if now.state == "busy" and (rank, now.restarts) not in self._lost:
                self._lost.add((rank, now.restarts))
                self._crew.signal(signal.SIGKILL, rank)
                print_line(f"rank {rank} {why}: a new worker replaces it, and its state is lost")

    def outcome(self) -> object:
        """Return the value of the last rank. Raises the first error in time, with a note about the others."""
        if not self._errors:
            return self._value
        first, *others = self._errors
        same = sorted(_rank_of(error) for error in others if str(error) == str(first))
        notes = [f"on rank {_rank_of(first)}"] if isinstance(first, RemoteError) else []
        if same:
            notes.append(f"the same on rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}")
        notes += [f"on rank {_rank_of(error)}: {error}" for error in others if str(error) != str(first)]
        first.__notes__ = notes  # type: ignore[attr-defined]
        raise first

    def _run_to_end(self) -> None:
        """Run it in this thread, unless another one does."""
        if self._is_followed.acquire(blocking=False):
            _, error = capture_foreign(self._send_and_follow)
            self._ended.set_exception(error) if error is not None else self._ended.set_result(None)

    def _send_and_follow(self) -> None:
        """Send it to the ranks, and take in the crew's events until no rank is left."""
        try:
            self._waiting = {rank: self._crew.worker(rank).send(self._cell) for rank in self._ranks}
        finally:
            self._is_sent.set()
        while self._waiting:
            is_quiet = bool(self._errors) and not self._has_hint
            events = self._crew.events(_QUIET_S if is_quiet else None)
            for event in events:
                self._handle(event)
            if not events and not is_quiet:
                raise CrewClosed("the crew was closed before this task was done")
            if not events:
                self._has_hint = True
                failed, others = _rank_of(self._errors[0]), ", ".join(map(str, self._waiting))
                print_line(f"rank {failed} failed; to stop the others ({others}), interrupt the cell")

    def _handle(self, event: CrewEvent) -> None:
        if event.kind == "emitted":
            _print_lines(event.rank, event.value)
        elif event.kind == "dropped":
            print_line(f"rank {event.rank}: dropped {counted(event.count, 'piece')} of its output between cells")
        elif event.kind == "progress" and self._display is not None:
            self._display.progress(event.rank, event.done, event.of)
        elif event.kind == "died" and isinstance(event.problem, WorkerDied):
            self._note_loss(event)
        elif event.kind in ("done", "failed", "cancelled") and self._waiting.get(event.rank) == event.task:
            self._end(event)
            del self._waiting[event.rank]

    def _end(self, event: CrewEvent) -> None:
        if event.kind == "cancelled":
            kind = "KeyboardInterrupt"
            self._errors.append(RemoteError(f"{kind}: before the cell began", kind, rank=event.rank, host=event.host))
            return
        if event.kind == "failed":
            error = event.error
            if isinstance(error, WorkerDied):
                self._note_loss(event)
            elif not isinstance(error, InfiniRunError):
                error = error.__cause__ if error is not None else None
            assert isinstance(error, InfiniRunError)
            self._errors.append(error)
            return
        end, cause = capture_foreign(lambda: event.value)
        if end is None:
            assert cause is not None
            self._errors.append(unreadable_result(cause, event.rank, event.host))
            return
        if end.kind:
            self._errors.append(
                RemoteError(f"{end.kind}: {end.text}", end.kind, end.trace, rank=event.rank, host=event.host)
            )
        self._value = end.value

    def _note_loss(self, event: CrewEvent) -> None:
        """Print once that a process is gone, unless this replaced it."""
        if (event.rank, event.restarts) not in self._lost:
            self._lost.add((event.rank, event.restarts))
            print_line(f"rank {event.rank} died: a new worker replaces it, and its state is lost")


def _has_ended(followed: Future[None], limit_s: float | None) -> bool:
    try:
        followed.exception(limit_s)
    except FutureTimeout:
        return False
    return True


def _rank_of(error: InfiniRunError) -> int:
    rank: int = getattr(error, "rank", -1)
    return rank


def _print_lines(rank: int, value: tuple[str, str]) -> None:
    """Print what a rank printed, each line with its label. A line that was written over shows its last text."""
    name, text = value
    label = f"[rank {rank}{' err' if name == 'stderr' else ''}]"
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    print("".join(f"{label} {line}\n" for line in lines), end="", file=getattr(sys, name), flush=True)
