"""Where workers are to run, as the caller said it."""

from __future__ import annotations

import os

from infini_run.crews.spawn.exec_spawner import RENDEZVOUS_FLAGS, python_command
from infini_run.environments.environment import BATCH
from infini_run.errors import UsageError, counted
from infini_run.options.from_python import one_of_two, read_flags
from infini_run.options.table import ENGINES
from infini_run.record import replace
from infini_run.system.interpreter import own_python
from infini_run.value_types import proc_count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.environments.hostlist import Host
    from infini_run.options.launch_options import Options
    from infini_run.options.nodes import NodeList

# The flags of a job that continues after the loss of a node; `nnodes` is one, too, if it is a range.
_MEMBERSHIP = ("spares", "join_window", "on_join", "node_check", "node_check_timeout", "max_node_failures")
# What is about hosts that have to be reached.
_NODES = (
    *_MEMBERSHIP,
    *("nnodes", "engine", "ssh_config", "remote_python", "export"),
    *("join_timeout", "node_timeout", "link_port", "link_address"),
)
_THIS_MACHINE = {"nnodes": (1, "1"), "engine": ("local", "auto")}
# What is said to the head; all other flags are the workers'.
_REACH = (*_NODES, "hosts", *RENDEZVOUS_FLAGS)
# Flags of the command that have no effect on workers that run Python functions, and why.
_NO_EFFECT = {
    **dict.fromkeys(("live", "trace", "plot"), "the live table shows only launches of programs"),
    **dict.fromkeys(
        ("events", "metrics", "metrics_interval"),
        "only launches of programs write them; a crew has events() and status()",
    ),
    **dict.fromkeys(("module", "no_python", "distributed_args"), "functions run in this Python"),
    "stdin": "a worker has no input",
    "token_file": "no launcher joins manually",
    "node_rank": "hosts get ranks in their order",
    "ready_timeout": "agent_timeout_s= limits the start",
    "progress_timeout": "use hang_timeout=",
    "snapshots": "use hang_timeout=",
}
_NO_EFFECT_ON_CREWS = {
    "ready_timeout": "ready_timeout_s= limits the start",
    **dict.fromkeys(
        ("max_restarts", "restart_delay", "restart_window", "max_no_progress"), "use restart=ir.Restart(...)"
    ),
    "keep_going": "use restart=ir.Restart(...)",
    "on_join": "a host that joins is a spare",
    "max_node_failures": "use restart=ir.Restart(...)",
}
# What is about restarts and hangs.
_FAILURE = ("max_restarts", "restart_delay", "restart_window", "max_no_progress", "hang_timeout", "stop_signal")
_SLACK_S = 5.0  # that a spawn server has beyond its workers' grace


def check_flags(flags: Mapping[str, object], *, is_crew: bool) -> None:
    """Raises UsageError, with all of them: flags that have no effect here."""
    without = _NO_EFFECT | (_NO_EFFECT_ON_CREWS if is_crew else {})
    found = [f"{name}= ({without[name]})" for name in flags if name in without and flags[name] is not None]
    if found:
        place = "a crew" if is_crew else "functions"
        raise UsageError(f"no effect on {place}: {', '.join(found)}")


def check_node_flags(flags: Mapping[str, object], hosts: Sequence[str]) -> None:
    """Raises UsageError: a flag is about other hosts, and there are none."""
    found = [name for name in _NODES if flags.get(name) not in (None, *_THIS_MACHINE.get(name, ()))]
    if found and not hosts:
        asked = ", ".join(f"{name}={flags[name]!r}" for name in found)
        raise UsageError(f"{asked}: needs the nodes of a launch; add hosts=[...]")


def goes_on_without_host(flags: Mapping[str, object]) -> bool:
    """Return whether these flags ask for workers that continue after the loss of a host."""
    return bool(flags.get("spares")) or _is_range(flags.get("nnodes"))


def _is_range(nnodes: object) -> bool:
    return isinstance(nnodes, tuple) or (isinstance(nnodes, str) and ":" in nnodes)


