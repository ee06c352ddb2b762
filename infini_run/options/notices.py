"""One line each for requests that infini-run follows, and that probably mean something else. Pure but for a look at
PATH.

Imported only where a name in the environment or a word of the command gives a reason. Nothing here changes any
behavior, and every line has a way to say that the request was meant.
"""

from __future__ import annotations

from infini_run.environments.compressed_hostlist import compress
from infini_run.environments.detect import detect
from infini_run.environments.environment import BATCH
from infini_run.environments.hostlist import quoted
from infini_run.errors import UsageError
from infini_run.options.grammar import quote
from infini_run.options.hints import is_executable, nearest
from infini_run.options.table import ALLOCATION_ENGINES, TABLE, flag_of_variable
from infini_run.system.shell import quoted as shell_quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.environment import ClusterEnvironment, Reader
    from infini_run.options.grammar import Entry

_NAMED = "to run several programs, add --program=NAME before each"
_OF_COLONS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun")  # for them a : begins another program


def of_cluster(environ: Mapping[str, str], read: Reader) -> str:
    """Return a line for a launch on one node that is one of several, or has more nodes; "" if there is no reason.

    Of several launchers only the first has a line.

    Args:
        environ: The environment.
        read: Reads a file that a variable names.
    """
    try:
        cluster = detect(environ, read)
    except UsageError:  # variables of half a scheduler: nobody has asked for them
        return ""
    if cluster is None:
        return ""
    if cluster.form == BATCH:
        return _of_allocation(cluster)
    size, index = cluster.nnodes, cluster.node_rank
    what = "node"
    if cluster.world_size > 1:
        size, index, what = cluster.world_size, cluster.rank, "task"
    if size < 2 or index != 0:
        return ""
    return (
        f"{what} {index} of {size} of {_job(cluster)}, but --engine is local, so each {what} runs its own world; "
        "use --engine=auto to join them"
    )


def _of_allocation(cluster: ClusterEnvironment) -> str:
    if cluster.nnodes < 2 or cluster.node_rank > 0:
        return ""
    names = quoted(compress(host.name for host in cluster.hosts))
    is_reached = cluster.engine in ALLOCATION_ENGINES
    way = f"--engine={cluster.engine}" if is_reached else f"--engine=ssh --hosts={shell_quoted(names)}"
    return (
        f"{cluster.engine} job {quoted(cluster.job_id)} has {cluster.nnodes} nodes, but --engine is local, so ranks "
        f"run only on this node; use {way} for all"
    )


def _job(cluster: ClusterEnvironment) -> str:
    """Return its name in a message; of a pod the variable that counts the nodes."""
    if not cluster.job_id:
        return cluster.source("nnodes") or cluster.engine
    return f"{cluster.engine} {'step' if cluster.engine == 'slurm' else 'job'} {quoted(cluster.job_id)}"


def of_variables(
    names: Sequence[str], prefix: str, table: Mapping[str, Entry] = TABLE, command: str = "infini-run"
) -> str:
    """Return a line for variables that set no flag.

    Args:
        names: The variables; at least one.
        prefix: What all begin with.
        table: The flags.
        command: Its --helpfull lists them.
    """
    known = [name for name in table if flag_of_variable(prefix, name, table)]
    found = list(dict.fromkeys(filter(None, (_meant(name, prefix, known, table) for name in names))))
    flags = [each for each in found if each.startswith("--")]
    meant = ", ".join([*(each for each in found if each not in flags), *flags])
    meant += f", which {'have' if flags[1:] else 'has'} no variable" if flags else ""
    listed = f"unknown variable{'s' * (len(names) > 1)} {', '.join(map(quote, names))}, ignored"
    return f"{listed}; did you mean {meant}?" if meant else f"{listed}; {command} --helpfull lists the flags"


def _meant(variable: str, prefix: str, known: Sequence[str], table: Mapping[str, Entry]) -> str:
    """Return the flag that no variable sets, or the variable with the nearest name; empty: there is none."""
    name = variable[len(prefix) :].lower()
    if name in table and not table[name][0].has_variable:
        return f"--{table[name][0].name}"
    near = nearest(name, known)
    return flag_of_variable(prefix, near, table) if near else ""


def of_colon(words: Sequence[str], environ: Mapping[str, str], way: str = _NAMED) -> str:
    """Return a line for a program whose words hold another command behind a bare `:`, as mpirun reads it; "" if they
    hold none.

    Args:
        words: The program and its arguments.
        environ: The environment, whose PATH this searches.
        way: How to run several programs.
    """
    if any(word.rpartition("/")[2] in _OF_COLONS for word in words):
        return ""
    for at in range(1, len(words) - 1):
        if words[at] != ":" or words[at - 1] == "-c":
            continue
        after = words[at + 1]
        name = after.lstrip("-").partition("=")[0].replace("-", "_")
        if (after[:2] == "--" and name in TABLE) or is_executable(after, environ):
            return f"':' and all that follows are arguments of {quote(words[0])}; {way}"
    return ""
