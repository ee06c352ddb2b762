"""Guesses for a word that another launcher knows, or that somebody typed in a hurry. Text only.

Imported once something is wrong, or looks so: nothing here changes any behavior.
"""

from __future__ import annotations

import os

from infini_run.value_types import PYTHON_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PROCESSES = "use --nproc_per_node=N for ranks per node, and --nnodes=N for nodes"
_HOSTS = "use --hosts=a,b:4 or --hostfile=FILE"
_EXPORT = "set the variable before the command, and use --export=NAME,... to pass it to other nodes"
_LIMIT = (
    "use timeout(1), as in timeout 2h infini-run ...; --hang_timeout, --ready_timeout, and --join_timeout limit "
    "single "
    "waits, and --grace=TIME the time from the stop signal to KILL"
)
_LABELS = "use --console=prefix to mark each line with its rank"
_FILES = "use --log_dir=DIR for one file per rank"
_ONE_STREAM = "use --log_dir=DIR, where a rank's file has both streams, or 2>&1 behind the command"
_FOLDER = "run cd first: ranks start in the current directory"
_BIND = "use --bind=numa|socket|cores to bind ranks to CPUs"
_ORDER = "use --hosts=a,b:4 or --hostfile=FILE, whose order ranks follow"
_PLAN = "use --dry_run to print the plan"
_STACKS = "use --hang_timeout=TIME for the stacks of a hung rank, or infini-run --stacks"
_PROGRAMS = "use --program=NAME before each program, and : between two of them"
_ENGINE = "use --engine=ssh|slurm|pbs|mpi|auto to reach the nodes"
_GPUS = "use --gpus_per_proc=N for GPUs per rank, or --nproc_per_node=gpu for one rank per GPU"
_NEEDLESS = "drop it, infini-run does not need it"
_MPI = "drop it, infini-run does not use MPI to communicate; use --link_address=ADDR to choose where the head listens"
_SCHEDULER = "use it with sbatch, salloc, qsub, or infini-job submit"

_ALIKE = "use it with infini-job submit, before all programs: its nodes are equal"

# By a flag's name with underscores: those of mpirun, mpiexec, srun, accelerate, deepspeed, torch.distributed.launch
_FLAGS = {
    **dict.fromkeys(("n", "np", "N", "ntasks", "num_processes", "num_procs", "nprocs", "tasks"), _PROCESSES),
    **dict.fromkeys(
        ("ppn", "npernode", "pernode", "perhost", "ntasks_per_node", "tasks_per_node", "nproc_per_host", "num_gpus"),
        _PROCESSES,
    ),
    **dict.fromkeys(("nodes", "num_nodes", "num_machines"), "use --nnodes=N for nodes"),
    **dict.fromkeys(("machine_rank", "nodeid"), "use --node_rank=N"),
    "main_process_ip": "use --master_addr=HOST",
    "main_process_port": "use --master_port=PORT",
    **dict.fromkeys(("H", "host", "w", "nodelist", "include"), _HOSTS),
    **dict.fromkeys(("nolocal", "skip_launch_node"), f"{_HOSTS} without this host"),
    **dict.fromkeys(("machinefile", "default_hostfile", "f"), "use --hostfile=FILE"),
    **dict.fromkeys(("x", "env", "genv", "envall", "envlist", "envnone", "genvall", "genvlist", "genvnone"), _EXPORT),
    **dict.fromkeys(("timeout", "time", "time_limit"), _LIMIT),
    **dict.fromkeys(("kill_wait", "wait"), "use --grace=TIME for the time from the stop signal to KILL"),
    **dict.fromkeys(("tag_output", "label", "l", "prepend_rank", "prepend_pattern", "timestamp_output"), _LABELS),
    **dict.fromkeys(("o", "output", "e", "error", "output_filename", "outfile_pattern", "errfile_pattern"), _FILES),
    "merge_stderr_to_stdout": _ONE_STREAM,
    **dict.fromkeys(("i", "input"), "use --stdin=rank0|all|none|N"),
    **dict.fromkeys(("wdir", "wd", "chdir", "D", "cwd", "workdir"), _FOLDER),
    **dict.fromkeys(("preload_files", "preload_binary"), "copy the files to the nodes before the launch"),
    **dict.fromkeys(
        ("map_by", "bind_to", "bind_to_core", "bind_to_socket", "cpu_bind", "cpu_list", "cpu_set", "cpus_per_proc"),
        _BIND,
    ),
    **dict.fromkeys(
        ("cpus_per_rank", "membind", "ppr", "rank_by", "report_bindings", "numa", "use_hwthread_cpus"), _BIND
    ),
    **dict.fromkeys(
        ("c", "cpus_per_task", "num_cpu_threads_per_process"), f"{_BIND}; use --omp_num_threads=N for threads"
    ),
    **dict.fromkeys(("gpus", "gres", "G", "gpu_ids", "gpus_per_node", "gpus_per_task", "multi_gpu"), _GPUS),
    **dict.fromkeys(("multi_prog", "app", "configfile"), _PROGRAMS),
    **dict.fromkeys(("launcher", "launcher_exec", "bootstrap", "rmk", "mpi"), _ENGINE),
    **dict.fromkeys(
        ("allow_run_as_root", "oversubscribe", "nooversubscribe", "K", "kill_on_bad_exit", "use_env", "u"), _NEEDLESS
    ),
    **dict.fromkeys(("leave_session_attached", "launch_agent", "quiet"), _NEEDLESS),
    **dict.fromkeys(("prefix", "noprefix"), "use --remote_python=FILE for the Python of the nodes"),
    **dict.fromkeys(("continuous", "disable_auto_cleanup"), "use --keep_going to let the other ranks finish"),
    **dict.fromkeys(("get_stack_traces", "report_state_on_timeout"), _STACKS),
    "show_progress": "use --live for a table of the ranks",
    "print_all_exitcodes": "use --report=FILE, which has the exit code of each rank",
    **dict.fromkeys(("v", "debug", "d"), "use --verbose to print each step"),
    **dict.fromkeys(("mca", "gmca", "am", "tune", "iface", "ompi_server", "nameserver", "pmi_port"), _MPI),
    **dict.fromkeys(("rankfile", "rf", "seq", "bynode", "byslot", "order_nodes"), _ORDER),
    **dict.fromkeys(("p", "partition", "A", "account", "qos", "constraint", "exclusive"), _SCHEDULER),
    **dict.fromkeys(("slots", "slots_per_node", "slot_type", "gpu_type", "cpus_per_slot", "mem_per_slot"), _ALIKE),
    "pool": _ALIKE,
    "mixed_precision": "set it before the command: ACCELERATE_MIXED_PRECISION=bf16 infini-run ...",
    **dict.fromkeys(("use_deepspeed", "use_fsdp"), "use Accelerator(deepspeed_plugin=...) in the script"),
    "V": "use --version",
    **dict.fromkeys(("dry", "n_dry_run", "print", "show"), _PLAN),
    **dict.fromkeys(("display", "display_map", "display_devel_map", "display_allocation", "display_topo"), _PLAN),
    **dict.fromkeys(("do_not_launch", "print_rank_map"), _PLAN),
}

