"""Slots to nodes: how many of them, and what each must have. Pure; both layouts, for every scheduler.

default      distinct hosts, all alike: slots fill their nodes, CPUs follow the GPUs; it refuses what cannot be
determined   the rows of Determined's tables ("HPC Launching Architecture"), rounding up and all.

A layout has the numbers; slurm and pbs know the words for them.
"""

from __future__ import annotations

from math import isqrt

from infini_run.errors import UsageError, counted
from infini_run.jobs.request.job_request import CPU, CUDA, DETERMINED
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.jobs.request.job_request import JobRequest
    from infini_run.jobs.scheduler import Facts, Kind, Queue


@record
class Layout:
    """The numbers to request. 0: none, or unknown.

    Args:
        style: default or determined.
        slots: of all nodes.
        slot_type: cuda, rocm, or cpu.
        nodes: those that run ranks; 0: the scheduler picks 1 to `max_nodes`.
        spares: further nodes.
        max_nodes: the most nodes, if the scheduler picks their number.
        slots_per_node: 0: the scheduler chooses it, too.
        gpu_type: one of the pool's types; empty: any.
        gpus: of all nodes.
        gpus_per_node, gpus_per_task: of each.
        cpus_per_gpu, cpus_per_node, mem_mb_per_node: what comes with it.
        is_exclusive: whole nodes.
        is_scattered: no two on one host (PBS).
        remark: for the user.
    """

    style: str
    slots: int
    slot_type: str
    nodes: int = 0
    spares: int = 0
    max_nodes: int = 0
    slots_per_node: int = 0
    gpu_type: str = ""
    gpus: int = 0
    gpus_per_node: int = 0
    gpus_per_task: int = 0
    cpus_per_gpu: int = 0
    cpus_per_node: int = 0
    mem_mb_per_node: int = 0
    is_exclusive: bool = False
    is_scattered: bool = False
    remark: str = ""

    @property
    def all_nodes(self) -> int:
        """The number of nodes in the request."""
        return self.nodes + self.spares


def lay_out(request: JobRequest, facts: Facts) -> Layout:
    """Return the layout of a request. Pure.

    Raises:
        UsageError: All that is wrong with it, one line each.
    """
    pool = facts.pool(request.pool)
    is_determined = request.layout == DETERMINED
    _refuse(_unknown_pool(request, facts, pool) + (_no_row(request) if is_determined else []))
    if is_determined:
        return _determined(request, facts, pool)
    limits = _limit_problems(request, pool)
    if problems := _pool_problems(request, facts, pool):
        _refuse(problems + limits)
    try:
        layout = _default(request, facts, pool)
    except UsageError as error:
        raise UsageError("\n".join([str(error), *limits])) from None
    _refuse(_size_problems(request, layout, pool) + limits)
    return layout


def slot_type_of(request: JobRequest, pool: Queue | None) -> str:
    """Return the kind of slots: the user's choice, else cpu in a pool without GPUs, else cuda."""
    return request.slot_type or (CPU if pool is not None and not pool.gpus_per_node else CUDA)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UsageError("\n".join(problems))


def _unknown_pool(request: JobRequest, facts: Facts, pool: Queue | None) -> list[str]:
    if not facts.pools or pool is not None:
        return []
    if not request.pool:
        return [f"missing --pool, as there is no default; use --pool={'|'.join(pool.name for pool in facts.pools)}"]
    from infini_run.options.hints import nearest

    names = [pool.name for pool in facts.pools]
    near = nearest(request.pool, names)
    return [
        f"--pool={request.pool}: unknown pool; " + (f"did you mean {near}?" if near else f"use {', '.join(names)}")
    ]


# ---- default


def _default(request: JobRequest, facts: Facts, pool: Queue | None) -> Layout:
    slot_type = slot_type_of(request, pool)
    kind = _kind(request, pool, slot_type)
    per_node = _per_node(request, kind, slot_type)
    slots, remark = request.slots, ""
    if slots % per_node:
        slots, remark = _filled(request, per_node)
    has_gres = _has_gres(request, facts)
    has_tres = (facts.has_tres if request.tres is None else request.tres) and has_gres
    is_gpu = slot_type != CPU
    is_whole = is_gpu and not has_gres
    cpus = request.cpus_per_slot or _cpus(kind, is_gpu) or 1
    cpus_per_node = cpus * per_node
    if is_whole and not request.cpus_per_slot and pool is not None:
        cpus_per_node = max(cpus_per_node, min((kind.cpus for kind in pool.kinds), default=0))
    is_cpus_per_gpu = is_gpu and has_tres and facts.scheduler == "slurm"
    return Layout(
        style=request.layout,
        slots=slots,
        slot_type=slot_type,
        nodes=slots // per_node,
        spares=request.spares,
        slots_per_node=per_node,
        gpu_type=request.gpu_type,
        gpus_per_node=per_node if is_gpu and has_gres else 0,
        cpus_per_gpu=cpus if is_cpus_per_gpu else 0,
        cpus_per_node=cpus_per_node if not is_cpus_per_gpu else 0,
        mem_mb_per_node=request.mem_mb_per_slot * per_node,
        is_exclusive=is_whole,
        is_scattered=True,
        remark=remark,
    )


