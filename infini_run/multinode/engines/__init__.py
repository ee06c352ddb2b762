"""What reaches other nodes: each engine turns hosts into local commands that start agents there.

The one rule: an engine knows commands and what they write when they fail, and nothing of ranks. The head supervises
an engine's commands as the core supervises any process.
"""

from __future__ import annotations

from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.environments.hostlist import Host
    from infini_run.options.launch_options import Options

    KnownAgent = tuple[Host, int, Mapping[str, Any]]  # a host, its node's index, the HELLO of its agent


@record
class Contact:
    """How agents reach the head.

    Args:
        target: `HOST,HOST:PORT`; empty if the Link is the command's own stdin and stdout.
        token_file: path of the file with the token; empty: the token is in the agents' environment.
        call: the function that a node's Python calls, `MODULE.FUNCTION`; the agent's own by default.
    """

    target: str = ""
    token_file: str = ""
    call: str = "infini_run.multinode.agent_main.run"


@record
class EngineCommand:
    """A local command that starts agents.

    Args:
        argv: program and arguments.
        nodes: indices of the nodes that it starts; empty: all of them, and each agent says which node it is.
        env: variables added to the head's own.
    """

    argv: tuple[str, ...]
    nodes: tuple[int, ...]
    env: tuple[tuple[str, str], ...] = ()


class Engine:
    """One way to reach nodes. A subclass states `commands` and `explain_exit`. The defaults below are those of an
    engine with one command, whose agents connect and have the token in their environment."""

    MAX_CONCURRENT = 1  # commands whose agents have not been heard of yet
    USES_STDIO = False  # the Link is the command's stdin and stdout; else agents connect over TCP
    TOKEN_BY_FILE = False  # agents read the token from a file
    OUTLIVES_HEAD_S = 0.0  # how long a command may take to end alone after SIGKILL of the head
    ENDS_STOPPED = False  # it can end a suspended agent, and its ranks with it

    def commands(
        self, hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        """Return the commands that start one agent on each host. Raises ProgramMissing, UsageError."""
        raise NotImplementedError

    def explain_exit(self, host: str, code: int | None, stderr: str) -> str:
        """Say why a command ended before its agent had said anything, and what the user can do.

        Args:
            host: the node's name, if known.
            code: exit code; None if another part of the host program has reaped the command.
            stderr: the last output of the command.
        """
        raise NotImplementedError

    def again_commands(
        self, host: Host, index: int, options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        """Return the commands that start an agent once more on a host whose agent has gone, if that can be. By
        default, for an engine with a command for each host, as the first time."""
        return [replace(command, nodes=(index,)) for command in self.commands([host], options, contact, environ)]

    def cleanup_commands(self, agents: Sequence[KnownAgent], options: Options) -> list[EngineCommand]:
        """Return commands that end what these agents have left, for agents that do not end themselves: they may be
        suspended, or out of reach. A command that names a node exits with 0 after it killed that agent. By default
        there are none: the engine can only end its own commands."""
        return []

    def has_reached(self, code: int | None) -> bool:
        """Return whether a command with this exit code may have reached its node, where the agent, or what it starts
        in (a container's runtime), failed then."""
        return True

    def has_agent_ended(self, code: int | None) -> bool:
        """Return whether this exit code of a command that was the Link proves that the agent's process is gone. Else
        only the connection to it is."""
        return False

    def first_failure_line(self, stderr: str) -> str:
        """Return the line of a running command that names a process whose end makes the command end all others. It is
        "" by default, because the Link itself reports such an end."""
        return ""

    def is_allocation_over(self, stderr: str) -> bool:
        """Return whether the last output of a command says that no node is reachable any more."""
        return False

    def was_cancelled(self, stderr: str) -> bool:
        """Return whether the last output of a command says that somebody canceled all of it."""
        return False

    def is_transient(self, code: int | None, stderr: str) -> bool:
        """Return whether the same command may well succeed a moment later."""
        return False


_ENGINES = {  # names of --engine, and of options/nodes.py: module, class
    "ssh": ("ssh", "SshEngine"),
    "slurm": ("slurm", "SlurmEngine"),
    "pbs": ("pbs", "PbsEngine"),
    "mpi": ("mpi", "MpiEngine"),
    "manual": ("this_node", "ManualEngine"),
    "this_node": ("this_node", "LocalEngine"),
}


def find_engine(name: str) -> Engine:
    """Import and return the engine of that name."""
    module, kind = _ENGINES[name]
    found = __import__(f"infini_run.multinode.engines.{module}", fromlist=[kind])  # importlib imports warnings
    engine: Engine = getattr(found, kind)()
    return engine


_OUR_MODULES = ("infini_run", "_cffi_backend")  # which a Python without infini-run lacks


def lines_of(stderr: str, *, by_engine: tuple[str, ...] = ()) -> list[str]:
    """Return the lines of a command's output. Lines that start as the engine's own come before those of agents, so
    that the last line is the best reason that there is."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return sorted(lines, key=lambda line: not line.startswith(by_engine)) if by_engine else lines


def exit_text(program: str, code: int | None, reason: str = "") -> str:
    """Return a sentence on the end of a command, with its exit code and the reason, as far as they are known."""
    how = (
        "and left no exit code (this program ignores SIGCHLD, or waits for every child)"
        if code is None
        else f"with {code}"
    )
    return f"{program} exited {how}" + (f": {reason}" if reason else "")


def lacks_infini_run(line: str) -> bool:
    """Return whether a Python reports that it lacks infini-run."""
    return "No module named" in line and any(name in line.rpartition("No module named")[2] for name in _OUR_MODULES)


def agent_argv(
    options: Options, contact: Contact, node: str = "", facts: Sequence[str] = (), host: str | None = None
) -> list[str]:
    """Return the command line of the agent: with the head's Python, or --remote_python.

    Args:
        node: index of the node, or the name of the variable that has it there.
        facts: names of variables whose values the agent adds to its HELLO.
        host: name of the variable that has the node's name in the list of hosts, for engines that may number nodes in
            another order. Empty: the agent sends the name that its system has; None: it sends none.
    """
    from infini_run.system.interpreter import bare_python, own_python

    call, there = contact.call, options.remote_python
    python = own_python(call, there) if there else bare_python(call)
    if not contact.target:
        return python
    argv = [*python, f"--link={contact.target}"]
    if contact.token_file:
        argv.append(f"--token_file={contact.token_file}")
    if node:
        argv.append(f"--node={node}")
    if host is not None:
        argv.append(f"--host={host}")
    if facts:
        argv.append(f"--facts={','.join(facts)}")
    return argv
