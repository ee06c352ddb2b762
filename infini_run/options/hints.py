"""What a word was probably meant to be that another launcher knows, or that was typed in a hurry. Text only.

Imported once something is wrong, or looks so: nothing here changes what is done.
"""

from __future__ import annotations

import os

from infini_run.value_types import PYTHON_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PROCESSES = "--nproc_per_node=N is how many processes on each node, --nnodes=N how many nodes"
_HOSTS = "--hosts=a,b:4 or --hostfile=FILE names the nodes"
_EXPORT = "--export=NAME,... hands variables of this environment to other nodes; set the value before the command"
_LIMIT = (
    "there is no limit of time here: put timeout(1) in front, as in timeout 2h infini-run ...; --hang_timeout, "
    "--ready_timeout and --join_timeout bound single waits, --grace=TIME is the time from the stop signal to KILL"
)
_LABELS = "--console=prefix marks each line with its rank"
_FILES = "--log_dir=DIR writes a file for each rank"
_FOLDER = "ranks start in this directory: cd to it first"
_BIND = "--bind=numa|socket|cores binds processes to CPUs"
_GPUS = "--gpus_per_proc=N is how many GPUs each process sees, --nproc_per_node=gpu one process for each GPU"
_NEEDLESS = "it is not needed here, drop it"
_MPI = "nothing here goes through MPI; --link_address=ADDR is where our own links listen"
_SCHEDULER = "it is the scheduler's: give it to sbatch, salloc, qsub or infini-job submit"

# By a flag's name with underscores: those of mpirun, mpiexec, srun, accelerate, deepspeed, torch.distributed.launch
_FLAGS = {
    **dict.fromkeys(("n", "np", "N", "ntasks", "num_processes", "num_procs", "nprocs", "tasks"), _PROCESSES),
    **dict.fromkeys(
        ("ppn", "npernode", "ntasks_per_node", "tasks_per_node", "nproc_per_host", "num_gpus"), _PROCESSES
    ),
    **dict.fromkeys(("nodes", "num_nodes", "num_machines"), "--nnodes=N is how many nodes"),
    **dict.fromkeys(("machine_rank", "nodeid"), "--node_rank=N is which node this is"),
    "main_process_ip": "--master_addr=HOST is the host of rank 0",
    "main_process_port": "--master_port=PORT is where rank 0 listens",
    **dict.fromkeys(("H", "host", "w", "nodelist", "include"), _HOSTS),
    **dict.fromkeys(("machinefile", "f"), "--hostfile=FILE names the nodes"),
    **dict.fromkeys(("x", "env", "genv", "envall", "genvlist", "envlist"), _EXPORT),
    **dict.fromkeys(("timeout", "time", "time_limit"), _LIMIT),
    **dict.fromkeys(("kill_wait", "wait"), "--grace=TIME is the time from the stop signal to KILL"),
    **dict.fromkeys(("tag_output", "label", "l", "prepend_rank", "timestamp_output"), _LABELS),
    **dict.fromkeys(("o", "output", "e", "error", "output_filename", "outfile_pattern"), _FILES),
    **dict.fromkeys(("i", "input"), "--stdin=rank0|all|none|N says who reads our stdin"),
    **dict.fromkeys(("wdir", "wd", "chdir", "D", "cwd", "workdir"), _FOLDER),
    **dict.fromkeys(("map_by", "bind_to", "cpu_bind", "rank_by", "report_bindings", "numa"), _BIND),
    **dict.fromkeys(
        ("c", "cpus_per_task", "num_cpu_threads_per_process"), f"{_BIND}; --omp_num_threads=N sets threads"
    ),
    **dict.fromkeys(("gpus", "gres", "G", "gpu_ids", "gpus_per_node", "gpus_per_task", "multi_gpu"), _GPUS),
    **dict.fromkeys(("launcher", "mpi"), "--engine=ssh|slurm|pbs|mpi|auto is what reaches the nodes"),
    **dict.fromkeys(("allow_run_as_root", "oversubscribe", "K", "kill_on_bad_exit", "use_env", "u"), _NEEDLESS),
    **dict.fromkeys(("v", "debug", "d"), "--verbose says what is done"),
    **dict.fromkeys(("mca", "gmca", "am", "tune", "iface"), _MPI),
    **dict.fromkeys(("rankfile", "rf", "seq"), "ranks follow the order of --hosts=a,b:4 or --hostfile=FILE"),
    **dict.fromkeys(("p", "partition", "A", "account", "qos", "constraint", "exclusive"), _SCHEDULER),
    "mixed_precision": "set it before the command: ACCELERATE_MIXED_PRECISION=bf16 infini-run ...",
    **dict.fromkeys(("use_deepspeed", "use_fsdp"), "the script says so itself: Accelerator(deepspeed_plugin=...)"),
    "V": "--version prints the version",
    **dict.fromkeys(("dry", "n_dry_run", "print", "show"), "--dry_run prints the plan"),
}