def check_elastic(counts: Sequence[int | str], flags: Mapping[str, object]) -> None:
    """Raise UsageError for flags with which functions cannot continue after the loss of a node.

    Args:
        counts: how many workers each host has.
        flags: the caller's.
    """
    asked = " and ".join(f"{name}={flags[name]!r}" for name in ("nnodes", "spares") if flags.get(name) is not None)
    if len(set(counts)) > 1:
        raise UsageError(
            f"{asked}: hosts with different numbers of workers cannot replace each other; use --nproc_per_node=N"
        )
    if flags.get("keep_going"):
        raise UsageError(f"{asked}: conflicts with keep_going: a failure ends all ranks, or none; drop one of them")


def read_hosts(
    hosts: Sequence[str] | str | None, hostfile: str | os.PathLike[str] | None = None, *, count: str = "nproc"
) -> tuple[str, ...]:
    """Return the names of hosts; none: this machine. hostfile: of a file that has them. count: the keyword for the
    number of workers. Raises UsageError."""
    if hostfile is not None:
        if hosts:
            raise UsageError(f"hosts={hosts!r}: conflicts with hostfile={hostfile!r}; drop one of them")
        return _read_hostfile(os.fspath(hostfile))
    if hosts is None or hosts == "":
        return ()
    if hosts == "auto":
        from infini_run.environments.detect import detect
        from infini_run.options.from_environment import read_file

        cluster = detect(os.environ, read_file)
        return tuple(host.name for host in cluster.hosts) if cluster is not None and cluster.nnodes > 1 else ()
    if isinstance(hosts, str) and hosts.lower() != "auto":
        from infini_run.environments.hostlist import parse_hosts

        return tuple(map(_host_text, parse_hosts(hosts, "hosts")))
    found = tuple(hosts) if isinstance(hosts, (list, tuple)) else ()
    if not found or not all(isinstance(host, str) and host for host in found):
        meant: object = hosts
        hint = ""
        if type(meant) is int and meant > 0:
            hint = f"; for {counted(meant, 'worker')}, use {count}={meant}"
        raise UsageError(f"hosts={hosts!r}: expected a list of names, or 'auto'{hint}")
    return found


def _read_hostfile(path: str) -> tuple[str, ...]:
    from infini_run.environments.hostlist import read_hostfile

    return tuple(map(_host_text, read_hostfile(path, f"hostfile={path!r}")))


def _host_text(host: Host) -> str:
    """Return the text of a host in a list of hosts."""
    user = f"{host.user}@" if host.user else ""
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{user}{name}" + (f":{host.slots}" if host.slots else "")


def read_nproc(
    nproc_per_node: int | str | Sequence[int] | None, alias: int | str | Sequence[int] | None, hosts: Sequence[str]
) -> int | str | tuple[int, ...] | None:
    """Return the number of workers: of a list, one per host; of one machine its only number. None: what the hosts
    have room for, where they say it, else one. alias: the same by the name of nproc. Raises UsageError."""
    name, nproc = one_of_two(nproc_per_node, alias)
    if nproc is None:
        return None if hosts else 1
    if isinstance(nproc, (str, int)) and not isinstance(nproc, bool):
        try:
            return proc_count(str(nproc))
        except ValueError as error:
            raise UsageError(f"{name}={nproc!r}: {error}") from None
    counts = tuple(nproc) if isinstance(nproc, (list, tuple)) else ()
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise UsageError(f"{name}={nproc!r}: expected a number from 1, 'gpu', 'cpu', or a list of numbers")
    if len(counts) != max(1, len(hosts)):
        wanted = counted(max(1, len(hosts)), "host")
        raise UsageError(f"{name}={nproc!r}: {counted(len(counts), 'number')} for {wanted}")
    return counts if hosts else counts[0]


