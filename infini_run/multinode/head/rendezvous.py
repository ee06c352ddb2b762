"""Checks before ranks start: which nodes are missing, whether the others fit together, where rank 0 listens. Pure."""

from __future__ import annotations

from infini_run.errors import NodeLost, UsageError
from infini_run.plan.rank_numbers import spans_on
from infini_run.system.addresses import unreachable_reason
from infini_run.value_types import MAX_INT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.errors import InfiniRunError
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.options.launch_options import Options
    from infini_run.plan.rank_numbers import RankNumbers

_NAMED = 8  # nodes in one message


def missing_names(agents: Sequence[RemoteAgent]) -> str:
    """Return the names of the nodes that are not ready; the first few of many."""
    return join_names([agent for agent in agents if agent.is_not_ready])


def explain_missed(
    missed: Sequence[tuple[RemoteAgent, InfiniRunError]], agents: Sequence[RemoteAgent]
) -> InfiniRunError:
    """Return the error of a job that cannot start: each missing node with its reason, and the nodes whose fate is
    unknown. The exit code is that of the first.

    Args:
        missed: the missing nodes and their errors.
        agents: of all nodes.
    """
    first, error = missed[0]
    unknown = missing_names(agents)
    rest = f"; not reached yet: {unknown}" if unknown else ""
    if len(missed) == 1 and not rest:
        return error
    more = f"; and {join_names([agent for agent, _ in missed[_NAMED:]])}" if missed[_NAMED:] else ""
    text = "; ".join(str(each) for _, each in missed[:_NAMED]) + more + rest
    if len(missed) > 1:
        text = f"{len(missed)} of {len(agents)} nodes did not join: {text}"
    merged = NodeLost(text, first.name, first.index) if isinstance(error, NodeLost) else type(error)(text)
    merged.exit_code = error.exit_code
    return merged


def join_names(agents: Sequence[RemoteAgent]) -> str:
    """Return their names; the first few of many."""
    names = [agent.name or f"node {agent.index}" for agent in agents]
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def count_ranks(options: Options, agents: Sequence[RemoteAgent]) -> list[list[int]]:
    """Return how many ranks of each program each node runs.

    Raises:
        UsageError: a program has none, or there are more ranks than is possible.
    """
    if options.programs:
        counts = [[int(agent.hello["counts"][at]) for agent in agents] for at in range(len(options.programs))]
    else:
        counts = [[int(agent.hello["nproc"]) for agent in agents]]
    world_size = sum(map(sum, counts))
    if world_size > MAX_INT:
        raise UsageError(f"{len(agents)} nodes make {world_size} ranks; expected at most {MAX_INT}")
    idle = next((at for at, each in enumerate(counts) if not any(each)), -1)
    if idle >= 0:
        raise UsageError(f"--program={options.programs[idle].name}: no node runs it; use --on_nodes=rest")
    return counts


def reader_of(reader: int | str, numbers: RankNumbers, agents: Sequence[RemoteAgent]) -> list[RemoteAgent]:
    """Return the agents whose ranks read stdin.

    Args:
        reader: the value of --stdin.
        numbers: of all ranks.

    Raises:
        UsageError: there is no such rank.
    """
    if reader in ("all", "none"):
        return list(agents) if reader == "all" else []
    rank = numbers.number(reader, "--stdin")
    return [agent for agent in agents if rank in agent.ranks]


def place_programs(
    options: Options, agents: Sequence[RemoteAgent], counts: Sequence[Sequence[int]], address: str
) -> list[list[dict[str, Any]]]:
    """Return for each node what its LAUNCH frame has of each of several programs.

    Args:
        counts: as count_ranks returns them.
        address: of rank 0, as rendezvous_address returns it.
    """
    columns = []
    for at, each in enumerate(counts):
        runners = [agent for agent, count in zip(agents, each, strict=True) if count]
        addr = address if at == 0 else _address_of(runners[0], is_alone=len(agents) == 1)
        port = options.programs[at].master_port or runners[0].free_ports[at]
        common = {"addr": addr, "port": port, "hosts": [agent.name for agent in runners]}
        columns.append(
            [
                {"first": s.first, "size": s.world_size, "most": s.most, "node": s.node, "nnodes": s.nnodes, **common}
                for s in spans_on(each)
            ]
        )
    return [list(row) for row in zip(*columns, strict=True)]


def uneven_notice(agents: Sequence[RemoteAgent], counts: Sequence[int]) -> str:
    """Say that nodes run different numbers of ranks, if they counted their own; "" if all are equal."""
    if len(set(counts)) == 1:
        return ""
    each = ", ".join(f"{agent.name}:{count}" for agent, count in zip(agents[:_NAMED], counts, strict=False))
    each += ", ..." if len(agents) > _NAMED else ""
    return f"nodes run different numbers of ranks: {each}; {sum(counts)} in all"


def rendezvous_address(
    options: Options, first: RemoteAgent, served: Sequence[str] = (), names: Sequence[str] = (), *, is_alone: bool
) -> tuple[str, int]:
    """Return the address and port of rank 0. By default, the address is that of its node as the head reached it, and
    the port is free there.

    The requested address is that of one node: the one of that name, else the node of rank 0 in the first attempt. On
    another node, rank 0 has that node's address. A node that has served another attempt takes a free port, because
    processes of that attempt may still connect to the requested one.

    Args:
        first: the node of rank 0.
        served: the names of that node in earlier attempts, if nodes may change; from the first attempt on.
        names: of all nodes, if nodes may change.
        is_alone: there is no other node.
    """
    address, port = _address_of(first, is_alone=is_alone), first.free_ports[0]
    if not options.rdzv_explicit:
        return address, port
    owner = options.master_addr if options.master_addr in names else [*served, first.name][0]
    if owner == first.name:
        address = options.master_addr
    return address, port if first.name in served else options.master_port or port


def _address_of(agent: RemoteAgent, *, is_alone: bool) -> str:
    return "127.0.0.1" if is_alone else str(agent.hello["address"]) or agent.name


def address_warning(address: str, agents: Sequence[RemoteAgent], hosts: str) -> str:
    """Say why other nodes may not reach node 0 at that address; "" if nothing speaks against it, or all are on this
    machine.

    Args:
        hosts: the text of /etc/hosts.
    """
    why = unreachable_reason(address, hosts)
    others = (str(agent.hello["address"]) or agent.name for agent in agents[1:])
    if not why or all(unreachable_reason(other, hosts) for other in others):
        return ""
    return f"other nodes cannot reach node 0: {why}; add --rdzv_endpoint=HOST:PORT, or change its name"
