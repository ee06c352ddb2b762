"""What a launch reports to the head of several nodes, which then decides. Types alone: no launch imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.report.hang_snapshot import HangSnapshot


class LaunchHead(Protocol):
    """The head, as far as the launch of one node knows it. Every call comes from within the launch's `poll`."""

    def on_look(self) -> None:
        """A rank here hangs, and this node looks at its ranks: other nodes look at theirs now."""

    def on_looked(self) -> None:
        """The look before a stop is complete here."""

    def on_hang(self, snapshots: Sequence[HangSnapshot], ranks_to_stop: Sequence[int]) -> None:
        """Ranks here hang, or another node has some.

        Args:
            snapshots: One per rank of this node that was looked at.
            ranks_to_stop: The ranks because of which the job is to be stopped.
        """

    def on_program_up(self, name: str) -> None:
        """All ranks of a program here are up (--after)."""

    def on_program_end(self, name: str) -> None:
        """All ranks here of a program with --ends_job exited with code 0."""