def _has_gres(request: JobRequest, facts: Facts) -> bool:
    return facts.has_gres if request.gres is None else request.gres


def _kind(request: JobRequest, pool: Queue | None, slot_type: str) -> Kind | None:
    """Return the nodes of the pool that give the numbers: the smallest of those that fit the request."""

    def count(kind: Kind) -> int:
        return kind.cpus if slot_type == CPU else kind.gpus_of(request.gpu_type)

    kinds = [kind for kind in pool.kinds if count(kind)] if pool is not None else []
    fitting = [kind for kind in kinds if count(kind) >= request.slots_per_node]
    return min(fitting or kinds, key=count, default=None)


def _per_node(request: JobRequest, kind: Kind | None, slot_type: str) -> int:
    """Return the slots on each node: the user's number, else as many as a node has. Raises UsageError if that is
    unknown."""
    if request.single_node:
        return request.slots
    if request.slots_per_node:
        return request.slots_per_node
    if kind is None and slot_type != CPU and request.slots > 1:
        raise UsageError(f"--slots={request.slots}: GPUs per node unknown; add --slots_per_node=N")
    if kind is None:
        return request.slots
    has = kind.cpus // (request.cpus_per_slot or 1) if slot_type == CPU else kind.gpus_of(request.gpu_type)
    return min(request.slots, max(has, 1))


def _cpus(kind: Kind | None, is_gpu: bool) -> int:
    """Return the CPUs that belong to one slot: a GPU's share of its node."""
    if kind is None or not is_gpu:
        return 0
    return kind.cpus // kind.gpus if kind.gpus else 0


