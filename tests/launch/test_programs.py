"""Several programs in one job, with real processes: their worlds, one first failure, one end, nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

import pytest

import infini_run as ir
from infini_run.display.event_schema import OF_PROGRAMS
from tests.launch.test_control import listed
from tests.support.nvml import FOUR, driver, stub_folder  # noqa: F401
from tests.support.processes import is_alive, marked

HOST = os.uname().nodename
SERVER = """
import os, socket
server = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
print("got", server.accept()[0].recv(9).decode())
"""
CLIENT = """
import json, os, socket, time
server = next(each for each in json.loads(os.environ["JOB_PROGRAMS"]) if each["name"] == "server")
while True:
    try:
        connection = socket.create_connection((server["addr"], server["port"]))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
connection.sendall(b"hello")
"""


def two(first, second, *flags, name="a", other="b", counts=(1, 1), of_first=(), of_second=()):
    """The words of a job of two programs."""
    words = [*flags, f"--program={name}", f"--nproc_per_node={counts[0]}", *of_first, *first, ":"]
    return [*words, f"--program={other}", f"--nproc_per_node={counts[1]}", *of_second, *second]


def sh(script):
    return ["sh", "-c", script]


def report_of(path):
    return json.loads(path.read_text())


def test_each_rank_sees_its_own_world(infini_run, every_path):
    says = sh("echo $ROLE_NAME $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $ROLE_RANK/$ROLE_WORLD_SIZE")
    command = infini_run(*two(says, says, counts=(2, 1)))
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == [
        "[a 0] a 0/2 0/2 0/2",
        "[a 1] a 1/2 1/2 1/2",
        "[b 0] b 0/1 0/1 0/1",
    ]


def test_one_world_counts_through(infini_run):
    says = sh("echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $ROLE_RANK/$ROLE_WORLD_SIZE $MASTER_PORT")
    command = infini_run(*two(says, says, "--one_world", "--master_port=4000", counts=(2, 1)))
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == [
        "[a 0] 0/3 0/3 0/2 4000",
        "[a 1] 1/3 1/3 1/2 4000",
        "[b 0] 2/3 2/3 0/1 4000",
    ]


def test_each_program_finds_the_port_of_the_other(infini_run):
    """A server listens on its MASTER_PORT, and a client of another program finds it by JOB_PROGRAMS."""
    server = [sys.executable, "-c", SERVER]
    client = [sys.executable, "-c", CLIENT]
    command = infini_run(*two(client, server, name="client", other="server"))
    assert command.wait() == 0, command.err
    assert command.out == b"[server 0] got hello\n"


def test_failure_of_one_program_ends_all(infini_run, tmp_path, every_path):
    words = two(sh("echo up; exec sleep 1000"), sh('test "$RANK" = 1 || exec sleep 1000; exit 7'), counts=(2, 2))
    command = infini_run(f"--report={tmp_path}/r", *words)
    assert command.wait() == 7
    assert command.err.startswith(f"infini-run: b 1 on {HOST} failed: exit code 7 (pid ".encode())
    assert b"; 3 others were stopped" in command.err
    report = report_of(tmp_path / "r")
    assert report["first_failure"] == 3
    assert report["world_size"] == 4
    assert [(each["rank"], each["program"], each["program_rank"]) for each in report["ranks"]] == [
        (0, "a", 0), (1, "a", 1), (2, "b", 0), (3, "b", 1),
    ]  # fmt: skip
    assert not marked(f"INFINI_RUN_ID={report['launch_id']}".encode())


def test_job_ends_when_all_programs_end(infini_run, bell):
    command = infini_run(*two(sh("true"), sh(f"read go < {bell.path}; echo last")))
    bell.ring("go")
    assert command.wait() == 0
    assert command.out == b"[b 0] last\n"


def test_good_end_of_ends_job_stops_the_others(infini_run, tmp_path, every_path):
    words = two(sh("exec sleep 1000"), sh("exit 0"), counts=(2, 2), of_second=("--ends_job",))
    command = infini_run(f"--report={tmp_path}/r", *words)
    assert command.wait() == 0
    assert command.err == b""
    report = report_of(tmp_path / "r")
    assert (report["ended_by"], report["exit_code"]) == ("b", 0)
    assert [each["stopped"] for each in report["ranks"]] == [True, True, False, False]


def test_ends_job_gives_the_others_their_grace(infini_run, bell):
    saves = sh(f"trap 'echo saved; exit 3' TERM; echo go > {bell.path}; while :; do sleep 0.05; done")
    command = infini_run(*two(saves, sh(f"read go < {bell.path}"), of_second=("--ends_job",)))
    assert command.wait() == 0
    assert command.out.splitlines()[-1] == b"[a 0] saved"


def test_failure_of_ends_job_is_the_job_s(infini_run):
    command = infini_run(*two(sh("exec sleep 1000"), sh("exit 5"), of_second=("--ends_job",)))
    assert command.wait() == 5
    assert command.err.startswith(f"infini-run: b 0 on {HOST} failed: exit code 5".encode())


def test_signal_stops_all_programs(infini_run):
    up = sh("echo up $$; exec sleep 1000")
    command = infini_run(*two(up, up))
    pids = [int(command.read_lines(start)[0][-1]) for start in (b"[a 0]", b"[b 0]")]
    command.signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in pids)


def test_logs_are_in_a_folder_per_program(infini_run, tmp_path):
    says = sh("echo $ROLE_NAME $RANK; echo e >&2")
    command = infini_run(f"--log_dir={tmp_path}/logs", *two(says, says, counts=(2, 1)))
    assert command.wait() == 0, command.err
    found = {str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log")}
    assert found == {"a/rank_0.log", "a/rank_1.log", "b/rank_0.log"}
    assert (tmp_path / "logs/b/rank_0.log").read_text().splitlines()[0] == "b 0"


def test_logs_of_a_program_are_in_its_own_folder(infini_run, tmp_path):
    says = sh("echo $ROLE_NAME $RANK")
    flags, of_second = (f"--log_dir={tmp_path}/logs",), (f"--log_dir={tmp_path}/own/b",)
    (tmp_path / "own").mkdir()
    command = infini_run(*two(says, says, *flags, f"--report={tmp_path}/r", counts=(2, 1), of_second=of_second))
    assert command.wait() == 0, command.err
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log")}
    assert found == {"logs/a/rank_0.log", "logs/a/rank_1.log", "own/b/rank_0.log"}
    assert (tmp_path / "own/b/rank_0.log").read_text().splitlines()[0] == "b 0"
    assert report_of(tmp_path / "r")["ranks"][2]["log"] == f"{tmp_path}/own/b/rank_0.log"


def test_one_program_alone_has_logs(infini_run, tmp_path):
    says = sh("echo $ROLE_NAME; test $ROLE_NAME = a || exit 3")
    command = infini_run(*two(says, says, of_second=("--log_dir=own",)), cwd=tmp_path)
    assert command.wait() == 3
    assert (tmp_path / "own/rank_0.log").read_text() == "b\n"
    assert not (tmp_path / "own/b").exists()
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log")} == {"own/rank_0.log"}


def test_folder_of_a_program_is_no_link(infini_run, tmp_path):
    """A stranger who may write to --log_dir does not choose where logs go."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs/b").symlink_to(tmp_path / "elsewhere")
    command = infini_run(f"--log_dir={tmp_path}/logs", *two(["true"], ["true"]))
    assert command.wait() == 2
    assert command.err.startswith(b"infini-run: --log_dir: the folder b cannot be made in it: ")
    assert not os.listdir(tmp_path / "elsewhere")


