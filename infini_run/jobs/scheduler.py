"""The questions to a batch scheduler, whichever it is, and its answers. slurm, pbs, and local implement it.

The one rule: an answer that did not come is no answer. Whoever asks gets QueryError, and knows what it knew before.
"""

from __future__ import annotations

from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Protocol

    class Scheduler(Protocol):
        """One batch scheduler. Each call runs its commands in an environment without its own variables, with a
        limit in time.
        """

        name: str

        @property
        def has_accounting(self) -> bool:
            """Whether its last answer had every job that ended, however long ago."""

        def facts(self) -> Facts:
            """Return what it is, and what it has. Raises QueryError."""

        def check(self, script_path: str) -> str:
            """Ask whether it could ever run a script.

            Returns:
                Why not, in one line; "": it could, or it cannot tell beforehand.

            Raises:
                QueryError: It does not answer.
            """

        def submit(self, script_path: str, name: str) -> str:
            """Hand a script over, once.

            Args:
                script_path: The script.
                name: Of the job, or NAME.K: this task of an array alone, once more.

            Returns:
                The scheduler's id.

            Raises:
                SubmitError: The scheduler refused it; or is not there; or gave no answer (`timed_out`), and may have
                    the job.
            """

        def find(self, name: str) -> str | None:
            """Return the id of a job of that name that waits, runs, or ended; None if there is none, or the scheduler
            refused it.

            Raises:
                QueryError: It does not answer.
            """

        def query(self, names: Sequence[str], ids: Mapping[str, str] | None = None) -> dict[str, SchedulerJob]:
            """Return what it knows of jobs, by as few commands as it allows.

            Args:
                names: Of jobs, or NAME.K of tasks.
                ids: The known ids, by name; None: none. PBS needs more commands for jobs without.

            Returns:
                By name. A job that is not in the answer is unknown (by then), which says nothing of how it ended.

            Raises:
                QueryError: It does not answer.
            """

        def cancel(self, *ids: str, again: bool = False) -> None:
            """End jobs; one that already ended is no error.

            Args:
                *ids: The scheduler's.
                again: Whether this is the second request to end them, so that their launchers may be beyond help.

            Raises:
                QueryError: It does not answer, or refuses.
            """

        def requeue(self, id: str) -> bool:  # noqa: A002
            """Run a job again under the same id; False: this scheduler does not allow it, submit anew. Raises
            QueryError.
            """


__all__ = [
    "CANCELLED",
    "COMPLETED",
    "END_REASONS",
    "FAILED",
    "HOPELESS",
    "LIVE",
    "LOST",
    "NODE_FAIL",
    "OOM",
    "PASSING",
    "PREEMPTED",
    "PRESENT",
    "QUEUED",
    "REFUSED",
    "RUNNING",
    "STARTING",
    "STATES",
    "SUSPENDED",
    "TIMED_OUT",
    "TIMEOUT",
    "UNREACHABLE",
    "WAITING",
    "WARNED",
    "Facts",
    "Kind",
    "QueryError",
    "Queue",
    "SchedulerJob",
    "SubmitError",
    "pool_of",
    "strip_scheduler_environment",
]

# states of a job
QUEUED, STARTING, RUNNING, WARNED, SUSPENDED = "QUEUED", "STARTING", "RUNNING", "WARNED", "SUSPENDED"
COMPLETED, FAILED, CANCELLED, TIMEOUT = "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"
NODE_FAIL, OOM, PREEMPTED, LOST = "NODE_FAIL", "OOM", "PREEMPTED", "LOST"
END_REASONS = {
    CANCELLED: "it was canceled",
    PREEMPTED: "it was preempted",
    TIMEOUT: "its time limit was reached",
}
PRESENT = (QUEUED, STARTING, RUNNING, SUSPENDED)  # the scheduler has the job
LIVE = (QUEUED, STARTING, RUNNING, WARNED, SUSPENDED)
STATES = (*LIVE, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, OOM, PREEMPTED, LOST)

# why a job waits: its turn has not come; something that passes without help; the user or an administrator must act
WAITING, PASSING, HOPELESS = "waiting", "passing", "hopeless"

# the result of a submission: refused; no answer, so the scheduler may have it; no scheduler, so it has not
REFUSED, TIMED_OUT, UNREACHABLE = "refused", "timed_out", "unreachable"

