"""The processes of workers as their supervisor sees them: the protocols of a Spawner and of what it starts.

The supervisor waits; nothing here does. A group says what to wait for (`fds`, `due_s`) and takes in what happened
without blocking (`poll`). The supervisor reads and writes a worker's channel; closing the WorkerProcess closes it.
Nothing here knows what a message means.
"""

from __future__ import annotations

PING_INTERVAL_S = 0.1  # a worker's signs of life (WATCHDOG=1) within it are passed on once
KILL_ANSWER_S = 15.0  # the wait while a zygote or node kills processes; the core there gives up after 5

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from infini_run.channel import Receiver, Sender
    from infini_run.channel.serializer import Buffer
    from infini_run.core.c_structs import Event
    from infini_run.errors import InfiniRunError
    from infini_run.node.outcome import Outcome
    from infini_run.plan.model import Plan
    from infini_run.report.exit import Exit
    from infini_run.report.report import Report
    from infini_run.system.poller import Poller

    class ProcessGroup(Protocol):
        """Worker processes that started together: a wait or a stop is for the whole group. Its objects can be keys of
        a dict."""

        @property
        def ended(self) -> bool:
            """Whether nothing is left of any of them, nor of what they had started, but what SIGKILL did not end."""

        def fds(self) -> Sequence[int]:
            """Return the descriptors: `poll` has something to do when one of them is readable. The first stays the
            same; the others may close at any time, so call this before each wait."""

        def next_deadline_s(self) -> float | None:
            """Return the time (monotonic) at which `poll` has something to do, whatever is readable; None: there is
            no such time."""

        def poll(self) -> None:
            """Take in what happened to all of them; never blocks."""

        def stop(self, number: int = 0) -> None:
            """Begin to stop all of them: this signal (0: the stop signal), SIGKILL after the grace, then the same for
            what they leave behind."""

        def kill(self) -> None:
            """Send SIGKILL to everything that is left."""

    class WorkerProcess(Protocol):
        """One process of one worker; after a restart the worker has another one.

        Attributes:
            pid: 0 until it has one.
            exit: how the process ended, once known, or after SIGKILL did not end it; what it left behind may still
                run.
            problem: why its end is unknown (its node was lost), else None.
            clock_s: to add to a time of its host's clock for a time of this one's.
            stuck: the processes of its group that SIGKILL did not end (uninterruptible sleep), in words, at the end
                of the group; "": none.
        """

        rank: int
        local_rank: int
        host: str
        pid: int
        tasks: Sender
        events: Receiver
        exit: Exit | None

        @property
        def problem(self) -> InfiniRunError | None: ...

        @property
        def group(self) -> ProcessGroup: ...

        @property
        def clock_s(self) -> float: ...

        @property
        def stuck(self) -> str: ...

        def watch_stuck(self, poller: Poller, on_end: Callable[[bool], None]) -> Callable[[], None]:
            """Call `on_end` once, from any thread, perhaps at once: with True when what is stuck is gone, with False
            if that is unknown. Call this before `close`. Return what ends the watch."""

        def last_ping_s(self) -> float:
            """Return when it last sent WATCHDOG=1 to its NOTIFY_SOCKET (monotonic); 0: never."""

        def signal(self, number: int) -> int:
            """Send a signal to its process; return how many it reached (0: it is gone)."""

        def close(self) -> None:
            """Kill what is left, reap it, close the channel and all else. Safe twice."""

        def after_fork_in_child(self) -> None:
            """Close only the copies of descriptors in a forked child, to which nothing of this belongs."""

    class Run(Protocol):
        """What a WorkerGroup needs of a NodeLaunch, or of an object in its place."""

        plan: Plan

        @property
        def ended(self) -> bool: ...
        @property
        def outcome(self) -> Outcome: ...
        def start(self) -> None: ...
        def poll(self, timeout_s: float = 0.0) -> list[Event]: ...
        def fds(self) -> list[int]: ...
        def next_deadline_s(self) -> float | None: ...
        def last_watchdog_ping_s(self, rank: int) -> float: ...
        def signal(self, number: int, rank: int | None = None) -> int: ...
        def stop(self, number: int = 0) -> None: ...
        def kill(self) -> None: ...
        def report(self) -> Report: ...
        def close(self) -> None: ...
        def after_fork_in_child(self) -> None: ...

    class Spawner(Protocol):
        """Starts workers."""

        @property
        def world_size(self) -> int:
            """How many ranks there are."""

        def start(
            self, ranks: Sequence[int], restarts: int = 0, *, separate_groups: bool = False
        ) -> Sequence[WorkerProcess]:
            """Start these ranks, in order, as one group; separate_groups: one group per rank. restarts: how many
            starts came before. Raises UsageError, ProgramError, StartError: then none is left."""

        def broadcast(self, processes: Sequence[WorkerProcess], frame: list[Buffer]) -> None:
            """Send the same message to all of them; it crosses the link to each node once. Those that are gone get
            nothing. Returns when no later message can overtake it."""

        def ask_alive(self) -> None:
            """Ask all other hosts for a sign of life, after the failure of a worker. So a host that is lost later was
            certainly alive after that."""

        def close(self) -> None:
            """Free what it holds beside its processes. Safe twice."""

        def after_fork_in_child(self) -> None:
            """Close the copies in a forked child."""