def test_isolated_job_has_its_programs(infini_run):
    says = sh("echo $ROLE_NAME $RANK/$WORLD_SIZE $$")
    command = infini_run("--isolate", *two(says, says))
    if command.wait() == 1 and b"namespace" in command.err:
        pytest.skip("namespaces are not permitted here")
    assert command.wait() == 0, command.err
    assert {line.split()[2] for line in command.out.decode().splitlines()} == {"a", "b"}


def test_keep_going_lets_all_programs_finish(infini_run):
    command = infini_run("--keep_going", *two(sh("sleep 0.3; echo done"), sh("exit 6")))
    assert command.wait() == 6
    assert command.out == b"[a 0] done\n"


def test_list_shows_all_programs(infini_run):
    up = sh("echo up; exec sleep 1000")
    command = infini_run(*two(up, ["sleep", "1000"]))
    command.read_lines(b"[a 0] up")
    mine = listed(command.pid)
    assert mine["program"].endswith(": --program=b sleep 1000")
    assert mine["world_size"] == 2
    command.signal(signal.SIGTERM)
    command.wait()


def test_restart_is_that_of_all_programs(infini_run, tmp_path):
    attempt = "$TORCHELASTIC_RESTART_COUNT"
    fails_once = sh(f"echo {attempt} $MASTER_PORT; mkdir {tmp_path}/once 2> /dev/null && exit 3; exit 0")
    shows = sh(f"echo {attempt} $JOB_PROGRAMS; exec sleep 1000")
    flags = ("--max_restarts=1", "--restart_delay=0")
    command = infini_run(*two(shows, fails_once, *flags, of_second=("--ends_job",)))
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    ports = dict(line.removeprefix("[b 0] ").split() for line in lines if line.startswith("[b 0]"))
    told = dict(line.removeprefix("[a 0] ").split(" ", 1) for line in lines if line.startswith("[a 0]"))
    assert sorted(ports) == ["0", "1"]
    seen = {number: str(json.loads(text)[1]["port"]) for number, text in told.items()}
    assert seen.items() <= ports.items()  # stopped, it may show none


