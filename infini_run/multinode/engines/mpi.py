"""MPI's launchers: one mpirun (Open MPI) or mpiexec (MPICH, Intel MPI: Hydra), which starts one agent on each node.
They dial. For those who have nothing else that reaches their nodes.

Exit codes of Hydra mean nothing, Open MPI takes a second to end what is left (both measured): the Link does it.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from infini_run.errors import ProgramMissing, UsageError
from infini_run.multinode.connection import TOKEN
from infini_run.multinode.engines import Contact, EngineCommand, agent_words, ended, said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.engines import Told
    from infini_run.options.options import Options

WINDOW = 1
OVER_STDIO = False
TOKEN_BY_FILE = False
ENDS_STOPPED = False
_OWN = ("[", "YOUR APPLICATION", "This typically refers", "Please see the FAQ", "mpirun")  # outside of boxes
_KNOWN = {"orterun": True, "prterun": True, "mpiexec.hydra": False}  # program: whether it is Open MPI's


def clients(
    hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
) -> list[EngineCommand]:
    """One mpirun for all of them."""
    is_open = _is_open_mpi(environ)
    words = ["mpirun"]
    if is_open:
        words += ["--map-by", "ppr:1:node", "--bind-to", "none", "-x", TOKEN]
        words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        words += ["--host", ",".join(f"{host.name}:1" for host in hosts), "-np", str(len(hosts))]
        node = "OMPI_COMM_WORLD_RANK"
    else:
        words += ["-ppn", "1", "-bind-to", "none", "-genvlist", f"{TOKEN},PATH"]
        words += ["-hosts", ",".join(host.name for host in hosts), "-n", str(len(hosts))]
        node = "PMI_RANK"
    env = (("PATH", environ["PATH"]),) if environ.get("PATH") else ()
    return [EngineCommand(argv=(*words, *agent_words(options, contact, node, host="")), nodes=(), env=env)]


def _is_open_mpi(environ: Mapping[str, str]) -> bool:
    """Which of the two it is: by the program behind the link, which is as good as always one; else as it says itself,
    which takes it 40 ms."""
    path = shutil.which("mpirun", path=environ.get("PATH"))
    program = os.path.basename(os.path.realpath(path)) if path else ""
    if program in _KNOWN:
        return _KNOWN[program]
    try:
        said = subprocess.run(
            ["mpirun", "--version"], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:
        raise ProgramMissing("mpirun is not on PATH: --engine=mpi needs it", "mpirun") from None
    text = said.stdout + said.stderr
    if b"Open MPI" in text or b"OpenRTE" in text or b"prterun" in text:
        return True
    if b"HYDRA" in text.upper() or b"Intel" in text:
        return False
    raise UsageError("mpirun on PATH is neither Open MPI's nor Hydra's (MPICH, Intel MPI): give another --engine")


def explain(host: str, code: int | None, words: str) -> str:
    """The agent's own last words, else mpirun's."""
    lines = said(words)
    ours, is_frame = [], False
    for line in lines:
        if not line.strip("-="):
            is_frame = not is_frame  # a box of mpirun's own
        elif not is_frame and not line.startswith(_OWN):
            ours.append(line)
    theirs = [line for line in lines if line.strip("-=")]
    about = (ours or theirs)[-1:]
    return ended("mpirun", code, about[0] if about else "")


def ending(told: Sequence[Told], options: Options) -> list[EngineCommand]:
    """mpirun's own end takes what it started with it."""
    return []


def is_passing(code: int | None, words: str) -> bool:
    """It tries by itself what may be tried again."""
    return False


def blames(words: str) -> str:
    """It ends nobody for another's end that the Link would not tell of."""
    return ""
