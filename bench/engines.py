"""(g) Engines: `--engine=slurm` and `--engine=mpi`, 4 nodes × 2 /bin/true, beside srun and mpirun themselves.

On the beds of the tests (tests/support/beds): a real Slurm of four nodes, four real sshd hosts, all on this machine.
An engine whose bed does not start here is named with the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from provision import ROOT
from sample import Case, CommandFailed, failures, interleave, raw, time_command

BEDS = ROOT / "tests" / "support" / "beds"
TRUE = "/bin/true"
ROUNDS = 10
HOSTS = "host1,host2,host3,host4"


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for first in range(21000, 31000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise CommandFailed("no free ports for the beds")


@contextmanager
def started(script: str, folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    """A bed of the tests, for as long as it is needed."""
    words, said, quiet = [str(BEDS / script)], folder.with_suffix(".said"), subprocess.DEVNULL
    try:
        with said.open("w") as file:  # its daemons would hold a pipe
            code = subprocess.run(
                [*words, "start", folder], env=env, stdout=file, stderr=file, check=False
            ).returncode
        if code:
            raise CommandFailed(f"{script} does not start: {said.read_text()[-300:].strip()}")
        yield
    finally:
        subprocess.run([*words, "stop", folder], env=env, stdout=quiet, check=False)


@contextmanager
def allocation(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment of an salloc of four nodes."""
    shell = ["salloc", "-Q", "-N4", "--ntasks-per-node=2", "sh", "-c", "env -0; echo END; read _"]
    with subprocess.Popen(shell, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        said = b""
        while not said.endswith(b"END\n"):
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                raise CommandFailed("salloc gives no allocation")
            said += piece
        yield dict(os.fsdecode(word).split("=", 1) for word in said.split(b"\0")[:-1])
        process.stdin.close()


def pair(
    name: str, ours: list[str], theirs: list[str], env: Mapping[str, str], rounds: int
) -> tuple[list[Row], list[Case]]:
    """Ours and the engine's own command, in turns."""
    both = {f"--engine={name}": ours, Path(theirs[0]).name: theirs}
    cases = [Case(name=each, measure=partial(time_command, argv, env), rounds=rounds) for each, argv in both.items()]
    done = interleave(cases)
    mine, peer = (done[each].median / 1e6 for each in both)
    about, against = f"{name} 4 x 2", " ".join([Path(theirs[0]).name, "itself"])
    rows = [
        Row(figure=about, value=mine, unit="ms", ratio=mine / peer, against=against, bar="engine"),
        Row(figure=f"- {against}", value=peer, unit="ms"),
    ]
    return rows, cases


def slurm(bed: Bed, folder: Path) -> tuple[list[Row], list[Case]]:
    env = {**bed.env, "SLURM_TB_PORT": str(free_ports(5)), "SLURM_CONF": str(folder / "slurm.conf")}
    with started("slurm.sh", folder, env), allocation(env) as inside:
        ours = [bed.infini_run, "--engine=slurm", "--nproc_per_node=2", TRUE]
        theirs = [shutil.which("srun") or "srun", "-N4", "-n8", "--ntasks-per-node=2", TRUE]
        return pair("slurm", ours, theirs, inside, bed.rounds(ROUNDS))


def mpi(bed: Bed, folder: Path) -> tuple[list[Row], list[Case]]:
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        raise CommandFailed("there is no mpirun.openmpi here")
    programs = folder.with_name("programs")
    programs.mkdir()
    (programs / "mpirun").symlink_to(mpirun)
    env = {
        **bed.env,
        "SSH_TB_PORT": str(free_ports(1)),
        "PATH": f"{programs}:{bed.env['PATH']}",
        "OMPI_MCA_plm_rsh_agent": f"ssh -F {folder}/ssh_config",
        "OMPI_MCA_oob_tcp_if_include": "lo",
        "OMPI_MCA_odls_base_cutoff": "100000",  # 4.1 loses the end of short processes otherwise
    }
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    with started("ssh.sh", folder, env):
        ours = [bed.infini_run, "--engine=mpi", f"--hosts={HOSTS}", "--nproc_per_node=2", TRUE]
        each = ",".join(f"{host}:2" for host in HOSTS.split(","))
        theirs = [
            str(programs / "mpirun"),
            *root,
            "--map-by",
            "ppr:2:node",
            "--bind-to",
            "none",
            "--host",
            each,
            TRUE,
        ]
        return pair("mpi", ours, theirs, env, bed.rounds(ROUNDS))


def measure(bed: Bed) -> Figure:
    rows: list[Row] = []
    cases: list[Case] = []
    remarks = []
    with scratch() as folder:
        for engine in (slurm, mpi):
            try:
                found, taken = engine(bed, folder / engine.__name__)
            except (CommandFailed, OSError) as error:
                remarks.append(f"{engine.__name__}: {' '.join(str(error).split())}")
                continue
            rows += found
            cases += taken
    return Figure(name="engines", rows=rows, samples=raw(cases), remarks=[*remarks, *failures(cases)])


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
