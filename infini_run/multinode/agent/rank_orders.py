"""What the head asks of the ranks of a node: to stop, to get a signal, to start. An agent's part of the protocol.

The one rule: what comes before the ranks run is kept until then. The head sends it as soon as it has sent LAUNCH.
"""

from __future__ import annotations

from infini_run.errors import LinkError
from infini_run.multinode.link import message_schema, protocol
from infini_run.system.signal_numbers import SIGSTOP, SIGTSTP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.node.launch import NodeLaunch

_EARLY_SIGNALS = 64  # that are kept until the ranks have started


class RankOrders:
    """The orders for the ranks of one attempt.

    Attributes:
        run: The ranks. None: none run.
    """

    def __init__(self) -> None:
        self.run: NodeLaunch | None = None
        self._stop: dict[str, Any] | None = None
        self._is_killed = False
        self._signals: list[int] = []
        self._programs: list[str] = []  # that may start
        self._ending: list[dict[str, Any]] = []  # programs to end alone

    def renew(self) -> None:
        """Drop what was kept: what comes now is for the ranks of another attempt."""
        self._stop, self._is_killed, self._signals = None, False, []
        self._programs, self._ending = [], []

    @property
    def is_stopped(self) -> bool:
        """Whether ranks that start now are stopped at once."""
        return self._stop is not None or self._is_killed

    def attach(self, run: NodeLaunch) -> None:
        """Do with ranks that have started what came before.

        Args:
            run: The ranks, which get all that comes from now on.
        """
        self.run = run
        if run.programs is not None:
            run.programs.start(self._programs)
        if run.headed is not None:
            for content in self._ending:
                run.headed.end(**content)
        for number in self._signals:
            _forward_signal(run, number)
        if self._is_killed:
            run.kill()
        elif self._stop is not None:
            _stop(run, **self._stop)

    def detach(self) -> None:
        """Drop the ranks: they are gone."""
        self.run = None

    def handle_frame(self, kind: bytes, payload: bytes) -> None:
        """Do what a frame of the head asks of the ranks, or keep it. Frames about anything else are ignored.

        Args:
            kind: The kind of the frame.
            payload: Its content.

        Raises:
            LinkError: It is not what infini-run sends.
        """
        run = self.run
        if kind == protocol.STOP:
            self._on_stop(message_schema.read(payload, message_schema.STOP, message_schema.STOP_PROGRAM))
        elif kind == protocol.SNAPSHOT_REQUEST and run is not None:
            run.take_snapshots(**message_schema.read(payload, message_schema.SNAPSHOT_REQUEST))
        elif kind == protocol.START:
            self._on_start(message_schema.read(payload, message_schema.START, message_schema.RESTART))
        elif kind == protocol.CAUSE and run is not None:
            run.outcome.record_cause(message_schema.read(payload, message_schema.CAUSE)["ranks"])
        elif kind == protocol.KILL:
            self._is_killed = True
            if run is not None:
                run.kill()
        elif kind == protocol.SIGNAL:
            self._on_signal(**message_schema.read(payload, message_schema.SIGNAL))

    def _on_stop(self, content: dict[str, Any]) -> None:
        """Stop all ranks, or end those of one program."""
        run = self.run
        if "program" not in content:
            self._stop = content
            if run is not None:
                _stop(run, **content)
        elif run is None:
            self._ending.append(content)
        elif run.headed is not None:
            run.headed.end(**content)

    def _on_start(self, content: dict[str, Any]) -> None:
        """Start programs that waited for others, or one that restarts alone."""
        run = self.run
        if "programs" in content and run is None:
            self._programs += content["programs"]
        elif run is not None and "programs" in content:
            if run.programs is not None:
                run.programs.start(content["programs"])
        elif run is not None and run.headed is not None and not run.headed.restart(**content):
            raise LinkError("unexpected message over the link")

    def _on_signal(self, signal: int, ranks: Sequence[int], by: str) -> None:
        """Send a signal to the ranks that another process asked for, or to all."""
        run = self.run
        if ranks:
            if run is not None:
                for rank in {worker.rank for worker in run.plan.workers}.intersection(ranks):
                    run.signal(signal, rank, by=by)
        elif run is not None:
            _forward_signal(run, signal)
        elif len(self._signals) < _EARLY_SIGNALS:
            self._signals.append(signal)


def _stop(run: NodeLaunch, signal: int, by_signal: bool, after_s: float) -> None:
    if after_s:
        run.stop_later(after_s)
    else:
        run.stop(signal, by_signal=by_signal)


def _forward_signal(run: NodeLaunch, number: int) -> None:
    """Pass a signal of the head's on as the launcher of one node does (csrc/group/signals.c)."""
    from infini_run.core.signal_pipe import GROUP_SIGNALS

    if number == SIGTSTP:
        run.signal_groups(SIGSTOP)
    elif number in GROUP_SIGNALS:
        run.signal_groups(number)
    else:
        run.signal(number)
