"""The names in `infini-job submit` for flags of sbatch, qsub, mpirun, and infini-run. Text only."""

from __future__ import annotations

_SLOTS = "--slots=N is how many ranks in all, one for each GPU or CPU"
_PER_NODE = "--slots_per_node=N is how many ranks on each node"

# By a flag's name with underscores: those of sbatch, srun, qsub, mpirun and accelerate
_FLAGS = {
    **dict.fromkeys(("n", "np", "ntasks", "gpus", "G", "num_processes", "world_size"), _SLOTS),
    **dict.fromkeys(
        ("N", "nodes", "nnodes", "num_nodes", "num_machines"), f"{_SLOTS}; {_PER_NODE}: nodes follow from both"
    ),
    **dict.fromkeys(("ntasks_per_node", "gpus_per_node", "nproc_per_node", "ppn", "tasks_per_node"), _PER_NODE),
    **dict.fromkeys(("t", "walltime", "timeout", "time_limit"), "--time=TIME is the limit, such as 4h or 1d"),
    **dict.fromkeys(("p", "q"), "--pool=NAME is the partition or queue"),
    **dict.fromkeys(("A", "charge"), "--account=NAME is whom to charge"),
    **dict.fromkeys(("c", "cpus_per_task"), "--cpus_per_slot=N is how many CPUs for each slot"),
    **dict.fromkeys(("mem", "mem_per_cpu", "mem_per_gpu"), "--mem_per_slot=SIZE is the memory for each slot"),
    **dict.fromkeys(("D", "chdir", "wd", "workdir"), "--cwd=DIR is where the ranks start"),
    **dict.fromkeys(("v", "export", "x"), "--env=NAME=VALUE sets variables for the ranks"),
    **dict.fromkeys(("requeue", "max_restarts", "r"), "--restarts=N runs it again after a failure"),
    **dict.fromkeys(("a", "J"), "--array=LIST is a task for each index; jobs get their names from infini-job"),
    **dict.fromkeys(("job_name", "name"), "--title=TEXT is what squeue and qstat show before the name"),
    **dict.fromkeys(("o", "e", "output", "error", "log_dir"), "infini-job logs JOB shows what ranks have written"),
    **dict.fromkeys(("l", "qos", "constraint", "C", "exclusive", "reservation", "w", "nodelist", "select"),
                    "--options=WORDS hands further options to sbatch or qsub"),
}  # fmt: skip


def of_flag(name: str) -> str:
    """Return the hint for another command's flag, which may include its value (n4); "" if none."""
    meant = _FLAGS.get(name, "") or _FLAGS.get(name.rstrip("0123456789"), "")
    if meant:
        return meant
    from infini_run.options.table import TABLE

    flag = TABLE.get(name)
    return f"it is a flag of infini-run: --run_options='--{flag[0].name}...'" if flag else ""
