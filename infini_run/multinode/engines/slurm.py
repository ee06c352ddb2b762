"""Slurm: one srun in the allocation of this process, which starts one agent on each of its nodes. The agents connect.

The head sends no signal to srun: srun answers SIGTERM with SIGKILL to its step, at once (srun(1), SIGNALS). The Link
stops the ranks, and srun ends after its agents. If an agent cannot end (it is suspended), scancel ends the step. The
command line of srun states the shape of the step anew. So it overrides what srun would inherit from the batch script
(SLURM_NTASKS and the like). Slurm numbers the nodes of a step in another order (SLURM_NODEID), so each agent sends
its node's name as well. In a heterogeneous job srun starts tasks in component 0 alone, unless --het-group names more.

After SIGKILL of the head, the agents end themselves, and srun with them. It has 10 s for that: a process of srun
answers the death of srun with SIGKILL to the step, and that may leave something. With proctrack/linuxproc Slurm kills
what is in a list, children first. A shell whose program dies may start the next one, which is not in the list, before
Slurm kills the shell. The agent and its guard, which were to end that program, die next. For the same reason an agent
whose head has gone ends with 0, and without a word. Another code, or a line to a pipe that nobody reads, makes srun
kill the step.
"""

from __future__ import annotations

import re

from infini_run.environments.compressed_hostlist import compress
from infini_run.environments.hostlist import quoted
from infini_run.errors import UsageError
from infini_run.multinode.engines import (
    Contact,
    Engine,
    EngineCommand,
    agent_argv,
    exit_text,
    lacks_infini_run,
    lines_of,
)
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.engines import KnownAgent
    from infini_run.options.launch_options import Options

_NO_SUCH_PROGRAM = "execve()"  # in the message of a node that lacks the Python
_SLURM_LINE = ("srun:", "slurmstepd")  # how lines start that Slurm itself writes
_STEP_ENDS = ("CANCELLED", "aborted")  # in the first message after somebody has asked for the end of the step
_CANCELLED = "CANCELLED AT"
_JOB_ENDS = re.compile(  # not what it says, too, when the controller does not answer
    r"srun: (error: )?(Slurm job \S+ has expired"
    r"|Unable to confirm allocation for job \S+ Invalid job id specified"
    r"|.*Job/step already completing or completed)"
)
_STEP_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID")


