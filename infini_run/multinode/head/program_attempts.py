"""--restart_scope=program on many nodes: the head ends and restarts the program of a failed rank on all its nodes.

The ranks of other programs run on. Each program has its own count of restarts. Its nodes agree as on a restart of all
ranks: the head ends them, gets a report from each, decides, and starts them again. Imported with the flag.
"""

from __future__ import annotations

import os
import time

from infini_run.errors import LinkError
from infini_run.multinode.head.head_state import stop_limit_s
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack_json
from infini_run.multinode.link.record_codec import decode_record
from infini_run.plan.restart_policy import NOT_ENDED, restart_states
from infini_run.record import replace
from infini_run.report.merge import merge_reports
from infini_run.report.report import Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.attempts import Attempts
    from infini_run.multinode.head.head_state import HeadState
    from infini_run.options.launch_options import OneProgram
    from infini_run.plan.restart_policy import RestartState
    from infini_run.report.exit import Exit

_NEVER = float("inf")
_RUNNING, _ENDING, _WAITING, _FAILED = range(4)  # the last one: its failure ends the job


class _Program:
    """One program, and where it is between two of its attempts."""

    def __init__(self, program: OneProgram, ranks: dict[RemoteAgent, range], restarts: RestartState) -> None:
        self.name, self.after = program.name, program.after
        self.ranks = ranks  # by node
        self.restarts = restarts
        self.state = _RUNNING
        self.ending: set[RemoteAgent] = set()  # nodes that have not reported the end of its ranks
        self.end_s = _NEVER  # they are lost then (monotonic)
        self.due_s = _NEVER  # its delay has passed then (monotonic)
        self.failed_s: dict[RemoteAgent, float] = {}  # the first failure on a node, in this attempt
        self.reports: dict[RemoteAgent, Report] = {}
        self.problem = ""  # why its ranks could not restart
        self.is_final = False  # and will not be able to
        self.first: Exit | None = None  # that failed first in the last attempt


