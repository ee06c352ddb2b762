"""Flags of jobs that continue after the loss of a node, and their conflicts."""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.options.grammar import COMMAND_LINE
from infini_run.options.table import HANDED_OUT, TOKEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.options.grammar import Given, Values
    from infini_run.options.nodes import NodeList

_ENDED_WITH = "mpi"  # its end of one node is the end of all


def check_membership(given: Given, values: Values, node_list: NodeList | None, *, has_token: bool) -> None:
    """Check the flags of a job that continues after the loss of a node. A manual launcher gets its node rank from the
    head.

    Args:
        given: the flags that somebody gave.
        values: of all flags; this changes `node_rank`.
        node_list: the nodes that this launcher reaches. None: this launcher is one of several.
        has_token: a token joins them.

    Raises:
        UsageError: two flags contradict each other, or nothing joins the nodes.
    """
    asked = given["nnodes" if "nnodes" in given and not values["spares"] else "spares"].origin
    if values["keep_going"]:
        raise UsageError(f"{asked} conflicts with --keep_going: a failure ends all ranks, or none; drop one of them")
    if node_list is not None:
        if node_list.engine == _ENDED_WITH:
            raise UsageError(
                f"{asked} conflicts with --engine=mpi: mpirun ends all nodes when one is lost; use --engine=ssh"
            )
        if node_list.counts:
            raise UsageError(
                f"{asked}: hosts with different numbers of processes cannot replace each other; add "
                "--nproc_per_node=N"
            )
        return
    rank = given.get("node_rank")
    if rank is not None and rank.precedence == COMMAND_LINE:
        raise UsageError(
            f"{asked} conflicts with {rank.origin}: node ranks are assigned, and change; drop {rank.origin}"
        )
    if not has_token and not values["dry_run"]:
        raise UsageError(
            f"{asked}: needs a token to join its nodes; set the same {TOKEN}=... on every node, or add "
            "--token_file=FILE or --hosts=a,b"
        )
    if rank is None:
        values["node_rank"] = HANDED_OUT
