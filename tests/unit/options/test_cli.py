"""The command from end to end: the two ways to call it, what it answers, reports, and leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import _cffi_backend
import pytest

import infini_run as package
from tests.support.waiting import LIMIT_S, until

HOST = os.uname().nodename
SCRIPT = str(Path(sys.executable).with_name("infini-run"))
MODULE = [sys.executable, "-m", "infini_run"]
IDLE = 'echo "$RANK" > "$0"; exec sleep 600'


def ask(*argv, **kwargs):
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, **kwargs)


@pytest.fixture
def ended(infini_run):
    """An `infini-run` that has ended."""

    def run(*words, **kwargs):
        command = infini_run(*words, **kwargs)
        command.code = command.wait()
        return command

    return run


# ---- calling it


@pytest.mark.parametrize("command", [[SCRIPT], MODULE], ids=["script", "module"])
def test_both_ways_to_call_it_are_the_same_command(command):
    if command == [SCRIPT] and not os.path.exists(SCRIPT):
        pytest.skip("the package was not installed with its script")
    done = ask(*command, "--nproc_per_node=2", "--keep_going", "sh", "-c", "echo $RANK; exit $RANK")
    assert (done.returncode, sorted(done.stdout.split())) == (1, ["0", "1"])
    assert ask(*command, "--version").stdout.startswith("infini-run 0.")
    assert ask(*command, "--nnodes=0", "true").returncode == 2


def test_help_comes_on_stdout_and_fails_nothing():
    short, full = ask(*MODULE, "--help"), ask(*MODULE, "--helpfull")
    assert (short.returncode, full.returncode, short.stderr, full.stderr) == (0, 0, "", "")
    assert short.stdout.startswith("usage: infini-run [flags] [--] program [args...]\n")
    assert len(full.stdout) > len(short.stdout)
    assert ask(*MODULE, "-h", "--nnodes=0").stdout == short.stdout


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert ask(*MODULE, "--version").stdout == f"infini-run {version('infini-run')}\n"


def test_what_follows_the_program_is_the_programs_own(ended):
    words = ["--help", "--nnodes=0", "--", "-m", "", "a b", "--version"]
    done = ended("--nproc_per_node=1", "--", "printf", "%s|", *words)
    assert (done.code, done.out.decode()) == (0, "".join(f"{word}|" for word in words))


def test_a_module_is_run_unbuffered(ended, tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:], sys.stdout.write_through, __name__)")
    done = ended("-m", "train", "--lr=1", cwd=tmp_path)
    assert (done.code, done.out) == (0, b"['--lr=1'] True __main__\n")


# ---- flags from elsewhere


def test_variables_set_flags_ours_before_torchruns_and_the_command_line_before_both(ended):
    environ = dict(os.environ, PET_NPROC_PER_NODE="3", PET_RDZV_ENDPOINT="pet:1", PET_NNODES="2", PET_NODE_RANK="1")
    show = ("sh", "-c", 'echo "$RANK/$WORLD_SIZE $MASTER_ADDR"')
    assert sorted(ended(*show, env=environ).out.split(b"\n")[:-1]) == [b"3/6 pet", b"4/6 pet", b"5/6 pet"]
    environ |= {"INFINI_RUN_NPROC_PER_NODE": "2", "INFINI_RUN_NNODES": "5"}
    assert sorted(ended(*show, env=environ).out.split(b"\n")[:-1]) == [b"2/10 pet", b"3/10 pet"]
    done = ended("--nproc_per_node=1", "--node_rank=0", "--master_addr=cli", *show, env=environ)
    assert done.out == b"0/5 cli\n"


def test_a_launch_inside_a_rank_is_a_launch_of_its_own(ended):
    """What a rank was told must not be taken for what its own launcher is told."""
    inner = [*MODULE, "--nproc_per_node=1", "sh", "-c", "echo $RANK/$WORLD_SIZE $INFINI_RUN_ID"]
    done = ended("--nproc_per_node=2", "sh", "-c", 'echo outer $INFINI_RUN_ID; exec "$@"', "sh", *inner)
    assert done.code == 0, done.err
    lines = done.out.decode().split("\n")[:-1]
    ids = {line.split()[1] for line in lines if line.startswith("0/1 ")}
    assert len(ids) == 2
    assert f"outer {ids.pop()}" not in lines


# ---- the report


def test_the_json_report_says_how_every_rank_ended(ended, tmp_path):
    path = tmp_path / "report.json"
    script = '[ "$RANK" = 1 ] || exec sleep 600; echo boom >&2; exit 3'
    before = time.time()
    done = ended(
        "--nproc_per_node=3", "--run_id=r", f"--report={path}", f"--log_dir={tmp_path}/logs", "sh", "-c", script
    )
    report = json.loads(path.read_text())
    assert done.code == report["exit_code"] == 3
    assert report["first_failure"] == 1
    assert (report["run_id"], report["host"], report["world_size"]) == ("r", HOST, 3)
    assert before - 1 < report["start"] <= report["end"] < time.time() + 1
    for number, rank in enumerate(report["ranks"]):
        assert (rank["rank"], rank["local_rank"], rank["host"]) == (number, number, HOST)
        assert report["start"] <= rank["start"] <= rank["end"] <= report["end"]
        assert rank["log"] == f"{tmp_path}/logs/rank_{number}.log"
        assert rank["rusage"]["max_rss_kib"] > 0
        assert rank["pid"] > 1
        assert (rank["failed"], rank["stopped"]) == (number == 1, number != 1)
    assert [rank["exit_code"] for rank in report["ranks"]] == [None, 3, None]
    assert [rank["signal"] for rank in report["ranks"]] == ["SIGTERM", None, "SIGTERM"]
    assert report["ranks"][1]["last_lines"] == ["boom"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["logs", "report.json"]


def test_a_report_replaces_an_earlier_one_and_is_written_on_success_too(ended, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    assert ended("--report=report.json", "true", cwd=tmp_path).code == 0
    report = json.loads(path.read_text())
    assert (report["exit_code"], report["first_failure"], report["ranks"][0]["exit_code"]) == (0, None, 0)


def test_a_report_is_written_when_we_are_told_to_stop(infini_run, bell, tmp_path):
    command = infini_run(f"--report={tmp_path}/report", "sh", "-c", IDLE, bell.path)
    bell.hear(1)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    report = json.loads((tmp_path / "report").read_text())
    assert (report["exit_code"], report["received_signal"], report["ranks"][0]["stopped"]) == (143, "SIGTERM", True)


# ---- the failure's ten lines


def test_a_failure_is_told_in_ten_lines_with_all_that_helps(ended, tmp_path):
    script = """
        [ "$RANK" = 2 ] || exec sleep 600
        printf '{"message": {"message": "CUDA out of memory"}}' > "$TORCHELASTIC_ERROR_FILE"
        i=0; while [ $i -lt 40 ]; do echo "line $i" >&2; i=$((i+1)); done
        kill -ABRT $$
    """
    done = ended("--nproc_per_node=4", f"--log_dir={tmp_path}/logs", "--console=none", "sh", "-c", script)
    assert done.code == 128 + signal.SIGABRT
    lines = done.err.decode().splitlines()
    assert len(lines) <= 10
    pid = json.dumps(lines[0])
    assert lines[0].startswith(f"infini-run: rank 2 on {HOST} failed: killed by SIGABRT")
    assert " (pid " in pid
    assert ", after " in lines[0]
    assert lines[0].endswith("; 3 others were stopped")
    assert "  error: CUDA out of memory" in lines
    assert [line for line in lines if line.startswith("  | ")] == [f"  | line {i}" for i in range(35, 40)]
    assert f"  log: {tmp_path}/logs/rank_2.log" in lines


def test_success_says_nothing_at_all(ended):
    done = ended("--nproc_per_node=4", "true")
    assert (done.code, done.out, done.err) == (0, b"", b"")


def test_last_words_are_kept_even_of_a_rank_that_was_not_shown(ended):
    done = ended("--console=none", "sh", "-c", "echo secret; echo why >&2; exit 1")
    assert done.out == b""
    assert done.err.decode().splitlines()[1:] == ["  | why"]


def test_verbose_says_what_is_done(ended):
    done = ended("--verbose", "--nproc_per_node=2", "sh", "-c", "exit 0")
    lines = done.err.decode().splitlines()
    assert lines[0].startswith("infini-run: started 2 of 2 ranks of ir-")
    assert sorted(lines[1:]) == [f"infini-run: rank {rank} exited, exit code 0" for rank in (0, 1)]


# ---- what a rank gets


def test_two_launchers_by_hand_make_one_world(infini_run, ended, tmp_path):
    """Rank 0 listens where every rank was told to; the ranks of both nodes come to it."""
    rank = """
