"""The records in a job's directory: the submission, the phase of a run, the job's end.

The one rule: a record is whole and frozen; job_dir.py alone reads and writes it.
"""

from __future__ import annotations

from infini_run.jobs.request.array import parse
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.jobs.request.job_request import JobRequest


@record
class Submission:
    """A job as its directory recorded it when it was submitted.

    Args:
        request: the request, with its scheduler resolved.
        nodes, slots_per_node: the number of nodes without spares, and of slots on each; 0: the scheduler decides.
        pool: the queue of the job; "" without one.
        submitted_s: the time, in seconds since the epoch.
        host: the host of the submission.
    """

    request: JobRequest
    nodes: int
    slots_per_node: int
    pool: str
    submitted_s: float
    host: str

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def shape(self) -> str:
        """`2 nodes x 8 gpus`, `2 nodes x 8 gpus + 1 spare`."""
        what = "cpu" if self.request.slot_type == "cpu" else "gpu"
        if not self.slots_per_node:
            return _count(self.request.slots, what)
        slots = _count(self.slots_per_node, what)
        spares = f" + {_count(self.request.spares, 'spare')}" if self.request.spares else ""
        return f"{_count(self.nodes, 'node')} x {slots}{spares}" if self.nodes else slots

    @property
    def tasks(self) -> tuple[int, ...]:
        """Of an array: their indices."""
        return parse(self.request.array).tasks if self.request.array else ()

    @property
    def whole_shape(self) -> str:
        """`10 tasks x 2 nodes x 8 gpus`; of a job that is no array the same."""
        return f"{_count(len(self.tasks), 'task')} x {self.shape}" if self.tasks else self.shape


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


@record
class Phase:
    """The progress of one run.

    Args:
        state: STARTING, RUNNING, WARNED; REQUEUED, where another one follows.
        since_s: the start of that state, in seconds since the epoch.
        nodes: hosts in the order of their node ranks.
        spares: hosts that run nothing.
        lost: hosts that were lost, or excluded.
        nproc: ranks on each; 0: of several programs.
        programs: of a job of several, the name and the number of ranks of each; empty: not known yet.
        reason: why it is in that state; empty: no reason to report.
        begun_s: the start of the ranks; 0: not yet.
        at_limit: whether another one follows because of the time limit.
    """

    state: str
    since_s: float
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    nproc: int = 0
    programs: tuple[tuple[str, int], ...] = ()
    reason: str = ""
    begun_s: float = 0.0
    at_limit: bool = False


REQUEUED = "REQUEUED"


@record
class JobResult:
    """The end of a job.

    Args:
        state: one of the final states.
        code: infini-run's exit code, that of the first rank to fail.
        node, rank: the place of the failure; "" and -1: none.
        program, program_rank: of a job of several programs, the program of that rank, and its rank in it.
        reason: a sentence.
        attempt: the run that ended.
        scheduler_ended_it: the scheduler ended it, and may know better why.
        end_s: the time, in seconds since the epoch.
        at_limit: the ranks were warned of the time limit, or it was reached.
    """

    state: str
    code: int
    node: str = ""
    rank: int = -1
    program: str = ""
    program_rank: int = -1
    reason: str = ""
    attempt: int = 0
    scheduler_ended_it: bool = False
    end_s: float
    at_limit: bool = False

    @property
    def rank_name(self) -> str:
        """What people call the rank: `rank 5`, or `server 1`."""
        return f"{self.program} {self.program_rank}" if self.program else f"rank {self.rank}"
