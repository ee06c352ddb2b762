"""A directory full of modules that are called as those of the standard library, and ours: none of them is imported by
an interpreter that runs our code, and users' programs keep Python's own path."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from infini_run.system.interpreter import flags, own_python
from tests.support.cluster import free_ports
from tests.support.processes import OURS

SCRIPTS = Path(sys.executable).parent
RUN, JOB = str(SCRIPTS / "infini-run"), str(SCRIPTS / "infini-job")
OTHERS = ("_cffi_backend", "cffi", "cloudpickle", "pynvml", "sitecustomize", "usercustomize")
# what a scheduler's command does, on this machine: the words after its own flags are run
SSH = 'shift $(($# - 1)); exec sh -c "$1"'
AFTER_DASHES = 'until [ "$1" = -- ]; do shift; done; shift; SLURM_NODEID=0 SLURMD_NODENAME=node1 exec "$@"'
MPIRUN = 'until [ "$1" = -n ]; do shift; done; shift 2; PMI_RANK=0 exec "$@"'
ENGINES = {
    "ssh": ({"ssh": SSH}, {}),
    "slurm": (
        {"srun": AFTER_DASHES},
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"},
    ),
    "pbs": ({"pbs_tmrsh": 'shift; exec "$@"'}, {"PBS_JOBID": "0.head", "PBS_ENVIRONMENT": "PBS_BATCH"}),
    "mpi": ({"mpirun": f'[ "$1" = --version ] && {{ echo HYDRA; exit; }}; {MPIRUN}'}, {}),
}


@pytest.fixture
def shadows(tmp_path):
    """The directory; whoever imports from it fails, and leaves his name in `mark` beside it."""
    folder = tmp_path / "shadows"
    (folder / "infini_run").mkdir(parents=True)
    text = (
        f"open({str(tmp_path / 'mark')!r}, 'a').write(__name__ + ' ')\nraise SystemExit(__name__ + ' is a shadow')\n"
    )
    for name in (*sorted(sys.stdlib_module_names), *OTHERS):
        if name not in sys.builtin_module_names:
            (folder / f"{name}.py").write_text(text)
    (folder / "infini_run" / "__init__.py").write_text(text)
    yield folder
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()


@pytest.fixture
def run(shadows, tmp_path):
    """Start something there, with these programs first on PATH."""

    def start(*words, programs=None, python=None, **env):
        for name, script in (programs or {}).items():
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        env = {**os.environ, OURS[0]: OURS[1], "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **env}
        return subprocess.run(
            [*map(str, words)], cwd=shadows, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=20,
        )  # fmt: skip

    return start


def is_fine(done, *lines):
    assert done.returncode == 0, done.stderr
    assert sorted(line.split("] ")[-1] for line in done.stdout.splitlines()) == sorted(lines), done.stderr


def program(tmp_path, text):
    path = tmp_path / "elsewhere" / "program.py"
    path.parent.mkdir()
    path.write_text(text)
    return path


def test_the_command_imports_nothing_from_there(run):
    flags = ["--nproc_per_node=2", "--max_restarts=1", "--console=prefix"]
    is_fine(run(RUN, *flags, "sh", "-c", "echo $RANK"), "0", "1")


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_the_standard_library_comes_before_pythonpath(run, shadows, engine):
    """Where Python itself starts at all: it imports from there before our first line."""
    for path in shadows.glob("*"):
        if path.name.removesuffix(".py") not in ("hmac", "select", "socket", "struct", "json", "array"):
            path.is_dir() or path.unlink()
    (shadows / "infini_run" / "__init__.py").unlink()
    (shadows / "infini_run").rmdir()
    words = ["--engine=slurm", "--hosts=node1"] if engine == "slurm" else ["--max_restarts=1", "--console=prefix"]
    programs, env = ENGINES["slurm"] if engine == "slurm" else ({}, {})
    is_fine(run(RUN, *words, "sh", "-c", "echo $RANK", programs=programs, PYTHONPATH=":.", **env), "0")


@pytest.mark.root
@pytest.mark.parametrize("start", [[RUN], [sys.executable, *flags(), "-m", "infini_run"]], ids=["script", "module"])
def test_isolate_imports_nothing_from_there(run, start, tmp_path, shadows):
    if start[0] != RUN and not flags():
        pytest.skip("-m itself looks into the working directory, and Python 3.10 has no -P")
    is_fine(run(*start, "--isolate", "sh", "-c", "echo $RANK"), "0")


@pytest.mark.parametrize("python", ["", sys.executable], ids=["same", "remote_python"])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_agents_import_nothing_from_there(run, engine, python, tmp_path):
    programs, env = ENGINES[engine]
    (tmp_path / "nodes").write_text("node1\n")
    env = env | ({"PBS_NODEFILE": str(tmp_path / "nodes")} if engine == "pbs" else {})
    words = [f"--engine={engine}", "--hosts=node1", "--nproc_per_node=2"]
    words += [f"--remote_python={python}"] if python else []
    is_fine(run(RUN, *words, "sh", "-c", "echo $RANK", programs=programs, **env), "0", "1")


def test_agents_by_hand_import_nothing_from_there(run, shadows):
    shape = ["--nnodes=2", f"--rdzv_endpoint=127.0.0.1:{free_ports(2)}", "--join_timeout=20"]
    env = {**os.environ, "INFINI_RUN_TOKEN": "a-secret-that-nobody-guesses"}
    words = ["sh", "-c", "echo $RANK"]
    with subprocess.Popen(
        [RUN, *shape, "--node_rank=1", *words], cwd=shadows, env=env, stdin=subprocess.DEVNULL
    ) as other:
        is_fine(run(RUN, *shape, "--node_rank=0", *words, INFINI_RUN_TOKEN="a-secret-that-nobody-guesses"), "0", "1")
        assert other.wait() == 0


@pytest.mark.parametrize("words", [(), ("--hosts=node1",)], ids=["here", "ssh"])
def test_the_doctor_imports_nothing_from_there(run, words):
    done = run(RUN, "--doctor", *words, programs={"ssh": SSH})
    assert done.returncode in (0, 1), done.stderr
    assert "machine" in done.stdout, done.stdout


def test_the_check_of_a_node_imports_nothing_from_there(run):
    words = ["--hosts=node1,node2", "--nnodes=1:2", "--node_check=true"]
    is_fine(run(RUN, *words, "sh", "-c", "echo $RANK", programs={"ssh": SSH}), "0", "1")


@pytest.mark.parametrize("kind", [(), ("--array=0-1",)], ids=["job", "array"])
def test_jobs_import_nothing_from_there(run, tmp_path, kind):
    words = ["submit", "--scheduler=local", f"--dir={tmp_path / 'jobs'}", "--slots=1", *kind, "--wait"]
    done = run(JOB, *words, "--", "sh", "-c", "echo $RANK")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "COMPLETED"


CREW = """
import os, sys
import infini_run as ir

