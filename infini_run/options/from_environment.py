"""--engine=auto: what the Site says becomes settings, of the lowest authority above the defaults.

The one rule: nothing is overruled in silence. What a flag and the Site both know (how many nodes, which one this is)
must be the same; what a flag may choose (processes, address, port) is the flag's; what neither says, and must be
known, is asked for.
"""

from __future__ import annotations

from infini_run.environments.detect import detect
from infini_run.environments.environment import BATCH, ClusterEnvironment
from infini_run.environments.hostlist import compress, quoted
from infini_run.errors import UsageError, printable
from infini_run.options.grammar import COMMAND_LINE, Setting
from infini_run.options.table import DEFAULTS, PREFIXES
from infini_run.record import replace
from infini_run.value_types import address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.environments.environment import Reader

    Given = dict[str, Setting]

MARK = "INFINI_RUN_ID"  # plan.MARK, which is above us
NOTHING = "--engine=auto: no engine was found in the environment; this is a launch on one node"
ENGINES = ("slurm", "pbs")  # whose allocations we reach from here
_LEVEL = COMMAND_LINE + len(PREFIXES) + 1
_VALUES = ("nnodes", "node_rank", "nproc", "gpus", "hosts", "master_addr", "master_port")
_KNOWN_BOTH = ("nnodes", "node_rank")  # by flags and by the Site
_TITLES = {"podenv": "variables of a pod, with a launcher on each node"}  # the others are known by their names
_PODS = ("podenv", "kubernetes", "lws", "sagemaker")  # where a pod's launcher has PET_* from an operator
_PET = COMMAND_LINE + 1 + [prefix.text for prefix in PREFIXES].index("PET_")
_TASK_VALUES = ("tasks_per_node", "local_rank", "rank", "world_size")

# What needs a launcher above the rank; where each task is a rank there is none.
_SUPERVISED = (
    *("log_dir", "report", "isolate", "keep_going", "ready_timeout", "hang_timeout", "max_restarts", "trace"),
    *("grace", "stop_signal", "stop_scope", "redirects", "tee"),
)


def read_file(path: str) -> str:
    """What is in a file that the surroundings name. Raises OSError."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def merge_environment(
    given: Given, environ: Mapping[str, str], read: Reader = read_file
) -> ClusterEnvironment | None:
    """Add to `given` what the Site says and nobody else did; return the Site, None where there is none.

    Raises UsageError: the Site and a flag contradict each other, the Site itself, or something is still missing.
    """
    site = detect(environ, read)
    if site is None:
        return None
    asked = given["engine"].origin
    if environ.get(MARK):
        raise UsageError(
            f"{asked}: {MARK} is set, so this is a rank of another launch, and the {site.engine} variables may be "
            "that one's; give --engine=local, or unset it"
        )
    if site.form == BATCH and _is_head(site, asked):
        given["engine"] = replace(given["engine"], value=site.engine)
        return site
    site = _without_guesses(given, site)
    for name in _KNOWN_BOTH:
        _agree(given, site, name)
    if site.is_task:
        _settle_task(given, site)
    if "nproc_per_node" in given:
        site = replace(site, counts=())
    _settle(given, site)
    _ask_for_the_rest(given, site, asked)
    return site


def _is_head(site: ClusterEnvironment, asked: str) -> bool:
    """A whole allocation is ours. On its only node we launch as on any machine; several are reached from here."""
    where = f"{site.engine} job {quoted(site.job_id)}"
    if not site.hosts:
        raise UsageError(f"{asked}: {where} has no host in its allocation")
    if site.nnodes == 1 and site.node_rank == 0:
        return False
    if site.engine not in ENGINES:
        names = quoted(compress(host.name for host in site.hosts))
        raise UsageError(
            f"{asked}: {where} holds {names}, which cannot be reached by {site.engine} itself; "
            f"where ssh may: --engine=ssh --hosts={names}"
        )
    return True


def _without_guesses(given: Given, site: ClusterEnvironment) -> ClusterEnvironment:
    """A pod's variables are many a framework's, and count nodes or ranks: they are not asked for what PET_* says.
    Where WORLD_SIZE is as many as the ranks that were asked for, it counts those."""
    if site.engine not in _PODS:
        return site
    names = [name for name in _KNOWN_BOTH if name in given and given[name].level == _PET]
    nnodes, nproc = given.get("nnodes"), given.get("nproc_per_node")
    if nnodes is not None and nproc is not None and "nnodes" not in names and isinstance(nproc.value, int):
        names += ["nnodes"] if site.remark and nnodes.value * nproc.value == site.nnodes else []
    unknown = {name: 0 if name == "nnodes" else -1 for name in names}
    return replace(
        site,
        **unknown,
        sources=tuple(source for source in site.sources if source[0] not in names),
        remark="" if "nnodes" in names else site.remark,
    )


def _agree(given: Given, site: ClusterEnvironment, name: str) -> None:
    """What a flag and the Site both know must be the same."""
    flag, known = given.get(name), getattr(site, name)
    if flag is None or known == (0 if name == "nnodes" else -1) or flag.value == known:
        return
    raise UsageError(
        f"{flag.origin}, but {site.source(name) or f'{name} is {known}'} ({site.engine}): "
        f"drop {flag.origin.partition('=')[0]}, or {given['engine'].origin}"
    )


def _settle_task(given: Given, site: ClusterEnvironment) -> None:
    """Each process on this node is one rank: their number is the engine's, and nobody is above them."""
    tasks = site.source("tasks_per_node")
    nproc = given.get("nproc_per_node")
    if nproc is not None and nproc.value != site.tasks_per_node:
        raise UsageError(
            f"{nproc.origin}, but {tasks} ({site.engine}), where each task is one rank: "
            "drop the flag, or start one task for each node"
        )
    for name in _SUPERVISED:
        if name in given and given[name].value != DEFAULTS[name]:
            _refuse_supervised(given[name], tasks)
    if "console" in given and given["console"].value in ("lines", "prefix"):
        _refuse_supervised(given["console"], tasks)
    for name in ("master_port", "rdzv_endpoint"):
        port = given.get(name)
        if port is not None and (port.value if name == "master_port" else port.value[1]) == 0:
            raise UsageError(
                f"{port.origin}: a free port is for one launcher; with {tasks} all must know the same one"
            )
    _offer(given, site, "nproc_per_node", site.tasks_per_node, "tasks_per_node")
    _offer(given, site, "master_port", site.master_port or DEFAULTS["master_port"], "master_port")


