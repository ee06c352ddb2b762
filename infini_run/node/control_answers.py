"""What a launch on one node does about the questions at its control socket. Imported when the first one comes."""

from __future__ import annotations

import time
from os import getpid, kill

from infini_run.control.server import Client, ControlServer, answer_request, check_request
from infini_run.errors import InfiniRunError, LinkError, UsageError, counted
from infini_run.node.earlier_lines import earlier_lines
from infini_run.record import fields
from infini_run.report.text import ASKED_TO_STOP, signal_name
from infini_run.system.poller import Poller
from infini_run.system.signal_numbers import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol

    from infini_run.control.server import Asker
    from infini_run.core.c_structs import ProcessState
    from infini_run.core.group import Group
    from infini_run.display.resource_usage import Sampler
    from infini_run.node.gpu_cards import GpuCards
    from infini_run.node.outcome import Outcome
    from infini_run.node.resources import LaunchResources
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan, Worker
    from infini_run.report.report import Report
    from infini_run.watchdog.snapshot_collector import SnapshotCollector

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
        def ended(self) -> bool: ...
        @property
        def group(self) -> Group: ...
        @property
        def entry(self) -> ProcessState | None: ...
        @property
        def environ(self) -> Mapping[str, str]: ...
        @property
        def resources(self) -> LaunchResources: ...
        def notice(self, text: str, *, is_kept: bool = True) -> None: ...
        @property
        def slow_now(self) -> frozenset[int]: ...
        def hung_ranks(self) -> dict[int, str]: ...
        def gpu_cards(self) -> GpuCards: ...
        def record_statuses(self) -> None: ...
        def report(self) -> Report: ...
        def trace_so_far(self) -> dict[str, Any] | None: ...
        def signal(self, number: int, rank: int | None = None, by: str = "") -> int: ...
        def stop(self, number: int = 0, *, by_signal: bool = False) -> None: ...
        def kill(self) -> None: ...


