"""MPI: one mpirun, of Open MPI or of Hydra (MPICH, Intel MPI), which starts one agent on each node. The agents
connect.

Exit codes of Hydra mean nothing, and Open MPI takes a second to end what is left (measured). So the exit codes and
the end go over the Link.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from infini_run.errors import ProgramMissing, StartError, UsageError
from infini_run.multinode.engines import Contact, Engine, EngineCommand, agent_argv, exit_text, lines_of
from infini_run.multinode.link.connection import TOKEN
from infini_run.system.python_probe import end_session
from infini_run.system.resource_limits import explain_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.options.launch_options import Options

_MPIRUN_LINE = (
    "[",
    "YOUR APPLICATION",
    "This typically refers",
    "Please see the FAQ",
    "mpirun",
)  # starts of mpirun's own lines outside its boxes
_VERSION_S = 10.0  # for `mpirun --version`
_IS_OPEN_MPI = {"orterun": True, "prterun": True, "mpiexec.hydra": False}  # by the name of the program


class MpiEngine(Engine):
    """mpirun, for users who have nothing else that reaches their nodes. It repeats what may be repeated, and its end
    ends all that it has started."""

    def commands(
        self, hosts: Sequence[Host], options: Options, contact: Contact, environ: Mapping[str, str]
    ) -> list[EngineCommand]:
        is_open = _is_open_mpi(environ)
        argv = ["mpirun"]
        if is_open:
            argv += ["--map-by", "ppr:1:node", "--bind-to", "none", "-x", TOKEN]
            argv += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            argv += ["--host", ",".join(f"{host.name}:1" for host in hosts), "-np", str(len(hosts))]
            node = "OMPI_COMM_WORLD_RANK"
        else:
            argv += ["-ppn", "1", "-bind-to", "none", "-genvlist", f"{TOKEN},PATH"]
            argv += ["-hosts", ",".join(host.name for host in hosts), "-n", str(len(hosts))]
            node = "PMI_RANK"
        env = (("PATH", environ["PATH"]),) if environ.get("PATH") else ()
        return [EngineCommand(argv=(*argv, *agent_argv(options, contact, node, host="")), nodes=(), env=env)]

    def explain_exit(self, host: str, code: int | None, stderr: str) -> str:
        """Quote the last line of an agent, or else of mpirun."""
        lines = lines_of(stderr)
        by_agents, is_in_box = [], False
        for line in lines:
            if not line.strip("-="):
                is_in_box = not is_in_box
            elif not is_in_box and not line.startswith(_MPIRUN_LINE):
                by_agents.append(line)
        by_mpirun = [line for line in lines if line.strip("-=")]
        return exit_text("mpirun", code, "".join((by_agents or by_mpirun)[-1:]))


def _is_open_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether mpirun is Open MPI's: by the program behind the symbolic link, or by its own --version, which
    takes 40 ms."""
    path = shutil.which("mpirun", path=environ.get("PATH"))
    if not path:
        raise ProgramMissing("mpirun is not on PATH, and --engine=mpi needs it", "mpirun")
    program = os.path.basename(os.path.realpath(path))
    if program in _IS_OPEN_MPI:
        return _IS_OPEN_MPI[program]
    text = _version_text(environ)
    if b"Open MPI" in text or b"OpenRTE" in text or b"prterun" in text:
        return True
    if b"HYDRA" in text.upper() or b"Intel" in text:
        return False
    raise UsageError("mpirun on PATH is neither from Open MPI nor Hydra (MPICH, Intel MPI); use another --engine")


def _version_text(environ: Mapping[str, str]) -> bytes:
    """Return what `mpirun --version` prints. Nobody reads this process's signals meanwhile, so it has a limit.

    Raises:
        StartError: It cannot start.
        UsageError: It does not end in time. It is killed then, with what it started.
    """
    try:
        process = subprocess.Popen(
            ["mpirun", "--version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        number = error.errno or 0
        raise explain_command(StartError(os.strerror(number), "--version", number), "mpirun") from None
    try:
        return process.communicate(timeout=_VERSION_S)[0]
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"mpirun --version: no answer within {_VERSION_S:g} s; run it to see why, or use another --engine"
        ) from None
    finally:
        end_session(process)