import os, socket
at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    server = socket.create_server(at)
    open(os.environ["READY"], "w").close()
    names = {"0"}
    while len(names) < int(os.environ["WORLD_SIZE"]):
        peer, _ = server.accept()
        names.add(peer.recv(10).decode())
        peer.close()
    print(*sorted(names))
    server.close()
else:
    while not os.path.exists(os.environ["READY"]):
        pass
    peer = socket.create_connection(at)
    peer.sendall(os.environ["RANK"].encode())
    peer.recv(1)
    peer.close()
"""
    environ = dict(os.environ, READY=str(tmp_path / "ready"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = "--nnodes=2", "--nproc_per_node=2", f"--rdzv_endpoint=127.0.0.1:{port}"
    first = infini_run(*flags, "--node_rank=0", sys.executable, "-SE", "-c", rank, env=environ)
    until(lambda: (tmp_path / "ready").exists())
    second = ended(*flags, "--node_rank=1", sys.executable, "-SE", "-c", rank, env=environ)
    assert (first.wait(), second.code) == (0, 0), (first.err, second.err)
    assert first.out == b"0 1 2 3\n"


@pytest.mark.parametrize("flag", ["--standalone", "--master_port=0", "--rdzv_endpoint=localhost:0"])
def test_a_free_port_is_the_same_for_all_and_free(flag, ended):
    done = ended(flag, "--nproc_per_node=3", "sh", "-c", "echo $MASTER_PORT")
    (port,) = set(done.out.split())
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(port)))


def test_the_folder_for_error_files_goes_with_us(ended):
    done = ended(
        "--nproc_per_node=2", "sh", "-c", 'echo "$TORCHELASTIC_ERROR_FILE"; echo x > "$TORCHELASTIC_ERROR_FILE"'
    )
    folders = {os.path.dirname(line) for line in done.out.decode().split()}
    assert len(folders) == 1
    assert not os.path.exists(folders.pop())


@pytest.mark.parametrize(
    "mess",
    ['echo x > "$d/more"', 'mkdir "$TORCHELASTIC_ERROR_FILE"', 'mkdir -p "$d/a/b"; echo > "$d/a/b/c"', 'rm -r "$d"'],
)
def test_what_ranks_do_to_that_folder_is_no_failure_of_ours(mess, ended):
    script = f'd=$(dirname "$TORCHELASTIC_ERROR_FILE"); echo "$d"; {mess}'
    done = ended("sh", "-c", script)
    assert (done.code, done.err) == (0, b"")
    assert not os.path.exists(done.out.decode().strip())


def test_error_files_of_an_earlier_launch_are_not_taken_for_this_ones(ended, tmp_path):
    script = 'echo old > "$TORCHELASTIC_ERROR_FILE"; exit 1'
    assert b"error: old" in ended(f"--log_dir={tmp_path}", "sh", "-c", script).err
    assert b"error: old" not in ended(f"--log_dir={tmp_path}", "sh", "-c", "exit 1").err


def test_a_rank_inherits_the_users_descriptors_and_none_of_ours(ended):
    read, write = os.pipe()
    try:
        script = "ls /proc/self/fd | sort -n | tr '\\n' ' '"
        bare = subprocess.run(["sh", "-c", script], pass_fds=[write], capture_output=True, check=True)
        for flags in ([], ["--console=prefix"]):
            done = ended(*flags, "sh", "-c", script, pass_fds=[write])
            assert done.out.removeprefix(b"[rank 0] ").split() == bare.stdout.split()
    finally:
        os.close(read)
        os.close(write)


# ---- what it costs


FORBIDDEN = {
    *("re", "typing", "dataclasses", "json", "pathlib", "tempfile", "enum", "signal", "threading"),
    *("os", "socket", "subprocess", "argparse", "logging", "inspect", "collections", "functools", "pynvml"),
}
PLAIN = {
    "infini_run",
    *(
        f"infini_run.{name}"
        for name in (
            "_irun",
            "cli",
            "errors",
            "lean_os",
            "options",
            "options.grammar",
            "options.launch_options",
            "core",
            "core.c_structs",
            "core.group",
            "value_types",
            "node",
            "node.group_setup",
            "node.launch",
            "options.table",
            "options.options",
            "plan",
            "plan.model",
            "plan.planner",
            "record",
            "node.resources",
            "plan.program",
        )
    ),
}


# is imported once a launch takes more than 20 ms, as on a busy machine `true` may
LONGER = {"infini_run.system", "infini_run.system.cgroup"}


def own_memory():
    """Words that give a command a /dev/shm of its own: a killed launch's folder there costs imports. Without root
    another launch removes those first."""
    if os.geteuid() == 0:
        mount = 'mount -t tmpfs none /dev/shm; exec "$@"'
        return ("unshare", "-m", "--propagation=private", "sh", "-ec", mount, "sh")
    ask(sys.executable, "-m", "infini_run", "true")
    return ()


@pytest.mark.parametrize("nproc", [1, 4])
def test_a_plain_launch_imports_these_modules_and_no_others(nproc):
    roots = [str(Path(package.__path__[0]).parent), str(Path(_cffi_backend.__file__).parent)]
    code = f"import sys; sys.path += {roots}; from infini_run.cli import main; main()"
    argv = [sys.executable, "-S", "-X", "importtime", "-c", code]
    lines = ask(*own_memory(), *argv, f"--nproc_per_node={nproc}", "true").stderr.splitlines()
    loaded = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert {name for name in loaded if name.startswith("infini_run")} - LONGER == PLAIN
    assert loaded.isdisjoint(FORBIDDEN)
    bare = ask(sys.executable, "-S", "-X", "importtime", "-c", "pass").stderr.splitlines()
    others = loaded - {line.rpartition("|")[2].strip() for line in bare} - PLAIN - LONGER
    assert others <= {
        "__future__",
        "_cffi_backend",
        "gc",
        "errno",
        "posixpath",
        "genericpath",
        "_stat",
        "stat",
        "os",
    } | {"_collections_abc"}


def test_before_anything_is_started_a_signal_ends_the_command(infini_run, tmp_path):
    os.mkfifo(tmp_path / "flags")
    command = infini_run(f"--flagfile={tmp_path}/flags", "true")
    until(lambda: b"fifo" in Path(f"/proc/{command.pid}/wchan").read_bytes() or blocked_in_open(command.pid))
    command.signal(signal.SIGTERM)
    assert command.wait() == -signal.SIGTERM


def blocked_in_open(pid):
    """It has come as far as its flags, and waits for whoever writes them."""
    return Path(f"/proc/{pid}/syscall").read_text().startswith(("257 ", "56 ", "2 "))


def test_an_answer_that_cannot_be_written_is_a_failure(infini_run):
    with open("/dev/full", "wb") as full:
        command = infini_run("--dry_run=json", "true", stdout=full)
        assert command.wait() == 1
    assert command.err == b"infini-run: the answer cannot be written: No space left on device\n"


def test_a_name_cannot_steer_the_terminal_or_break_the_line(infini_run):
    command = infini_run("./no\n\x1b[31msuch")
    assert command.wait() == 127
    assert command.err.count(b"\n") == 1
    assert b"\x1b" not in command.err


def test_a_report_that_is_refused_later_is_not_the_earlier_one(infini_run, tmp_path):
    assert infini_run(f"--report={tmp_path}/r", "true").wait() == 0
    assert infini_run(f"--report={tmp_path}/r", "--log_dir=/proc/nowhere", "true").wait() == 2
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("spelling", ["logs", "./logs/", "new/logs"])
def test_a_report_and_a_trace_may_lie_in_the_folder_of_logs_that_is_not_there_yet(infini_run, tmp_path, spelling):
    targets = [f"--report={spelling}/r.json", f"--trace={spelling}/t.json"]
    for flags in (targets[:1], targets[1:], targets):
        command = infini_run(*flags, f"--log_dir={spelling}", "true", cwd=tmp_path)
        assert (command.wait(), command.err) == (0, b"")
        assert len(os.listdir(tmp_path / spelling)) == 1 + len(flags)
        shutil.rmtree(tmp_path / spelling)


@pytest.mark.parametrize("flag", ["report", "trace"])
@pytest.mark.parametrize("target", ["logs/deeper/x.json", "other/x.json"])
def test_no_other_folder_is_made_for_a_report_or_a_trace(infini_run, tmp_path, flag, target):
    command = infini_run(f"--{flag}={target}", "--log_dir=logs", "true", cwd=tmp_path)
    assert command.wait() == 2
    assert command.err.startswith(f"infini-run: --{flag}={target} cannot be written: No such file".encode())
    assert os.listdir(tmp_path) == []


def test_nodes_that_cannot_meet_are_told(infini_run):
    command = infini_run("--nnodes=2", "true")
    assert command.wait() == 0
    assert b"add --rdzv_endpoint=HOST:PORT of node 0" in command.err
