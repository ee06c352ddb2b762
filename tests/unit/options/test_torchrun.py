"""Moving over from torchrun: every option of its own works, has no effect, or is refused, as
docs/reference/torchrun.md says. The tests with torch itself are in test_torch.py."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

from infini_run.errors import UsageError
from infini_run.options.grammar import Setting
from infini_run.options.options import resolve
from infini_run.options.table import TABLE
from infini_run.options.torchrun import translate
from infini_run.system.secure_files import open_logs
from tests.support.command import COMMAND
from tests.support.paths import ROOT
from tests.support.plans import plan_of
from tests.support.torchrun_parser import options_of, torchrun_source

DOCUMENT = ROOT / "docs" / "reference" / "torchrun.md"
GOLDEN = ROOT / "tests" / "support" / "golden" / "torchrun-2.15.0.txt"  # of the newest torch that we compared with
NEWEST = tuple(map(int, GOLDEN.stem.rpartition("-")[2].split(".")))
ROW = re.compile(r"^\| `--(?P<name>[a-z-]+)` \| (`(?P<variable>\w+)`)? ?\| (?P<fate>works|no effect|refused) \|")
FATES = {"": "works", "ignored": "no effect", "refused": "refused"}  # in the help, in the document
# a value that makes a difference where the flag works, and is allowed where it has none
VALUES = {
    "nnodes": "2:2",
    "nproc_per_node": "3",
    "node_rank": "1",
    "master_addr": "h",
    "master_port": "7",
    "local_addr": "10.0.0.1",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "h:7",
    "rdzv_id": "job",
    "rdzv_conf": "timeout=900,join_timeout=60",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "event_log_handler": "console",
    "role": "trainer",
    "log_dir": "logs",
    "redirects": "0:1,11:3",
    "tee": "11:3",
    "local_ranks_filter": "0,11",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "120",
    "log_line_prefix_template": "${hostname}:${rank}: ",
}
WITH = {  # what else must be said for the value to be allowed
    "node_rank": ["--nnodes=2"],
    "redirects": ["--log_dir=x", "--nproc_per_node=12"],
    "tee": ["--nproc_per_node=12"],
    "local_ranks_filter": ["--nproc_per_node=12"],
}
ASKS = {"help", "print_completion"}  # they are answered, not resolved
ELSEWHERE = {"max_restarts", "numa_binding"}  # tested with what they stand for


def test_the_time_that_nodes_have_to_join_is_torchs_too():
    assert resolve(["--rdzv_conf=timeout=9,join_timeout=600", "x"], {}).options.join_timeout_s == 600
    assert resolve(["--join_timeout=5", "x"], {"PET_RDZV_CONF": "join_timeout=600"}).options.join_timeout_s == 5
    assert resolve(["--rdzv_conf=timeout=9", "x"], {}).options.join_timeout_s == 300
    with pytest.raises(UsageError, match="join_timeout: "):
        resolve(["--rdzv_conf=join_timeout=soon", "x"], {})
    with pytest.raises(UsageError, match="conflicts with"):
        resolve(["--rdzv_conf=join_timeout=600", "--join_timeout=5", "x"], {})


def rows():
    found = [ROW.match(line) for line in DOCUMENT.read_text().splitlines()]
    return {m["name"].replace("-", "_"): (m["variable"] or "", m["fate"]) for m in found if m}


DOCUMENTED = rows()


def options(*words, **environ):
    return resolve([*words, "program"], environ).options


def golden():
    rows = [line.split() for line in GOLDEN.read_text().splitlines()]
    return {name: (short.strip("-"), variable.strip("-")) for name, short, variable in rows}


def test_document_and_table_have_every_option_of_torchrun():
    theirs = golden()
    assert {name: variable for name, (_, variable) in theirs.items()} == {
        name: variable
        for name, (variable, _) in DOCUMENTED.items()
        if name != "help"  # argparse's own
    }
    for name, (short, _) in theirs.items():
        assert not short or TABLE[short][0] is TABLE[name][0]


@pytest.mark.parametrize("page", ["README.md", "docs/torchrun.md", "docs/tour.md"])
def test_pages_name_the_newest_torchrun_compared(page):
    assert f" of torchrun {NEWEST[0]}.{NEWEST[1]}" in " ".join((ROOT / page).read_text().split())


def test_installed_torchrun_has_only_known_options():
    """TEST_TORCH_WHEEL names the wheel of a torch that is newer than the one that can be installed."""
    found = torchrun_source()
    if found is None:
        pytest.skip("no torch here, and TEST_TORCH_WHEEL names no wheel")
    source, version = found
    theirs, known = options_of(source), golden()
    assert {"nnodes", "nproc_per_node", "log_dir"} <= theirs.keys()
    assert theirs.items() <= known.items()
    if tuple(map(int, version.split("."))) == NEWEST:
        assert theirs == known


def test_completion_answers_to_torchruns_name():
    for shell in ("bash", "zsh"):
        said = [
            subprocess.run([*COMMAND, f"--{flag}={shell}"], capture_output=True, text=True)
            for flag in ("print-completion", "completion")
        ]
        assert said[0].stdout == said[1].stdout
        assert "infini-run" in said[0].stdout
    refused = subprocess.run([*COMMAND, "--print-completion=tcsh"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "bash, zsh, fish" in refused.stderr


def test_the_document_has_a_row_for_each_of_torchruns_flags_that_we_know():
    assert len(DOCUMENTED) == 33
    theirs = {flag.name for flag, _, _ in TABLE.values() if flag.group == "torchrun"}
    assert theirs <= DOCUMENTED.keys() <= TABLE.keys()


def test_the_help_text_says_what_the_document_says():
    for name, (_, fate) in DOCUMENTED.items():
        text = TABLE[name][0].help
        word = next((word for word in FATES if text.startswith(word + ": ")), "")
        assert FATES[word] == fate, name


@pytest.mark.parametrize(
    "name", [n for n, (_, fate) in DOCUMENTED.items() if fate != "refused" and n not in ASKS | ELSEWHERE]
)
def test_working_flags_make_a_difference_and_others_none(name):
    variable, fate = DOCUMENTED[name]
    more = WITH.get(name, [])
    ways = [options(*more, **{variable: VALUES.get(name, "1")})]
    for spelling in ("--" + name, "--" + name.replace("_", "-")):
        ways.append(options(*more, *([spelling, VALUES[name]] if name in VALUES else [spelling])))
    for got in ways:
        assert (got != options(*more)) == (fate == "works")


def test_a_flag_that_is_refused_says_what_to_use():
    refused = [name for name, (_, fate) in DOCUMENTED.items() if fate == "refused"]
    for name in refused:
        with pytest.raises(UsageError) as caught:
            options(f"--{name}=1")
        line = str(caught.value)
        assert line.startswith(f"--{name}=1: ")
        assert "--log_dir" in line or "use the script" in line
    assert len(refused) == 4


def test_the_short_forms_are_known():
    assert {"r", "t", "m", "h"} <= TABLE.keys()


MET = (
    ("--nnodes=1:4", "set the same INFINI_RUN_TOKEN=... on every node"),
    ("--nnodes=4:", "expected 1"),
    ("--rdzv_conf=fast", "--rdzv_endpoint=HOST:PORT for the address of rank 0, and --ready_timeout"),
    ("--rdzv_conf==3", "expected K=V,..."),
    ("--rdzv_backend=etcd-v2", "--rdzv_endpoint=HOST:PORT for the address of rank 0"),
    ("--start_method=thread", "expected spawn, fork, or forkserver"),
    ("--monitor_interval=often", "a time from 0"),
    ("--local_addr=a,b", "a host name or an address"),
    ("--signals_to_handle=SIGTERM,SIGKILL", "SIGKILL: not a signal that can be handled"),
    ("--signals_to_handle=SIGFOO", "TERM, INT, and QUIT stop the job, and HUP, USR1, and others reach"),
    ("--numa_binding=nodes", "did you mean node?"),
    ("--virtual_local_rank --gpus_per_proc=0", "; drop one of them"),
    ("--redirects=3", "needs a file; add --log_dir=DIR (--log_dir=/dev/null drops"),
    ("--log_layout=torchrun --log_dir=x --rdzv_id=a/b", "cannot contain /, because --log_layout=torchrun"),
    ("--log_layout=elastic", "expected flat or torchrun"),
    ("--nproc_per_node=xpu", "expected 1 to"),
)


def test_what_a_user_of_torchrun_meets_says_what_to_type():
    for flags, message in MET:
        with pytest.raises(UsageError) as caught:
            options(*flags.split())
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


# ---- what stands for a flag of ours


@pytest.mark.parametrize(
    ("kind", "bind"), [("node", "numa"), ("socket", "socket"), ("exclusive", "cores"), ("core-complex", "cores")]
)
def test_numa_binding_is_a_way_to_bind(kind, bind):
    given = {"numa_binding": Setting(value=kind, origin=f"--numa_binding={kind}", precedence=0)}
    translate(given)
    assert given["bind"] == Setting(value=bind, origin=f"--numa_binding={kind}", precedence=0)


def test_a_way_to_bind_of_ours_beats_numa_binding_by_authority_only():
    bind = Setting(value="none", origin="--bind=none", precedence=0)
    numa = Setting(value="node", origin="PET_NUMA_BINDING=node", precedence=2)
    given = {"numa_binding": numa, "bind": bind}
    translate(given)
    assert given["bind"] == bind
    with pytest.raises(UsageError, match="drop one of them"):
        translate({"numa_binding": Setting(value="node", origin="--numa_binding=node", precedence=0), "bind": bind})


def test_virtual_local_rank_gives_each_rank_a_gpu_where_nobody_said_how_many():
    assert options("--virtual_local_rank").gpus_per_proc == 1
    assert options("--virtual_local_rank", "--gpus_per_proc=2").gpus_per_proc == 2
    assert options("--novirtual_local_rank").gpus_per_proc == 0
    assert options("--virtual_local_rank", INFINI_RUN_GPUS_PER_PROC="0").gpus_per_proc == 1
    without = options("--gpus_per_proc=0", PET_VIRTUAL_LOCAL_RANK="1")
    assert (without.gpus_per_proc, without.virtual_local_rank) == (0, False)
    assert options("--gpus_per_proc=0", PET_VIRTUAL_LOCAL_RANK="1").gpus_per_proc == 0


def test_the_shutdown_timeout_of_the_environment_is_read_last():
    theirs = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
    assert options(**theirs).grace_s == 120.0
    assert options("--grace=3", **theirs).grace_s == 3.0
    assert options(PET_SHUTDOWN_TIMEOUT="4", **theirs).grace_s == 4.0
    with pytest.raises(UsageError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon: not a time from 0"):
        options(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon")


def test_tee_without_a_folder_labels_the_console():
    assert options("--tee=3").console == "prefix"
    assert options("--tee=3", "--console=none").console == "none"
    assert options("--tee=0").console == "auto"


def test_logs_in_dev_null_are_no_logs():
    got = options("--log_dir=/dev/null", "--redirects=1")
    assert (got.log_dir, got.console, got.redirects.others) == ("", "auto", 1)


def test_a_virtual_local_rank_is_always_0_and_the_others_stay_what_they_are():
    plan = plan_of("--nproc_per_node=2", "--virtual_local_rank", devices=(("4",), ("6",)))
    seen = [plan.environ(worker, {}) for worker in plan.workers]
    names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_PROC_RANK", "LOCAL_WORLD_SIZE")
    assert [[one[name] for name in names] for one in seen] == [["0", "4", "0", "0", "2"], ["0", "6", "1", "1", "2"]]


def test_the_layout_of_torchrun_goes_by_local_rank_and_its_error_file_is_absolute():
    flags = "--nnodes=2", "--node_rank=1", "--log_dir=logs", "--log_layout=torchrun"
    (worker,) = plan_of(*flags, error_dir="/home/logs").workers
    folder = "none_1/node_1/attempt_0/0"
    assert (worker.log, worker.error_log) == (f"logs/{folder}/stdout.log", f"logs/{folder}/stderr.log")
    assert worker.error_file == f"/home/logs/{folder}/error.json"


def test_the_folder_of_the_layout_of_torchrun_has_the_run_id_that_ranks_see():
    for flags, expected in ((["--standalone"], None), (["--standalone", "--rdzv_id=job"], "job"), ([], "none")):
        plan = plan_of(*flags, "--log_dir=logs", "--log_layout=torchrun")
        (worker,) = plan.workers
        run_id = plan.environ(worker, {})["TORCHELASTIC_RUN_ID"]
        assert worker.log.startswith(f"logs/{run_id}_")
        assert run_id == (expected or plan.launch_id)


# ---- for real


def test_what_is_redirected_to_dev_null_is_dropped_but_not_the_last_words(infini_run):
    command = infini_run("-r", "3", "--log-dir", "/dev/null", "sh", "-c", "echo out; echo why >&2; exit 3")
    assert command.wait() == 3
    assert command.out == b""
    assert command.err.count(b"why") == 1
    assert b"  | why\n" in command.err


def torchrun_logs(folder):
    (run,) = os.listdir(folder)
    files = {str(path.relative_to(folder / run)): path for path in (folder / run).rglob("*") if path.is_file()}
    return run, {name: path.read_bytes() for name, path in files.items()}


def test_the_layout_of_torchrun_has_its_names_and_its_streams_apart(infini_run, tmp_path):
    script = 'printf out$RANK; echo err$RANK >&2; echo more; echo "boom" > $TORCHELASTIC_ERROR_FILE; exit $RANK'
    command = infini_run(
        *("--nproc_per_node=2", "--rdzv_id=job", f"--log_dir={tmp_path}", "--log_layout=torchrun", "--keep_going"),
        *("sh", "-c", script),
    )
    assert command.wait() == 1
    run, files = torchrun_logs(tmp_path)
    assert re.fullmatch("job_[0-9a-f]{12}", run)
    expected = {}
    for rank in (0, 1):
        expected[f"attempt_0/{rank}/stdout.log"] = b"out%dmore\n" % rank
        expected[f"attempt_0/{rank}/stderr.log"] = b"err%d\n" % rank
        expected[f"attempt_0/{rank}/error.json"] = b"boom\n"
    assert files == expected
    assert b"error: boom\n" in command.err
    assert f"log: {tmp_path}/{run}/attempt_0/1/stderr.log\n".encode() in command.err
    assert sorted(command.out.splitlines()) == [b"[rank 0] out0more", b"[rank 1] out1more"]


def test_every_attempt_has_its_own_files_in_the_layout_of_torchrun(infini_run, tmp_path):
    count = "$TORCHELASTIC_RESTART_COUNT"
    script = f"echo out {count}; echo boom {count} > $TORCHELASTIC_ERROR_FILE; exit 3"
    flags = "--max_restarts=1", "--restart_delay=0", f"--log_dir={tmp_path}", "--log_layout=torchrun"
    command = infini_run(*flags, "sh", "-c", script)
    assert command.wait() == 3
    run, files = torchrun_logs(tmp_path)
    assert {name: text for name, text in files.items() if "stderr" not in name} == {
        f"attempt_{i}/0/{name}": b"%s %d\n" % (word, i)
        for i in (0, 1)
        for name, word in (("stdout.log", b"out"), ("error.json", b"boom"))
    }
    assert b"error: boom 1\n" in command.err
    assert f"log: {tmp_path}/{run}/attempt_1/0/stderr.log\n".encode() in command.err


def test_a_second_run_in_the_layout_of_torchrun_has_a_folder_of_its_own(infini_run, tmp_path):
    for _ in range(2):
        assert infini_run(f"--log_dir={tmp_path}", "--log_layout=torchrun", "true").wait() == 0
    assert sorted(name.partition("_")[0] for name in os.listdir(tmp_path)) == ["none", "none"]


def test_the_layout_of_torchrun_keeps_every_byte_of_a_rank_that_was_killed(infini_run, tmp_path):
    script = (
        "i=0; while [ $i -lt 2000 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done; printf x; printf y >&2; kill -9 $$"
    )
    command = infini_run(f"--log_dir={tmp_path}", "--log_layout=torchrun", "--console=none", "sh", "-c", script)
    assert command.wait() == 137
    _, files = torchrun_logs(tmp_path)
    assert files["attempt_0/0/stdout.log"] == b"".join(b"o%d\n" % i for i in range(2000)) + b"x"
    assert files["attempt_0/0/stderr.log"] == b"".join(b"e%d\n" % i for i in range(2000)) + b"y"


def test_a_file_in_the_way_of_a_log_is_one_line_before_anything_starts(tmp_path):
    (tmp_path / "logs").write_text("")
    argv = [*COMMAND, f"--log_dir={tmp_path}/logs", "--log_layout=torchrun", "touch", f"{tmp_path}/started"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "started").exists()


def test_a_link_in_the_way_of_a_ranks_folder_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs" / "none_1").mkdir(parents=True)
    (tmp_path / "logs" / "none_1" / "attempt_0").symlink_to(tmp_path / "elsewhere")
    plan = plan_of(f"--log_dir={tmp_path}/logs", "--log_layout=torchrun", error_dir=f"{tmp_path}/logs")
    logs, error_logs = {}, {}
    with pytest.raises(UsageError, match="the folder none_1/attempt_0/0 cannot be made in it: Not a directory"):
        open_logs(f"{tmp_path}/logs", plan.workers, logs, error_logs)
    assert (logs, error_logs, list((tmp_path / "elsewhere").iterdir())) == ({}, {}, [])


def test_arguments_of_the_program_are_no_templates():
    words = ["$$5", "${local_rank}", "$local_rank", "--r=16", "--max=3", "--n=3"]
    argv = [*COMMAND, sys.executable, "-c", "import sys; print(sys.argv[1:])", *words]
    assert subprocess.run(argv, capture_output=True, text=True).stdout == f"{words}\n"


LISTEN = "import os, socket; socket.create_server(('', int(os.environ['MASTER_PORT'])))"


def test_a_port_that_is_in_use_is_named_with_the_way_out(infini_run):
    with socket.create_server(("", 0)) as theirs:
        port = theirs.getsockname()[1]
        command = infini_run(f"--master_port={port}", sys.executable, "-c", LISTEN)
        assert command.wait() == 1
        hint = f"  next: port {port} is in use by another program; add --standalone for a free one\n"
        assert command.err.decode().endswith(hint)
        command = infini_run(f"--rdzv_endpoint=127.0.0.1:{port}", "--nnodes=2", sys.executable, "-c", LISTEN)
        assert command.wait() == 1
        assert command.err.endswith(b"; set another --rdzv_endpoint=HOST:PORT on every node\n")
    command = infini_run(f"--master_port={port}", "false")
    assert command.wait() == 1
    assert b"port" not in command.err
