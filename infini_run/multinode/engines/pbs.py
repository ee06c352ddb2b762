"""PBS: one pbs_tmrsh for each host of the job that we are in. The agents dial.

pbs_tmrsh(8B) passes no environment, no stdin and no stdout on, and what it started lives on when it is killed: all of
that is the Link's. The token is in a file that only we can read, in the working directory, which the nodes share: a
command line is there for everybody to see. What runs there has PATH=/bin:/usr/bin; --export says what else it gets.

The one rule: signals are for us, not for pbs_tmrsh. PBS sends TERM (qdel, the limit) to every process of the job's
session: a pbs_tmrsh that ends of it would be a node that is lost, and with it the grace of all ranks.
"""

from __future__ import annotations

import os

from infini_run.errors import ProgramMissing
from infini_run.multinode.engines import Contact, EngineCommand, agent_words, ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.engines import Told
    from infini_run.options.options import Options

WINDOW = 32
OVER_STDIO = False
TOKEN_BY_FILE = True
ENDS_STOPPED = False


_DEAF = 'trap \'\' HUP INT QUIT ALRM TERM USR1 USR2; exec "$0" "$@"'


def clients(
    hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
) -> list[EngineCommand]:
    """One pbs_tmrsh for each host. Raises ProgramMissing."""
    path = f"{environ.get('PATH', os.defpath)}:{programs()}".rstrip(":")
    folder = next((folder for folder in path.split(":") if os.access(f"{folder}/pbs_tmrsh", os.X_OK)), None)
    if folder is None:
        raise ProgramMissing("pbs_tmrsh is not on PATH: --engine needs it", "pbs_tmrsh")
    deaf = ("sh", "-c", _DEAF, f"{folder}/pbs_tmrsh")
    return [
        EngineCommand(argv=(*deaf, host.name, *agent_words(options, contact, str(index))), nodes=(index,))
        for index, host in enumerate(hosts)
    ]


def programs() -> str:
    """Where pbs_tmrsh is: on no PATH that PBS gives to a job (measured on OpenPBS 23.06). "": nobody says."""
    path = os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            said = dict(line.strip().partition("=")[::2] for line in file if "=" in line)
    except OSError:
        return ""
    return f"{said['PBS_EXEC']}/bin" if said.get("PBS_EXEC") else ""


def explain(host: str, code: int | None, words: str) -> str:
    """pbs_tmrsh's own last words; what the agent wrote is in the job's files."""
    said = [line.strip() for line in words.splitlines() if line.strip()]
    return (
        ended("pbs_tmrsh", code, said[-1]) if said else ended("pbs_tmrsh", code) + "; the job's .e file may say why"
    )


def ending(told: Sequence[Told], options: Options) -> list[EngineCommand]:
    """A task that lives on ends with its job (qdel)."""
    return []


def is_passing(code: int | None, words: str) -> bool:
    """A mother superior that is busy says so at once, and not for long; nothing of it can be told from the code."""
    return False


def blames(words: str) -> str:
    """It ends nobody for another's end that the Link would not tell of."""
    return ""
