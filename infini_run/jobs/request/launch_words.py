"""The flags of a job's launch: those of --run_options, then the job's own; and which ones a job cannot take. Pure."""

from __future__ import annotations

from infini_run.jobs.request.programs import names_programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.jobs.request.job_request import JobRequest

NO_DESCRIPTOR = "a job has no descriptor of your shell; use a file"
ONE_FILE = "conflicts with --array: each task would replace the file; drop it, as each task has its own report.json"
CONSOLE = "infini-run writes the output of a job; use --console=lines, prefix, fold, or none"
_SIZE = "use --slots and --slots_per_node of infini-job"
_NODES = "the scheduler chooses the nodes; use --scheduler and --pool of infini-job"
_ANSWERS = "use --print or --check of infini-job"
_RUNNING = "use infini-job top, follow, stacks, or cancel"
_ONE = "give programs in place of the command: infini-job submit [flags] --program=NAME ..."
OF_THE_JOB = {  # flags of infini-run that a job sets itself, or that start no ranks; and what replaces them
    **dict.fromkeys(("nproc_per_node", "nnodes", "standalone"), _SIZE),
    **dict.fromkeys(("hosts", "hostfile", "engine", "node_rank"), _NODES),
    **dict.fromkeys(("dry_run", "plot", "completion", "doctor"), _ANSWERS),
    **dict.fromkeys(("program", "programs", "one_world", "on_nodes", "after", "ready_port", "ends_job"), _ONE),
    **dict.fromkeys(("list", "top", "follow", "tail", "stacks", "stop", "send", "bundle", "ranks"), _RUNNING),
    "ssh_config": "the scheduler reaches the nodes; drop it",
    "token_file": "the nodes of a job need no token; drop it",
    "isolate": "a job needs no isolation; drop it",
    "spares": "use --spares of infini-job, which also allocates the nodes",
    "stdin": "a job has no input; drop it",
    "live": "use infini-job logs -f or infini-job status",
}

ENGINES = {"slurm": "slurm", "pbs": "pbs"}  # all others: here


def launch_words(request: JobRequest, slots_per_node: int, hosts: Sequence[str]) -> list[str]:
    """Return the flags of the launch, and its program, or several.

    Args:
        request: What the user asked for.
        slots_per_node: How many ranks a node runs; 0: one per GPU.
        hosts: The nodes of the allocation, spares too. A launch without an engine needs none.
    """
    engine = ENGINES.get(request.scheduler, "")
    words = [*request.run_options, "--stdin=none", "--live=off", f"--engine={engine or 'local'}"]
    words += [f"--hosts={','.join(hosts)}"] if engine else []
    words += [f"--spares={request.spares}"] if request.spares else []
    if not names_programs(request.command):
        words += [f"--nproc_per_node={slots_per_node or 'gpu'}", "--"]
    return [*words, *request.command]
