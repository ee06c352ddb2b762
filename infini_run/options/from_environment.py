"""--engine=auto: the facts of the cluster environment become settings, of the lowest precedence above the defaults.

The one rule: nothing overrules in silence. A fact that a flag and the cluster environment both have (how many nodes,
which one this is) must be the same in both. What a flag may choose (processes, address, port) is the flag's. A
necessary fact that neither has is an error.
"""

from __future__ import annotations

from infini_run.environments.compressed_hostlist import compress
from infini_run.environments.environment import BATCH, ClusterEnvironment
from infini_run.environments.hostlist import quoted
from infini_run.errors import UsageError, printable
from infini_run.options.grammar import COMMAND_LINE, Setting
from infini_run.options.table import ALLOCATION_ENGINES, DEFAULTS, ENVIRONMENT_PRECEDENCE, PREFIXES, TOKEN
from infini_run.record import replace
from infini_run.value_types import MARKER_VARIABLE, address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.environments.environment import Reader
    from infini_run.options.grammar import Given

NOTHING = "--engine=auto: no scheduler or launcher found in the environment; launching on one node"
_VALUES = ("nnodes", "node_rank", "nproc", "gpus", "hosts", "master_addr", "master_port")
_KNOWN_BOTH = ("nnodes", "node_rank")  # by flags and by the cluster environment
_TITLES = {"pod_variables": "variables of a pod, with a launcher on each node"}  # the others are known by their names
_PODS = ("pod_variables", "kubernetes", "lws", "sagemaker")  # where a pod's launcher has PET_* from an operator
_PET = COMMAND_LINE + 1 + [prefix.text for prefix in PREFIXES].index("PET_")
_TASK_VALUES = ("tasks_per_node", "local_rank", "rank", "world_size")

# What needs a launcher above the rank; where each task is a rank there is none.
_SUPERVISED = (
    *("log_dir", "report", "isolate", "keep_going", "ready_timeout", "hang_timeout", "max_restarts", "trace"),
    *("progress_timeout", "events", "metrics", "metrics_interval", "termination_log", "spares"),
    *("grace", "stop_signal", "stop_scope", "redirects", "tee", "timestamps"),
)


