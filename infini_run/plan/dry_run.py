"""--dry_run: the plan for people and for programs. It leaves out what a rank inherits unchanged."""

from __future__ import annotations

from infini_run.errors import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.environment import ClusterEnvironment
    from infini_run.plan.model import Plan, Worker

_ADDED = "each node adds: the Python for .py files, OMP_NUM_THREADS, and its own paths of sockets and error files"
_ITS_GPUS = "with --gpus_per_proc, CUDA_VISIBLE_DEVICES or the like"


def render_text(
    plan: Plan,
    cluster: ClusterEnvironment | None = None,
    later: Mapping[str, str] | None = None,
    *,
    least_nodes: int = 0,
    spares: Sequence[str] = (),
    preload: Sequence[str] = (),
    auto: str = "",
    exported: Sequence[str] = (),
) -> str:
    """Render a plan for people: every rank's variables and its command, ready for a shell.

    Args:
        plan: The plan.
        cluster: The cluster environment that --engine=auto found. None: without it.
        later: Variables whose values need all nodes to connect, with what they will be. None: the plan is this
            node's own.
        least_nodes: The job also runs with this many nodes; 0: it needs all.
        spares: Hosts that run nothing until the loss of a node; "": one that is unknown before it joins.
        preload: Modules to import once, before the ranks are forked.
        auto: Why --preload=auto has no modules here. Empty: it has some, or nobody asked for it.
        exported: Names of variables that other nodes get from here.
    """
    known_later = later or {}
    env = _with_later(plan.env, known_later)
    nodes = counted(plan.nnodes, "node")
    if 0 < least_nodes < plan.nnodes:
        nodes += f" ({least_nodes} are enough)" if least_nodes > 1 else " (1 is enough)"
    ranks = f"{len(plan.workers)} of {counted(plan.world_size, 'rank')}"
    lines = [
        f"{ranks}, {nodes}, rendezvous at {_endpoint(plan, known_later)}",
        f"every rank: {_assignments(env)}",
    ]
    if later is not None:
        lines.append(f"{_ADDED}; {_ITS_GPUS}" if _awaits_gpus(plan) else _ADDED)
    if exported:
        lines.append(f"exported: {', '.join(exported)}")
    if plan.programs[0].options.name:
        programs = [worker.program for worker in plan.workers]
        named = ", ".join(
            f"{each.options.name} ({programs.count(each.options.name)})"
            + (f" after {', '.join(each.options.after)}" if each.options.after else "")
            for each in plan.programs
        )
        lines.append(f"programs: {named}")
    if cluster is not None:
        from infini_run.options.from_environment import describe

        found, *values = describe(cluster)
        lines += [f"found: {found}", *values]
    for node in plan.nodes:
        lines.append(f"node {node.index} ({node.host}):")
        lines += [_worker_text(worker, known_later) for worker in plan.workers if worker.node == node.index]
    if auto:
        lines.append(f"preload: auto: {auto}")
    elif preload:
        once = "once per node" if plan.nnodes > 1 else "once"
        lines.append(f"preload: {', '.join(preload)}, imported {once}; the ranks are forked from that process")
    if spares:
        known = ", ".join(filter(None, spares))
        lines.append(f"spares: {known or f'{len(spares)} (the last by name of the nodes that join)'}")
    return "\n".join(lines)


def _awaits_gpus(plan: Plan) -> bool:
    """Return whether ranks get GPUs whose names only their nodes know."""
    return any(_has_gpus(plan, worker) for worker in plan.workers)


def _has_gpus(plan: Plan, worker: Worker) -> bool:
    names = [each.options.name for each in plan.programs]
    return plan.programs[names.index(worker.program)].options.gpus_per_proc > 0


def _with_later(env: tuple[tuple[str, str], ...], later: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"<{later[name]}>" if name in later else value) for name, value in env)