def test_dry_run_shows_every_program(infini_run):
    command = infini_run("--dry_run=json", *two(["true", "x"], ["false"], counts=(2, 1)))
    assert command.wait() == 0, command.err
    plan = json.loads(command.out)
    assert [(each["program"], each["program_rank"], each["rank"]) for each in plan["ranks"]] == [
        ("a", 0, 0), ("a", 1, 1), ("b", 0, 2),
    ]  # fmt: skip
    assert [each["argv"] for each in plan["ranks"]] == [["true", "x"], ["true", "x"], ["false"]]
    text = infini_run("--dry_run", *two(["true"], ["false"], counts=(2, 1)))
    assert text.wait() == 0
    assert b"programs: a (2), b (1)\n" in text.out


def test_missing_program_is_one_line_and_nothing_starts(infini_run, tmp_path):
    command = infini_run(*two(sh(f"touch {tmp_path}/started"), ["./no-such-program"]))
    assert command.wait() == 127
    assert command.err.count(b"\n") == 1
    assert not os.listdir(tmp_path)


def test_more_gpus_than_the_node_has_is_one_line(infini_run, driver):  # noqa: F811
    environ = {**os.environ, **driver.settings(FOUR[:3]), "LD_LIBRARY_PATH": str(driver.folder)}
    flags = ("--gpus_per_proc=1",)
    words = ["--program=a", *flags, "--nproc_per_node=2", "true", ":", "--program=b", "--gpus_per_proc=2", "true"]
    command = infini_run(*words, env=environ)
    assert command.wait() == 2
    assert command.err.count(b"\n") == 1
    assert (
        b"2 of a with --gpus_per_proc=1, 1 of b with --gpus_per_proc=2 need 4 GPUs, and 3 can be used" in command.err
    )


def test_gpus_are_given_out_once(infini_run, driver):  # noqa: F811
    environ = {**os.environ, **driver.settings(FOUR), "LD_LIBRARY_PATH": str(driver.folder)}
    says = sh("echo $CUDA_VISIBLE_DEVICES")
    words = ["--program=a", "--gpus_per_proc=1", "--nproc_per_node=2", *says]
    command = infini_run(*words, ":", "--program=b", "--gpus_per_proc=2", *says, env=environ)
    assert command.wait() == 0, command.err
    lines = dict(line.split("] ") for line in command.out.decode().splitlines())
    given = [name for text in lines.values() for name in text.split(",")]
    assert len(given) == len(set(given)) == 4
    assert len(lines["[b 0"].split(",")) == 2