def ask(i):
    import beside
    return beside.NAME, int(os.environ["RANK"])

if __name__ == "__main__":
    with ir.Pool({given}) as pool:
        print(sorted(pool.run(ask, 0)))
"""


@pytest.mark.parametrize(
    "given",
    [
        "None, 2",
        "None, 2, preload=['beside']",
        "['node1'], 2, engine='ssh'",
        "['node1'], 2, engine='ssh', preload=['beside'], remote_python=sys.executable",
    ],
    ids=["workers", "forked", "outpost", "outpost, forked, remote_python"],
)
def test_workers_import_nothing_from_there_and_what_lies_beside_the_program(run, tmp_path, given):
    path = program(tmp_path, CREW.format(given=given))
    path.with_name("beside.py").write_text("NAME = __file__\n")
    where = str(path.with_name("beside.py"))
    done = run(sys.executable, path, programs={"ssh": SSH})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([(where, 0), (where, 1)])


ASK = """
import os, sys
flag = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
print(sys.path[0], bool(flag), *[name for name in os.environ if name.startswith("PYTHON")], sep=",")
"""


@pytest.mark.parametrize("how", ["here", "ssh", "remote_python"])
@pytest.mark.parametrize("form", ["script", "module"])
def test_programs_of_users_keep_the_path_of_python(infini_run, tmp_path, how, form):
    path = program(tmp_path, ASK)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\n{SSH}\n")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
    words = ["--console=inherit"] if how == "here" else ["--hosts=node1", "--engine=ssh"]
    words += [f"--remote_python={sys.executable}"] if how == "remote_python" else []
    words = ["--module", "program"] if form == "module" else [str(path)]
    command = infini_run(*words, *words, env=env, cwd=path.parent)
    assert command.wait() == 0, command.err
    assert command.out.decode().splitlines()[-1].split("] ")[-1] == f"{path.parent},False"


def test_words_for_an_interpreter_survive_every_shell():
    for words in (
        own_python("infini_run.multinode.agent_main.run"),
        own_python("infini_run.multinode.agent_main.run", "/opt/python"),
    ):
        assert not set('\n"\\$`') & set(" ".join(words))
        assert shlex.split(shlex.join(words)) == words