def _endpoint(plan: Plan, later: Mapping[str, str]) -> str:
    """Return where ranks meet: the ranks of each program, or of all in one world."""
    host = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
    if not later:
        return ", ".join(f"{host}:{port}" for port in plan.master_ports)
    host = f"the {later['MASTER_ADDR']}" if "MASTER_ADDR" in later else host
    return f"{host}, " + (f"a {later['MASTER_PORT']}" if "MASTER_PORT" in later else f"port {plan.master_ports[0]}")


def _worker_text(worker: Worker, later: Mapping[str, str]) -> str:
    import shlex

    words = worker.argv if worker.file == worker.argv[0] else (worker.file, *worker.argv[1:])
    bound = f"  # {worker.cpu_binding}" if worker.cpu_binding else ""  # a comment to a shell, too
    return f"  {worker.name}: {_assignments(_with_later(worker.env, later))} {shlex.join(words)}{bound}"


def _assignments(env: tuple[tuple[str, str], ...]) -> str:
    import shlex

    return " ".join(f"{name}={shlex.quote(value)}" for name, value in env)


def render_json(
    plan: Plan,
    cluster: ClusterEnvironment | None = None,
    later: Mapping[str, str] | None = None,
    *,
    least_nodes: int = 0,
    spares: Sequence[str] = (),
    preload: Sequence[str] = (),
    auto: str = "",
    exported: Sequence[str] = (),
) -> str:
    """Render a plan as one JSON object. The `env` of a rank is complete except for inherited variables.

    Args:
        plan: The plan.
        cluster: The cluster environment that --engine=auto found. None: without it.
        later: Variables whose values need all nodes to connect: null in the object. None: none.
        least_nodes: As for render_text.
        spares: As for render_text; null in the object: not known before it joins.
        preload: As for render_text.
        auto: As for render_text.
        exported: As for render_text.
    """
    import json

    awaits_gpus = later is not None and _awaits_gpus(plan)
    later = later or {}
    return json.dumps(
        {
            **_found(cluster),
            "format": 2,
            "launch_id": plan.launch_id,
            "nnodes": plan.nnodes,
            "least_nodes": least_nodes or plan.nnodes,
            "spares": [host or None for host in spares],
            "preload": list(preload),
            "exported": list(exported),
            "world_size": plan.world_size,
            "master_addr": None if "MASTER_ADDR" in later else plan.master_addr,
            "master_port": None if "MASTER_PORT" in later else plan.master_ports[0],
            "nodes": [{"node_rank": node.index, "host": node.host, "nproc": node.nproc} for node in plan.nodes],
            "ranks": [
                {
                    "rank": worker.rank,
                    "local_rank": worker.local_rank,
                    "node_rank": worker.node,
                    "program": worker.program or None,
                    "program_rank": worker.program_rank,
                    "cwd": worker.cwd or None,
                    "file": worker.file,
                    "argv": list(worker.argv),
                    "env": dict(plan.env + worker.env) | dict.fromkeys(later),
                    "devices": None if awaits_gpus and _has_gpus(plan, worker) else list(worker.devices),
                    "cpus": list(worker.cpu_binding.cpus) if worker.cpu_binding else None,
                    "memory_nodes": list(worker.cpu_binding.nodes) if worker.cpu_binding else None,
                    "stdin": worker.stdin,
                    "stdout": worker.stdout.way,
                    "stderr": worker.stderr.way,
                    "log": worker.log or None,
                    "error_log": worker.error_log or None,
                }
                for worker in plan.workers
            ],
        },
        indent=1,
        ensure_ascii=True,
    )


def _found(cluster: ClusterEnvironment | None) -> dict[str, object]:
    if cluster is None:
        return {}
    from infini_run.options.from_environment import facts

    values = [{"name": name, "value": value, "from": source or None} for name, value, source in facts(cluster)]
    return {
        "cluster": {
            "engine": cluster.engine,
            "form": cluster.form,
            "job_id": cluster.job_id or None,
            "values": values,
        }
    }
