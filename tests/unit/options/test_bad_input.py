"""Whatever is wrong with a request: one clear line, the right exit code, and nothing was started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import infini_run as ir
from tests.support.command import COMMAND

PROGRAM = ("sh", "-c", "touch started; exit 0")
BINFMT = os.path.exists("/proc/sys/fs/binfmt_misc/status")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(here, infini_run):
    """Run a request that is refused; return its exit code and its one line."""

    def run(*words, **kwargs):
        before = sorted(os.listdir(here))
        command = infini_run(*words, **kwargs)
        code, line = command.wait(), command.err.decode(errors="surrogateescape")
        assert line.startswith("infini-run: "), line
        assert line.endswith("\n")
        assert line[:-1].isprintable(), line
        assert command.out == b""
        assert not (here / "started").exists()
        assert sorted(os.listdir(here)) == before
        return code, line[:-1].removeprefix("infini-run: ")

    return run


def script(path, content, mode=0o755):
    path.write_text(content)
    path.chmod(mode)


# ---- flags, counts, ranks, endpoints

FLAGS = [
    ("--nprocs_per_node=8", "unknown flag --nprocs_per_node; did you mean --nproc_per_node?"),
    ("--frobnicate", "unknown flag --frobnicate; run --help for the list"),
    ("--nnodes", "missing program"),
    ("--nproc_per_node=0", "--nproc_per_node=0: expected 1 to 4194304, auto, gpu, or cpu"),
    ("--nproc_per_node=-2", "--nproc_per_node=-2: expected 1"),
    ("--nproc_per_node=2.5", "--nproc_per_node=2.5: expected 1"),
    ("--nnodes=zero", "--nnodes=zero: expected 1"),
    ("--nnodes=1:4", "--nnodes=1:4: needs a token to join its nodes; set the same INFINI_RUN_TOKEN"),
    (
        "--nnodes=4:1",
        "--nnodes=4:1: expected 1 to 2147483647, or MIN:MAX with MIN at most MAX",
    ),
    ("--nnodes=2 --node_rank=2", "--node_rank=2: with --nnodes=2, expected a rank from 0 to 1"),
    ("--node_rank=-1", "--node_rank=-1: expected 0"),
    ("--nnodes=65536 --nproc_per_node=65536", "make 4294967296 ranks; use at most 2147483647"),
    ("--rdzv_endpoint=host", "--rdzv_endpoint=host: missing port"),
    ("--rdzv_endpoint=host:99999", "--rdzv_endpoint=host:99999: expected a port from 0 to 65535"),
    ("--rdzv_endpoint=::1:5", "[IPV6]:PORT"),
    ("--nnodes=2 --master_port=0", "--master_port=0: cannot be a free port"),
    ("--grace=soon", "--grace=soon: not a time from 0"),
    ("--stop_signal=KILL", "--stop_signal=KILL: cannot be caught by a process"),
    ("--console=prefx", "did you mean prefix?"),
    ("--stdin=7", "--stdin=7: unknown rank 7; use ranks 0 to 0"),
    ("--redirects=3", "--redirects=3: needs a file; add --log_dir=DIR"),
    ("--noverbose=1", "cannot take a value; use --verbose=1"),
    ("--verbose=maybe", "--verbose=maybe: expected true or false"),
    ("--engine=ssh", "--engine=ssh: needs a list of hosts; add --hosts=a,b or --hostfile=FILE"),
    ("--hosts=a,b,a", "--hosts=a,b,a: column 5"),
    ("--rdzv_conf=fast", "--ready_timeout=TIME to limit how long ranks take to meet"),
    ("--start_method=thread", "--start_method=thread: expected spawn, fork, or forkserver"),
    ("--rdzv_backend=etcd", "--rdzv_backend=etcd: expected static or c10d"),
    ("--flagfile=missing", "--flagfile=missing: cannot be read: No such file or directory"),
    ("--flagfile=.", "--flagfile=.: cannot be read: Is a directory"),
    ("--flagfile=/dev/full", "--flagfile=/dev/full: expected at most 1048576 bytes"),
    ("--hostfile=/dev/full", "--hostfile=/dev/full: expected at most 16777216 bytes"),
    ("--fromenv=nnodes", "--fromenv=nnodes: missing FLAGS_nnodes"),
]


@pytest.mark.parametrize(("words", "said"), FLAGS)
def test_a_wrong_flag_is_refused_in_one_line(words, said, refused):
    program = () if words == "--nnodes" else PROGRAM
    code, line = refused(*(words.split() if program else ["--nnodes", "1"]), *program)
    assert code == 2
    assert said in line


def test_no_words_at_all_are_answered_with_the_usage(refused):
    code, line = refused()
    assert (code, "infini-run [flags] [--] program [args...]" in line) == (2, True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("--nnodes=0\n", "--nnodes=0 (flags:1): expected 1"),
        ("# fine\n\n--grace=x\n", "--grace=x (flags:3): not a time"),
        ("sh -c true\n", "sh -c true (flags:1): expected a flag; use one line per flag"),
        ("--flagfile=flags\n", "cannot be read: flag files include each other: flags -> flags"),
        ("--nproc=4\n", "unknown flag --nproc (flags:1); did you mean --nproc_per_node?"),
    ],
)
def test_a_wrong_line_of_a_flag_file_is_named_with_its_place(content, said, refused, here):
    (here / "flags").write_text(content)
    code, line = refused("--flagfile=flags", *PROGRAM)
    assert code == 2
    assert said in line


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PET_NNODES", "1:4", "PET_NNODES=1:4: needs a token to join its nodes"),
        ("PET_STANDALONE", "yes", "PET_STANDALONE=yes: expected 0 or 1"),
        ("INFINI_RUN_NPROC_PER_NODE", "many", "INFINI_RUN_NPROC_PER_NODE=many: expected 1"),
        ("INFINI_RUN_GRACE", "x\ny", "INFINI_RUN_GRACE="),
        ("PET_NODE_RANK", "3", "PET_NODE_RANK=3: with --nnodes=1 (the default), expected a rank from 0 to 0"),
    ],
)
def test_a_wrong_variable_is_named(name, value, said, refused):
    code, line = refused(*PROGRAM, env=dict(os.environ, **{name: value}))
    assert code == 2
    assert said in line


# ---- programs


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("no-such-program", 127, "no-such-program is not on PATH"),
        ("./missing", 127, "./missing does not exist (in /"),
        ("", 127, "the program's name is empty"),
        ("plain", 127, "plain is not on PATH; use infini-run ... sh ./plain (python3 for Python)"),
        (
            "./plain",
            126,
            "./plain has no run bit; use infini-run ... sh ./plain (python3 for Python), or run chmod +x ./plain",
        ),
        ("./folder", 126, "./folder is a directory; use a program in it"),
        ("./loop", 127, "./loop cannot be reached: Too many levels of symbolic links"),
        ("./dos", 126, "the file has DOS line ends"),
        ("./nowhere", 126, "./nowhere needs the interpreter /no/python, which does not exist"),
        ("./plain/x", 127, "./plain/x does not exist"),
    ],
)
def test_a_program_that_cannot_be_run_is_refused_with_a_shells_code(word, code, said, refused, here):
    script(here / "plain", "touch started\n", 0o644)
    script(here / "dos", "#!/bin/sh\r\ntouch started\r\n")
    script(here / "nowhere", "#!/no/python\n")
    (here / "folder").mkdir()
    (here / "loop").symlink_to("loop")
    assert refused("--nproc_per_node=4", word)[0] == code
    assert said in refused(word)[1]


@pytest.mark.skipif(BINFMT, reason="binfmt_misc may run anything")
def test_a_script_without_interpreter_says_what_to_type(refused, here):
    script(here / "job", "touch started\n")
    script(here / "train.py", "open('started', 'w')\n")
    assert refused("./job") == (
        126,
        "./job has no #! line, so the kernel cannot run it; use infini-run ... sh ./job (python3 for Python)",
    )
    code, line = refused("--no_python", "./train.py")
    assert code == 126
    assert line.endswith(f"; use infini-run ... {sys.executable} ./train.py")


def test_what_only_the_kernel_knows_is_told_by_it_with_a_shells_code(here, infini_run):
    (here / "broken").write_bytes(b"\x7fELF\0\0\0\0 nothing")
    (here / "broken").chmod(0o755)
    command = infini_run("--nproc_per_node=2", "./broken")
    assert command.wait() == 126
    assert b"could not be started: executing the program: Exec format error" in command.err


def test_arguments_that_are_too_large_are_told_with_the_limit(here):
    with pytest.raises(ir.WorkerError) as caught:
        ir.run(["true", "x" * (4 << 20)])
    assert caught.value.exit_code == 126
    assert "Argument list too long" in str(caught.value)
    assert "ulimit -s" in str(caught.value)


# ---- files


def test_a_log_directory_that_cannot_be_made_is_refused(refused, here):
    (here / "file").write_text("")
    for folder, reason in (
        ("file/logs", "Not a directory"),
        ("file", "File exists"),
        ("/proc/no/logs", "No such file"),
    ):
        code, line = refused(f"--log_dir={folder}", *PROGRAM)
        assert code == 2
        assert line.startswith(f"--log_dir={folder} cannot be made: {reason}")


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_a_log_that_cannot_be_written_is_refused(kind, refused, here):
    log = here / "logs/rank_1.log"
    log.parent.mkdir()
    (here / "logs/rank_0.log").write_text("earlier\n")
    if kind == "folder":
        log.mkdir()
    elif kind == "link":
        log.symlink_to(here / "elsewhere")
    else:
        os.mkfifo(log)
    code, line = refused("--log_dir=logs", "--nproc_per_node=2", *PROGRAM)
    assert code == 2
    assert line.startswith("--log_dir: logs/rank_1.log cannot be written: ")
    assert (here / "logs/rank_0.log").read_text() == "earlier\n"


@pytest.mark.parametrize("report", ["folder", "missing/report", "file/report", "fifo", "x" * 300, "/proc/report"])
def test_a_report_that_cannot_be_written_is_refused(report, refused, here):
    (here / "folder").mkdir()
    (here / "file").write_text("")
    os.mkfifo(here / "fifo")
    code, line = refused(f"--report={report}", *PROGRAM)
    assert code == 2
    assert line.startswith(f"--report={report} ")
    assert "use a file in a" in line
    assert (here / "fifo").is_fifo()


# ---- surroundings


def test_gpus_that_are_not_there_are_refused(refused, here):
    code, line = refused("--nproc_per_node=2", "--gpus_per_proc=1000000", *PROGRAM)
    assert code == 2
    assert "NVIDIA" in line or "GPU" in line


def test_a_directory_that_was_deleted_is_no_traceback(refused, here, infini_run):
    gone = ("sh", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "sh")
    code, line = refused("./prog", under=gone)
    assert (code, line) == (127, "./prog does not exist (in a working directory that was deleted)")
    command = infini_run("true", under=gone)
    assert (command.wait(), command.err) == (0, b"")
    for flag in ("--log_dir=logs", "--report=report"):
        code, line = refused(flag, "true", under=gone)
        assert code == 2
        assert line == f"{flag} cannot be found, because this directory was deleted; use an absolute path"


def test_an_empty_environment_is_enough(here):
    done = subprocess.run([*COMMAND, "sh", "-c", "exit 4"], env={}, capture_output=True, check=False)
    assert done.returncode == 4


def test_too_few_descriptors_are_named_with_the_limit(refused):
    limit = ("sh", "-c", 'ulimit -n 24; exec "$@"', "sh")
    code, line = refused("--nproc_per_node=64", "--console=prefix", *PROGRAM, under=limit)
    assert code == 1
    assert "the limit on open descriptors was reached; raise ulimit -n" in line


# ---- permissions


@pytest.fixture
def bound():
    """Words that run a command as one whom permissions bind: root has to give up what overrides them."""
    if os.geteuid() != 0:
        return ()
    less = "-dac_override,-dac_read_search"
    words = ("setpriv", f"--bounding-set={less}", f"--inh-caps={less}")
    try:
        subprocess.run([*words, "true"], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"root stays root here: {error}")
    return words


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--log_dir=closed/logs", *PROGRAM), 2, "--log_dir=closed/logs cannot be made: Permission denied"),
        (("--log_dir=closed", *PROGRAM), 2, "--log_dir: closed/rank_0.log cannot be written: Permission denied"),
        (("--report=closed/report", *PROGRAM), 2, "--report=closed/report cannot be written: Permission denied"),
        (("--plot=o.png", "locked"), 2, "--plot: locked cannot be read: Permission denied; use the FILE"),
        (("--flagfile=secret.py", *PROGRAM), 2, "--flagfile=secret.py: cannot be read: Permission denied"),
        (("secret.py",), 126, "secret.py cannot be read: permission denied"),
    ],
)
def test_what_is_not_permitted_is_refused(words, code, said, refused, bound, here):
    (here / "closed").mkdir(mode=0o555)
    (here / "locked").mkdir(mode=0o311)
    script(here / "secret.py", "", 0)
    got, line = refused(*words, under=bound)
    assert got == code
    assert said in line
