"""The names in `infini-job submit` for flags of sbatch, qsub, mpirun, and infini-run. Text only."""

from __future__ import annotations

from infini_run.jobs.request.launch_words import OF_THE_JOB

_SLOTS = "use --slots=N for the ranks in all, one per GPU or CPU"
_PER_NODE = "use --slots_per_node=N for the ranks per node"

# By a flag's name with underscores: those of sbatch, srun, qsub, mpirun and accelerate
_FLAGS = {
    **dict.fromkeys(("n", "np", "ntasks", "gpus", "G", "num_gpus", "num_processes", "world_size"), _SLOTS),
    **dict.fromkeys(
        ("N", "nodes", "nnodes", "num_nodes", "num_machines"), "use --slots=N (ranks in all) and "
                                                               "--slots_per_node=N; nodes follow from both"
    ),
    **dict.fromkeys(("ntasks_per_node", "gpus_per_node", "nproc_per_node", "ppn", "tasks_per_node"), _PER_NODE),
    **dict.fromkeys(("t", "walltime", "timeout", "time_limit"), "use --time=TIME, such as 4h or 1d"),
    **dict.fromkeys(("p", "q"), "use --pool=NAME for the partition or queue"),
    **dict.fromkeys(("A", "charge"), "use --account=NAME"),
    **dict.fromkeys(("c", "cpus_per_task"), "use --cpus_per_slot=N"),
    **dict.fromkeys(("mem", "mem_per_cpu", "mem_per_gpu"), "use --mem_per_slot=SIZE"),
    **dict.fromkeys(("D", "chdir", "wd", "workdir"), "use --cwd=DIR"),
    **dict.fromkeys(("v", "export", "x"), "use --env=NAME=VALUE to set variables of the ranks"),
    **dict.fromkeys(("requeue", "max_restarts", "r"), "use --restarts=N to run it again after a failure"),
    "max_num_timeout": "use --max_timeouts=N to limit how often it runs again after its time limit",
    **dict.fromkeys(("a", "J"), "use --array=LIST for a task per index; infini-job names jobs itself"),
    **dict.fromkeys(("job_name", "name"), "use --title=TEXT, which squeue and qstat show before the name"),
    **dict.fromkeys(("o", "e", "output", "error", "log_dir"), "run infini-job logs JOB to read what ranks wrote"),
    **dict.fromkeys(("l", "qos", "constraint", "C", "exclusive", "reservation", "w", "nodelist", "select", "comment",
                     "exclude", "mail_type", "mail_user", "wckey"),
                    "use --options=WORDS to pass options to sbatch or qsub"),
    **dict.fromkeys(("dependency", "d"), "use --options=--dependency=afterok:ID, with the ID that submit prints"),
    **dict.fromkeys(("W", "depend"), "use --options='-W depend=afterok:ID', with the ID that submit prints"),
    "signal": "use --warn=[SIGNAL@]TIME, which signals the ranks before the time limit",
}  # fmt: skip


def of_flag(name: str) -> str:
    """Return the hint for another command's flag, which may include its value (n4); "" if none."""
    meant = _FLAGS.get(name, "") or _FLAGS.get(name.rstrip("0123456789"), "")
    if meant:
        return meant
    from infini_run.options.table import TABLE

    flag = TABLE.get(name)
    if not flag:
        return ""
    name = flag[0].name
    return OF_THE_JOB.get(name, f"use --run_options='--{name}...', as it is a flag of infini-run")
