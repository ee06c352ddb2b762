"""What every MPI launcher says in its own words: a rank, how many there are, and the same on this node.

With one process a node the rank is the node's. With several the nodes are counted by division: all must have the
same number, and GROUP_RANK is right where ranks fill one node after the other (the launchers' default). Numbers that
differ, and all divide the world's, are noticed by a process that counts more nodes than Open MPI says there are at
most; without that word by one whose rank is where no even world has it.
"""

from __future__ import annotations

from infini_run.environments.environment import UNKNOWN, ClusterEnvironment, Variables
from infini_run.errors import UsageError
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.environments.environment import Fact


@record
class Words:
    """The names of the variables of one launcher.

    Attributes:
        rank, size, local_rank, local_size: the four numbers of each process.
        job: a variable that is the same on every node.
        most_nodes: a variable with the number of nodes that the launcher can use, of which some may have no process;
            empty: there is none.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str = ""
    most_nodes: str = ""


def site_of(engine: str, around: Variables, words: Words, hosts: Fact = UNKNOWN) -> ClusterEnvironment:
    """Return the facts of a process that an MPI launcher has started.

    Args:
        engine: the name of the launcher.
        around: the environment, and the files that it names.
        words: the names of the launcher's variables.
        hosts: those that may be the nodes. They are, if they are as many: a task may have less than all hosts.

    Raises:
        UsageError: the numbers contradict each other, or nodes have different numbers of processes.
    """
    rank, size = around.number(words.rank, unset=-1), around.number(words.size, 1)
    local_rank, local_size = around.number(words.local_rank), around.number(words.local_size, 1) or 1
    nnodes, most = size // local_size, around.number(words.most_nodes) if words.most_nodes else 0
    is_odd = nnodes > most if most else not _is_even(rank, nnodes, local_rank, local_size)
    if size % local_size or is_odd:
        total, here = around.setting(words.size), around.setting(words.local_size)
        raise UsageError(
            f"{total} processes, {here} of them here: the rank of this node is unknown; start the same number on "
            "all nodes, or one per node, or use infini-run --engine=mpi --hosts=a:4,b:8"
        )
    node_rank = (rank - local_rank) // local_size if rank >= local_rank else rank
    return around.cluster(
        engine,
        hosts=hosts if len(hosts[0]) == nnodes else UNKNOWN,
        job=words.job,
        nnodes=(nnodes, words.size),
        node_rank=(node_rank, words.rank),
        tasks_per_node=(local_size, words.local_size),
        local_rank=(local_rank, words.local_rank),
        rank=(rank, words.rank),
        world_size=(size, words.size),
    )


def _is_even(rank: int, nnodes: int, local_rank: int, local_size: int) -> bool:
    """Return whether this rank fits a world of equal nodes, filled node after node or one rank on each in turn."""
    return rank < 0 or (rank - local_rank) % local_size == 0 or rank // max(1, nnodes) == local_rank