def read_file(path: str) -> str:
    """Return the content of a file that the surroundings name. Raises OSError."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def merge_environment(
    given: Given, environ: Mapping[str, str], read: Reader = read_file
) -> ClusterEnvironment | None:
    """Add to `given` what the cluster environment says and no flag or variable said.

    Args:
        given: The settings so far, by flag. Changed in place.
        environ: The environment.
        read: Reads a file that a variable names.

    Returns:
        The cluster environment. None: there is none.

    Raises:
        UsageError: It contradicts a flag, or itself, or something is still missing.
    """
    from infini_run.environments.detect import detect  # it imports all that there are

    cluster = detect(environ, read)
    if cluster is None:
        return None
    asked = given["engine"].origin
    if environ.get(MARKER_VARIABLE):
        raise UsageError(
            f"{asked}: {MARKER_VARIABLE} is set, so this is a rank of another launch, and the {cluster.engine} "
            "variables may belong to that launch; use --engine=local, or unset it"
        )
    if cluster.form == BATCH and _is_allocation_owner(cluster, asked):
        given["engine"] = replace(given["engine"], value=cluster.engine)
        return _without_choices(cluster)
    cluster = _without_guesses(given, cluster)
    for name in _KNOWN_BOTH:
        _require_same(given, cluster, name)
    if cluster.is_task:
        _apply_task(given, cluster)
    if "nproc_per_node" in given or "program" in given:
        cluster = replace(cluster, counts=())
    _apply(given, cluster)
    _require_missing(given, cluster, asked)
    if cluster.is_mixed and not (environ.get(TOKEN) or ("token_file" in given and given["token_file"].value)):
        _require_count(given, cluster)
    nproc = given.get("nproc_per_node")
    is_used = nproc is not None and nproc.origin == cluster.source("nproc")
    return cluster if is_used else replace(cluster, nproc=0)  # --dry_run shows what counts


def find_allocation(environ: Mapping[str, str], read: Reader = read_file) -> ClusterEnvironment | None:
    """Return the allocation in which this launcher is the head, as `merge_environment` does. None: there is none."""
    from infini_run.environments.detect import detect  # it imports all that there are

    cluster = detect(environ, read)
    return None if cluster is None else _without_choices(cluster)


def _without_choices(cluster: ClusterEnvironment) -> ClusterEnvironment:
    """Drop what the head chooses itself."""
    return replace(cluster, node_rank=-1, nproc=0, gpus=0, master_addr="", master_port=0)


def _is_allocation_owner(cluster: ClusterEnvironment, asked: str) -> bool:
    """Return whether this launcher has a whole allocation. On its only node it launches as on any machine; it reaches
    several from here."""
    where = f"{cluster.engine} job {quoted(cluster.job_id)}"
    if not cluster.hosts:
        raise UsageError(f"{asked}: {where} has no host in its allocation")
    if cluster.nnodes == 1 and cluster.node_rank == 0:
        return False
    if cluster.engine not in ALLOCATION_ENGINES:
        from infini_run.system.shell import quoted as shell_quoted

        names = quoted(compress(host.name for host in cluster.hosts))
        raise UsageError(
            f"{asked}: {where} holds {names}, which {cluster.engine} cannot reach; if ssh can, use --engine=ssh "
            f"--hosts={shell_quoted(names)}"
        )
    return True


def _without_guesses(given: Given, cluster: ClusterEnvironment) -> ClusterEnvironment:
    """Drop what a pod's variables say of values that PET_* gives: many frameworks set them, and they count nodes or
    ranks. Where WORLD_SIZE is the requested number of ranks, it counts those."""
    if cluster.engine not in _PODS:
        return cluster
    names = [name for name in _KNOWN_BOTH if name in given and given[name].precedence == _PET]
    nnodes, nproc = given.get("nnodes"), given.get("nproc_per_node")
    if nnodes is not None and nproc is not None and "nnodes" not in names and isinstance(nproc.value, int):
        names += ["nnodes"] if cluster.warning and nnodes.value * nproc.value == cluster.nnodes else []
    unknown = {name: 0 if name == "nnodes" else -1 for name in names}
    return replace(
        cluster,
        **unknown,
        sources=tuple(source for source in cluster.sources if source[0] not in names),
        warning="" if "nnodes" in names else cluster.warning,
    )


def _require_same(given: Given, cluster: ClusterEnvironment, name: str) -> None:
    """Check that a flag and the cluster environment agree on what both know."""
    flag, known = given.get(name), getattr(cluster, name)
    if flag is None or known == (0 if name == "nnodes" else -1) or flag.value == known:
        return
    if name == "nnodes" and flag.value + _spares(given) == known:
        return
    raise UsageError(
        f"{flag.origin} conflicts with {cluster.source(name) or f'{name} is {known}'} ({cluster.engine}); "
        f"drop {flag.origin.partition('=')[0]}, or {given['engine'].origin}"
    )


def _apply_task(given: Given, cluster: ClusterEnvironment) -> None:
    """Make each process on this node one rank: their number is the engine's, and they have no launcher above them."""
    tasks = cluster.source("tasks_per_node")
    if "program" in given:
        _refuse_supervised(given["program"], tasks)
    nproc = given.get("nproc_per_node")
    if nproc is not None and nproc.value != cluster.tasks_per_node:
        raise UsageError(
            f"{nproc.origin} conflicts with {tasks} ({cluster.engine}): each task is one rank; drop the flag, or "
            "run one task per node"
        )
    for name in _SUPERVISED:
        if name in given and given[name].value != DEFAULTS[name]:
            _refuse_supervised(given[name], tasks)
    if "console" in given and given["console"].value in ("lines", "prefix", "fold"):
        _refuse_supervised(given["console"], tasks)
    for name in ("master_port", "rdzv_endpoint"):
        port = given.get(name)
        if port is not None and (port.value if name == "master_port" else port.value[1]) == 0:
            raise UsageError(
                f"{port.origin}: cannot be a free port with {tasks}, because all tasks need the same one; use a "
                "port from 1 to 65535"
            )
    _set_default(given, cluster, "nproc_per_node", cluster.tasks_per_node, "tasks_per_node")
    _set_default(given, cluster, "master_port", cluster.master_port or DEFAULTS["master_port"], "master_port")


def _refuse_supervised(flag: Setting, tasks: str) -> None:
    raise UsageError(
        f"{flag.origin}: needs a launcher above the ranks, but with {tasks} each task is one rank; run one task per "
        "node (srun --ntasks-per-node=1)"
    )


