"""The table of --live for a launch that runs elsewhere: --top asks it once a second, and draws here.

What ranks of this machine use is read here, so the launcher has no part in it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty

from infini_run.control.client import NODES_S, ask, dicts_in
from infini_run.display.live_table import TICK_S, LaunchView, LiveTable
from infini_run.display.resource_usage import Sampler
from infini_run.display.table_rendering import TableRenderer
from infini_run.display.terminal import TerminalArea
from infini_run.errors import InfiniRunError, LinkError, UsageError
from infini_run.multinode.head.observed_node import RemoteGroup, partial_plan, whole_number
from infini_run.multinode.link.record_codec import decode_record
from infini_run.questions.outer_pids import outer_pids
from infini_run.record import replace
from infini_run.report.exit import Exit
from infini_run.report.pace import Pace
from infini_run.report.program_pace import make_pace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.control.launches import FoundLaunch
    from infini_run.display.resource_usage import Usage
    from infini_run.plan.model import Worker

_COLUMNS = 120  # of a table that goes to no terminal
_KEY = 64  # bytes of keys that are read at a time
_QUIT = (b"q", b"Q")


class _Node:
    """The ranks of one node, as the launch describes them: a group and an outcome for the table."""

    def __init__(self) -> None:
        self.sampler: Sampler | None = None  # if its ranks can be measured here
        self._exits: tuple[Exit, ...] = ()
        self.group = RemoteGroup()
        self._pace = Pace()  # until its ranks are known
        self.is_interrupted = False
        self.view: LaunchView | None = None

    def exits(self) -> tuple[Exit, ...]:
        """Return the state of every rank."""
        return self._exits

    def _sample(self, ranks: Mapping[int, tuple[Worker, float]], now_s: float) -> dict[int, Usage]:
        return dict(self.group.samples) if self.sampler is None else self.sampler.sample(ranks, now_s)

    def update(
        self, facts: Mapping[str, Any], slow: frozenset[int], pids: Mapping[int, int], name: str, *, has_host: bool
    ) -> LaunchView:
        """Use what the launch says of the node. Raises LinkError and others: it is something else.

        Args:
            facts: What it says.
            slow: The ranks of the launch that are slow.
            pids: As outer_pids returns them.
            name: The launch's id.
            has_host: Whether the table shows the node's name.
        """
        exits = tuple(decode_record(Exit, each) for each in facts["exits"])
        exits = tuple(replace(each, pid=pids.get(each.pid or 0, each.pid)) for each in exits) if pids else exits
        if self.view is None or [each.rank for each in exits] != [each.rank for each in self._exits]:
            plan = partial_plan(0, name, "", [each[:4] for each in facts["ranks"]])
            uuids = [tuple(str(uuid) for uuid in each[4]) for each in facts["ranks"]]
            workers = tuple(replace(each, uuids=of) for each, of in zip(plan.workers, uuids, strict=True))
            if [worker.rank for worker in workers] != [each.rank for each in exits]:
                raise LinkError("what came over the link is not what infini-run sends")
            host = str(facts["host"]) if has_host else ""
            self._pace = make_pace({each.rank: each.program for each in exits}, one_world=False)
            self.view = LaunchView(
                replace(plan, workers=workers),
                self.group,
                lambda: self,
                self._sample,
                self._pace,
                lambda: self.group.hung_ranks,
                host,
            )
        self._note_progress(exits)
        self._pace.slow = slow  # as the launch compares, which has more reports than this view
        self._exits, self.is_interrupted = exits, facts["is_interrupted"] is True
        self.group.update(facts["lines"], facts["usage"], facts["hung"], len(exits))
        if facts["is_stopping"] is True:
            self.view.stop()
        return self.view

    def _note_progress(self, exits: Sequence[Exit]) -> None:
        epoch_s = time.time() - time.monotonic()
        for exit_ in exits:
            if exit_.progress is not None and exit_.progress_s is not None:
                before = self._pace.value(exit_.rank)
                passed = 1 if before is None else exit_.progress - before  # reports between two questions are unseen
                self._pace.note(exit_.rank, exit_.progress, exit_.progress_s - epoch_s, reports=max(1, passed))


class _Ranks:
    """All ranks of a launch."""

    def __init__(self, launch: FoundLaunch) -> None:
        self._launch = launch
        self._nodes: dict[int, _Node] = {}
        self._sampler = Sampler()

    def ask(self) -> dict[int, LaunchView]:
        """Ask the launch, and return a view of each node. Raises InfiniRunError."""
        return self.read(ask(self._launch, "facts", limit_s=NODES_S, ranks=None, usage=False))

    def read(self, answer: Mapping[str, Any]) -> dict[int, LaunchView]:
        """Return a view of each node that an answer has. Raises InfiniRunError: it is no answer."""
        nodes = dicts_in(answer.get("nodes"))
        views = {}
        try:
            slow = frozenset(whole_number(rank) for rank in answer["slow"])
            has_other_nodes = "problems" in answer
            pids = {} if has_other_nodes else outer_pids(self._launch.pid)
            for facts in nodes:
                number = int(facts["node"])
                # ranks in another PID namespace have other numbers here
                is_here = not has_other_nodes and (bool(pids) or facts["pid"] == self._launch.pid)
                node = self._nodes.setdefault(number, _Node())
                node.sampler = self._sampler if is_here else None
                views[number] = node.update(facts, slow, pids, self._launch.launch_id, has_host=len(nodes) > 1)
        except (LinkError, LookupError, TypeError, ValueError, OverflowError):
            raise InfiniRunError(f"{self._launch.launch_id}: its answer is not what infini-run sends") from None
        return views

    def close(self) -> None:
        """Release what samples needed."""
        self._sampler.close()


def show_ranks(launch: FoundLaunch, environ: Mapping[str, str], origin: str) -> tuple[str, int]:
    """Show the ranks of a launch until q or its end.

    Args:
        launch: The launch.
        environ: The environment, for the terminal.
        origin: What asks for the view, for an error.

    Returns:
        Without a terminal, the ranks for stdout, else ""; and the exit code.

    Raises:
        UsageError: rich is missing.
        InfiniRunError: The launch does not answer.
    """
    try:
        import rich  # noqa: F401
    except ImportError:
        raise UsageError(f"{origin}: needs rich; run pip install 'infini-run[live]'") from None
    ranks = _Ranks(launch)
    try:
        if os.isatty(1) and environ.get("TERM", "") not in ("", "dumb"):
            return "", _show_live(launch, ranks, environ)
        return "\n".join(_frame(launch, ranks.ask(), environ)), 0
    finally:
        ranks.close()


def _begin_s(launch: FoundLaunch) -> float:
    return time.time() if launch.facts is None else launch.facts.start_s


def _frame(launch: FoundLaunch, views: Mapping[int, LaunchView], environ: Mapping[str, str]) -> list[str]:
    """The table as plain lines, with a line for every rank."""
    from rich.text import Text

    lines: dict[int, Callable[[int], str]] = {}
    rows = []
    for view in views.values():
        for row in view.rows(time.monotonic()):
            rows.append(row)
            lines[row.rank] = view.last_line
    title = LiveTable.title(len(rows), len(views), time.time() - _begin_s(launch))
    width = int(environ["COLUMNS"]) if environ.get("COLUMNS", "").isdecimal() else _COLUMNS
    painted = TableRenderer(environ).frame(rows, title, (width, len(rows) + 3), lambda rank: lines[rank](rank))
    return [Text.from_ansi(line).plain.rstrip() for line in painted]


def _show_live(launch: FoundLaunch, ranks: _Ranks, environ: Mapping[str, str]) -> int:
    views, before = ranks.ask(), set[int]()
    table = LiveTable(TerminalArea(1), environ, begin_s=_begin_s(launch))
    try:
        with _Keys() as keys:
            while True:
                table.drop(before - views.keys())
                for number, view in views.items():
                    table.begin(view, number)
                table.run_due()
                if keys.has_quit(TICK_S):
                    return 0
                before, views = set(views), ranks.ask()
    except InfiniRunError as error:  # in most cases, of its end
        print(f"infini-run: {error}", file=sys.stderr, flush=True)
        return 0
    finally:
        table.close()


class _Keys:
    """The keyboard, whose keys come without Enter in a `with` block; its modes come back behind it."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> _Keys:
        if os.isatty(0):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they would leave the modes as they are
                signal.signal(number, _exit)
            self._before = termios.tcgetattr(0)
            tty.setcbreak(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def has_quit(self, limit_s: float) -> bool:
        """Wait for a key, at most limit_s seconds. Return whether it ends the view."""
        if not select.select([] if self._before is None else [0], [], [], limit_s)[0]:
            return False
        keys = os.read(0, _KEY)
        return not keys or any(key in keys for key in _QUIT)


def _exit(number: int, _frame: object) -> None:
    sys.exit(128 + number)