_FOREIGN = ("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SCANCEL_", "SQUEUE_", "SINFO_", "SACCT_", "PBS_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "PBS_CONF_FILE", "PBS_SERVER", "PBS_EXEC")


@record
class Kind:
    """Nodes of a queue that are alike.

    Args:
        nodes: How many.
        cpus: Of each.
        mem_mb: Of each, in MiB; 0: not known.
        gpus: Of each.
        gpu_types: Pairs of type and number, if its GPUs have types.
    """

    nodes: int
    cpus: int
    mem_mb: int = 0
    gpus: int = 0
    gpu_types: tuple[tuple[str, int], ...] = ()

    def gpus_of(self, gpu_type: str) -> int:
        """Return the number of GPUs of that type on each node; "": of any type."""
        return dict(self.gpu_types).get(gpu_type, 0) if gpu_type else self.gpus


@record
class Queue:
    """A partition (Slurm) or queue (PBS). 0: nobody said, or no limit.

    Args:
        gpus_per_node, cpus_per_node, mem_mb_per_node: of its smallest node that has GPUs, where any has some; `kinds`
            has them all.
        default_s: the limit of a job that requests none, in seconds; 0: no limit, -1: unknown.
        gpu_types: as `--gres=gpu:TYPE:N` takes them; empty where they have none.
    """

    name: str
    nodes: int = 0
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    mem_mb_per_node: int = 0
    limit_s: int = 0
    default_s: int = -1
    is_default: bool = False
    gpu_types: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()


def pool_of(
    name: str, kinds: Sequence[Kind], limit_s: int = 0, is_default: bool = False, default_s: int = -1
) -> Queue:
    """Return a queue of these kinds of nodes; its numbers for one node are those of the smallest with GPUs, if any
    has some.

    Args:
        name: Of the queue.
        kinds: Of its nodes.
        limit_s: Its time limit in seconds; 0: none.
        is_default: Whether jobs go there that name none.
        default_s: The limit in seconds of a job that asks for none; 0: it has none, -1: not known.
    """
    first = min(kinds, key=lambda kind: (not kind.gpus, kind.gpus or kind.cpus), default=Kind(nodes=0, cpus=0))
    return Queue(
        name=name,
        nodes=sum(kind.nodes for kind in kinds),
        gpus_per_node=first.gpus,
        cpus_per_node=first.cpus,
        mem_mb_per_node=first.mem_mb,
        limit_s=limit_s,
        default_s=default_s,
        is_default=is_default,
        gpu_types=tuple(sorted({name for kind in kinds for name, _ in kind.gpu_types})),
        kinds=tuple(kinds),
    )


@record
class Facts:
    """The properties of a scheduler.

    Args:
        scheduler: slurm, pbs or local.
        version: Its own.
        select: Slurm's plugin: cons_tres, cons_res or linear.
        has_tres: Whether `--gpus` and its kind work.
        has_gres: Whether nodes have GPUs as a resource, `gpu` or `ngpus`.
        has_accounting: Whether sacct answers.
        has_history: Whether PBS lists jobs that ended.
        pools: Its partitions or queues.
        query_error: Why it did not answer, and nothing else is known; "" after an answer.
    """

    scheduler: str
    version: str = ""
    select: str = ""
    has_tres: bool = False
    has_gres: bool = False
    has_accounting: bool = False
    has_history: bool = False
    pools: tuple[Queue, ...] = ()
    query_error: str = ""

    def pool(self, name: str = "") -> Queue | None:
        """Return the pool of that name, or the default one; None: there is none."""
        return next((pool for pool in self.pools if (pool.name == name if name else pool.is_default)), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain types by the same names."""
        pools = [{**vars(pool), "kinds": [dict(vars(kind)) for kind in pool.kinds]} for pool in self.pools]
        return {**vars(self), "pools": pools}


@record
class SchedulerJob:
    """A job as its scheduler sees it.

    Args:
        id: The scheduler's.
        state: One of STATES; "": not known, and `reason` says why, for the part of the scheduler that would know
            did not answer.
        reason: Why it waits, or how it ended, in the scheduler's words.
        hold: Of a job that waits, WAITING, PASSING or HOPELESS.
        advice: What to change in a hopeless one.
        code: Its exit code; -1: none.
        nodes: Its nodes, as the scheduler writes them.
    """

    id: str
    state: str
    reason: str = ""
    hold: str = ""
    advice: str = ""
    code: int = -1
    nodes: str = ""

    @property
    def hopeless(self) -> bool:
        """Return whether it begins only after its user or an administrator changes something."""
        return self.hold == HOPELESS


def strip_scheduler_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that a scheduler's commands read as options, and without those
    of the job around this process. The place of a configuration stays: SLURM_CONF, PBS_CONF_FILE, PBS_SERVER.
    """
    return {name: text for name, text in environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}
