"""PBS: one pbs_tmrsh for each host of the job that the head runs in. The agents connect.

pbs_tmrsh(8B) passes on no environment, no stdin, and no stdout, and its task survives its SIGKILL. So variables,
input, output, and the end go over the Link. Everybody can read a command line, so the token is in a file of mode 0600
in the working directory, which the nodes share. Tasks have PATH=/bin:/usr/bin; --export names the variables that
ranks get.

The one rule: pbs_tmrsh ignores signals. PBS sends TERM (qdel, the limit) to every process of the job's session. If
pbs_tmrsh ended, its node would be lost, and the grace of all ranks with it.
"""

from __future__ import annotations

import os

from infini_run.errors import ProgramMissing
from infini_run.multinode.engines import Contact, Engine, EngineCommand, agent_argv, exit_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.options.launch_options import Options

_IGNORING_SIGNALS = 'trap \'\' HUP INT QUIT ALRM TERM USR1 USR2; exec "$0" "$@"'


class PbsEngine(Engine):
    """One pbs_tmrsh per host. A task that survives ends with its job (qdel). A failure of pbs_tmrsh may be transient,
    but its exit code does not show it."""

    MAX_CONCURRENT = 32
    TOKEN_BY_FILE = True

    def commands(
        self, hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        path = f"{environ.get('PATH', os.defpath)}:{program_dir()}".rstrip(":")
        folder = next((folder for folder in path.split(":") if os.access(f"{folder}/pbs_tmrsh", os.X_OK)), None)
        if folder is None:
            raise ProgramMissing("pbs_tmrsh is not on PATH, and --engine needs it", "pbs_tmrsh")
        tmrsh = ("sh", "-c", _IGNORING_SIGNALS, f"{folder}/pbs_tmrsh")
        return [
            EngineCommand(argv=(*tmrsh, host.name, *agent_argv(options, contact, str(index))), nodes=(index,))
            for index, host in enumerate(hosts)
        ]

    def again_commands(
        self, host: Host, index: int, options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        (command,) = self.commands([host], options, contact, environ)
        argv = tuple(f"--node={index}" if word == "--node=0" else word for word in command.argv)
        return [EngineCommand(argv=argv, nodes=(index,))]

    def explain_exit(self, host: str, code: int | None, stderr: str) -> str:
        """Quote the last line of pbs_tmrsh. The agent's own output is in the job's files."""
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        if not lines:
            return exit_text("pbs_tmrsh", code) + "; read the job's .e file"
        return exit_text("pbs_tmrsh", code, lines[-1])


def program_dir() -> str:
    """Return the directory of pbs_tmrsh, which is not on the PATH of a job (measured on OpenPBS 23.06); "" if
    unknown."""
    path = os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            settings = dict(line.strip().partition("=")[::2] for line in file if "=" in line)
    except OSError:
        return ""
    return f"{settings['PBS_EXEC']}/bin" if settings.get("PBS_EXEC") else ""