# Keywords of torchrunx, concurrent.futures, joblib, Ray and accelerate, flags of mpirun and srun, and infini-run's
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
    """Return the hint for another launcher's flag, which may include its value (n4, xHOME); "" if none."""
    is_export = name[:1] == "x" and name[1:].isidentifier() and name[1:].isupper()
    front = "x" if is_export else name.rstrip("0123456789")
    return _FLAGS.get(name, "") or _FLAGS.get(front, "") or (_of_dash(name[0]) if name[:1] in _DASHES else "")


def of_keyword(name: str, known: Iterable[str]) -> str:
    """Return the keyword that `name` probably means; "" if none is near."""
    words = list(known)
    meant = _KEYWORDS.get(name, "")
    return meant if meant in words else nearest(name, words)


def _of_dash(dash: str) -> str:
    return f"{dash} is a typographic dash; use - or --" if dash else ""


def of_program(name: str, environ: Mapping[str, str], cwd: str) -> str:
    """Return what a missing program was probably for, to be put behind "; "; "" if that is unknown."""
    words = name.split()
    if len(words) > 1 and (_is_there(words[0], environ, cwd) or words[0].endswith(PYTHON_FILES)):
        return f"drop the quotes ({' '.join(words)}), or use sh -c '{name}'"
    variable, is_set, _ = name.partition("=")
    if is_set and variable.isidentifier():
        return f"set it before the command: {name} infini-run ..., or use env {name} ..."
    if name[0] in _DASHES:
        return _of_dash(name[0])
    if name == "launch":
        return "drop it, infini-run has no verbs"
    if name in _QUESTIONS:
        return f"did you mean infini-run {_QUESTIONS[name]}?"
    above, _, last = name.rpartition("/")
    near = f"{last}.py"
    if os.path.isfile(os.path.join(cwd, above or ".", near)):
        return f"did you mean {name}.py?"
    if "." not in last and not above:
        return ""
    near = _nearest_file(os.path.join(cwd, above or "."), last)
    if not near:
        return ""
    return (
        f"did you mean {above}/{near}?" if above else f"did you mean {near if near.endswith('.py') else './' + near}?"
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
    """Return a hint for a late flag. words: the program's; name: a flag of `command` that is among them."""
    return f"{name} after {words[0]} goes to that program; use flags of {command} before the program"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that `word` probably means, or "".

    Two words are near if two of three letters are in both, in this order (difflib). Then the front of a longer
    name counts, so that `--nproc` finds `--nproc_per_node`.
    """
    from difflib import get_close_matches

    words = list(known)
    fronts = {name[: len(word)]: name for name in sorted(words, reverse=True)} if len(word) > 2 else {}
    close = get_close_matches(word, words, 1, 0.65) or [fronts[w] for w in get_close_matches(word, fronts, 1, 0.8)]
    return close[0] if close else ""
