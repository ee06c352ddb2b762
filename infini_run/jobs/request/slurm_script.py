"""The text of an sbatch script for Slurm: its options, those that infini-job sets, and the lines of a layout.

The one rule: every option of sbatch(1) is in the table, to know each spelling of one that infini-job sets. Options of
Slurm 20.11 to 25.11; the last #SBATCH line of an option wins (22.05), so merged options are one line.
"""

from __future__ import annotations

from infini_run.jobs.request.job_request import CPU, DETERMINED
from infini_run.jobs.request.user_options import MAYBE, NONE, VALUE, Table, read, refusals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.jobs.request.job_request import JobRequest
    from infini_run.jobs.request.node_shape import Layout
    from infini_run.jobs.request.user_options import Read

_WITH_VALUE = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core
ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output partition power prefer priority
profile qos reservation segment signal sockets-per-node switches tasks-per-node thread-spec threads-per-core time
time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey workdir wrap
"""
_ALONE = """
contiguous help hold ignore-pbs no-requeue overcommit parsable quiet reboot requeue spread-job stepmgr test-only usage
use-min-nodes verbose version wait consolidate-segments oversubscribe share
"""
_MAYBE = "exclusive get-user-env nice no-kill oom-kill-step propagate resv-ports"
_LONGS = {
    **dict.fromkeys(_WITH_VALUE.split(), VALUE),
    **dict.fromkeys(_ALONE.split(), NONE),
    **dict.fromkeys(_MAYBE.split(), MAYBE),
}
_SHORTS = """
A=account B=extra-node-info C=constraint D=chdir F=nodefile G=gpus H=hold J=job-name L=licenses M=clusters N=nodes
O=overcommit Q=quiet S=core-spec V=version W=wait a=array b=begin c=cpus-per-task d=dependency e=error h=help i=input
k=no-kill m=distribution n=ntasks o=output p=partition q=qos s=oversubscribe t=time v=verbose w=nodelist x=exclude
"""
_EQUAL_NODES = "cannot be: all nodes of a job are equal; use #SBATCH hetjob in a script that runs infini-run"
OPTIONS = Table(
    longs=_LONGS,
    shorts={pair[0]: (pair[2:], _LONGS[pair[2:]]) for pair in _SHORTS.split()},
    words=dict.fromkeys((":", "hetjob", "packjob"), _EQUAL_NODES),  # begin a component of a heterogeneous job
)

_SIZE = "computed from the slots; use --slots and --slots_per_node"
_CPUS = "use --cpus_per_slot of infini-job"
_FILES = "the job's output goes to its directory; run infini-job logs to see it"
_SBATCH = "concerns sbatch itself, which infini-job runs; drop it"
_ENV = "use --env of infini-job"
REASONS = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu"), _SIZE),
    **dict.fromkeys(("ntasks-per-tres", "ntasks-per-core", "ntasks-per-socket"), _SIZE),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task"), _SIZE),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), _CPUS),
    **dict.fromkeys(("output", "error", "input", "open-mode"), _FILES),
    **dict.fromkeys(("parsable", "wait", "wrap", "test-only"), _SBATCH),
    **dict.fromkeys(("help", "usage", "version", "verbose", "quiet"), _SBATCH),
    **dict.fromkeys(("export", "export-file"), _ENV),
    "job-name": "use --title of infini-job",
    "partition": "use --pool of infini-job",
    "account": "use --account of infini-job",
    "wckey": "use --project of infini-job",
    "time": "use --time of infini-job",
    "requeue": "use --restarts=N of infini-job",
    "no-requeue": "use --restarts=0 of infini-job, the default",
    "signal": "use --warn of infini-job",
    "array": "use --array of infini-job",
    "chdir": "use --cwd of infini-job",
    "workdir": "use --cwd of infini-job",
    "container": "use --container of infini-job",
    "container-id": "use --container of infini-job",
    "clusters": "jobs run on the cluster whose commands are on PATH; drop it",
    "no-kill": "use --spares=N of infini-job; without spares, losing a node ends the job",
}  # fmt: skip
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=.,:/@%+[]*")


def quoted(word: str) -> str:
    """Quote a word for a line of #SBATCH. A backslash takes away any character's meaning, in quotes as well, but a
    blank's: that takes quotes (22.05, `_get_argument`)."""
    if word and all(char in _SAFE for char in word):
        return word
    inside = "".join(f"\\{char}" if char in '"\\' else char for char in word)
    return f'"{inside}"'


