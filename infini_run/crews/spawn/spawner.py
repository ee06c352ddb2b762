"""The processes of workers as their supervisor sees them: the protocols of a Spawner and of what it starts.

The supervisor waits; nothing here does. A group says what to wait for (`fds`, `due_s`) and takes in what happened
without blocking (`poll`). The supervisor reads and writes a worker's channel; closing the WorkerProcess closes it.
Nothing here knows what a message means.
"""

from __future__ import annotations

PING_INTERVAL_S = 0.1  # a worker's signs of life (WATCHDOG=1) within it are passed on once
KILL_ANSWER_S = 15.0  # the wait for what a zygote or node kills for us; the core there gives up after 5

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from infini_run.channel import Receiver, Sender
    from infini_run.channel.serializer import Buffer
    from infini_run.core.group import Event
    from infini_run.errors import InfiniRunError
    from infini_run.node.outcome import Outcome
    from infini_run.plan.model import Plan
    from infini_run.report.exit import Exit
    from infini_run.report.report import Report
    from infini_run.system.poller import Poller

    class ProcessGroup(Protocol):
        """Worker processes that were started together: what is waited for and stopped is the whole group. Its objects
        can be keys of a dict."""

        @property
        def ended(self) -> bool:
            """Nothing is left of any of them, nor of what they had started, but what SIGKILL did not end."""

        def fds(self) -> Sequence[int]:
            """`poll` has something to do when one of them can be read. The first stays the same; the others may be
            closed at any time, so ask again before each wait."""

        def next_deadline_s(self) -> float | None:
            """`poll` has something to do at this time (monotonic), whatever can be read; None: there is no such
            time."""

        def poll(self) -> None:
            """Take in what happened to all of them; never blocks."""

        def stop(self, number: int = 0) -> None:
            """Begin to stop all of them: this signal (0: the stop signal), SIGKILL after the grace, then the same for
            what they leave behind."""

        def kill(self) -> None:
            """Send SIGKILL to everything that is left."""

    class WorkerProcess(Protocol):
        """One process of one worker; after a restart the worker has another one.

        pid: 0 until it has one. exit: how the process ended, as soon as it has, or was given up because
        SIGKILL did not end it; what it left behind may still run.
        problem: why nothing is known of its end (its node was lost), else None. clock_s: what has to be added to a
        time of its host's clock for a time of this one's. stuck: the processes of its group that SIGKILL did not end
        (uninterruptible sleep), in words, as soon as the group has ended; "": none.
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
            """Have `on_end` called once, from any thread, perhaps at once: with True when what is stuck has ended,
            with False if that cannot be known. To be called before `close`. Returns what ends the watch."""

        def last_ping_s(self) -> float:
            """When it last said WATCHDOG=1 to its NOTIFY_SOCKET (monotonic); 0: never."""

        def signal(self, number: int) -> int:
            """Send a signal to its process; return how many it reached (0: it has ended)."""

        def close(self) -> None:
            """Kill what is left, reap it, close the channel and all else. Safe twice."""

        def after_fork_in_child(self) -> None:
            """In a forked child, to which nothing of this belongs: close only the copies of descriptors."""

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
            """Start these ranks, in order, as one group; separate_groups: each as a group of its own. restarts: how
            often that was done before. Raises UsageError, ProgramError, StartError: then none is left."""

        def broadcast(self, processes: Sequence[WorkerProcess], frame: list[Buffer]) -> None:
            """Send the same message to all of them; it crosses the link to each node once. Those that have ended get
            nothing. Returns when nothing that is sent later can overtake it."""

        def ask_alive(self) -> None:
            """A worker has failed: ask all other hosts for a sign of life, so that one that is lost later is known to
            have been alive after that."""

        def close(self) -> None:
            """Free what it holds beside its processes. Safe twice."""

        def after_fork_in_child(self) -> None:
            """In a forked child."""