def _refuse_supervised(flag: Setting, tasks: str) -> None:
    raise UsageError(
        f"{flag.origin}: with {tasks} each task is one rank and no launcher is above it; "
        "start one task for each node (srun --ntasks-per-node=1)"
    )


def _settle(given: Given, site: ClusterEnvironment) -> None:
    is_standalone = "standalone" in given and given["standalone"].value
    _offer(given, site, "nnodes", site.nnodes, "nnodes")
    if not site.is_task:
        _offer_nproc(given, site)
    if is_standalone:
        return
    if site.node_rank >= 0:
        _offer(given, site, "node_rank", site.node_rank, "node_rank")
    is_alone = "nnodes" in given and given["nnodes"].value == 1
    if site.master_addr and not is_alone:
        try:
            _offer(given, site, "master_addr", address(site.master_addr), "master_addr")
        except ValueError as error:
            raise UsageError(f"{site.source('master_addr')}: {error}") from None
    backend = given.get("rdzv_backend")
    if not (is_alone and backend is not None and backend.value == "c10d"):  # then a free port is what was asked for
        _offer(given, site, "master_port", site.master_port, "master_port")


def _offer_nproc(given: Given, site: ClusterEnvironment) -> None:
    """A process for each share of the GPUs, where the Site counts them; else as many as it says."""
    share = given["gpus_per_proc"].value if "gpus_per_proc" in given else 1
    if site.gpus and site.gpus >= share:
        _offer(given, site, "nproc_per_node", site.gpus // max(1, share), "gpus")
    else:
        _offer(given, site, "nproc_per_node", site.nproc, "nproc")


def _offer(given: Given, site: ClusterEnvironment, flag: str, value: object, name: str) -> None:
    if value not in (0, "") or flag == "node_rank":
        given.setdefault(flag, Setting(value=value, origin=site.source(name) or f"--{flag}={value}", level=_LEVEL))


def _ask_for_the_rest(given: Given, site: ClusterEnvironment, asked: str) -> None:
    """What must be known on many nodes, and neither the Site nor a flag has said."""
    knows = f"{asked}: {site.engine} does not say"
    if "nnodes" not in given:
        raise UsageError(f"{knows} how many nodes there are: give --nnodes")
    if given["nnodes"].value == 1:
        return
    if "node_rank" not in given:
        raise UsageError(f"{knows} which of the nodes this is: give --node_rank")
    if not given.keys() & {"master_addr", "rdzv_endpoint"}:
        raise UsageError(f"{knows} where node 0 is: give --rdzv_endpoint=HOST:PORT")


def describe(site: ClusterEnvironment) -> list[str]:
    """What was found, a value a line, each with the variable that said it."""
    what = _TITLES.get(site.engine, f"{site.engine} {site.form}")
    lines = [what + (f" {site.job_id}" if site.job_id else "")]
    for name, value, source in facts(site):
        lines.append(f"  {name} {value} ({source})" if source else f"  {name} {value}")
    if site.remark:
        lines.append(f"  {site.remark}")
    return [printable(line) for line in lines]


def facts(site: ClusterEnvironment) -> list[tuple[str, str | int, str]]:
    """The values that the Site has: name, value, who said it."""
    found: list[tuple[str, str | int, str]] = []
    for name in _VALUES + (_TASK_VALUES if site.is_task else ()):
        value = getattr(site, name)
        if name == "hosts":
            value = compress(host.name for host in value)
        if value not in ("", 0 if name != "node_rank" else -1) or (name in _TASK_VALUES):
            found.append((name, value, site.source(name)))
    return found