def test_cpus_are_given_out_once(infini_run):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    command = infini_run("--dry_run=json", "--bind=cores", *two(["true"], ["true"]))
    if command.wait() == 2:
        pytest.skip("needs two cores")
    first, second = (set(each["cpus"]) for each in json.loads(command.out)["ranks"])
    assert first
    assert second
    assert first.isdisjoint(second)


def test_stacks_and_send_know_the_programs(infini_run):
    up = sh("trap 'echo got; exit 0' USR1; echo up; while :; do sleep 0.05; done")
    command = infini_run(*two(up, up))
    for start in (b"[a 0] up", b"[b 0] up"):
        command.read_lines(start)
    stacks = infini_run("--stacks", str(command.pid))
    assert stacks.wait() == 0, stacks.err
    assert f"a 0 on {HOST}" in stacks.out.decode()
    assert f"b 0 on {HOST}" in stacks.out.decode()
    sent = infini_run("--send=USR1", str(command.pid))
    assert sent.wait() == 0, sent.err
    assert command.wait() == 0


def test_flags_name_ranks_by_program(infini_run, tmp_path):
    (tmp_path / "typed").write_text("typed\n")
    says = sh("echo $ROLE_RANK; cat")
    flags = ("--ranks_on_console=a:1,b:0-1", "--stdin=b:1")
    with open(tmp_path / "typed") as stdin:
        command = infini_run(*two(says, says, *flags, counts=(2, 2)), stdin=stdin)
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == ["[a 1] 1", "[b 0] 0", "[b 1] 1", "[b 1] typed"]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--stdin=c:0", "--stdin: unknown program c; use a, b"),
        ("--stdin=b:1", "--stdin: unknown rank b:1; use b:0 to b:0"),
        ("--ranks_on_console=a:0,b:0-2", "--ranks_on_console: unknown rank b:1; use b:0 to b:0"),
        ("--ranks_on_console=2", "--ranks_on_console: unknown rank 2; use ranks 0 to 1"),
        ("--ranks_on_console=a:", "--ranks_on_console=a:: expected all, or ranks and ranges such as 0,4-7, or "),
        ("--ranks_on_console=:1", "--ranks_on_console=:1: expected all, or ranks and ranges such as 0,4-7, or "),
    ],
)
def test_rank_of_program_that_is_not_there_is_refused(infini_run, flag, line):
    command = infini_run(flag, *two(["true"], ["true"]))
    assert command.wait() == 2
    assert command.err.decode().startswith(f"infini-run: {line}")
    assert command.err.count(b"\n") == 1


def test_rank_of_program_needs_names(infini_run):
    command = infini_run("--stdin=b:0", "true")
    assert command.wait() == 2
    assert command.err == b"infini-run: --stdin=b:0: unknown program b; add --program=b\n"


def test_question_names_rank_by_program(infini_run):
    up = sh("trap 'echo got; exit 0' USR1; echo up; while :; do sleep 0.05; done")
    command = infini_run(*two(up, up, of_second=("--ends_job",)))
    for start in (b"[a 0] up", b"[b 0] up"):
        command.read_lines(start)
    refused = infini_run("--send=USR1", "--ranks=c:0", str(command.pid))
    assert refused.wait() != 0
    assert b"unknown rank c:0; use ranks 0 to 1" in refused.err
    sent = infini_run("--send=USR1", "--ranks=b:0", str(command.pid))
    assert sent.wait() == 0, sent.err
    assert command.wait() == 0
    assert b"[b 0] got" in command.out
    assert b"[a 0] got" not in command.out


def test_follow_names_ranks_by_program(infini_run, tmp_path):
    chatty = sh("while :; do echo on; sleep 0.1; done")
    command = infini_run(f"--log_dir={tmp_path}/logs", *two(chatty, chatty, counts=(2, 1)))
    command.read_lines(b"[b 0] on")
    follower = infini_run("--follow", "--ranks=b:0,a:1", str(command.pid))
    for start in (b"[b 0] on", b"[a 1] on"):
        follower.read_lines(start)
    assert b"[a 0]" not in follower.out
    follower.signal(signal.SIGINT)
    follower.wait()
    command.signal(signal.SIGTERM)
    command.wait()


