"""Engines that start one agent on this machine, as a child process, and reach no other."""

from __future__ import annotations

from infini_run.multinode.engines import Contact, Engine, EngineCommand, agent_argv, exit_text, lines_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.options.launch_options import Options


class ManualEngine(Engine):
    """The same command on every node, which the user starts with a token. Node 0 is the head and starts its own
    agent; the launchers of the other nodes are agents themselves, and connect to it."""

    def commands(
        self, hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        return [EngineCommand(argv=tuple(agent_argv(options, contact, "0")), nodes=(0,))]

    def again_commands(
        self, host: Host, index: int, options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        """Return a command for this node's agent alone; the others connect."""
        return [] if index else self.commands([host], options, contact, environ)

    def explain_exit(self, host: str, code: int | None, stderr: str) -> str:
        return exit_text("the agent of this node", code, "".join(lines_of(stderr)[-1:]))


class LocalEngine(Engine):
    """One agent whose stdin and stdout are the Link. A job of one machine gets the output, the stops, and the report
    of a job of many (`infini-job --scheduler=local`)."""

    USES_STDIO = True
    ENDS_STOPPED = True

    def commands(
        self, hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        return [EngineCommand(argv=tuple(agent_argv(options, contact)), nodes=(0,))]

    def explain_exit(self, host: str, code: int | None, stderr: str) -> str:
        return exit_text("its agent", code, "".join(lines_of(stderr)[-1:]))