class SlurmEngine(Engine):
    """srun, in the allocation of the head. srun itself repeats what may be repeated."""

    ENDS_STOPPED = True
    OUTLIVES_HEAD_S = 10.0

    def commands(
        self, hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        """Return one srun. In a heterogeneous job it has a part for each component, which --het-group reaches.

        Raises:
            UsageError: A host is in no component, or SLURM_HET_SIZE is another job's.
        """
        agent = agent_argv(options, contact, "SLURM_NODEID", _STEP_VARIABLES, host="SLURMD_NODENAME")
        component_of = _components(environ)
        if not component_of:
            return [EngineCommand(argv=("srun", *_shape(hosts, options, environ), "--", *agent), nodes=())]
        parts: dict[int, list[Host]] = {}
        for host in hosts:
            if host.name not in component_of:
                raise UsageError(f"{quoted(host.name)}: not a node of this job; use {quoted(compress(component_of))}")
            parts.setdefault(component_of[host.name], []).append(host)
        argv: list[str] = []
        for component in sorted(parts):
            shape = _shape(parts[component], options, environ, f"_HET_GROUP_{component}")
            argv += [":" if argv else "srun", f"--het-group={component}", *shape, "--", *agent]
        return [EngineCommand(argv=tuple(argv), nodes=())]

    def again_commands(
        self, host: Host, index: int, options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        """Return a separate step for the node. It shares the node with the first step, which may still live there
        (srun(1), --overlap)."""
        (command,) = self.commands([host], options, contact, environ)
        return [replace(command, argv=(command.argv[0], "--overlap", *command.argv[1:]), nodes=(index,))]

    def explain_exit(self, host: str, code: int | None, stderr: str) -> str:
        """Prefer the last line of an agent; then the line of Slurm that names `host`, a killed task, or an error."""
        lines = [line for line in lines_of(stderr, by_engine=_SLURM_LINE) if "CANCELLED" not in line]
        cause = next((line for line in lines if _NO_SUCH_PROGRAM in line or lacks_infini_run(line)), "")
        named = next((line for line in reversed(lines) if host and host in line), "")
        is_agents = bool(lines) and not lines[-1].startswith(_SLURM_LINE)
        errors = [line for line in lines if "error:" in line]
        killed = next((line for line in lines if line.startswith(_SLURM_LINE) and line.endswith(": Killed")), "")
        reason = cause or named or killed or (lines[-1] if is_agents or not errors else errors[-1]) if lines else ""
        hint = "; add --remote_python=PATH, a Python there with infini-run" if cause else ""
        return exit_text("srun", code, reason) + hint

    def is_allocation_over(self, stderr: str) -> bool:
        """Return whether the allocation is finished: srun reports it where it looks for its job, and where it asks
        for a step."""
        return any(_JOB_ENDS.match(line) for line in lines_of(stderr))

    def was_cancelled(self, stderr: str) -> bool:
        """Return whether a user, a time limit, or a more important job ended it. The line for the end of a node has
        the same words, and NODE FAILURE."""
        lines = [line for line in lines_of(stderr) if line.startswith(_SLURM_LINE) and _CANCELLED in line]
        return bool(lines) and not any("NODE FAILURE" in line for line in lines)

    def cleanup_commands(self, agents: Sequence[KnownAgent], options: Options) -> list[EngineCommand]:
        """Return scancel of the step, which sends SIGKILL to all of it. Only an agent knows the number of the
        step."""
        facts = [
            tuple(hello["facts"]) for _, _, hello in agents if len(hello.get("facts", ())) == len(_STEP_VARIABLES)
        ]
        steps = [".".join(step) for step in dict.fromkeys(facts)]
        return [EngineCommand(argv=("scancel", "--quiet", *steps), nodes=())] if steps else []

    def first_failure_line(self, stderr: str) -> str:
        """Return `srun: error: node2: task 1: Killed` if it comes before the messages about the end of the step. The
        Link need not tell of it: if the task was a container's runtime, its agent may still be alive when
        --kill-on-bad-exit ends the step."""
        lines = [line for line in lines_of(stderr) if line.startswith(_SLURM_LINE)]
        at = next((at for at, line in enumerate(lines) if any(part in line for part in _STEP_ENDS)), len(lines))
        return next((line for line in lines[:at] if "error:" in line and ": task" in line), "")


def _components(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the component of each host in a heterogeneous job; empty in any other job.

    Raises:
        UsageError: The variables are invalid, or those of another job, in which srun fails.
    """
    if not environ.get("SLURM_HET_SIZE"):
        return {}
    from infini_run.environments.environment import Variables
    from infini_run.environments.slurm import components
    from infini_run.options.from_environment import read_file

    around = Variables(environ, read_file)
    found = components(around)
    if not found:
        raise UsageError(f"{around.setting('SLURM_HET_SIZE')}: not of this job, and srun fails with it; unset it")
    return {host.name: index for index, component in enumerate(found) for host in component}


def _shape(hosts: Sequence[Host], options: Options, environ: Mapping[str, str], of_component: str = "") -> list[str]:
    """Return srun's flags for one agent on each of these hosts.

    Args:
        hosts: The hosts.
        options: Those of the launch.
        environ: The head's variables.
        of_component: How the names of Slurm's variables for the hosts' component end.
    """
    nodes = len(hosts)
    flags = [
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *(("--no-kill", "--kill-on-bad-exit=0") if options.is_elastic else ("--kill-on-bad-exit=1",)),
        "--mpi=none",
        "--cpu-bind=none",
        "--input=none",
        "--unbuffered",
        "--export=ALL",
        f"--nodelist={','.join(host.name for host in hosts)}",
    ]
    cpus = environ.get(f"SLURM_CPUS_PER_TASK{of_component}")
    if cpus:  # not inherited by srun from 22.05 to 23.02
        flags.append(f"--cpus-per-task={cpus}")
    return flags
