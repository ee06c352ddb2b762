"""The facts that a scheduler or launcher put into variables: the nodes, which of them this one is, the rendezvous
address, and the variable behind each fact.

The one rule: pure. The environment and a reader of files come in, a ClusterEnvironment or UsageError comes out. Each
engine's variables are read in one file of this package, and nowhere else.
"""

from __future__ import annotations

from infini_run.environments.hostlist import Host, expand, quoted, repeats
from infini_run.errors import UsageError, counted
from infini_run.record import record
from infini_run.value_types import MAX_INT, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Fact = tuple[Any, str]  # a value, and the variable or the file that says it; "": nothing does
    Reader = Callable[[str], str]

STEP, BATCH = "step", "batch"
UNKNOWN: Fact = ((), "")

# Linux gives ports 32768 to 60999 to outgoing connections (ip(7), ip_local_port_range): one of these may be taken.
_FIRST_PORT, _PORTS = 29500, 3200
_PORTS_APART = 97  # between two steps of one job, which may run at once


@record
class ClusterEnvironment:
    """The facts. 0, -1, "" and () mean that a fact is not known.

    Args:
        engine: name of the scheduler or launcher.
        form: "step": every node has a process like this one; "batch": this process alone holds an allocation.
        nnodes: number of nodes.
        node_rank: index of this node; 0 in a batch script that runs on the first node.
        nproc: ranks on each node.
        counts: ranks on each node, if they differ and each node knows those of all.
        gpus: GPUs of this node.
        is_mixed: Whether other nodes may have other numbers of GPUs, because the scheduler chose them by another
            request.
        hosts: of all nodes, in their order.
        master_addr, master_port: the rendezvous address.
        job_id: id of the job.
        tasks_per_node: processes like this one on this node. If any node has several, each of them is one rank, with
            `local_rank`, `rank` and `world_size` as the engine numbers them.
        sources: for each name of a fact, the variable that it comes from.
        warning: a sentence about what was guessed.
    """

    engine: str
    form: str = STEP
    nnodes: int = 0
    node_rank: int = -1
    nproc: int = 0
    counts: tuple[int, ...] = ()
    gpus: int = 0
    is_mixed: bool = False
    hosts: tuple[Host, ...] = ()
    master_addr: str = ""
    master_port: int = 0
    job_id: str = ""
    tasks_per_node: int = 1
    local_rank: int = 0
    rank: int = -1
    world_size: int = 0
    sources: tuple[tuple[str, str], ...] = ()
    warning: str = ""

    def source(self, name: str) -> str:
        """Return the variable behind a fact, such as `SLURM_NODEID=3`; empty if the fact is not known.

        Args:
            name: the name of a field.
        """
        return dict(self.sources).get(name, "")

    @property
    def is_task(self) -> bool:
        """Whether each process like this one is one rank, because some node has several of them."""
        return self.form == STEP and (self.tasks_per_node > 1 or 0 < self.nnodes < self.world_size)