BETWEEN_ATTEMPTS = "no rank runs: the launch is about to restart; try again"
_MOST_NOTED = 20  # requests of other processes that the report has
_OF_HEADS = ("stacks", "facts", "report", "earlier")  # questions that a head asks for another process
MOST_LINES = 500  # ranks whose last lines, or variables, one answer has
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
        self._add(f"{client.who} {ASKED_TO_STOP}")

    def answer_send(self, client: Asker, number: int, ranks: Sequence[int], count: int) -> None:
        """Answer a request for a signal that has reached `count` of the ranks, and note who asked for it.

        Raises UsageError: It has reached none.
        """
        if not count:
            whom = "any rank" if len(ranks) != 1 else f"rank {ranks[0]}"
            raise UsageError(f"cannot send {signal_name(number)} to {whom}: not running; run infini-run --list")
        self._add(f"{client.who} sent {signal_name(number)} to {ranks_text(ranks)}")
        client.finish({"text": f"sent {signal_name(number)} to {count} of {counted(len(ranks), 'rank')}"})

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
        self._sampler: Sampler | None = None  # once a head has asked what ranks use

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
        """Serve the clients that are ready, and continue to collect stacks. Never blocks."""
        self._poller.poll(0)
        if self._stacks is not None:
            self._collect(self._stacks)

    def close(self) -> None:
        """End every connection."""
        if self._stacks is not None:
            self._stacks.close()
        if self._sampler is not None:
            self._sampler.close()
        self._server.close()
        self._poller.close()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child."""
        self._server.after_fork_in_child()
        self._poller.close()

    # ---- the questions

    def ask(self, client: Asker, request: dict[str, Any]) -> None:
        """Answer a request that came another way than the socket. Raises LinkError: it is none."""
        check_request(request)
        if request["question"] not in _OF_HEADS:
            raise LinkError("unexpected message over the link")
        answer_request(self, client, request)

    def answer(self, client: Asker, request: dict[str, Any]) -> None:
        """Answer a request, as Answers.answer."""
        answers = {
            "stop": self._stop,
            "send": self._send,
            "stacks": self._stacks_of,
            "facts": self._facts,
            "report": self._report,
            "trace": lambda client, _: client.finish({"trace": self._run.trace_so_far()}),
            "follow": self._add_follower,
            "earlier": self._earlier,
        }
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
        if is_again:  # not by SIGTERM: soon after the first one, the core takes it for timeout(1)'s echo
            if run.entry is not None:
                run.notice(f"{signal_name(SIGTERM)} again: killing what is left", is_kept=False)
            run.kill()
        elif run.entry is not None:
            kill(getpid(), SIGTERM)
        elif run.on_asked_stop is not None:
            run.on_asked_stop()
        else:
            run.stop(by_signal=True)

    def _send(self, client: Asker, request: dict[str, Any]) -> None:
        number, ranks = request["signal"], self._ranks(request["ranks"])
        count = sum(self._run.signal(number, rank, by=client.who) for rank in ranks)
        self._notes.answer_send(client, number, ranks, count)

    def _facts(self, client: Asker, request: dict[str, Any]) -> None:
        """Say how each rank is; of the named ones, also their last lines."""
        run, named = self._run, set(self._ranks(request["ranks"]))
        run.record_statuses()
        outcome = run.outcome
        is_failing = outcome.first is not None and not run.options.keep_going
        exits, usage = outcome.exits(), []
        if request["usage"]:
            from infini_run.display.live_table import living
            from infini_run.display.resource_usage import Sampler

            now_s = time.monotonic()
            self._sampler = self._sampler or Sampler(run.gpu_cards())
            usage = [
                [pid, each.cpu, each.memory, each.is_suspended, each.gpu_memory, each.gpu]
                for pid, each in self._sampler.sample(living(run.plan, exits, now_s), now_s).items()
            ]
        lined = [(index, worker) for index, worker in enumerate(run.plan.workers) if worker.rank in named]
        facts: dict[str, object] = {
            "node": run.plan.nodes[0].index,
            "host": run.plan.nodes[0].host,
            "pid": getpid(),
            "is_stopping": self._is_stopping or bool(outcome.received_signal) or is_failing,
            "is_interrupted": outcome.is_interrupted,
            "ranks": [[w.rank, w.local_rank, w.devices, w.stdout.piped, w.uuids] for w in run.plan.workers],
            "exits": [{"record": "Exit", "fields": {name: getattr(e, name) for name in fields(e)}} for e in exits],
            "lines": [] if run.ended else [_lines_of(run.group, index) for index, _ in lined[:MOST_LINES]],
            "usage": usage,
            "hung": list(run.hung_ranks().items()),
        }
        client.finish({"nodes": [facts], "slow": sorted(run.slow_now)})

    def _report(self, client: Asker, request: dict[str, Any]) -> None:
        """Say what the report would be now, and what the ranks' environment is, without secrets."""
        from infini_run.node.masking import masked

        run = self._run
        plan = run.plan
        run.record_statuses()
        common = plan.common_environ(run.environ)
        own = {str(worker.rank): masked(dict(worker.env)) for worker in plan.workers[:MOST_LINES]}
        found = {
            "node": plan.nodes[0].index,
            "host": plan.nodes[0].host,
            "report": run.report().to_json(),
            "environment": {"common": masked(common), "ranks": own},
        }
        client.finish({"nodes": [found]})

    def _add_follower(self, client: Asker, request: dict[str, Any]) -> None:
        """Let the core send what ranks write, from now on."""
        assert isinstance(client, Client)
        run, workers = self._run, self._workers(request)
        answer: dict[str, object] = {
            "unseen": {
                "stdout": [worker.rank for worker in workers.values() if not worker.stdout.piped],
                "stderr": [worker.rank for worker in workers.values() if not worker.stderr.piped],
            },
        }
        earlier = earlier_lines(workers, request["tail"], run.group, run.resources) if request["tail"] else []
        first = run.plan.workers[0].rank  # from which the core counts (csrc/io/followers.c)
        if run.plan.workers[0].program:  # the ranks of one node are no row then
            numbers = {worker.rank: first + index for index, worker in enumerate(run.plan.workers)}
            answer["names"] = [[numbers[worker.rank], worker.name] for worker in run.plan.workers]
            earlier = [{**each, "rank": numbers[each["rank"]]} for each in earlier]
        answer["earlier"] = earlier
        wanted = [index in workers for index in range(len(run.plan.workers))]
        client.hand_over(answer, lambda fd, first: run.group.add_follower(fd, wanted, first))

    def _earlier(self, client: Asker, request: dict[str, Any]) -> None:
        """Say what ranks have written so far, for a follower at a head."""
        run, workers = self._run, self._workers(request)
        labels = {worker.rank: worker.label for worker in workers.values()}
        found = earlier_lines(workers, request["tail"], run.group, run.resources)
        client.finish({"earlier": [{**each, "label": labels[each["rank"]]} for each in found]})

    def _workers(self, request: dict[str, Any]) -> dict[int, Worker]:
        """Return the ranks of a request, by their indices. Raises UsageError: none runs."""
        if self._run.ended:
            raise UsageError(BETWEEN_ATTEMPTS)
        ranks = set(self._ranks(request["ranks"]))
        return {index: worker for index, worker in enumerate(self._run.plan.workers) if worker.rank in ranks}

    def _stacks_of(self, client: Asker, request: dict[str, Any]) -> None:
        """Begin to collect stacks of the ranks that run; one client at a time has them."""
        if self._stacks is not None:
            raise InfiniRunError("another process asks for stacks; try again")
        from infini_run.system.procfs import ProcessTable
        from infini_run.watchdog.snapshot_collector import RankToInspect, SnapshotCollector

        asked = set(self._ranks(request["ranks"]))
        subjects = [
            RankToInspect(
                index=index,
                rank=exit_.rank,
                pid=exit_.pid or 0,
                kind="",
                why="",
                program=exit_.program,
                program_rank=exit_.program_rank,
            )
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
            stacks = sorted((each.to_json() for each in collector.snapshots), key=_rank)
            client.finish({"stacks": stacks})

    def _ranks(self, asked: Sequence[int | str] | None) -> list[int]:
        """Raises UsageError: one of them is not here."""
        workers = self._run.plan.workers
        here: dict[int | str, int] = {worker.rank: worker.rank for worker in workers}
        here |= {f"{worker.program}:{worker.program_rank}": worker.rank for worker in workers if worker.program}
        unknown = [rank for rank in asked or () if rank not in here]
        if unknown:
            raise UsageError(f"unknown rank {unknown[0]}; use ranks {workers[0].rank} to {workers[-1].rank}")
        return [worker.rank for worker in workers] if asked is None else [here[rank] for rank in asked]


def _lines_of(group: Group, index: int) -> list[object]:
    return [index, _end_of(group.line(index)), _end_of(group.status(index))]


def _end_of(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


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