def test_trace_names_ranks_by_program(infini_run, tmp_path):
    command = infini_run(f"--trace={tmp_path}/t", *two(["true"], ["true"]))
    assert command.wait() == 0, command.err
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    found = {
        each["name"]: each["args"] for each in events if each.get("cat") == "rank" and "rank" in each.get("args", {})
    }
    assert {name: args["program"] for name, args in found.items()} == {"a 0": "a", "b 0": "b"}


def test_events_name_ranks_by_program(infini_run, tmp_path):
    command = infini_run(f"--events={tmp_path}/e", *two(["true"], ["true"], counts=(2, 1)))
    assert command.wait() == 0, command.err
    facts = [json.loads(line) for line in (tmp_path / "e").read_text().splitlines()]
    found = {(each["kind"], each["rank"], each["program"], each["program_rank"]) for each in facts if "rank" in each}
    places = ((0, "a", 0), (1, "a", 1), (2, "b", 0))
    assert found == {(kind, *place) for kind in ("started", "exited") for place in places}
    assert facts[0]["programs"] == {"a": 2, "b": 1}
    assert all(set(OF_PROGRAMS).isdisjoint(each) or "rank" in each or each["kind"] == "launched" for each in facts)


def test_hang_is_that_of_one_program(infini_run, tmp_path):
    hangs = sh("echo up; exec sleep 1000")
    works = sh("while :; do echo on; sleep 0.1; done")
    flags = ("--hang_timeout=1", "--on_hang=stop", f"--report={tmp_path}/r")
    command = infini_run(*two(works, hangs, *flags, counts=(1, 2)))
    assert command.wait() == 1
    assert b"all 2 ranks wait in" in command.err
    assert b"b 0-1 on" in command.err
    report = report_of(tmp_path / "r")
    assert {each["program"] for each in report["snapshots"] if each["kind"]} == {"b"}


def test_port_of_a_program_is_not_free_for_others(infini_run):
    """Launches on one machine do not get each other's ports."""
    command = infini_run(*two(sh("echo $MASTER_PORT; exec sleep 1000"), sh("echo $MASTER_PORT; exec sleep 1000")))
    ports = {int(command.read_lines(start)[0][-1]) for start in (b"[a 0]", b"[b 0]")}
    assert len(ports) == 2
    for port in ports:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with lock, pytest.raises(OSError, match="in use"):
            lock.bind(f"\0infini-run-port-{port}")
    command.signal(signal.SIGTERM)
    command.wait()


# ---- the same from a file, and from Python

TOML = """
[[program]]
name = "a"
command = ["sh", "-c", "echo $X $PWD $ROLE_NAME $RANK/$WORLD_SIZE"]
nproc_per_node = 2
env = { X = "x" }
cwd = "/"

[[program]]
name = "b"
command = "sh -c 'echo $X $ROLE_NAME; exec sleep 1000'"

[[program]]
name = "c"
command = ["true"]
ends_job = false
"""


def test_file_has_the_programs(infini_run, tmp_path):
    (tmp_path / "job.toml").write_text(TOML.replace("exec sleep 1000", "true"))
    command = infini_run("--programs=job.toml", cwd=tmp_path, env={**os.environ, "X": "mine"})
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == ["[a 0] x / a 0/2", "[a 1] x / a 1/2", "[b 0] mine b"]


