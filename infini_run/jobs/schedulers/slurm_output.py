"""The words of Slurm: states, reasons why a job waits, complaints; and what they mean to infini-job.

The one rule: an unknown word takes nothing away. An unknown state is that of a live job, an unknown reason passes.
Names are those of 20.11 to 25.11 (squeue(1), "JOB REASON CODES").
"""

from __future__ import annotations

from infini_run.jobs.scheduler import (
    CANCELLED,
    COMPLETED,
    FAILED,
    HOPELESS,
    NODE_FAIL,
    OOM,
    PASSING,
    PREEMPTED,
    QUEUED,
    RUNNING,
    STARTING,
    SUSPENDED,
    TIMEOUT,
    WAITING,
)
from infini_run.jobs.schedulers.scheduler_command import MISSING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.jobs.schedulers.scheduler_command import CommandResult

_STATES = {
    "PENDING": QUEUED, "REQUEUED": QUEUED, "REQUEUE_FED": QUEUED, "REQUEUE_HOLD": QUEUED, "SPECIAL_EXIT": QUEUED,
    "RESV_DEL_HOLD": QUEUED, "CONFIGURING": STARTING, "POWER_UP_NODE": STARTING, "RUNNING": RUNNING,
    "COMPLETING": RUNNING, "SUSPENDED": SUSPENDED, "STOPPED": RUNNING, "SIGNALING": RUNNING, "STAGE_OUT": RUNNING,
    "RESIZING": RUNNING, "EXPEDITING": QUEUED, "UPDATE_DB": RUNNING, "COMPLETED": COMPLETED, "FAILED": FAILED,
    "LAUNCH_FAILED": FAILED, "RECONFIG_FAIL": FAILED, "CANCELLED": CANCELLED, "REVOKED": CANCELLED,
    "TIMEOUT": TIMEOUT, "DEADLINE": TIMEOUT, "NODE_FAIL": NODE_FAIL, "BOOT_FAIL": NODE_FAIL, "OUT_OF_MEMORY": OOM,
    "PREEMPTED": PREEMPTED,
}  # fmt: skip

# what no scheduler changes, only its user or an administrator; and what to do about it
_HOPELESS = {
    "PartitionNodeLimit": "the pool has or allows fewer nodes; request fewer, or use another --pool",
    "PartitionTimeLimit": "request less --time, or use another --pool",
    "PartitionConfig": "request less, or use another --pool",
    "BadConstraints": "no node has what --constraint and similar options request",
    "InvalidAccount": "use another --account; run `sacctmgr show assoc user=$USER` to list yours",
    "AccountNotAllowed": "the pool does not take this account; use another --account or --pool",
    "InvalidQOS": "use another --qos; run `sacctmgr show assoc user=$USER` to list yours",
    "QOSNotAllowed": "the pool does not take this QOS; use another --qos or --pool",
    "JobHeldAdmin": "an administrator holds it; ask them",
    "DependencyNeverSatisfied": "its dependency cannot be met; cancel it",
    "MaxMemPerLimit": "request less --mem_per_slot",
    "ReservationDeleted": "its --reservation is gone; submit it without one",
    "DeadLine": "it cannot end before its --deadline",
    "QOSTimeLimit": "the QOS allows less; request less --time",
    "AssociationTimeLimit": "the account allows less; request less --time",
    "JobHoldMaxRequeue": "the cluster permits no more runs of it",
    "launch_failed_requeued_held": "its nodes could not start it; cancel it, or run `scontrol release`",
}
_OVER_A_LIMIT = "its QOS or account allows less per job; request less"
_PASSING = (
    "None", "Prolog", "Cleaning", "WaitingForScheduling", "BeginTime", "NodeDown", "FrontEndDown", "PartitionDown",
    "PartitionInactive", "SystemFailure", "JobLaunchFailure", "NonZeroExitCode", "BurstBufferStageIn",
    "BurstBufferResources", "Reserved", "InactiveLimit",
)  # fmt: skip

# what the commands say of a controller that did not answer; after the first the job may be there all the same
_UNSURE = ("timed out", "Zero Bytes were transmitted", "Unexpected message", "reset by peer", "Broken pipe")
_AWAY = ("Unable to contact", "Connection refused", "connect failure", "No route", "Unable to establish", "munge",
         "Munge", "authentication", "Could not establish a configuration", "slurm.conf")  # fmt: skip
