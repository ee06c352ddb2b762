"""The choice of the engine and its hosts: by the flags, else by the allocation of this process.

The one rule: no host is dropped in silence. A listed host runs ranks unless --nnodes takes the first few. The room of
a host is a limit, and the default number of ranks.
"""

from __future__ import annotations

from infini_run.environments.environment import BATCH
from infini_run.environments.hostlist import parse_hosts, read_hostfile
from infini_run.errors import UsageError, counted
from infini_run.options.grammar import Setting
from infini_run.options.table import ALLOCATION_ENGINES, ENGINES, ENVIRONMENT_PRECEDENCE
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.environments.environment import Reader
    from infini_run.environments.hostlist import Host
    from infini_run.options.grammar import Given

MANUAL = "manual"  # no engine reaches other nodes: the same command on every node, with a token
_ONE_NODE = {
    "node_rank": "node ranks follow the order of the hosts",
    "standalone": "it is for one node",
    "isolate": "it is for one node",
}

_NO_DOCTOR = {  # engines without a command for each node that brings back what is written there, and why
    "pbs": "pbs_tmrsh brings back nothing of what is written on a node",
    "mpi": "one mpirun reaches all nodes, and ends all if one fails",
}


@record
class NodeList:
    """The nodes of a launch.

    Args:
        engine: a name of ENGINES.
        hosts: one per node, in the order of their ranks.
        counts: how many ranks each runs, where they differ; empty: as the options say.
    """

    engine: str
    hosts: tuple[Host, ...]
    counts: tuple[int, ...] = ()


def resolve_nodes(given: Given, environ: Mapping[str, str], read: Reader, least_nodes: int = 0) -> NodeList:
    """Return the nodes of the job and its spares, and add to `given` what they say of its shape. With `least_nodes`
    the job also runs; 0: only with all. Raises UsageError."""
    engine = given["engine"].value if "engine" in given and given["engine"].value in ENGINES else "ssh"
    hosts, origin = _hosts(given, environ, engine, read)
    for name, why in _ONE_NODE.items():
        if name in given and given[name].value not in (False, 0):
            raise UsageError(f"{given[name].origin} conflicts with {origin}: {why}; drop one of them")
    hosts, nnodes = _first(given, hosts, origin, least_nodes)
    is_single = "program" not in given  # several have their own numbers: check_room
    counts = _settle_count(given, hosts, origin, is_limit=_is_limit(engine, origin)) if is_single else ()
    given["nnodes"] = Setting(value=nnodes, origin=origin, precedence=ENVIRONMENT_PRECEDENCE)
    return NodeList(engine=engine, hosts=hosts, counts=counts)


def _is_limit(engine: str, origin: str) -> bool:
    """Return whether the slots of hosts are a limit: tasks of Slurm's are a number, not a room."""
    return engine != "slurm" or "SLURM_" not in origin


def check_doctor_engine(engine: str, origin: str) -> None:
    """Check that --doctor can ask every node by an engine.

    Args:
        engine: The engine.
        origin: What chose it.

    Raises:
        UsageError: It has no command for each node that brings back what is written there.
    """
    if engine in _NO_DOCTOR:
        raise UsageError(
            f"--doctor with {origin}: {_NO_DOCTOR[engine]}; use --engine=ssh --hosts=a,b, or run infini-run "
            "--doctor on each node"
        )


def check_room(origin: str, engine: str, host: Host, count: int) -> None:
    """Check that a host has room for the ranks of all programs.

    Args:
        origin: Who named the hosts.
        engine: What reaches them.
        host: The host.
        count: The ranks of all programs there.

    Raises:
        UsageError: It has less.
    """
    if host.slots and count > host.slots and _is_limit(engine, origin):
        raise UsageError(
            f"{origin}: needs more than the {counted(host.slots, 'slot')} of {host.name} for {count} ranks of "
            "all programs; use fewer ranks, or --on_nodes"
        )


