"""What the surroundings say: the nodes, which of them we are, where they meet, and which variable said so.

The one rule: pure. The environment and a reader of files come in, a Site or UsageError comes out; who reads which
variables is in sites/, one engine a file. Nobody else looks at an engine's variables.
"""

from __future__ import annotations

from infini_run.environments.hostlist import Host, expand, quoted, repeats
from infini_run.errors import UsageError
from infini_run.record import record
from infini_run.value_types import MAX_INT, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Reader = Callable[[str], str]

STEP, BATCH = "step", "batch"

# Linux gives out 32768 to 60999 by itself (ip(7), ip_local_port_range): a port of these may be taken by a stranger.
_FIRST_PORT, _PORTS = 29500, 3200
_STEPS_APART = 97  # steps of one job may run at once: each gets a port of its own

# What mpirun, mpiexec and srun say to their own process alone. A rank that imported MPI would answer in our place.
_PLACE_PREFIXES = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PMI2_",
    "PRTE_",
    "ORTE_",
    "HYDI_",
    "MV2_COMM_WORLD_",
    "SLURM_PMI",
    "PALS_",
)
_PLACE_NAMES = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@record
class ClusterEnvironment:
    """What the surroundings say. 0, -1, "" and () where they say nothing.

    form: "step" where every node has a process like us; "batch" where we alone hold an allocation.
    node_rank: in a batch script 0 where it runs on the first node. nproc: ranks on each node. gpus: of this node.
    tasks_per_node: how many processes like us are on this node; where any node has several each is a rank, with
    `local_rank`, `rank` and `world_size` as the engine numbers them.
    counts: ranks on each node, where they differ and each node knows those of all.
    sources: for each of these names the variable that said it. remark: what we had to guess.
    """

    engine: str
    form: str = STEP
    nnodes: int = 0
    node_rank: int = -1
    nproc: int = 0
    counts: tuple[int, ...] = ()
    gpus: int = 0
    hosts: tuple[Host, ...] = ()
    master_addr: str = ""
    master_port: int = 0
    job_id: str = ""
    tasks_per_node: int = 1
    local_rank: int = 0
    rank: int = -1
    world_size: int = 0
    sources: tuple[tuple[str, str], ...] = ()
    remark: str = ""

    def source(self, name: str) -> str:
        """Who said the value `name`: `SLURM_NODEID=3`; "" where nobody did."""
        return dict(self.sources).get(name, "")

    @property
    def is_task(self) -> bool:
        """Whether each process like us is to be one rank: some node has several of them, ours or another."""
        return self.form == STEP and (self.tasks_per_node > 1 or 0 < self.nnodes < self.world_size)


class Variables:
    """The environment, and the files that it names. An empty variable is one that is not set."""

    def __init__(self, environ: Mapping[str, str], read: Reader) -> None:
        self._environ = environ
        self._read = read

    def has(self, *names: str) -> bool:
        return all(self.text(name) for name in names)

    def text(self, name: str) -> str:
        return self._environ.get(name, "")

    def first(self, *names: str) -> str:
        """The first of these variables that is set, by its name; "" where none is."""
        return next((name for name in names if self.has(name)), "")

    def said(self, name: str) -> str:
        """A variable as a message shows it."""
        text = self.text(name)
        return f"{name}={quoted(text)}"

    def number(self, name: str, low: int = 0, unset: int = 0) -> int:
        """Raises UsageError: it is set to something else than a whole number from `low`."""
        text = self.text(name)
        value = number(text)
        if not text:
            return unset
        if value is None or not low <= value <= MAX_INT:
            raise UsageError(f"{self.said(name)}: a whole number from {low} is expected; --engine=local ignores it")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        return repeats(self.text(name), name) if self.has(name) else ()

    def hosts(self, name: str) -> tuple[Host, ...]:
        """The hosts of a node list."""
        return tuple(Host(name=each) for each in expand(self.text(name), name)) if self.has(name) else ()

    def file(self, path: str) -> str:
        """What is in a file; "" where there is none that we may read."""
        try:
            return self._read(path)
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return ""

    def sources(self, derived: tuple[str, ...] = (), **names: str) -> tuple[tuple[str, str], ...]:
        """For each value the variable that said it, where one did. `derived`: what our own port is made from."""
        found = [(value, self.said(name)) for value, name in names.items() if name and self.has(name)]
        if any(self.has(name) for name in derived):
            found.append(("master_port", "derived from " + ", ".join(self.said(name) for name in derived)))
        return tuple(found)


def derived_port(job: str, step: int = 0) -> int:
    """A port that every node of a job step finds by itself: from 29500 to 32699, the next job's is the next one.

    job: its id, by the number in front; a name without number is summed up (CRC-32).
    """
    digits = job[: len(job) - len(job.lstrip("0123456789"))]
    if digits:
        start = int(digits[-18:])
    else:
        from binascii import crc32

        start = crc32(job.encode(errors="surrogateescape"))
    return _FIRST_PORT + (start + _STEPS_APART * step) % _PORTS


def without_place(environ: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment less what an MPI launcher said to us alone; `keep` are names that stay for all that."""
    return {
        name: value
        for name, value in environ.items()
        if name in keep or not (name.startswith(_PLACE_PREFIXES) or name in _PLACE_NAMES)
    }


def checked(site: ClusterEnvironment) -> ClusterEnvironment:
    """Raises UsageError: what the surroundings say contradicts itself; both are shown."""
    _below(site, "node_rank", "nnodes")
    _below(site, "local_rank", "tasks_per_node")
    _below(site, "rank", "world_size")
    if site.hosts and site.nnodes and len(site.hosts) != site.nnodes:
        raise UsageError(f"{site.source('nnodes')}, but {site.source('hosts')} are {len(site.hosts)} hosts")
    if site.is_task and (site.rank < 0 or not site.world_size):
        raise UsageError(f"{site.source('tasks_per_node')}, but nothing says which rank this is: start one per node")
    return site


def _below(site: ClusterEnvironment, name: str, limit: str) -> None:
    value, end = getattr(site, name), getattr(site, limit)
    if end and value >= end:
        low, high = site.source(name) or f"{name} {value}", site.source(limit) or f"{limit} {end}"
        raise UsageError(f"{low}, but {high}: they contradict each other")