def resolve_hosts_and_engine(
    reach: Mapping[str, object], flags: Mapping[str, object], nproc: object
) -> tuple[Options, NodeList, Options]:
    """Return the head's task, one spawn server per host; and the options of the workers. Raises UsageError, for the
    workers' flags, too."""
    count = nproc if isinstance(nproc, (int, str)) else 1
    workers = read_worker_options(flags, nproc)
    remote_python = str(reach.get("remote_python") or "")
    words = (
        own_python("infini_run.crews.spawn.spawn_server.main", remote_python)
        if remote_python
        else python_command("spawn.spawn_server")
    )
    reach = {**reach, "engine": _engine(reach), "nproc_per_node": count}
    if "grace" in flags:
        reach["grace"] = flags["grace"]
    request = read_flags(reach, tuple(words), os.environ)
    if request.node_list is None:
        raise UsageError(f"engine={reach['engine']!r}: to run functions on hosts, use {', '.join(ENGINES)}")
    assert request.options is not None
    asked = request.options
    graces = {"grace_s": asked.grace_s + _SLACK_S, "signal_grace_s": asked.signal_grace_s + _SLACK_S}
    options = replace(asked, nproc_per_node=1, **graces)
    if options.is_elastic:  # of spawn servers that end unasked; the workers' restarts are the launch's
        own = read_failure_options(flags)
        restarts = ("max_restarts", "restart_delay_s", "restart_window_s")
        options = replace(options, **{name: getattr(own, name) for name in restarts})
    return options, request.node_list, workers


def _engine(reach: Mapping[str, Any]) -> str:
    """Return the requested engine; auto, or nothing: the allocation's own, where the hosts are in one, else ssh."""
    asked = str(reach.get("engine") or "auto")
    if asked != "auto":
        return asked
    from infini_run.environments.detect import detect
    from infini_run.environments.hostlist import parse_hosts
    from infini_run.options.from_environment import read_file

    cluster = detect(os.environ, read_file)
    if cluster is None or cluster.engine not in ENGINES or cluster.form != BATCH:
        return "ssh"
    hosts = parse_hosts(reach["hosts"], "hosts") if reach.get("hosts") else ()
    return cluster.engine if {host.name for host in hosts} <= {host.name for host in cluster.hosts} else "ssh"


def read_worker_options(flags: Mapping[str, Any], nproc: object) -> Options:
    """Return the options of the workers on one machine, among a launcher's flags. Raises UsageError for an invalid
    one."""
    own = {name: value for name, value in flags.items() if name != "cwd" and not reaches(name)}
    count = nproc if isinstance(nproc, (int, str)) else 1
    options = read_flags(
        {"console": "prefix", **own, "nproc_per_node": count, "stdin": "none"}, ("true",), {}
    ).options
    assert options is not None
    return options


def read_failure_options(given: Mapping[str, object]) -> Options:
    """Return the command's options of restarts and hangs among a launcher's flags. Raises UsageError for an invalid
    one."""
    request = read_flags({name: given[name] for name in _FAILURE if name in given}, ("true",), {})
    assert request.options is not None
    return request.options


def read_counts(nproc: int | str | Sequence[int] | None, node_list: NodeList) -> list[int | str]:
    """Return the number for each host. Raises UsageError if one has too little room."""
    hosts = node_list.hosts
    if nproc is None:
        return [host.slots or 1 for host in hosts]
    counts: list[int | str] = [nproc] * len(hosts) if isinstance(nproc, (int, str)) else list(nproc)
    if len(counts) != len(hosts):
        wanted = counted(len(hosts), "host")
        raise UsageError(f"nproc_per_node={nproc!r}: {counted(len(counts), 'number')} for {wanted}")
    for host, count in zip(hosts, counts, strict=True):
        if host.slots and isinstance(count, int) and count > host.slots:
            raise UsageError(f"nproc_per_node={nproc!r}, but hosts has room for {host.slots} on {host.name}")
    return counts


def reaches(flag: str) -> bool:
    """Return whether that flag says how to reach hosts; all others are the workers'."""
    return flag in _REACH


def plain_flag(value: object) -> Any:
    """Return a flag as it can go to another host."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {str(key): plain_flag(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain_flag(item) for item in value]
    return value
