"""The attempts of a launch: all ranks start when all nodes are ready, and restart after a failure, if they may."""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.multinode.head.head_report import attempt_report
from infini_run.multinode.head.rendezvous import (
    address_warning,
    count_ranks,
    place_programs,
    reader_of,
    rendezvous_address,
    uneven_notice,
)
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack_json
from infini_run.options.nodes import MANUAL
from infini_run.plan.rank_numbers import NodeRanks, RankNumbers, spans_of
from infini_run.plan.start_order import StartOrder, UpCount
from infini_run.report.program_pace import make_pace
from infini_run.system.addresses import read_hosts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.head_state import HeadState
    from infini_run.multinode.head.join_phase import JoinPhase
    from infini_run.multinode.head.stdin_forwarder import StdinForwarder


class Attempts:
    """Starts the ranks of all nodes.

    Args:
        join: the join phase, which learns that all nodes are ready.
        stdin: the forwarder, which learns which node runs which ranks.
        has_stream: each node runs one process with a byte stream to the head.
    """

    def __init__(self, state: HeadState, join: JoinPhase, stdin: StdinForwarder, *, has_stream: bool) -> None:
        self._state = state
        self._join = join
        self._stdin = stdin
        self._has_stream = has_stream
        self._order: StartOrder | None = None  # of programs, where some wait for others
        self._up = UpCount({})  # the nodes of those that others wait for
        self._first_nodes: list[str] = []  # the names of the node of rank 0, in each attempt
        self._nodes: dict[str, set[RemoteAgent]] = {}  # that run a program
        self._awaited: dict[str, set[RemoteAgent]] = {}  # the nodes where a program with --ends_job has not finished

    def in_order(self) -> Sequence[RemoteAgent]:
        """Return all agents in the order of their node ranks: as in the list, or by their names if the head assigns
        the ranks."""
        state = self._state
        agents = state.agents.all
        if state.node_list.engine == MANUAL and state.is_handing_out and not state.restarts.total:
            from infini_run.multinode.head.membership import natural_key

            others = sorted(agents[1:], key=lambda agent: natural_key(agent.name))
            state.world = [agents[0], *others]
            for rank, agent in enumerate(state.world):
                agent.node_rank = rank
        return state.world

    def start_ranks(self, agents: Sequence[RemoteAgent]) -> None:
        """Start the ranks: all nodes are ready, or a restart is due, so the number of every rank is known.

        Args:
            agents: those that run ranks, in the order of their node ranks.
        """
        state, restarts, options = self._state, self._state.restarts, self._state.options
        try:
            by_program = count_ranks(options, agents)
            numbers = RankNumbers([each.name for each in options.programs] or [""], list(map(sum, by_program)))
            _number_ranks(agents, by_program, numbers)
            readers = reader_of(options.stdin, numbers, agents)
        except UsageError as error:
            state.fail(error)
            return
        self._stdin.begin(readers)
        counts = [len(agent.ranks) for agent in agents]
        spans = spans_of(counts)
        state.numbers, state.ender = numbers, ""
        self._nodes = {
            each.name: {agent for agent, count in zip(agents, of, strict=True) if count}
            for each, of in zip(options.programs, by_program, strict=False)
        }
        self._awaited = {each.name: set(self._nodes[each.name]) for each in options.programs if each.ends_job}
        if any(each.after for each in options.programs):
            self._order = StartOrder(options.programs)
            self._up = UpCount({name: len(nodes) for name, nodes in self._nodes.items()})
        state.begin_output(has_labels=not self._has_stream)
        self._join.end()
        restarts.begin()
        first = next(agent for agent, count in zip(agents, by_program[0], strict=True) if count)
        served, names = (
            (self._first_nodes, [each.name for each in state.agents.all]) if options.is_elastic else ((), ())
        )
        address, port = rendezvous_address(options, first, served, names, is_alone=len(agents) == 1)
        self._first_nodes.append(first.name)
        if not restarts.total:
            self._print_warnings(agents, address, counts)
        rows = place_programs(options, agents, by_program, address) if options.programs else [[] for _ in agents]
        state.pace = make_pace(numbers.programs() if options.programs else {}, one_world=options.one_world)
        state.unanswered = ()
        if self._state.observers is not None:
            self._state.observers.begin(agents, state.launch_id, restarts.total, numbers, state.pace)
        for node, (agent, span, nproc, programs) in enumerate(zip(agents, spans, counts, rows, strict=True)):
            self._state.agents.set_state(agent, "running")
            agent.report, agent.first_failure_s = None, float("inf")
            for known in (agent.rank_pids, agent.ready_ranks, agent.exited_ranks, agent.failed_ranks):
                known.clear()
            agent.progress.latest.clear()
            content = {
                "node": node,
                "nnodes": len(agents),
                "nproc": nproc,
                "first": span.first,
                "world_size": span.world_size,
                "most": span.most,
                "host": agent.name,
                "master_addr": address,
                "master_port": port,
                "launch_id": f"{state.launch_id}.{restarts.total}" if restarts.total else state.launch_id,
                "restarts": restarts.total,
                "heading": restarts.heading,
                "programs": programs,
            }
            self._state.agents.send(agent, pack_json(protocol.LAUNCH, content))

    def _print_warnings(self, agents: Sequence[RemoteAgent], address: str, counts: Sequence[int]) -> None:
        node_list = self._state.node_list
        is_known = node_list.counts or self._state.options.programs  # who asked for it knows
        if not is_known and not self._has_stream and (uneven := uneven_notice(agents, counts)):
            self._state.notice(uneven)
        if node_list.engine != MANUAL:  # in a manual launch, the others have just reached node 0 at that address
            warning = address_warning(address, agents, read_hosts())
            if warning:
                self._state.notice(warning)

    def on_program_up(self, agent: RemoteAgent, name: str) -> None:
        """Start the programs that wait for one, once it is up on all its nodes."""
        if self._order is None or not self._up.note(name, agent.index):
            return
        names = self._order.on_up(name)
        if names and not self._state.is_stopping:
            self._state.agents.send_all(pack_json(protocol.START, {"programs": names}), "running")

    def renew_program(self, name: str) -> None:
        """Forget that a program was up, or has finished, on some of its nodes: its ranks restart."""
        self._up.renew(name, len(self._nodes[name]))
        if name in self._awaited:
            self._awaited[name] = set(self._nodes[name])

    def waits_for(self, programs: Sequence[str]) -> bool:
        """Return whether one of some programs is not up."""
        return any(map(self._up.waits_for, programs))

    def on_program_end(self, agent: RemoteAgent, name: str) -> None:
        """Stop the job once a program with --ends_job has finished on all its nodes."""
        awaited, state = self._awaited.get(name, set()), self._state
        if agent not in awaited:
            return
        awaited.discard(agent)
        if not awaited and not state.is_stopping:
            state.ender = name
            state.stop()

    def should_restart(self) -> bool:
        """Return whether all ranks restart, at once or after a delay, once all nodes finished. A signal or a lost
        node prevents that."""
        state, restarts = self._state, self._state.restarts
        if restarts.is_waiting:
            if not state.is_stopping and not state.stop_signal and state.error is None:
                return True
            restarts.cancel()
        if state.stop_signal or state.error is not None or not self._state.options.max_restarts:
            return False
        line = restarts.decide(attempt_report(state)) if self._state.agents.counts.count("lost") == 0 else ""
        if line:
            state.is_stopping, state.stop_end_s = False, float("inf")
            for agent in self._state.agents.all:
                agent.first_failure_s = float("inf")  # the next failure is another one
            if self._state.observers is not None:
                self._state.observers.rest()
            state.print(line)
        return bool(line)


def _number_ranks(agents: Sequence[RemoteAgent], counts: Sequence[Sequence[int]], numbers: RankNumbers) -> None:
    """Number the ranks of each node: those of each program in a row, from node to node."""
    nexts = list(numbers.firsts)
    for node, agent in enumerate(agents):
        spans = []
        for at, of in enumerate(counts):
            spans.append(range(nexts[at], nexts[at] + of[node]))
            nexts[at] += of[node]
        agent.ranks = NodeRanks(spans)
