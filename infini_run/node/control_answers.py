"""What a launch on one node does about the questions at its control socket. Imported when the first one comes."""

from __future__ import annotations

import time
from os import getpid, kill

from infini_run.control.server import ControlServer, answer_request, check_request
from infini_run.errors import InfiniRunError, UsageError
from infini_run.report.text import signal_name
from infini_run.system.poller import Poller
from infini_run.system.procfs import ProcessTable
from infini_run.system.signal_numbers import SIGTERM
from infini_run.watchdog.snapshot_collector import RankToInspect, SnapshotCollector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol

    from infini_run.control.server import Asker
    from infini_run.core.group import Group, ProcessState
    from infini_run.node.outcome import Outcome
    from infini_run.options.options import Options
    from infini_run.plan.model import Plan

    class Launch(Protocol):
        """A NodeLaunch, as far as other processes may ask about it."""

        on_asked_stop: Callable[[], None] | None

        @property
        def plan(self) -> Plan: ...
        @property
        def options(self) -> Options: ...
        @property
        def outcome(self) -> Outcome: ...
        @property
        def group(self) -> Group: ...
        @property
        def entry(self) -> ProcessState | None: ...
        @property
        def environ(self) -> Mapping[str, str]: ...
        def notice(self, text: str, *, is_kept: bool = True) -> None: ...
        def signal(self, number: int, rank: int | None = None) -> int: ...
        def stop(self, number: int = 0, *, by_signal: bool = False) -> None: ...
        def kill(self) -> None: ...


_MOST_NOTED = 20  # requests of other processes that the report has
_SHOWN = 8  # ranks that a sentence names


class Notes:
    """What other processes have asked for, as lines for the user; the report has the first ones.

    Args:
        print_note: Called with a sentence, and whether the report is to have it.
    """

    def __init__(self, print_note: Callable[[str, bool], None]) -> None:
        self._print_note = print_note
        self._count = 0

    def add_stop(self, client: Asker) -> None:
        """Note who asked for the stop."""
        self._add(f"{client.who} asked to stop this launch")

    def answer_send(self, client: Asker, number: int, ranks: Sequence[int], count: int) -> None:
        """Answer a request for a signal that has reached `count` of the ranks, and note who asked for it."""
        if count:
            self._add(f"{client.who} sent {signal_name(number)} to {ranks_text(ranks)}")
        client.finish({"text": f"sent {signal_name(number)} to {count} of {len(ranks)} ranks"})

    def _add(self, text: str) -> None:
        self._count += 1
        self._print_note(text, self._count <= _MOST_NOTED)


class NodeControl:
    """The control socket of a launch on one node: its clients and their answers.

    Args:
        run: The launch.
    """

    def __init__(self, run: Launch) -> None:
        self._run = run
        self._poller = Poller()
        self._server = ControlServer(self, self._poller)
        self._notes = Notes(lambda text, is_kept: run.notice(text, is_kept=is_kept))
        self._is_stopping = False
        self._stacks: SnapshotCollector | None = None
        self._stacks_client: Asker | None = None

    # ---- as a part of the launch's loop

    def fds(self) -> list[int]:
        """Return descriptors that are readable when `run_due` has something to do."""
        return [self._poller.fileno(), *(() if self._stacks is None else self._stacks.fds())]

    def add(self, fd: int) -> None:
        """Take over the connection of a client."""
        self._server.add(fd)

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until `run_due` has something to do, at most `asked_s`. None: there is no limit."""
        if self._stacks is None or self._stacks.deadline_s == float("inf"):
            return asked_s
        wait_s = max(0.0, self._stacks.deadline_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> None:
        """Serve the clients that are ready, and go on with stacks. Never blocks."""
        self._poller.poll(0)
        if self._stacks is not None:
            self._collect(self._stacks)

    def close(self) -> None:
        """End every connection."""
        if self._stacks is not None:
            self._stacks.close()
        self._server.close()
        self._poller.close()

    def after_fork_in_child(self) -> None:
        """In a forked child: close the copies."""
        self._server.after_fork_in_child()
        self._poller.close()

    # ---- the questions

    def ask(self, client: Asker, request: dict[str, Any]) -> None:
        """Answer a request that came another way than the socket. Raises LinkError: it is none."""
        check_request(request)
        answer_request(self, client, request)

    def answer(self, client: Asker, request: dict[str, Any]) -> None:
        """Answer a request, as Answers.answer."""
        answers = {"stop": self._stop, "send": self._send, "stacks": self._stacks_of}
        answers[request["question"]](client, request)

    def _stop(self, client: Asker, request: dict[str, Any]) -> None:
        """Stop the launch as SIGTERM does: the second time it kills."""
        self._notes.add_stop(client)
        is_again = self._is_stopping or bool(self._run.outcome.received_signal)
        self._is_stopping = True
        self._stop_run(is_again)
        client.finish({"text": stop_text(is_again, self._run.options.signal_grace_s)})

    def _stop_run(self, is_again: bool) -> None:
        run = self._run
        if run.entry is not None:
            kill(getpid(), SIGTERM)
        elif is_again:
            run.kill()
        elif run.on_asked_stop is not None:
            run.on_asked_stop()
        else:
            run.stop(by_signal=True)

    def _send(self, client: Asker, request: dict[str, Any]) -> None:
        number, ranks = request["signal"], self._ranks(request["ranks"])
        self._notes.answer_send(client, number, ranks, sum(self._run.signal(number, rank) for rank in ranks))

    def _stacks_of(self, client: Asker, request: dict[str, Any]) -> None:
        """Begin to collect stacks of the ranks that run; one client at a time has them."""
        if self._stacks is not None:
            raise InfiniRunError("another process asks for stacks; try again")
        asked = set(self._ranks(request["ranks"]))
        subjects = [
            RankToInspect(index=index, rank=exit_.rank, pid=exit_.pid or 0, kind="", why="")
            for index, exit_ in enumerate(self._run.outcome.exits())
            if exit_.rank in asked and exit_.start_s is not None and exit_.end_s is None
        ]
        if not subjects:
            client.finish({"stacks": []})
            return
        run = self._run
        self._stacks_client = client
        self._stacks = SnapshotCollector(
            subjects, ProcessTable(), group=run.group, entry=run.entry, environ=run.environ, folder=""
        )
        self._collect(self._stacks)

    def _collect(self, collector: SnapshotCollector) -> None:
        collector.poll(time.monotonic())
        if collector.done:
            client, self._stacks, self._stacks_client = self._stacks_client, None, None
            assert client is not None
            stacks = sorted(({"host": each.host, **each.to_json()} for each in collector.snapshots), key=_rank)
            client.finish({"stacks": stacks})

    def _ranks(self, asked: Sequence[int] | None) -> list[int]:
        """Raises UsageError: one of them is not here."""
        here = [worker.rank for worker in self._run.plan.workers]
        unknown = sorted(set(asked or ()) - set(here))
        if unknown:
            raise UsageError(f"unknown rank {unknown[0]}; use ranks {here[0]} to {here[-1]}")
        return here if asked is None else list(asked)


def stop_text(is_again: bool, grace_s: float) -> str:
    """Return the answer to a stop."""
    return "killing what is left" if is_again else f"stopping; SIGKILL in {grace_s:g} s, or now if repeated"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 2`, or `16 ranks`."""
    if len(ranks) > _SHOWN:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _rank(stack: Mapping[str, Any]) -> int:
    return int(stack["rank"])
