"""What a launch on one node does about the questions at its control socket. Imported when the first one comes."""

from __future__ import annotations

from os import getpid, kill

from infini_run.control.server import ControlServer
from infini_run.errors import UsageError
from infini_run.report.text import signal_name
from infini_run.system.signal_numbers import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol

    from infini_run.control.server import Client
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
        def owns_process(self) -> bool: ...
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

    def add(self, text: str) -> None:
        """Add a sentence."""
        self._count += 1
        self._print_note(text, self._count <= _MOST_NOTED)


class NodeAnswers:
    """The answers of a launch on one node.

    Args:
        run: The launch.
    """

    def __init__(self, run: Launch) -> None:
        self._run = run
        self._notes = Notes(lambda text, is_kept: run.notice(text, is_kept=is_kept))
        self._is_stopping = False

    def answer(self, client: Client, request: dict[str, Any]) -> None:
        """Answer a request, as Answers.answer."""
        getattr(self, f"_{request['question']}")(client, request)

    def _stop(self, client: Client, request: dict[str, Any]) -> None:
        """Stop the launch as SIGTERM does: the second time it kills."""
        self._notes.add(f"{client.who} asked to stop this launch")
        is_again = self._is_stopping or bool(self._run.outcome.received_signal)
        self._is_stopping = True
        self._stop_run(is_again)
        grace_s = self._run.options.signal_grace_s
        text = "killing what is left" if is_again else f"stopping; SIGKILL in {grace_s:g} s, or now if repeated"
        client.finish({"text": text})

    def _stop_run(self, is_again: bool) -> None:
        run = self._run
        if run.owns_process:
            kill(getpid(), SIGTERM)
        elif is_again:
            run.kill()
        elif run.on_asked_stop is not None:
            run.on_asked_stop()
        else:
            run.stop(by_signal=True)

    def _send(self, client: Client, request: dict[str, Any]) -> None:
        number, ranks = request["signal"], self._ranks(request["ranks"])
        count = sum(self._run.signal(number, rank) for rank in ranks)
        if count:
            self._notes.add(f"{client.who} sent {signal_name(number)} to {ranks_text(ranks)}")
        client.finish({"text": f"sent {signal_name(number)} to {count} of {len(ranks)} ranks"})

    def _ranks(self, asked: Sequence[int] | None) -> list[int]:
        """Raises UsageError: one of them is not here."""
        here = [worker.rank for worker in self._run.plan.workers]
        unknown = sorted(set(asked or ()) - set(here))
        if unknown:
            raise UsageError(f"unknown rank {unknown[0]}; use ranks {here[0]} to {here[-1]}")
        return here if asked is None else list(asked)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 2`, or `16 ranks`."""
    if len(ranks) > _SHOWN:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def open_control(run: Launch) -> ControlServer:
    """Return the server of a launch's control socket."""
    return ControlServer(NodeAnswers(run))
