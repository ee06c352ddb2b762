"""What a batch scheduler can be asked, whichever it is, and how it answers. slurm, pbs and local implement it.

The one rule: an answer that did not come is no answer. Whoever asks gets QueryError, and knows what it knew before.
"""

from __future__ import annotations

from infini_run.errors import QueryError, SubmitError
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    class Scheduler(Protocol):
        """One batch scheduler. Every call runs its commands with `clean` surroundings and a limit in time."""

        name: str

        def facts(self) -> Facts:
            """What it is, and what it has. Raises QueryError."""

        def check(self, script_path: str) -> str:
            """Why the script could never run, in one line; "": it could, or the scheduler cannot tell beforehand.
            Raises QueryError."""

        def submit(self, script_path: str, name: str) -> str:
            """Hand the script over, once; the scheduler's id of the job. Raises SubmitError."""

        def find(self, name: str) -> str | None:
            """The id of a job of that name that waits, runs or has ended well; what was refused is none.
            Raises QueryError."""

        def query(self, names: Sequence[str], ids: Mapping[str, str] | None = None) -> dict[str, SchedulerJob]:
            """What it knows of the jobs of these names (NAME.K: a task of an array), by one command for all of them.
            What is not in the answer is not known (any more), which says nothing of how it ended. ids: where we know
            them, by name; PBS needs more commands for those that are missing there, or over. Raises
            QueryError."""

        def cancel(self, *ids: str, again: bool = False) -> None:
            """End these; one that has ended already is none of our business. again: they were asked to end before,
            and their launchers may be beyond help. Raises QueryError."""

        def requeue(self, id: str) -> bool:  # noqa: A002
            """Run it again under the same id; False: this scheduler does not let us, submit anew."""


__all__ = [
    "CANCELLED",
    "COMPLETED",
    "FAILED",
    "HOPELESS",
    "LIVE",
    "LOST",
    "NODE_FAIL",
    "OOM",
    "PASSING",
    "PREEMPTED",
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
LIVE = (QUEUED, STARTING, RUNNING, WARNED, SUSPENDED)
STATES = (*LIVE, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, OOM, PREEMPTED, LOST)

# why a job waits: its turn has not come; something that passes by itself; as it is it never starts
WAITING, PASSING, HOPELESS = "waiting", "passing", "hopeless"

# what became of a submission: told no; no answer, it may be there all the same; nobody to ask, it is not there
REFUSED, TIMED_OUT, UNREACHABLE = "refused", "timed_out", "unreachable"

_FOREIGN = ("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SCANCEL_", "SQUEUE_", "SINFO_", "SACCT_", "PBS_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "PBS_CONF_FILE", "PBS_SERVER", "PBS_EXEC")


@record
class Kind:
    """So many nodes of a pool that are alike. gpu_types: how many GPUs of which type, where they have types."""

    nodes: int
    cpus: int
    mem_mb: int = 0
    gpus: int = 0
    gpu_types: tuple[tuple[str, int], ...] = ()

    def gpus_of(self, gpu_type: str) -> int:
        """GPUs of that type on each of them; "": of any."""
        return dict(self.gpu_types).get(gpu_type, 0) if gpu_type else self.gpus


@record
class Queue:
    """A partition (Slurm) or queue (PBS). 0: nobody said, or no limit.

    gpus_per_node, cpus_per_node, mem_mb_per_node: of its smallest node that has GPUs, where any has some; `kinds` has
    them all. default_s: the limit of a job that asks for none; 0: it has none, -1: nobody said. gpu_types: as
    `--gres=gpu:TYPE:N` takes them; empty where they have none.
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
    """A pool of these kinds of nodes."""
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
    """What a scheduler was found to be.

    select: Slurm's plugin (cons_tres, cons_res, linear). has_tres: `--gpus` and its kind work. has_gres: nodes have
    GPUs as a resource, `gpu` or `ngpus`. has_accounting: sacct answers. has_history: PBS tells of jobs that ended.
    news: why it did not answer, and nothing else is known; "" where it did.
    """

    scheduler: str
    version: str = ""
    select: str = ""
    has_tres: bool = False
    has_gres: bool = False
    has_accounting: bool = False
    has_history: bool = False
    pools: tuple[Queue, ...] = ()
    news: str = ""

    def pool(self, name: str = "") -> Queue | None:
        """The pool of that name, or the default one; None where there is none."""
        return next((pool for pool in self.pools if (pool.name == name if name else pool.is_default)), None)


@record
class SchedulerJob:
    """A job as the scheduler sees it. state: one of STATES; "": nobody could say, and `reason` has why, for the part
    of the scheduler that would know did not answer. reason: why it waits, or how it ended, in its words.

    hold: of a job that waits, WAITING, PASSING or HOPELESS. advice: what to change in a hopeless one. code: the exit
    code that it reports, -1: none. nodes: those it has, as it writes them.
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
        return self.hold == HOPELESS


def strip_scheduler_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment less what would be read as options by a scheduler's commands, or belongs to the job that we
    are in. Where its configuration is stays: SLURM_CONF, PBS_CONF_FILE, PBS_SERVER."""
    return {name: text for name, text in environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}
