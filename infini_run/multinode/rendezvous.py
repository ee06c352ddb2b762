"""Before the start: who has not come, whether those that have fit together, where rank 0 listens. Pure."""

from __future__ import annotations

from infini_run.errors import NodeLost, UsageError
from infini_run.system.addresses import unreachable_reason
from infini_run.value_types import MAX_INT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.errors import InfiniRunError
    from infini_run.multinode.agent_state import RemoteAgent
    from infini_run.options.options import Options

_NAMED = 8  # nodes that a message names


def missing_names(peers: Sequence[RemoteAgent]) -> str:
    """Those that have not come yet, by name; the first few of many."""
    return join_names([peer for peer in peers if peer.is_new])


def explain_missed(
    missed: Sequence[tuple[RemoteAgent, InfiniRunError]], peers: Sequence[RemoteAgent]
) -> InfiniRunError:
    """Why the job cannot begin: all nodes that do not come, with why, and those of which nobody knows yet. The exit
    code is that of the first."""
    first, error = missed[0]
    unknown = missing_names(peers)
    rest = f"; not reached yet: {unknown}" if unknown else ""
    if len(missed) == 1 and not rest:
        return error
    more = f"; and {join_names([peer for peer, _ in missed[_NAMED:]])}" if missed[_NAMED:] else ""
    text = "; ".join(str(each) for _, each in missed[:_NAMED]) + more + rest
    if len(missed) > 1:
        text = f"{len(missed)} of {len(peers)} nodes do not come: {text}"
    joint = NodeLost(text, first.name, first.index) if isinstance(error, NodeLost) else type(error)(text)
    joint.exit_code = error.exit_code
    return joint


def join_names(peers: Sequence[RemoteAgent]) -> str:
    """Their names; the first few of many."""
    names = [peer.name or f"node {peer.index}" for peer in peers]
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def count_ranks(peers: Sequence[RemoteAgent], reader: int | str) -> list[int]:
    """How many ranks each node runs, as it says. reader: of stdin, as --stdin says. Raises UsageError: there is no
    such rank, or more than there can be."""
    counts = [int(peer.hello["nproc"]) for peer in peers]
    world_size = sum(counts)
    if world_size > MAX_INT:
        raise UsageError(f"{len(peers)} nodes make {world_size} ranks: at most {MAX_INT} are allowed")
    if isinstance(reader, int) and reader >= world_size:
        raise UsageError(f"--stdin={reader}: there are ranks 0 to {world_size - 1}")
    return counts


def unlike(peers: Sequence[RemoteAgent], counts: Sequence[int]) -> str:
    """That nodes differ in how many ranks they run, which none but themselves have said; "" where they do not."""
    if len(set(counts)) == 1:
        return ""
    each = ", ".join(f"{peer.name}:{count}" for peer, count in zip(peers[:_NAMED], counts, strict=False))
    each += ", ..." if len(peers) > _NAMED else ""
    return f"the nodes differ in how many ranks they run: {each}; {sum(counts)} in all"


def rendezvous_address(options: Options, peers: Sequence[RemoteAgent]) -> tuple[str, int]:
    """Where rank 0 listens: what was asked for; else node 0's address as it was reached, and a port free there."""
    first = peers[0]
    if options.rdzv_explicit:
        return options.master_addr, options.master_port or first.port
    if len(peers) == 1:
        return "127.0.0.1", first.port
    return str(first.hello["address"]) or first.name, first.port


def address_warning(address: str, peers: Sequence[RemoteAgent], hosts: str) -> str:
    """Why the other nodes may not reach node 0 at that address; "" where nothing speaks against it, or where all of
    them are on this machine. hosts: what is in /etc/hosts."""
    why = unreachable_reason(address, hosts)
    others = (str(peer.hello["address"]) or peer.name for peer in peers[1:])
    if not why or all(unreachable_reason(other, hosts) for other in others):
        return ""
    return f"other nodes cannot reach node 0: {why}; give --rdzv_endpoint=HOST:PORT, or another name for it"