class Variables:
    """The environment, and the files that it names. An empty variable counts as not set.

    Args:
        read: returns the text of a file, or raises OSError.
    """

    def __init__(self, environ: Mapping[str, str], read: Reader) -> None:
        self._environ = environ
        self._read = read

    def has(self, *names: str) -> bool:
        """Return whether all of these variables are set and not empty."""
        return all(self.text(name) for name in names)

    def text(self, name: str) -> str:
        """Return the value of a variable; empty if it is not set."""
        return self._environ.get(name, "")

    def first(self, *names: str) -> str:
        """Return the name of the first of these variables that is set; "" if none is."""
        return next((name for name in names if self.has(name)), "")

    def setting(self, name: str) -> str:
        """Return a variable and its value as messages show them, such as `SLURM_NODEID=3`.

        Args:
            name: the name of the variable.
        """
        text = self.text(name)
        return f"{name}={quoted(text)}"

    def settings(self, *names: str) -> str:
        """Return those of these variables that are set, as `setting` does, with commas between."""
        return ", ".join(self.setting(name) for name in names if self.has(name))

    def number(self, name: str, low: int = 0, unset: int = 0) -> int:
        """Return the value of a variable as a whole number.

        Args:
            name: the name of the variable.
            low: the lowest value that is allowed.
            unset: the result if the variable is not set.

        Raises:
            UsageError: it is no whole number from `low`.
        """
        text = self.text(name)
        value = number(text)
        if not text:
            return unset
        if value is None or not low <= value <= MAX_INT:
            raise UsageError(
                f"{self.setting(name)}: expected a whole number of at least {low}; use --engine=local to ignore it"
            )
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """Return the numbers of a variable with a run-length list, such as `2(x3),1`; empty if it is not set.

        Raises:
            UsageError: it is no such list.
        """
        return repeats(self.text(name), name) if self.has(name) else ()

    def hosts(self, name: str) -> tuple[Host, ...]:
        """Return the hosts of a variable with a node list; empty if it is not set.

        Raises:
            UsageError: it is no node list.
        """
        return tuple(Host(name=each) for each in expand(self.text(name), name)) if self.has(name) else ()

    def file(self, path: str) -> str:
        """Return the text of a file; empty if it cannot be read.

        Args:
            path: the file.
        """
        try:
            return self._read(path)
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return ""

    def fact(self, name: str, low: int = 0, unset: int = 0) -> Fact:
        """Return the value of a variable as `number` does, and the variable's name."""
        return self.number(name, low, unset), name

    def cluster(
        self, engine: str, *, form: str = STEP, hosts: Fact = UNKNOWN, job: str = "", step: str = "", **facts: Fact
    ) -> ClusterEnvironment:
        """Return the facts, with the variable behind each.

        Args:
            hosts: of all nodes. They say how many nodes there are, and where rank 0 is, unless `facts` knows better.
            job, step: variables that number the job, and the step in it; the port where ranks meet follows from them.
            facts: name of a field = its value, and the variable or the file that says it, or several variables with
                blanks between.
        """
        known = facts
        if hosts[1]:
            known = {"hosts": hosts, "nnodes": (len(hosts[0]), hosts[1])}
            known["master_addr"] = hosts[0][0].name if hosts[0] else "", hosts[1]
            known |= {name: fact for name, fact in facts.items() if name not in known or self._source(fact[1])}
        values = {name: fact[0] for name, fact in known.items()}
        sources = [(name, source) for name, fact in known.items() if (source := self._source(fact[1]))]
        if job and self.has(job):
            number = self.text(job)
            values["job_id"] = f"{number}.{self.number(step)}" if step else number
            values["master_port"] = derived_port(number, self.number(step) if step else 0)
            derived = ", ".join(self.setting(name) for name in (job, step) if name)
            sources += [("job_id", self.setting(job)), ("master_port", f"derived from {derived}")]
        return ClusterEnvironment(engine=engine, form=form, sources=tuple(sources), **values)

    def _source(self, name: str) -> str:
        """Return what messages show of variables that are set, or of a file."""
        return name if name.startswith("/") else self.settings(*name.split())


def derived_port(job: str, step: int = 0) -> int:
    """Return a port that every node of a job step can compute: from 29500 to 32699, and for the next job the next
    one.

    Args:
        job: id of the job. The number at its start counts; a name without one counts by its CRC-32.
        step: number of the step within the job.
    """
    digits = job[: len(job) - len(job.lstrip("0123456789"))]
    if digits:
        start = int(digits[-18:])
    else:
        from binascii import crc32

        start = crc32(job.encode(errors="surrogateescape"))
    return _FIRST_PORT + (start + _PORTS_APART * step) % _PORTS


def checked(cluster: ClusterEnvironment) -> ClusterEnvironment:
    """Return the facts unchanged.

    Args:
        cluster: the facts that a detector has found.

    Raises:
        UsageError: two of them contradict each other; the message shows both.
    """
    _below(cluster, "node_rank", "nnodes")
    _below(cluster, "local_rank", "tasks_per_node")
    _below(cluster, "rank", "world_size")
    if cluster.hosts and cluster.nnodes and len(cluster.hosts) != cluster.nnodes:
        named = f"{cluster.source('hosts')} names {counted(len(cluster.hosts), 'host')}"
        raise UsageError(f"{cluster.source('nnodes')}, but {named}")
    if cluster.is_task and (cluster.rank < 0 or not cluster.world_size):
        raise UsageError(
            f"{cluster.source('tasks_per_node')}, but the rank of this process is unknown; start one per node"
        )
    return cluster


def _below(cluster: ClusterEnvironment, name: str, limit: str) -> None:
    value, end = getattr(cluster, name), getattr(cluster, limit)
    if end and value >= end:
        low, high = cluster.source(name) or f"{name} {value}", cluster.source(limit) or f"{limit} {end}"
        raise UsageError(f"{low}, but {high}: they contradict each other")