def _filled(request: JobRequest, per_node: int) -> tuple[int, str]:
    """Return the slots that fill their nodes, and a remark, with --round_up. Raises UsageError without it."""
    low = request.slots // per_node * per_node
    high = low + per_node
    if request.round_up:
        return high, f"rounded {counted(request.slots, 'slot')} up to {high}, to fill nodes of {per_node}"
    small = [n for n in range(1, isqrt(request.slots) + 1) if request.slots % n == 0]  # each has a large one
    divisors = sorted({each for n in small for each in (n, request.slots // n) if each < per_node})
    others = " or ".join(f"{n}" for n in divisors[:-3:-1])
    nearest = f"{low} or {high}" if low else f"{high}"
    slots = "1 slot does" if request.slots == 1 else f"{request.slots} slots do"
    raise UsageError(
        f"--slots={request.slots}: {slots} not fill nodes of {per_node}; "
        f"use {nearest}, --slots_per_node={others}, or --round_up ({high})"
    )


def _pool_problems(request: JobRequest, facts: Facts, pool: Queue | None) -> list[str]:
    """Return what is wrong whatever the numbers of nodes."""
    found = []
    if request.slots < 1:
        found.append(f"--slots={request.slots}: expected at least 1")
    if pool is None:
        return found
    slot_type = slot_type_of(request, pool)
    types = sorted({name for kind in pool.kinds for name, _ in kind.gpu_types})
    if request.gpu_type and slot_type == CPU:
        found.append(
            f"--gpu_type={request.gpu_type}: conflicts with slots that are CPUs; drop it, or use --slot_type=cuda"
        )
    elif request.gpu_type and not _has_gres(request, facts):
        found.append(f"--gpu_type={request.gpu_type}: the scheduler knows no GPUs; use a --pool that has them")
    elif request.gpu_type and pool.kinds and request.gpu_type not in types:
        has = f"use {', '.join(types)}" if types else "its GPUs have no types, so drop it"
        found.append(f"--gpu_type={request.gpu_type}: unknown in pool {pool.name}; {has}")
    elif slot_type != CPU and facts.has_gres and pool.kinds and not pool.gpus_per_node and request.gres is not False:
        found.append(
            f"--slot_type={slot_type}: the scheduler knows no GPUs in pool {pool.name}; use another --pool, or "
            "--slot_type=cpu"
        )
    return found


def _limit_problems(request: JobRequest, pool: Queue | None) -> list[str]:
    """Return what is wrong with the limit of the job's time."""
    if pool is None or not pool.limit_s or request.time_s <= pool.limit_s:
        return []
    return [f"--time: expected at most {_span(pool.limit_s)}, the limit of pool {pool.name}"]


def _size_problems(request: JobRequest, layout: Layout, pool: Queue | None) -> list[str]:
    """Return why a size does not fit: too few nodes have it, or none, or a slot has too many CPUs or too
    much memory."""
    if pool is None or not pool.kinds:
        return []
    is_gpu, known = layout.slot_type != CPU, layout.gpus_per_node > 0
    per_node = layout.slots_per_node
    if is_gpu and known:
        fits = [kind for kind in pool.kinds if kind.gpus_of(request.gpu_type) >= per_node]
        most = max(kind.gpus_of(request.gpu_type) for kind in pool.kinds)
        what = counted(per_node, "GPU")
    else:
        need = layout.cpus_per_node
        fits = [kind for kind in pool.kinds if kind.cpus >= need]
        most, what = max(kind.cpus for kind in pool.kinds), counted(need, "CPU")
    nodes = sum(kind.nodes for kind in fits or pool.kinds)
    found = []
    if not fits:
        found.append(f"the request needs nodes with {what}; those of pool {pool.name} have at most {most}")
    if nodes < layout.all_nodes:
        with_what = f" with {what}" if fits else ""
        spares = f" ({counted(layout.spares, 'spare')} among them)" if layout.spares else ""
        asked = f"the request needs {counted(layout.all_nodes, 'node')}{with_what}{spares}"
        found.append(f"{asked}; pool {pool.name} has {nodes}")
    return found + _share_problems(request, layout, pool, fits)


def _share_problems(request: JobRequest, layout: Layout, pool: Queue, fits: Sequence[Kind]) -> list[str]:
    """Return what is wrong with the CPUs and the memory of each slot. fits: nodes with enough slots; empty: the slots
    are wrong, and only a number of the user's is worth a line."""
    cpus = layout.cpus_per_node or layout.cpus_per_gpu * layout.gpus_per_node
    kinds = fits or pool.kinds
    most_cpus, most_mb = max(kind.cpus for kind in kinds), max(kind.mem_mb for kind in kinds)
    found = []
    if cpus > most_cpus and (fits or (layout.gpus_per_node and request.cpus_per_slot)):
        found.append(f"--cpus_per_slot: needs {cpus} CPUs per node; those of pool {pool.name} have {most_cpus}")
    if most_mb and layout.mem_mb_per_node > most_mb:
        found.append(
            f"--mem_per_slot: needs {layout.mem_mb_per_node} MB per node; those of pool {pool.name} have {most_mb}"
        )
    return found


def _span(time_s: int) -> str:
    for unit, each_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if time_s % each_s == 0:
            return f"{time_s // each_s}{unit}"
    return f"{time_s}s"


# ---- determined


def _no_row(request: JobRequest) -> list[str]:
    """Return what Determined's tables have no place for."""
    given = [("--cpus_per_slot", request.cpus_per_slot), ("--mem_per_slot", request.mem_mb_per_slot)]
    given += [("--round_up", request.round_up), ("--spares", request.spares)]
    found = [
        f"{name}: conflicts with --layout=determined; use the scheduler's own option in --options"
        for name, on in given
        if on
    ]
    if request.slots < 0 or (request.slots == 0 and request.slot_type != CPU):
        found.append(f"--slots={request.slots}: expected at least 1")
    return found


def _determined(request: JobRequest, facts: Facts, pool: Queue | None) -> Layout:
    """Return the rows of the tables. tres and gres are the user's, else true, as in Determined's configuration."""
    slots, asked = request.slots, request.slots_per_node
    has_gres = request.gres is not False
    has_tres = request.tres is not False and has_gres
    remark = (
        ""
        if has_gres or request.tres is not True
        else "--tres: no effect without --gres in --layout=determined; using --notres"
    )
    slot_type = slot_type_of(request, pool)
    nodes, per_node = (-(-slots // asked), asked) if asked else (slots, 1)
    common = {"style": request.layout, "slots": slots, "slot_type": slot_type, "remark": remark}
    if slot_type == CPU:
        if slots == 0:  # a task that needs no slots runs on one node
            nodes, per_node, asked = 1, 1, 0
        is_pbs = facts.scheduler == "pbs"
        share = {"cpus_per_node": per_node if asked or is_pbs else 0}
    elif has_gres and has_tres and facts.scheduler != "pbs":
        share = {"gpus": slots, "gpus_per_task": asked}
        nodes, per_node = 0, asked
    else:
        share = {"gpus_per_node": per_node if has_gres else 0}
    if request.single_node:
        nodes = 1
    return Layout(**common, **share, nodes=nodes, max_nodes=slots, slots_per_node=per_node, gpu_type=request.gpu_type)  # type: ignore[arg-type]