def _hosts(given: Given, environ: Mapping[str, str], engine: str, read: Reader) -> tuple[tuple[Host, ...], str]:
    """Return the hosts, and who named them."""
    lists = [given[name] for name in ("hosts", "hostfile") if name in given and given[name].value]
    if len(lists) == 2 and lists[0].precedence == lists[1].precedence:
        raise UsageError(
            f"{lists[0].origin} conflicts with {lists[1].origin}: only one list of hosts is possible; drop one of "
            "them"
        )
    if lists:
        chosen = min(lists, key=lambda setting: setting.precedence)
        is_file = chosen is given.get("hostfile")
        parse = read_hostfile if is_file else parse_hosts
        return parse(chosen.value, chosen.origin), chosen.origin
    asked = given["engine"].origin
    if engine == "ssh":
        raise UsageError(f"{asked}: needs a list of hosts; add --hosts=a,b or --hostfile=FILE")
    return _allocated(asked, engine, environ, read)


def _allocated(asked: str, engine: str, environ: Mapping[str, str], read: Reader) -> tuple[tuple[Host, ...], str]:
    from infini_run.environments.detect import detect

    site = detect(environ, read)
    if site is None or (engine in ALLOCATION_ENGINES and site.engine != engine):
        way = {"slurm": "run salloc -N2 or sbatch", "pbs": "run qsub"}.get(engine, "add --hosts=a,b")
        raise UsageError(f"{asked}: needs an allocation; {way}")
    if site.form != BATCH:
        raise UsageError(f"{asked}: already one process of a step; use --engine=auto to take its place in it")
    if engine == "mpi" and "_HET_GROUP_" in site.source("hosts"):
        raise UsageError(
            f"{asked}: cannot reach all components of a heterogeneous Slurm job, because mpirun starts only in the "
            "first; use --engine=slurm"
        )
    if not site.hosts:
        raise UsageError(f"{asked}: {site.engine} job {site.job_id} has no host in its allocation")
    return site.hosts, site.source("hosts") or f"{site.engine} job {site.job_id}"


def _first(given: Given, hosts: tuple[Host, ...], origin: str, least_nodes: int) -> tuple[tuple[Host, ...], int]:
    """Return the first --nnodes of them and --spares more; and how many nodes run ranks at a time."""
    asked, spares = given.get("nnodes"), given.get("spares")
    extra = 0 if spares is None else int(spares.value)
    count = counted(len(hosts), "host")
    if asked is None:
        if spares is not None and extra >= len(hosts):
            raise UsageError(f"{spares.origin}: needs more hosts than {origin}, which is {count}; add hosts")
        return hosts, len(hosts) - extra
    wanted = f"{asked.origin} and {spares.origin}" if spares is not None and extra else asked.origin
    if (least_nodes or asked.value + extra) > len(hosts):
        raise UsageError(f"{wanted}: needs more hosts than {origin}, which is {count}; add hosts")
    return hosts[: asked.value + extra], asked.value


def _settle_count(given: Given, hosts: tuple[Host, ...], origin: str, *, is_limit: bool) -> tuple[int, ...]:
    """Return the ranks on each node: as requested, where every host has room for them; else what they have room for.
    Also return the ranks of each, where that differs."""
    asked = given.get("nproc_per_node")
    if asked is not None:
        small = next((host for host in hosts if host.slots and isinstance(asked.value, int)
                      and asked.value > host.slots), None)  # fmt: skip
        if small is not None and is_limit:
            raise UsageError(
                f"{asked.origin}: needs more than the {counted(small.slots, 'slot')} of {small.name} in {origin}; "
                f"use at most {small.slots}"
            )
        return ()
    slots = {host.slots for host in hosts}
    if slots == {0}:
        return ()
    if 0 in slots:
        unknown = next(host.name for host in hosts if not host.slots)
        raise UsageError(f"{origin}: missing the number of processes for {unknown}; add --nproc_per_node=N")
    given["nproc_per_node"] = Setting(value=max(slots), origin=origin, precedence=ENVIRONMENT_PRECEDENCE)
    return tuple(host.slots for host in hosts) if len(slots) > 1 else ()