def user_options(request: JobRequest) -> tuple[Read, list[str]]:
    """Return the user's options, and all that is wrong with them."""
    given = read(request.options, OPTIONS)
    problems = [*given.problems, *refusals(given.options, REASONS)]
    for option in given.options:
        if option.name in _MEMORY and request.mem_mb_per_slot:
            problems.append(f"{option.text}: use --mem_per_slot of infini-job")
        if not option.is_known and option.name.startswith("container-"):
            problems.append(f"{option.text}: use --container of infini-job")
        if option.name == "gres":
            problems += _gres_problems(option.text, option.value or "")
    return given, problems


def _gres_problems(origin: str, value: str) -> list[str]:
    names = [item.strip().lower().removeprefix("gres:").removeprefix("gres/") for item in value.split(",")]
    found = []
    if any(name.partition(":")[0].partition("=")[0] == "gpu" for name in names):
        found.append(f"{origin}: GPUs are computed from --slots; use --gpu_type for their type")
    if any(name in ("", "none", "help", "list") for name in names):
        found.append(f"{origin}: expected names of resources, such as nvme:1")
    return found


def options(request: JobRequest, layout: Layout, log: str) -> list[tuple[str, ...]]:
    """Return the options of a request, each as its words, infini-job's first. `log`: where the script's own output
    goes. Does not check again what `user_options` rejects."""
    given = read(request.options, OPTIONS)
    output = _pattern(log)
    if request.array:
        output = "/task/%a/".join(output.rpartition("/")[::2])
    ours = [f"--job-name={request.queue_name}", f"--output={output}", "--open-mode=append"]
    ours += [f"--array={request.array}"] if request.array else []
    ours.append("--requeue" if request.restarts else "--no-requeue")
    for name, text in (("partition", request.pool), ("account", request.account), ("wckey", request.project)):
        if text:
            ours.append(f"--{name}={text}")
    if request.time_s:
        ours.append(f"--time={_minutes(request.time_s)}")
    gres = [item for value in given.values("gres") for item in value.split(",")]
    ours += size(layout, list(dict.fromkeys(gres)))
    exclude = list(dict.fromkeys(given.values("exclude")))
    if exclude:
        ours.append(f"--exclude={','.join(exclude)}")
    return [(word,) for word in ours] + [
        option.argv
        for option in given.without("gres", "exclude")
        if option.argv != ("--exclusive",) or "--exclusive" not in ours
    ]


def size(layout: Layout, gres: list[str]) -> list[str]:
    """Return the options of a layout. gres: further ones of the user."""
    typed = f"{layout.gpu_type}:" if layout.gpu_type else ""
    if layout.gpus_per_node:
        gres = [f"gpu:{typed}{layout.gpus_per_node}", *gres]
    if layout.style == DETERMINED:
        found = _row(layout, typed)
    else:
        found = [f"--nodes={layout.all_nodes}", "--ntasks-per-node=1", *(["--no-kill"] if layout.spares else [])]
        if layout.is_exclusive:
            found.append("--exclusive")
        elif layout.cpus_per_gpu:
            found.append(f"--cpus-per-gpu={layout.cpus_per_gpu}")
        elif layout.cpus_per_node:
            found.append(f"--cpus-per-task={layout.cpus_per_node}")
        if layout.mem_mb_per_node:
            found.append(f"--mem={layout.mem_mb_per_node}M")
    return [*found, f"--gres={','.join(gres)}"] if gres else found


def _row(layout: Layout, typed: str) -> list[str]:
    """Return a row of Determined's table, but for --gres."""
    if layout.gpus:
        per_task = [f"--gpus-per-task={typed}{layout.gpus_per_task}"] if layout.gpus_per_task else []
        nodes = ["--nodes=1"] if layout.nodes else [f"--nodes=1-{layout.max_nodes}", "--tasks-per-node=1"]
        return [f"--gpus={typed}{layout.gpus}", *nodes, *per_task]
    found = [f"--nodes={layout.nodes}", f"--ntasks={layout.nodes}"]
    if layout.slot_type == CPU and layout.cpus_per_node:
        found.append(f"--cpus-per-task={layout.cpus_per_node}")
    return found


def _pattern(path: str) -> str:
    """Return a path as --output takes it: %% is a percent sign (sbatch(1), "filename pattern"). A backslash anywhere
    takes away the meaning of every %, and each takes away that of the next character (measured on 22.05.8)."""
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def _minutes(time_s: int) -> str:
    """Return a time in Slurm's minutes, which it rounds up, so that the script shows the result."""
    minutes = -(-time_s // 60)
    return f"{minutes // 60}:{minutes % 60:02}:00"
