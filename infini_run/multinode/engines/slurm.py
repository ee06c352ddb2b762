"""Slurm: one srun in the allocation that we are in, which starts one agent on each of its nodes. They dial.

srun is never told to stop: SIGTERM to it is SIGKILL to the step, at once (srun(1), SIGNALS). The Link stops the
ranks; srun ends when its agents have, and where one cannot (it was stopped), scancel of the step ends it. What srun
inherits of the batch script's own shape (SLURM_NTASKS and the like) is stated anew on its command line, which wins.
Slurm numbers the nodes of a step in its own order (SLURM_NODEID), so each agent says its name as well.
"""

from __future__ import annotations

from infini_run.multinode.engines import Contact, EngineCommand, agent_words, ended, lacks_us, said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.engines import Told
    from infini_run.options.options import Options

WINDOW = 1
OVER_STDIO = False
TOKEN_BY_FILE = False
ENDS_STOPPED = True
_NOT_THERE = "execve()"  # what the node says of an interpreter that it does not have
_OWN = ("srun:", "slurmstepd")
_ENDS = ("CANCELLED", "aborted")  # what it says first when it is told to end the step
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def clients(
    hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
) -> list[EngineCommand]:
    """One srun for all of them."""
    nodes = len(hosts)
    words = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--mpi=none",
        "--cpu-bind=none",
        "--input=none",
        "--unbuffered",
        "--export=ALL",
        f"--nodelist={','.join(host.name for host in hosts)}",
    ]
    if environ.get("SLURM_CPUS_PER_TASK"):  # not inherited by srun from 22.05 to 23.02
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    agent = agent_words(options, contact, "SLURM_NODEID", _STEP, host="SLURMD_NODENAME")
    return [EngineCommand(argv=(*words, "--", *agent), nodes=())]


def explain(host: str, code: int | None, words: str) -> str:
    """The agent's own last words; of a node that was lost what srun says of it, else its last complaint."""
    lines = [line for line in said(words, by_engine=_OWN) if "CANCELLED" not in line]
    cause = next((line for line in lines if _NOT_THERE in line or lacks_us(line)), "")
    named = next((line for line in reversed(lines) if host and host in line), "")
    is_own = bool(lines) and not lines[-1].startswith(_OWN)
    errors = [line for line in lines if "error:" in line]
    killed = next((line for line in lines if line.startswith(_OWN) and line.endswith(": Killed")), "")
    about = cause or named or killed or (lines[-1] if is_own or not errors else errors[-1]) if lines else ""
    hint = "; give --remote_python=PATH of a Python there that has infini-run" if cause else ""
    return ended("srun", code, about) + hint


def ending(told: Sequence[Told], options: Options) -> list[EngineCommand]:
    """scancel of the step, which is SIGKILL to all that is in it. Only an agent knows which step it is."""
    steps = [hello["told"] for _, _, hello in told if len(hello.get("told", ())) == len(_STEP)]
    return [EngineCommand(argv=("scancel", "--quiet", ".".join(steps[0])), nodes=())] if steps else []


def is_passing(code: int | None, words: str) -> bool:
    """srun tries again by itself."""
    return False


def blames(words: str) -> str:
    """`error: node2: task 1: Killed`, before it says that all are ended: a task that a container's runtime was may
    have left its agent alive (--kill-on-bad-exit)."""
    lines = [line for line in said(words) if line.startswith(_OWN)]
    at = next((at for at, line in enumerate(lines) if any(part in line for part in _ENDS)), len(lines))
    return next((line for line in lines[:at] if "error:" in line and ": task" in line), "")