# Keywords of torchrunx, concurrent.futures, joblib, Ray and accelerate, flags of mpirun and srun, and ours
_KEYWORDS = {
    **dict.fromkeys(
        (
            "max_workers",
            "num_workers",
            "n_jobs",
            "workers_per_host",
            "processes",
            "n",
            "np",
            "ntasks",
            "num_processes",
        ),
        "nproc_per_node",
    ),
    **dict.fromkeys(("hostnames", "hostlist", "nodes"), "hosts"),
    **dict.fromkeys(("extra_env_vars", "env_vars", "environ"), "env"),
    **dict.fromkeys(("copy_env_vars", "default_env_vars"), "copy_env"),
}

_QUESTIONS = {"help": "--help", "version": "--version"}

_DASHES = "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}\N{EM DASH}\N{HORIZONTAL BAR}\N{MINUS SIGN}"

_NEAR = 400  # files of a folder that are compared


def of_flag(name: str) -> str:
    """What stands here for a flag of another launcher, perhaps with its value joined to it (n4, xHOME); "": nobody
    knows."""
    is_export = name[:1] == "x" and name[1:].isidentifier() and name[1:].isupper()
    front = "x" if is_export else name.rstrip("0123456789")
    return _FLAGS.get(name, "") or _FLAGS.get(front, "") or (_of_dash(name[0]) if name[:1] in _DASHES else "")


def of_keyword(name: str, known: Iterable[str]) -> str:
    """Return the keyword that `name` was probably meant to be; "": none that is known."""
    words = list(known)
    meant = _KEYWORDS.get(name, "")
    return meant if meant in words else nearest(name, words)


def _of_dash(dash: str) -> str:
    return f"{dash} is a typographic dash, as editors and web pages make it: flags begin with - or --" if dash else ""


def of_program(name: str, environ: Mapping[str, str], cwd: str) -> str:
    """What was probably meant where there is no such program, to be put behind "; "; "": nobody knows."""
    words = name.split()
    if len(words) > 1 and (_is_there(words[0], environ, cwd) or words[0].endswith(PYTHON_FILES)):
        return f"it is one word here: leave its quotes out ({' '.join(words)}), or give sh -c '{name}'"
    variable, is_set, _ = name.partition("=")
    if is_set and variable.isidentifier():
        return f"set it before the command: {name} infini-run ..., or: env {name} ..."
    if name[0] in _DASHES:
        return _of_dash(name[0])
    if name == "launch":
        return "there is no such verb here: drop it"
    if name in _QUESTIONS:
        return f"infini-run {_QUESTIONS[name]} is what it is called"
    above, _, last = name.rpartition("/")
    near = f"{last}.py"
    if os.path.isfile(os.path.join(cwd, above or ".", near)):
        return f"the nearest is {name}.py"
    if "." not in last and not above:
        return ""
    near = _nearest_file(os.path.join(cwd, above or "."), last)
    if not near:
        return ""
    return (
        f"the nearest is {above}/{near}"
        if above
        else f"the nearest is {near if near.endswith('.py') else './' + near}"
    )


def _is_there(word: str, environ: Mapping[str, str], cwd: str) -> bool:
    folders = [""] if "/" in word else (environ.get("PATH") or os.defpath).split(":")
    return any(os.path.isfile(os.path.join(cwd, folder, word)) for folder in folders)


def is_executable(word: str, environ: Mapping[str, str]) -> bool:
    """Return whether a shell would find a program by this word."""
    folders = [""] if "/" in word else (environ.get("PATH") or os.defpath).split(":")
    paths = [os.path.join(folder, word) for folder in folders]
    return any(os.path.isfile(path) and os.access(path, os.X_OK) for path in paths)


def _nearest_file(folder: str, name: str) -> str:
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if abs(len(entry.name) - len(name)) <= 2 and entry.is_file()]
    except OSError:
        return ""
    return nearest(name, sorted(found)[:_NEAR])


def of_late_flag(words: Sequence[str], name: str, command: str = "infini-run") -> str:
    """words: the program's; name: a flag of `command` that is among them."""
    return (
        f"{name} stands after {words[0]}, so it is for that program and none of ours: flags of {command} come first"
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that `word` was probably meant to be, or "".

    Two words are near if two of three letters are in both, in this order (difflib). Then the front of a longer
    name counts, so that `--nproc` finds `--nproc_per_node`.
    """
    from difflib import get_close_matches

    words = list(known)
    fronts = {name[: len(word)]: name for name in sorted(words, reverse=True)} if len(word) > 2 else {}
    close = get_close_matches(word, words, 1, 0.65) or [fronts[w] for w in get_close_matches(word, fronts, 1, 0.8)]
    return close[0] if close else ""
