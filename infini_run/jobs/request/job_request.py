"""The user's request to a batch queue: one frozen record, complete before anything uses it.

The one rule: it names no scheduler's options but the user's own, unchanged.
"""

from __future__ import annotations

from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.jobs.request.container import Image

CUDA, ROCM, CPU = "cuda", "rocm", "cpu"
DEFAULT, DETERMINED = "default", "determined"
LOG = "job.log"  # in the job's directory: what the script itself says, of every run
SPOOL = "job.out"  # there too: what PBS has caught before the script could say where its output goes


@record
class JobRequest:
    """The request for a job. "", 0, () and None mean no wish: the value is detected, or the scheduler chooses it.

    Args:
        name: unique.
        title: the user's name for it, one printable line; in the queue it precedes the name.
        folder: the job's directory, on storage that all nodes share.
        command, cwd: what each rank runs and where.
        scheduler: slurm, pbs, local, or auto.
        slots: devices in all, one rank each.
        slots_per_node: on each node.
        spares: further nodes, which run nothing until the job loses one.
        slot_type: cuda, rocm, or cpu.
        gpu_type: which of a pool's GPUs.
        tres, gres: whether the cluster supports these, in place of what infini-job detected.
        layout: default or determined.
        single_node: all slots on one node.
        round_up: more slots than the request has, if those do not fill their nodes.
        cpus_per_slot, mem_mb_per_slot: the CPUs and the memory in MB of each slot.
        time_s: the scheduler's time limit, in seconds.
        pool: partition or queue.
        account, project: whom to charge; the project is Slurm's wckey, PBS's -P.
        options: for sbatch or qsub, words as on its command line, or lines such as `-C a100`.
        container: what wraps the command.
        env: variables of the ranks, any bytes (surrogateescape).
        run_options: for infini-run itself, such as --keep_going.
        array: indices of tasks, each of which is such a job, as sbatch has them (jobs/request/array.py).
        restarts: how often it may run again after a failure.
        max_timeouts: how often after exit code 85 at its time limit; None: any number of times.
        warn_s: the ranks get warn_signal (a number) this long before the limit, in seconds.
        python: the interpreter of the nodes.
    """

    name: str
    folder: str
    command: tuple[str, ...]
    cwd: str
    python: str
    slots: int
    scheduler: str = "auto"
    slots_per_node: int = 0
    spares: int = 0
    slot_type: str = ""
    gpu_type: str = ""
    tres: bool | None = None
    gres: bool | None = None
    layout: str = DEFAULT
    single_node: bool = False
    round_up: bool = False
    pool: str = ""
    account: str = ""
    project: str = ""
    time_s: int = 0
    cpus_per_slot: int = 0
    mem_mb_per_slot: int = 0
    options: tuple[str, ...] = ()
    container: Image | None = None
    env: tuple[tuple[str, str], ...] = ()
    run_options: tuple[str, ...] = ()
    array: str = ""
    restarts: int = 0
    max_timeouts: int | None = None
    warn_s: int = 0
    warn_signal: int = 12
    title: str = ""

    @property
    def queue_name(self) -> str:
        """What its scheduler calls it: unique, so it is found again by that. A title comes first: squeue and qstat
        show the first 8 to 16 characters. Of its characters those stay that PBS takes in a name (qsub(1B), -N)."""
        text = "".join(char if char.isascii() and (char.isalnum() or char in "-_+.") else "_" for char in self.title)
        if text and not text[0].isalnum():  # a dash would be an option
            text = f"_{text[1:]}"
        return f"{text}.{self.name}" if text else self.name