@pytest.mark.parametrize(
    ("text", "flags", "line"),
    [
        (None, (), "--programs=job.toml: cannot be read: No such file or directory"),
        ("", (), "--programs=job.toml: missing [[program]] table; use one per program"),
        ("program = 3", (), "--programs=job.toml: missing [[program]] table; use one per program"),
        ("a = [", (), "--programs=job.toml: not TOML: "),
        ("\x00", (), "--programs=job.toml: not TOML: "),
        pytest.param("#" * ((1 << 20) + 1), (), "--programs=job.toml: expected at most 1048576 bytes", id="large"),
        ("log_dir = 'x'", (), "--programs=job.toml: unknown key log_dir; use [[program]] tables"),
        ("[[program]]\ncommand = 'x'", (), '--programs=job.toml: program 1: missing name; add name = "NAME"'),
        ("[[program]]\nname = 'a'", (), "--programs=job.toml: program 1: missing command; add command = "),
        (
            "[[program]]\nname = 'a'\ncommand = 'x \"'",
            (),
            "--programs=job.toml: program 1: command: expected a command with matching quotes",
        ),
        ("[[program]]\nname = 'a'\ncommand = [1]", (), "--programs=job.toml: program 1: command: 1: expected text"),
        ("[[program]]\nname = 'a'\ncommand = []", (), "--program=a: missing program; use --program=a [flags] "),
        (
            "[[program]]\nname = 'a'\ncommand = 'x'\nnproc = 2",
            (),
            "--programs=job.toml: program 1: unknown flag --nproc; did you mean --nproc_per_node?",
        ),
        (
            "[[program]]\nname = 'a'\ncommand = 'x'\nmax_restarts = 1",
            (),
            "--max_restarts=1: cannot hold for one of several programs; add --restart_scope=program, or move it to ",
        ),
        (
            "[[program]]\nname = 'a'\ncommand = 'true'\nenv = {RANK = '1'}",
            (),
            "env of a: RANK is set by infini-run; use another name",
        ),
        (
            "[[program]]\nname = 'a'\ncommand = 'true'\nenv = {X = 1}",
            (),
            "--programs=job.toml: program 1: env['X']: 1: expected text",
        ),
        (
            "[[program]]\nname = 'a'\ncommand = 'true'\ncwd = 'none'",
            (),
            "--programs=job.toml: program 1: cwd=none is not a directory",
        ),
        (
            "[[program]]\nname = 'a'\ncommand = 'true'\ncwd = 1",
            (),
            "--programs=job.toml: program 1: cwd = 1: expected a path, as text",
        ),
        (TOML, ("--", "true"), "--programs=job.toml: conflicts with the program true; drop one of them"),
        (TOML, ("--program=x",), "--program=x: conflicts with --programs=job.toml: it is one program's; write it "),
        (
            TOML,
            ("--nproc_per_node=2",),
            "--nproc_per_node=2: conflicts with --programs=job.toml: it is one program's",
        ),
        (TOML, ("--spares=1",), "--spares=1: conflicts with --programs=job.toml: several programs need all"),
    ],
)
def test_bad_file_is_one_line_and_nothing_starts(infini_run, tmp_path, text, flags, line):
    if text is not None:
        (tmp_path / "job.toml").write_text(text)
    command = infini_run("--programs=job.toml", *flags, cwd=tmp_path)
    assert command.wait() == 2
    assert command.err.decode().startswith(f"infini-run: {line}")
    assert command.err.count(b"\n") == 1
    assert command.out == b""


def test_python_runs_several_programs(tmp_path):
    says = ["sh", "-c", "echo $X $PWD $ROLE_NAME $RANK/$WORLD_SIZE"]
    first = ir.Program(says, name="a", nproc_per_node=2, env={"X": "x"}, cwd="/")
    report = ir.run([first, ir.Program(says, name="b")], log_dir=tmp_path, env={"X": "mine"}, cwd=tmp_path)
    assert [(each.program, each.program_rank, each.name) for each in report.exits] == [
        ("a", 0, "a 0"), ("a", 1, "a 1"), ("b", 0, "b 0"),
    ]  # fmt: skip
    assert (tmp_path / "a/rank_1.log").read_text() == "x / a 1/2\n"
    assert (tmp_path / "b/rank_0.log").read_text() == f"mine {tmp_path} b 0/1\n"


def test_python_names_the_program_that_failed():
    with pytest.raises(ir.WorkerError) as raised:
        ir.run([ir.Program(["sleep", "1000"], name="a"), ir.Program(["false"], name="b")], console="none")
    assert (raised.value.rank, raised.value.exit_code) == (1, 1)
    assert "b 0 on" in str(raised.value)


def test_launcher_ends_with_ends_job():
    programs = [ir.Program(["sleep", "1000"], name="a"), ir.Program(["true"], name="b", ends_job=True)]
    with ir.ProcessLauncher(programs, console="none") as launcher:
        launcher.launch()
        assert launcher.wait(60)
        report = launcher.report()
    assert (report.exit_code, report.ended_by) == (0, "b")


