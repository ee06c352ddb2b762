"""What an agent sends the head of its ranks: that they started, are ready, failed, exited; snapshots, and reports."""

from __future__ import annotations

import time

from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack_json
from infini_run.multinode.link.record_codec import to_jsonable
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.core.c_structs import Event
    from infini_run.multinode.agent.rank_stdio import RankStdio
    from infini_run.multinode.link.connection import Connection
    from infini_run.multinode.link.progress_messages import ProgressSender
    from infini_run.node.headed_programs import HeadedPrograms
    from infini_run.report.hang_snapshot import HangSnapshot
    from infini_run.report.report import Report


class RankReports:
    """The messages about the ranks of one attempt. It is the LaunchHead of their launch (node/launch_head.py).

    Args:
        connection: The Link.
        stdio: That of the ranks: their lines go before the message that they are gone.
        again_code: The exit code by which a rank asks for another run of the job; 0: none does.
    """

    def __init__(self, connection: Connection, stdio: RankStdio, again_code: int) -> None:
        self._connection = connection
        self._stdio = stdio
        self._again_code = again_code
        self._has_failed = False

    def _send_event(self, content: dict[str, Any]) -> None:
        self._connection.send(pack_json(protocol.EVENT, content))

    def send_event(self, event: Event, *, is_headed: bool) -> None:
        """Send what the head wants to know at once.

        Args:
            event: An event of the ranks.
            is_headed: Programs may restart alone; `send_failures` then sends what fails.
        """
        asks_again = event.asks_again(self._again_code)
        if event.kind == "signalled":
            self._send_event({"signalled": event.signal})
        if event.is_failure and (not is_headed or asks_again):
            self.send_failure(event.rank, event.time_ns, asks_again=asks_again)
        if event.kind in ("started", "ready"):
            self._send_event({event.kind: event.rank, "pid": event.pid})

    def send_exits(self, events: Sequence[Event]) -> None:
        """Send which ranks exited, while others run."""
        exits = [event for event in events if event.kind == "exited"]
        if exits:
            failed = [event.rank for event in exits if event.is_failure and not event.asks_again(self._again_code)]
            self._send_event({"exited": [event.rank for event in exits], "failed_ranks": failed})

    def send_failure(self, rank: int, time_ns: int, *, asks_again: bool = False) -> None:
        """Send the first failure here; nothing for further ones.

        Args:
            rank: The rank that failed.
            time_ns: When, by this node's CLOCK_MONOTONIC. The message has its age, too: no two nodes' clocks agree.
            asks_again: It asked for another run of the job.
        """
        if not self._has_failed:
            self._has_failed = True
            self._send_failed(rank, time_ns, asks_again)

    def _send_failed(self, rank: int, time_ns: int, asks_again: bool = False) -> None:
        age_ns = max(0, time.monotonic_ns() - time_ns)
        self._send_event({"failed": rank, "age_ns": age_ns, "time_ns": time_ns, "asks_again": asks_again})

    def send_failures(self, programs: HeadedPrograms) -> None:
        """Send the failures whose programs may restart alone."""
        for rank, time_ns in programs.take_failures():
            self._send_failed(rank, time_ns)

    def send_ends(self, programs: HeadedPrograms, progress: ProgressSender) -> None:
        """Send the programs that ended here, alone. Their lines and exits go first.

        Args:
            programs: The programs.
            progress: Forgets what their ranks have sent.
        """
        from infini_run.node.headed_programs import NotStarted

        for each in programs.take_reports():
            if isinstance(each, NotStarted):
                self._send_event({"not_started": each.program, "problem": each.problem, "is_final": each.is_final})
                continue
            self._stdio.send_waiting()
            progress.drop(exit_.rank for exit_ in each.report.exits)
            done = {"program": each.program, "report": to_jsonable(each.report)}
            done |= {"progress": each.progress, "has_ended": each.has_ended}
            self._connection.send(pack_json(protocol.DONE, done))

    def send_progress(self, entries: list[list[int]]) -> None:
        """Send the progress of ranks, as ProgressSender has it."""
        self._send_event({"progress": entries, "time_ns": time.monotonic_ns()})

    def send_done(self, report: Report, ports: Sequence[int], progress: int) -> None:
        """Send that all ranks here are gone.

        Args:
            report: The report of this node.
            ports: Free ports for another attempt, one per program.
            progress: The highest PROGRESS= of a rank; -1: none has sent it.
        """
        done = {"report": to_jsonable(report), "ports": list(ports), "progress": progress}
        self._connection.send(pack_json(protocol.DONE, done))

    # ---- what the launch says itself

    def on_look(self) -> None:
        """Send that a rank here hangs: other nodes look at theirs now."""
        self._send_event({"suspects": True})

    def on_looked(self) -> None:
        """Send that the look before a stop is complete here."""
        self.on_hang((), ())

    def on_hang(self, snapshots: Sequence[HangSnapshot], ranks_to_stop: Sequence[int]) -> None:
        """Send what this node saw of its ranks, with the processes of one alone. This node's report has all.

        Args:
            snapshots: One per rank that was looked at. Empty: the look is complete.
            ranks_to_stop: The ranks because of which the job is to be stopped.
        """
        hung = next((snapshot for snapshot in snapshots if snapshot.kind), None)
        short = [each if each is hung else replace(each, processes=(), python=()) for each in snapshots]
        content = {"snapshots": to_jsonable(short), "ranks": list(ranks_to_stop)}
        self._connection.send(pack_json(protocol.SNAPSHOTS, content))

    def on_program_up(self, name: str) -> None:
        """Send that a program is up here. Its lines so far go first: those of programs that waited come later."""
        self._stdio.send_waiting()
        self._send_event({"up": name})

    def on_program_end(self, name: str) -> None:
        """Send that all ranks here of a program with --ends_job exited with code 0."""
        self._send_event({"finished": name})