_SIGNAL = 128  # and its number; what Slurm's commands cannot read themselves ends with 255
# of a job that ended before
GONE = ("Invalid job id", "already completing or completed", "Job/step already")
# of slurmstepd and srun, 22.05 to 25.05: jobacct_gather's OverMemoryKill, and the kernel's own in a cgroup
_OUT_OF_MEMORY = ("exceeded memory limit", "Exceeded job memory limit", "oom-kill event", "oom_kill event",
                  ": Out Of Memory")  # fmt: skip
_ADVICE = {
    "nvalid partition": "run infini-job clusters to list the pools",
    "Invalid account": "run `sacctmgr show assoc user=$USER` to list the accounts",
    "Invalid qos": "run `sacctmgr show assoc user=$USER` to list the QOS",
    "Requested node configuration is not available": "no node of the pool has what the job requests per node",
    "CPU count per node": "no node of the pool has that many CPUs",
    "Invalid generic resource": "no such resource; run infini-job clusters to list the GPUs",
    "Requested time limit is invalid": "request less --time, or use another --pool",
    "Memory specification": "no node of the pool has that much memory",
    "Node count specification": "request fewer nodes, or use another --pool",
    "Invalid job array": "an index exceeds MaxArraySize; run `scontrol show config` to see it",
    "Invalid feature": "no node has what --constraint requests; run `sinfo -o '%P %f'` to list what they have",
    "Invalid node name": "run `sinfo -N` to list the nodes",
    "reservation is invalid": "run `scontrol show reservation` to list them",
    "unrecognized option": "run `sbatch --help` to list its options",
}


def hold_of(reason: str) -> tuple[str, str]:
    """Return why a job waits: WAITING, PASSING, or HOPELESS by Slurm's reason, and what to change in a hopeless
    one."""
    word = reason.strip("()").partition(",")[0].strip()
    if word in _HOPELESS:
        return HOPELESS, _HOPELESS[word]
    if word.startswith("ReqNodeNotAvail"):
        is_down = "Unavailable" in reason
        advice = "nodes that it needs are down; request others, or wait until they are back"
        return (HOPELESS, advice) if is_down else (PASSING, "")
    is_limit = word.startswith(("QOSMax", "AssocMax")) and ("PerJob" in word or "PerNode" in word)
    if is_limit or word.startswith("QOSMin"):
        return HOPELESS, _OVER_A_LIMIT
    return (PASSING, "") if word in _PASSING or not word else (WAITING, "")


def is_never_met(reason: str) -> bool:
    """Return whether a job waits for one with a different end than it needs. Nothing changes that: Slurm leaves the
    job in its queue, without kill_invalid_depend (slurm.conf(5))."""
    return reason.strip("()").partition(",")[0].strip() == "DependencyNeverSatisfied"


def state_of(word: str) -> str:
    """Return the state of a word; `CANCELLED by 1000` and `CANCELLED+` are sacct's. An unknown word is of a live
    job."""
    return _STATES.get(word.split()[0].rstrip("+") if word.split() else "", RUNNING)


def is_unsure(result: CommandResult) -> bool:
    """Return whether Slurm may have acted all the same. A command that a signal ended has not said."""
    return result.timed_out or _SIGNAL < result.code <= _SIGNAL + 64 or any(part in result.error for part in _UNSURE)


def is_away(result: CommandResult) -> bool:
    """Return whether there was nobody to ask."""
    return result.code == MISSING or any(part in result.error for part in _AWAY)


def is_queued(result: CommandResult) -> bool:
    """Return whether a job to be queued again already is (ESLURM_JOB_PENDING)."""
    return "Job is pending execution" in result.error


def is_out_of_memory(line: str) -> bool:
    """Return whether Slurm says there that it, or the kernel for it, ended something for its memory."""
    return any(part in line for part in _OUT_OF_MEMORY)


def advised(result: CommandResult) -> str:
    """Return Slurm's own words, without the command's name, and what to do."""
    lines = [line.strip() for line in (result.error or result.out).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Try ")]
    text = lines[-1] if lines else f"sbatch exited with {result.code} and no message"
    for prefix in ("sbatch: error: ", "sbatch: fatal: ", "sbatch: ", "allocation failure: "):
        text = text.removeprefix(prefix)
    advice = next((advice for part, advice in _ADVICE.items() if any(part in line for line in lines)), "")
    return f"{text}; {advice}" if advice else text


def failure_text(what: str, result: CommandResult) -> str:
    """Return what went wrong with a command, in one line."""
    if result.timed_out:
        return f"{what}: no response in time; the controller may be down or busy"
    if result.code == MISSING:
        return result.error
    words = result.last_line
    return (
        f"{what} exited with {result.code}: {words}" if words else f"{what} exited with {result.code} and no message"
    )