@pytest.mark.parametrize(
    ("command", "flags", "line"),
    [
        ([ir.Program(["true"], name="a"), "true"], {}, r"expected words alone, or Program alone"),
        (
            [ir.Program(["true"], name="a")],
            {"nproc_per_node": 2},
            r"^nproc_per_node=2: cannot hold for one of several",
        ),
        ([ir.Program(["true"], name="a")] * 2, {}, r"already the name of another program"),
        ([ir.Program(["true"], name="a b")], {}, r"expected a letter"),
        ([ir.Program(["true"], name="a", nproc_per_node="x")], {}, r'^nproc_per_node="x": expected'),
        ([ir.Program(["true"], name="a")], {"spares": 1}, r"^spares=1: conflicts with a list of Program: several"),
        ([ir.Program(["true"], name="a", cwd="/nowhere")], {}, r"^cwd=/nowhere is not a directory"),
    ],
)
def test_bad_python_call_is_one_line(command, flags, line):
    with pytest.raises(ir.UsageError, match=line):
        ir.run(command, **flags)


def test_arguments_of_launch_are_for_one_program():
    launcher = ir.ProcessLauncher([ir.Program(["true"], name="a")])
    with launcher, pytest.raises(ir.UsageError, match="cannot follow several programs"):
        launcher.launch(["x"])


# ---- what mpirun(1) of Open MPI and mpiexec(1) of MPICH (hydra) show with `:`, with names and --one_world in front


@pytest.fixture
def named(tmp_path):
    """A folder with programs of these names that say who they are; for PATH."""

    def make(*names):
        for name in names:
            (tmp_path / name).write_text('#!/bin/sh\necho "${0##*/} $RANK of $WORLD_SIZE $*"\n')
            (tmp_path / name).chmod(0o755)
        return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return make


def test_case_of_mpich_ocean_and_air(infini_run, named):
    """mpiexec -n 4 ocean : -n 8 air"""
    words = ["--one_world", "--program=ocean", "--nproc_per_node=4", "ocean", ":", "--program=air"]
    command = infini_run(*words, "--nproc_per_node=8", "air", env=named("ocean", "air"))
    assert command.wait() == 0, command.err
    seen = sorted(line.partition("] ")[2].split() for line in command.out.decode().splitlines())
    wanted = [["air", str(rank), "of", "12"] for rank in range(4, 12)]
    assert seen == sorted(wanted + [["ocean", str(rank), "of", "12"] for rank in range(4)])


def test_case_of_open_mpi_hostname_and_uptime(infini_run, named):
    """mpirun -np 1 hostname : -np 2 uptime, and one more program, each with arguments of its own"""
    words = ["--one_world", "--program=a", "hostname", "-x", ":", "--program=b", "--nproc_per_node=2", "uptime"]
    command = infini_run(*words, ":", "--program=c", "who", "-y", env=named("hostname", "uptime", "who"))
    assert command.wait() == 0, command.err
    assert sorted(line.partition("] ")[2] for line in command.out.decode().splitlines()) == [
        "hostname 0 of 4 -x", "uptime 1 of 4 ", "uptime 2 of 4 ", "who 3 of 4 -y",
    ]  # fmt: skip


def test_case_of_mpi_manager_and_workers_fails_as_one(infini_run):
    """mpiexec -n 1 manager : -n 3 worker: a worker's failure ends the manager, too"""
    words = ["--one_world", "--program=manager", *sh("exec sleep 1000"), ":", "--program=worker"]
    command = infini_run(*words, "--nproc_per_node=3", *sh('test "$RANK" = 3 && exit 9; exec sleep 1000'))
    assert command.wait() == 9
    assert command.err.startswith(f"infini-run: worker 2 on {HOST} failed: exit code 9".encode())


def test_flag_of_another_launcher_says_what_programs_do(infini_run):
    command = infini_run("--multi-prog", *two(["true"], ["true"]))
    assert command.wait() == 2
    assert command.err.startswith(b"infini-run: unknown flag --multi-prog; ")
    assert b"run --help" not in command.err