class ProgramAttempts:
    """The programs of a job that restart alone.

    Args:
        attempts: What starts programs, and knows which are up.
        stop_job: Stops all ranks after a failure.
        ask_running: Asks all nodes for a sign of life.
        on_lost: Gives up a node that does not stop in time.
    """

    def __init__(
        self,
        state: HeadState,
        attempts: Attempts,
        *,
        stop_job: Callable[[], None],
        ask_running: Callable[[], None],
        on_lost: Callable[[RemoteAgent, str], None],
    ) -> None:
        self._state = state
        self._attempts = attempts
        self._stop_job = stop_job
        self._ask_running = ask_running
        self._on_lost = on_lost
        self._programs: dict[str, _Program] = {}
        self._is_ending_well = False  # all ranks exited, and the agents may end

    def begin(self, agents: Sequence[RemoteAgent]) -> None:
        """Begin the attempt of the job: all ranks start.

        Args:
            agents: That run ranks.
        """
        programs = self._state.options.programs
        restarts = restart_states(self._state.options)
        for at, each in enumerate(programs):
            ranks = {agent: agent.ranks.spans[at] for agent in agents if agent.ranks.spans[at]}
            self._programs[each.name] = _Program(each, ranks, restarts[each.name])

    @property
    def next_deadline_s(self) -> float:
        """When `run_due` has something to do: time.monotonic()."""
        if self._state.is_stopping:
            return _NEVER
        return min(
            (min(each.end_s, each.due_s) for each in self._programs.values()),
            default=_NEVER,
        )

    def postpone(self, by_s: float) -> None:
        """Move the limits by a suspension of this process, in which no node could report in time."""
        for each in self._programs.values():
            each.end_s += by_s

    def _program_of(self, rank: int) -> _Program:
        return self._programs[self._state.numbers.place(rank)[0]]

    def runs(self, name: str) -> bool:
        """Return whether the ranks of a program are not about to end and restart."""
        return name in self._programs and self._programs[name].state == _RUNNING

    # ---- what nodes say

    def on_progress(self, rank: int, value: int) -> None:
        """Note the PROGRESS= of a rank."""
        self._program_of(rank).restarts.note_progress(value)

    def on_failed(self, agent: RemoteAgent, rank: int, failed_s: float, *, with_snapshot: bool = True) -> None:
        """End the program of a rank that failed, or the job. Raises LinkError: the node has no such rank.

        Args:
            agent: The node.
            rank: The rank.
            failed_s: When that was (monotonic).
            with_snapshot: With --snapshots=failure after a look at its ranks.
        """
        if rank not in agent.ranks:
            raise _unexpected()
        each = self._program_of(rank)
        each.failed_s[agent] = min(failed_s, each.failed_s.get(agent, _NEVER))
        if each.state != _RUNNING:
            return
        if self._state.is_stopping or each.restarts.is_spent:
            self._end_job_for(each)
        else:
            self._ask_running()
            self._end(each, with_snapshot=with_snapshot)

    def on_hang(self, ranks: Sequence[int]) -> None:
        """End the programs of ranks that hang. All nodes have looked at their ranks for that."""
        agents = [(agent, rank) for rank in ranks for agent in self._state.world if rank in agent.ranks]
        for agent, rank in agents:
            self.on_failed(agent, rank, time.monotonic(), with_snapshot=False)
        if not agents:
            self._state.stop()

    def on_not_started(self, agent: RemoteAgent, name: str, problem: str, *, is_final: bool) -> None:
        """Act on a node that cannot start the ranks of a program again. Raises LinkError: it has none."""
        each = self._programs.get(name)
        if each is None or agent not in each.ranks:
            raise _unexpected()
        each.problem, each.is_final = each.problem or problem, each.is_final or is_final
        if each.state == _RUNNING and not self._state.is_stopping:
            self._end(each)

    def on_done(self, agent: RemoteAgent, content: dict[str, Any]) -> None:
        """Note that the ranks of a program are gone on a node. Raises LinkError: nobody asked for that."""
        each = self._programs.get(content["program"])
        if each is None or agent not in each.ending:
            raise _unexpected()
        each.ending.discard(agent)
        each.reports[agent] = agent.clock.to_our_time(decode_record(Report, content["report"]))
        each.restarts.note_progress(content["progress"])
        if not content["has_ended"]:
            each.problem, each.is_final = NOT_ENDED, True
        if not each.ending and not self._state.is_stopping:
            self._decide(each)

    def on_exits(self) -> None:
        """Let the agents end once all ranks exited, and none restarts: they keep their launches for a restart."""
        state = self._state
        if self._is_ending_well or state.is_stopping or not self._programs:
            return
        exited = sum(len(agent.exited_ranks) for agent in state.world)
        if exited == state.world_size and all(each.state == _RUNNING for each in self._programs.values()):
            self._is_ending_well = True
            content = {"signal": 0, "by_signal": False, "after_s": 0.0}
            state.agents.send_all(pack_json(protocol.STOP, content), "running")

    def on_node_done(self) -> None:
        """Note that the launch of a node ended. Where nobody asked for that, its programs cannot restart there."""
        if not self._is_ending_well and self._programs:
            self._state.stop()

    # ---- one program

    def _end(self, each: _Program, *, with_snapshot: bool = True) -> None:
        """End the ranks of a program on all its nodes."""
        state = self._state
        each.state, each.reports = _ENDING, {}
        each.ending = {agent for agent in each.ranks if agent.state == "running"}
        each.end_s = time.monotonic() + stop_limit_s(state.options.grace_s)
        self._reset_ranks(each)
        stop = pack_json(protocol.STOP, {"program": each.name, "with_snapshot": with_snapshot})
        for agent in each.ending:
            state.agents.send(agent, stop)

    def _merged(self, each: _Program) -> Report:
        """Return the report of the last attempt of a program."""
        state = self._state
        reports = [(report, each.failed_s.get(agent, _NEVER)) for agent, report in each.reports.items()]
        return merge_reports(
            reports,
            launch_id=state.launch_id,
            run_id=state.options.run_id,
            host=os.uname().nodename,
            world_size=sum(map(len, each.ranks.values())),
            start_s=time.time(),
            end_s=time.time(),
            received_signal=state.stop_signal,
            forwarded_signals=state.forwarded_signals,
            notices=(),
        )

    def _decide(self, each: _Program) -> None:
        """Decide what follows the end of a program's ranks on all nodes."""
        state, restarts = self._state, each.restarts
        report = self._merged(each)
        each.first, each.end_s = report.first_failure or each.first, _NEVER
        problem, each.problem = each.problem, ""
        if problem and each.is_final:
            restarts.give_up(problem)
            line = ""
        elif problem:
            line = restarts.start_failed(problem)
        else:
            line = restarts.decide(report)
        if not line:
            self._end_job_for(each)
            return
        each.state, each.due_s = _WAITING, restarts.due_s
        state.print(f"{each.name}: {line}")
        if state.observers is not None:
            state.observers.restart_program(each.name, restarts.total)

    def _end_job_for(self, each: _Program) -> None:
        """Stop the job because of a program's failure, which is none to restart it."""
        is_first = each.state == _RUNNING and not self._state.is_stopping
        if each.state != _RUNNING:  # its ranks are gone
            each.state, is_first = _FAILED, True
        for agent, failed_s in each.failed_s.items():
            agent.first_failure_s = min(agent.first_failure_s, failed_s)
        if is_first:
            self._ask_running()
            self._stop_job()

    def run_due(self, now_s: float) -> None:
        """Restart the programs whose delay has passed, and give up the nodes that take too long."""
        if self._state.is_stopping:
            return
        for each in self._programs.values():
            if each.state == _ENDING and self._state.console.is_backlogged:  # the head reads from nobody
                each.end_s = now_s + stop_limit_s(self._state.options.grace_s)
            if each.state == _ENDING and now_s >= each.end_s:
                each.end_s = _NEVER
                for agent in tuple(each.ending):
                    self._on_lost(agent, "it did not stop in time")
            if each.state == _WAITING and now_s >= each.restarts.due_s:
                each.due_s = _NEVER
                if not self._attempts.waits_for(each.after):
                    self._restart(each)

    def _restart(self, each: _Program) -> None:
        """Start the ranks of a program again, on all its nodes."""
        restarts = each.restarts
        restarts.begin()
        each.state, each.failed_s = _RUNNING, {}
        self._reset_ranks(each)
        content = {"program": each.name, "restarts": restarts.total, "heading": restarts.heading}
        for agent, ranks in each.ranks.items():
            for known in (agent.ready_ranks, agent.exited_ranks, agent.failed_ranks):
                known.difference_update(ranks)
            self._state.agents.send(agent, pack_json(protocol.START, content))

    def _reset_ranks(self, each: _Program) -> None:
        """Forget what the ranks of a program have said in an attempt."""
        self._attempts.renew_program(each.name)
        for agent, ranks in each.ranks.items():
            self._state.pace.drop(ranks)
            for rank in ranks:
                agent.progress.latest.pop(rank, None)

    # ---- the report

    def add_to(self, report: Report) -> Report:
        """Return the report of the launch with what became of the earlier attempts of its programs."""
        fatal = next((each for each in self._programs.values() if each.state == _FAILED), None)
        if fatal is not None and fatal.first is not None and not report.error:
            first = replace(fatal.first, stopped=False)
            exits = tuple(first if exit_.rank == first.rank else exit_ for exit_ in report.exits)
            report = replace(report, first_failure=first, exits=exits)
        first_failure = report.first_failure
        last = None if first_failure is None else self._programs.get(first_failure.program)
        earlier = [exit_ for each in self._programs.values() for exit_ in each.restarts.earlier]
        undecided = [self._merged(each).first_failure for each in self._programs.values() if each.state == _ENDING]
        earlier = [exit_ for exit_ in (*earlier, *undecided) if exit_ is not None and exit_ != first_failure]
        return replace(
            report,
            restarts=sum(each.restarts.begun for each in self._programs.values()),
            earlier_failures=tuple(sorted(earlier, key=lambda exit_: exit_.end_s or 0.0)),
            not_restarted="" if last is None else last.restarts.not_restarted,
        )


def _unexpected() -> LinkError:
    return LinkError("unexpected message over the link")