def _apply(given: Given, cluster: ClusterEnvironment) -> None:
    is_standalone = "standalone" in given and given["standalone"].value
    _set_default(given, cluster, "nnodes", _running_nodes(given, cluster), "nnodes")
    if not cluster.is_task and "program" not in given:
        _offer_nproc(given, cluster)
    if is_standalone:
        return
    if cluster.node_rank >= 0:
        _set_default(given, cluster, "node_rank", cluster.node_rank, "node_rank")
    is_alone = "nnodes" in given and given["nnodes"].value == 1
    if cluster.master_addr and not is_alone:
        try:
            _set_default(given, cluster, "master_addr", address(cluster.master_addr), "master_addr")
        except ValueError as error:
            raise UsageError(f"{cluster.source('master_addr')}: {error}") from None
    backend = given.get("rdzv_backend")
    if not (is_alone and backend is not None and backend.value == "c10d"):  # then a free port is what was asked for
        _set_default(given, cluster, "master_port", cluster.master_port, "master_port")


def _spares(given: Given) -> int:
    return int(given["spares"].value) if "spares" in given else 0


def _running_nodes(given: Given, cluster: ClusterEnvironment) -> int:
    """Return how many of its nodes run ranks at a time: spares are some of them, as those of a list of hosts are."""
    spares = _spares(given)
    if cluster.nnodes and spares >= cluster.nnodes:
        raise UsageError(
            f"{given['spares'].origin}: needs more nodes than {cluster.source('nnodes')} ({cluster.engine}); add "
            "nodes"
        )
    return cluster.nnodes - spares if cluster.nnodes else 0


def _offer_nproc(given: Given, cluster: ClusterEnvironment) -> None:
    """Offer a process per share of the GPUs, where the cluster environment counts them; else as many as it says."""
    share = given["gpus_per_proc"].value if "gpus_per_proc" in given else 1
    if cluster.gpus and cluster.gpus >= share:
        _set_default(given, cluster, "nproc_per_node", cluster.gpus // max(1, share), "gpus")
    else:
        _set_default(given, cluster, "nproc_per_node", cluster.nproc, "nproc")


def _set_default(given: Given, cluster: ClusterEnvironment, flag: str, value: object, name: str) -> None:
    if value not in (0, "") or flag == "node_rank":
        given.setdefault(
            flag,
            Setting(
                value=value, origin=cluster.source(name) or f"--{flag}={value}", precedence=ENVIRONMENT_PRECEDENCE
            ),
        )


def _require_missing(given: Given, cluster: ClusterEnvironment, asked: str) -> None:
    """Check for what many nodes need, and neither the cluster environment nor a flag has said."""
    knows = f"{asked}: {cluster.engine} does not report"
    if "nnodes" not in given:
        raise UsageError(f"{knows} the number of nodes; add --nnodes=N")
    if given["nnodes"].value == 1:
        return
    if "node_rank" not in given:
        raise UsageError(f"{knows} the rank of this node; add --node_rank=N")
    if not given.keys() & {"master_addr", "rdzv_endpoint"}:
        raise UsageError(f"{knows} the address of node 0; add --rdzv_endpoint=HOST:PORT")


def _require_count(given: Given, cluster: ClusterEnvironment) -> None:
    """Check that a launcher without a connection to the others knows how many ranks each node has."""
    nproc = given.get("nproc_per_node")
    is_counted = nproc is not None and (
        not isinstance(nproc.value, int) or nproc.origin == cluster.source("gpus") != ""
    )
    if nproc is not None and is_counted and not cluster.is_task:
        raise UsageError(
            f"{nproc.origin}: other components of the job may have other numbers; add --nproc_per_node=N, or set the "
            f"same {TOKEN}=... on every node"
        )


def describe(cluster: ClusterEnvironment) -> list[str]:
    """Describe what the search found, a value a line, each with its variable."""
    what = _TITLES.get(cluster.engine, f"{cluster.engine} {cluster.form}")
    lines = [what + (f" {cluster.job_id}" if cluster.job_id else "")]
    for name, value, source in facts(cluster):
        lines.append(f"  {name} {value} ({source})" if source else f"  {name} {value}")
    if cluster.warning:
        lines.append(f"  {cluster.warning}")
    return [printable(line) for line in lines]


def facts(cluster: ClusterEnvironment) -> list[tuple[str, str | int, str]]:
    """Yield the values of the cluster environment: name, value, who said it."""
    found: list[tuple[str, str | int, str]] = []
    for name in _VALUES + (_TASK_VALUES if cluster.is_task else ()):
        value = getattr(cluster, name)
        if name == "hosts":
            value = compress(host.name for host in value)
        if value not in ("", 0 if name != "node_rank" else -1) or (name in _TASK_VALUES):
            found.append((name, value, cluster.source(name)))
    return found
