"""The control socket of a launch (csrc/io/control.c): who is found there, who may ask, and what asking changes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infini_run as ir
from infini_run.control import launches, server
from infini_run.control.launch_facts import ABOUT, COUNTS, REQUEST, read_greeting
from infini_run.errors import LinkError
from infini_run.plan.program import MEMORY
from infini_run.questions.choice import choose_launch
from infini_run.questions.listing import render_text
from infini_run.record import replace
from infini_run.system.frames import WireDecoder, pack
from tests.launch.test_hang import PYSPY
from tests.launch.test_security import as_stranger, needs_root
from tests.support.command import COMMAND, Command, play
from tests.support.processes import is_alive, marked
from tests.support.waiting import until

UP = ("sh", "-c", "echo up $RANK $$; exec sleep 1000")


@pytest.fixture
def running(infini_run):
    """Start a launch whose ranks are up; return it and the pids of its ranks."""

    def start(*flags, nproc=2, program=UP, **kwargs):
        command = infini_run(f"--nproc_per_node={nproc}", *flags, *program, **kwargs)
        return command, command.pids_of(b"up", nproc)

    return start


def ask(*words, code=0, **kwargs):
    """What a command that asks prints; where it refuses, its one line."""
    done = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == code, done
    return done.stdout if code == 0 else done.stderr.removeprefix("infini-run: ").rstrip("\n")


def listed(pid):
    """The row of the launch of that process, among those of all tests that run now."""
    rows = json.loads(ask("--list=json"))["launches"]
    return next((row for row in rows if row["pid"] == pid), None)


def found(pid):
    return next(each for each in launches.find_launches(os.environ) if each.pid == pid)


def connect(pid):
    """A connection to the control socket of a launch, as any program may have one."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(f"{found(pid).folder}/control")
    return client


def stop(command):
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


# ---- --list


def test_list_shows_ranks_by_state(running):
    command, _ = running(
        "--keep_going", nproc=3, program=play("say=up", "@1", "exit=3", "@2", "exit=0", "@*", "wait")
    )
    until(lambda: listed(command.pid)["ranks"]["failed"] == 1 and listed(command.pid)["ranks"]["done"] == 1)
    row = listed(command.pid)
    assert row["state"] == "running"
    assert row["ranks"] == {"waiting": 0, "running": 1, "ready": 0, "done": 1, "failed": 1}
    assert (row["nodes"], row["node"], row["world_size"], row["uid"]) == (1, None, 3, os.geteuid())
    command.signal(signal.SIGTERM)
    assert command.wait() == 3
    assert listed(command.pid) is None


def test_list_is_a_table_with_the_schedulers_job(running):
    command, _ = running(env={**os.environ, "SLURM_JOB_ID": "4711", "SLURM_PROCID": "1"})
    line = next(line for line in ask("--list").splitlines() if f" {command.pid} " in line)
    assert line.split()[0] == found(command.pid).launch_id
    assert "2 running" in line
    assert "4711" in line
    assert line.endswith("sh -c echo up $RANK $$; exec sleep 1000")
    stop(command)


def test_suspended_launch_does_not_answer(running):
    command, _ = running()
    command.suspend()
    begin_s = time.monotonic()
    assert next(each for each in launches.find_launches(os.environ) if each.pid == command.pid).problem == (
        "does not answer (stopped)"
    )
    assert time.monotonic() - begin_s < 5
    line = ask("--stop", command.pid, code=2)
    assert line.endswith(" does not answer (stopped); run infini-run --list")
    command.signal(signal.SIGCONT)
    stop(command)


def test_nothing_is_left_when_launcher_is_killed(running):
    _kill(running)


@pytest.mark.slow
def test_nothing_is_left_when_launcher_is_killed_100_times(running):
    for _ in range(100):
        _kill(running)


def _kill(running):
    command, ranks = running()
    folder = found(command.pid).folder
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: not os.path.exists(folder))
    until(lambda: not any(map(is_alive, ranks.values())))
    assert listed(command.pid) is None


def test_socket_without_a_launch_is_lost(running):
    command, _ = running()
    folder = f"{MEMORY}/infini-run-ir-{os.urandom(6).hex()}"
    os.mkdir(folder, 0o700)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(f"{folder}/control")  # and does not listen: as after a SIGKILL
    try:
        row = next(each for each in launches.find_launches(os.environ) if each.folder == folder)
        assert (row.problem, row.launch_id) == ("lost", os.path.basename(folder).removeprefix("infini-run-"))
        assert ask("--stop", row.launch_id, code=2).endswith(" lost; run infini-run --list")
    finally:
        os.unlink(f"{folder}/control")
        os.rmdir(folder)
    stop(command)


def test_program_in_python_finds_the_same(running):
    command, _ = running()
    row = next(each for each in ir.running() if each.pid == command.pid)
    assert row.to_json() == listed(command.pid)
    assert (row.state, row.ranks["running"], row.gpus, row.job) == ("running", 2, (), None)
    stop(command)


# ---- --stop and --send


@pytest.mark.parametrize("by", ["id", "beginning", "launcher", "rank"])
def test_stop_is_a_sigterm_whose_sender_is_named(running, tmp_path, by):
    command, ranks = running(f"--report={tmp_path / 'r.json'}")
    launch_id = found(command.pid).launch_id
    word = {"id": launch_id, "beginning": launch_id[:-1], "launcher": command.pid, "rank": ranks[1]}[by]
    assert ask("--stop", word) == f"{launch_id}: stopping; SIGKILL in 25 s, or now if repeated\n"
    assert command.wait() == 143
    asked, stopping = command.err.decode().splitlines()
    assert asked.endswith(") asked to stop this launch")
    assert stopping == "infini-run: SIGTERM: stopping; SIGKILL in 25 s, or now if repeated"
    report = json.loads((tmp_path / "r.json").read_text())
    assert [f"infini-run: {notice}" for notice in report["notices"]] == [asked]


def test_second_stop_kills(running):
    program = ("sh", "-c", "trap 'echo told' TERM; echo up $RANK $$; while :; do sleep 1000 & wait; done")
    command, _ = running(nproc=1, program=program)
    ask("--stop", command.pid)
    command.read_until(b"told")
    time.sleep(0.3)  # within 0.2 s a second SIGTERM is the same request
    assert ask("--stop", command.pid).endswith(": killing what is left\n")
    assert command.wait() == 143


def test_send_reaches_the_named_ranks(running):
    program = (
        "sh",
        "-c",
        "trap 'echo got $RANK; exit 0' USR1; echo up $RANK $$; while :; do sleep 1000 & wait; done",
    )
    command, _ = running("--stop_scope=leader", nproc=3, program=program)
    launch_id = found(command.pid).launch_id
    assert ask("--send=USR1", "--ranks=0,2", command.pid) == f"{launch_id}: sent SIGUSR1 to 2 of 2 ranks\n"
    command.read_lines(b"got", 2)
    assert ask("--send=USR1", "--ranks=7", command.pid, code=2) == f"{launch_id}: unknown rank 7; use ranks 0 to 2"
    assert ask("--send=10", command.pid) == f"{launch_id}: sent SIGUSR1 to 1 of 3 ranks\n"
    assert command.wait() == 0
    assert sorted(command.read_lines(b"got", 3)) == [["got", "0"], ["got", "1"], ["got", "2"]]
    notices = [line for line in command.err.decode().splitlines() if "sent" in line]
    assert [line.partition(") ")[2] for line in notices] == [
        "sent SIGUSR1 to ranks 0, 2",
        "sent SIGUSR1 to ranks 0, 1, 2",
    ]


def test_rank_can_stop_its_own_launch(infini_run):
    words = " ".join(COMMAND)
    command = infini_run(
        "--nproc_per_node=2", "sh", "-c", f"[ $RANK = 0 ] || exec {words} --stop $$; exec sleep 1000"
    )
    assert command.wait() == 143


def test_launcher_in_python_is_stopped_and_its_ranks_do_not_restart():
    launcher = ir.ProcessLauncher(["sleep", "1000"], nproc_per_node=2, max_restarts=3, restart_delay=0)
    with launcher:
        launcher.launch()
        mine = [each for each in _found_while(launcher) if each.pid == os.getpid()]
        assert [each.facts.counts["running"] for each in mine] == [2]
        asked = threading.Thread(target=ask, args=("--stop", mine[0].launch_id))
        asked.start()
        kinds = []
        while launcher.running():
            kinds += [event.kind for event in launcher.events()]
        asked.join()
        report = launcher.report()
    assert set(kinds) <= {"started", "exited", "ended"}
    assert all(exit_.stopped for exit_ in report.exits)
    assert report.notices[0].endswith(") asked to stop this launch")


def _found_while(launcher):
    """The launches of this machine, while this program waits for its own."""
    found = []
    asking = threading.Thread(target=lambda: found.extend(launches.find_launches(os.environ)))
    asking.start()
    while asking.is_alive():
        launcher.events(0.05)
    return found


# ---- --stacks

PYTHON_UP = """
import os, time
def wait_for_data():
    print("up", os.environ["RANK"], os.getpid(), flush=True)
    time.sleep(1000)
wait_for_data()
"""


@PYSPY
def test_stacks_name_the_function_of_every_rank(running):
    command, ranks = running(nproc=3, program=(sys.executable, "-c", PYTHON_UP))
    head, *frames = ask("--stacks", command.pid).splitlines()
    assert head == f"ranks 0-2 on {os.uname().nodename}: wait_for_data (<string>:5)"
    assert sum("wait_for_data (" in line for line in frames) == 1
    alone = ask("--stacks", "--ranks=2", command.pid)
    assert alone.startswith(f"rank 2 on {os.uname().nodename}, pid {ranks[2]}: wait_for_data ")
    stacks = json.loads(ask("--stacks=json", "--ranks=1", command.pid))["stacks"]
    assert [(stack["rank"], stack["pid"]) for stack in stacks] == [(1, ranks[1])]
    assert "wait_for_data" in stacks[0]["python"][0]
    stop(command)
    assert len(command.err.splitlines()) == 1


def test_stacks_of_other_programs_are_system_calls(running):
    command, ranks = running(nproc=1)
    assert f"  sleep ({ranks[0]}) in " in ask("--stacks", command.pid)
    assert ask("--stacks", "--ranks=1", command.pid, code=2).endswith(": unknown rank 1; use ranks 0 to 0")
    stop(command)


def test_launch_that_ends_while_stacks_are_taken_is_one_line(running, tmp_path, monkeypatch):
    """py-spy hangs, so the launch ends first; the py-spy ends with it."""
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho spying >&2\nexec sleep 1000\n")
    (tmp_path / "py-spy").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command, _ = running(nproc=1, program=(sys.executable, "-c", PYTHON_UP), env=environ)
    asking = subprocess.Popen([*COMMAND, "--stacks", str(command.pid)], stderr=subprocess.PIPE, text=True)
    until(lambda: any(found_name == "sleep" for found_name in marked(b"PATH=" + os.fsencode(tmp_path)).values()))
    assert ask("--stacks", command.pid, code=2).endswith(": another process asks for stacks; try again")
    stop(command)
    assert asking.communicate()[1].endswith(": it ended before it answered\n")
    assert asking.returncode == 1


# ---- words


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--list", "x"], "--list: unexpected x; drop it"),
        (["--list", "--stop", "x"], "--list: conflicts with --stop; drop one of them"),
        (["--list=yaml"], "--list=yaml: expected text or json"),
        (["--stop", "--nnodes=2", "ir-1"], "--stop: conflicts with --nnodes=2; drop one of them"),
        (["--stop"], "--stop: missing launch; add its id, or the pid of one of its processes"),
        (["--send=USR1"], "--send=USR1: missing launch; add its id, or the pid of one of its processes"),
        (["--send=HUGO", "ir-1"], "--send=HUGO: expected a signal, such as TERM, RTMIN+3, or a number up to 64"),
        (["--stop", "ir-1", "ir-2"], "--stop: unexpected ir-2; drop it"),
        (["--stop", "train.py"], "--stop train.py: not a launch that runs here; run infini-run --list"),
        (["--stop", "1"], "--stop 1: not a launch that runs here; run infini-run --list"),
        (["--ranks=1", "true"], "--ranks=1: needs a question about ranks; add --stacks or --send, or drop it"),
        (["--list", "--ranks=1"], "--ranks=1: needs a question about ranks; add --stacks or --send, or drop it"),
        (
            ["--stop", "--ranks=1", "ir-1"],
            "--ranks=1: needs a question about ranks; add --stacks or --send, or drop it",
        ),
    ],
)
def test_words_that_ask_nothing_are_refused(words, line):
    assert ask(*words, code=2) == line


def test_beginning_of_several_ids_is_refused(running):
    commands = [running(nproc=1)[0] for _ in range(2)]
    line = ask("--stop", "ir-", code=2)
    assert line.startswith("--stop ir-: ")
    assert line.endswith("); add the id of one")
    for command in commands:
        stop(command)


def test_variables_ask_nothing(infini_run):
    asking = {"LIST": "json", "STOP": "1", "SEND": "USR1", "RANKS": "1"}
    variables = {f"{prefix}{name}": text for prefix in ("INFINI_RUN_", "PET_") for name, text in asking.items()}
    command = infini_run("echo", "ran", env={**os.environ, **variables})
    assert command.wait() == 0
    assert command.out == b"ran\n"
    assert command.err == b""


# ---- who may ask, and who only connects


@needs_root("becoming a stranger")
def test_stranger_gets_nothing(running):
    command, _ = running()
    path = f"{found(command.pid).folder}/control"

    def look():
        assert [each for each in launches.find_launches({}) if each.pid == command.pid] == []
        with pytest.raises(PermissionError), socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        return True

    assert as_stranger(look)
    stop(command)


@needs_root("becoming a stranger")
def test_link_in_a_strangers_folder_leads_to_no_launch(running, tmp_path):
    """As root: what is behind a user's socket has to be that user's process."""
    command, _ = running()
    target = f"{found(command.pid).folder}/control"
    folder = f"{MEMORY}/infini-run-ir-{os.urandom(6).hex()}"

    def plant():
        os.mkdir(folder, 0o700)
        os.symlink(target, f"{folder}/control")
        return True

    try:
        assert as_stranger(plant)
        assert not [each for each in launches.find_launches({}) if each.folder == folder and each.facts]
    finally:
        os.unlink(f"{folder}/control")
        os.rmdir(folder)
    stop(command)


def _ends(client):
    """Whether the launch has ended a connection: beyond the greeting, nothing comes."""
    client.settimeout(10)
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


REQUEST_TEXT = b'{"protocol":1,"question":"stop"'
BROKEN = {
    "no-kind": b"\0" * 100,
    "too-long": REQUEST + struct.pack(">I", 1 << 30),
    "no-json": pack(REQUEST, b"{"),
    "no-object": pack(REQUEST, b"[1]"),
    "no-question": pack(REQUEST, b'{"protocol":1}'),
    "question-no-text": pack(REQUEST, b'{"protocol":1,"question":["stop"]}'),
    "unknown-question": pack(REQUEST, b'{"protocol":1,"question":"__init__"}'),
    "unknown-field": pack(REQUEST, REQUEST_TEXT + b',"signal":9}'),
    "no-signal": pack(REQUEST, b'{"protocol":1,"question":"send","signal":65,"ranks":null}'),
    "no-ranks": pack(REQUEST, b'{"protocol":1,"question":"send","signal":10,"ranks":[-1]}'),
    "deep": pack(REQUEST, b"[" * 60000),
    "other-kind": pack(ABOUT, b""),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_malformed_request_ends_its_connection_alone(running, data):
    command, ranks = running()
    with connect(command.pid) as client:
        client.sendall(data)
        assert _ends(client)
    assert all(map(is_alive, ranks.values()))
    assert listed(command.pid)["state"] == "running"
    stop(command)
    assert command.err.count(b"\n") == 1


def test_request_of_another_version_is_refused_with_a_line(running):
    command, _ = running()
    with connect(command.pid) as client:
        client.sendall(pack(REQUEST, b'{"protocol":2,"question":"stop"}'))
        client.settimeout(10)
        data = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"the launch runs another version of infini-run" in data
    stop(command)


@given(st.lists(st.binary(max_size=200), max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_request_or_none(pieces):
    """Of the server alone: what it does with bytes is no more than to end the connection, or to answer."""
    asked = []

    class Nothing:
        def answer(self, client, request):
            asked.append(request)
            client.finish({})

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with contextlib.closing(ours), contextlib.closing(server.ControlServer(Nothing())) as made:
        made.add(theirs.detach())
        for piece in pieces:
            with contextlib.suppress(OSError):
                ours.send(piece)
            made.run_due()
    assert asked == []


@given(st.binary(max_size=300), st.binary(max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_greeting_is_facts_or_a_link_error(about, counts):
    with contextlib.suppress(LinkError):
        read_greeting(about, counts)


def test_greeting_of_a_launch_without_a_time_is_refused(infini_run, monkeypatch):
    kept = []
    monkeypatch.setattr(launches, "read_greeting", lambda *parts: kept.append(parts) or read_greeting(*parts))
    command = infini_run("--nproc_per_node=1", *UP)
    command.pids_of(b"up")
    found(command.pid)
    about, counts = kept[0]
    start = next(part for part in about.split(b"\0") if part.startswith(b"start="))
    for text in (b"nan", b"inf", b"-1", b"1e300"):
        with pytest.raises(LinkError):
            read_greeting(about.replace(start, b"start=" + text), counts)
    stop(command)


def test_more_sockets_than_descriptors_do_not_hide_a_launch(running, tmp_path):
    """300 folders that look like a launch's, none of which answers."""
    command, _ = running()
    made = []
    try:
        for number in range(300):
            folder = Path(MEMORY) / f"infini-run-ir-test{os.getpid()}-{number}"
            folder.mkdir(mode=0o700)
            made.append(folder)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{folder}/control")
        done = subprocess.run(
            ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *COMMAND, "--list=json"], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert command.pid in {row["pid"] for row in json.loads(done.stdout)["launches"]}
    finally:
        for folder in made:
            shutil.rmtree(folder)
    stop(command)


def test_clients_that_never_read_cost_the_job_nothing(infini_run):
    """100 of them, and their questions, while ranks write; all that the ranks wrote comes, and the job ends."""
    line = "x" * 1000
    script = f"echo up $RANK $$; read go; i=0; while [ $i -lt 3000 ]; do echo {line}; i=$((i+1)); done"
    command = infini_run(
        "--console=lines", "--stdin=all", "--nproc_per_node=2", "sh", "-c", script, stdin=subprocess.PIPE
    )
    command.pids_of(b"up", 2)
    clients = [connect(command.pid) for _ in range(100)]
    for client in clients[50:]:
        with contextlib.suppress(OSError):
            client.sendall(pack(REQUEST, b"{"))
    assert listed(command.pid)["ranks"]["running"] == 2
    command.process.stdin.write(b"go\n")
    command.close_stdin()
    assert command.wait() == 0
    assert command.out.count(line.encode()) == 6000
    for client in clients:
        client.close()


def _cpu_ns_of_a_second(pid):
    cpu = Path(f"/proc/{pid}/schedstat")  # the time on a CPU comes first
    before = int(cpu.read_text().split()[0])
    time.sleep(1)
    return int(cpu.read_text().split()[0]) - before


def test_launch_without_descriptors_leaves_clients_waiting_at_no_cost(running):
    """Once it has some again, the next client wakes it, and all are greeted."""
    command, _ = running()
    folder = found(command.pid).folder
    until(lambda: _cpu_ns_of_a_second(command.pid) == 0)  # all that it looks at once the ranks run has been looked at
    limits = resource.prlimit(command.pid, resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        first.connect(f"{folder}/control")
        cpu_ns = _cpu_ns_of_a_second(command.pid)
        resource.prlimit(command.pid, resource.RLIMIT_NOFILE, limits)
        assert cpu_ns < 100e6
        second.connect(f"{folder}/control")
        for client in (first, second):
            client.settimeout(10)
            assert client.recv(1) == ABOUT
    stop(command)


def test_greeting_is_two_frames(running):
    command, _ = running()
    with connect(command.pid) as client:
        decoder, frames = WireDecoder(frozenset((ABOUT, COUNTS)), 1 << 16), []
        while len(frames) < 2:
            frames += decoder.feed(client.recv(65536))
    assert [kind for kind, _ in frames] == [ABOUT, COUNTS]
    assert struct.unpack(">5I", frames[1][1]) == (0, 2, 0, 0, 0)
    stop(command)


def test_question_to_a_launch_whose_package_was_replaced_does_not_end_it(tmp_path):
    package = tmp_path / "infini_run"
    shutil.copytree(Path(ir.__file__).parent, package)
    command = Command([sys.executable, "-m", "infini_run", "--nproc_per_node=1", *UP], cwd=tmp_path)
    try:
        command.pids_of(b"up")
        (package / "control" / "server.py").write_text("from infini_run import not_there\n")
        for _ in range(2):
            ask("--stop", command.pid, code=1)
        stop(command)
        assert command.err.count(b"cannot answer questions of other processes: ImportError: cannot import name") == 1
    finally:
        command.close()


def test_words_for_one_rank_of_a_node_and_for_many_launches(running):
    command, _ = running()
    here = found(command.pid)
    stop(command)
    node = replace(here, facts=replace(here.facts, nodes=3, node=1, ranks="2-2"))
    assert " node 1 of 3, rank 2 " in render_text([node])
    many = [replace(here, facts=replace(here.facts, launch_id=f"ir-{number}")) for number in range(6)]
    text = r"--stacks: 6 launches run here \(ir-0, ir-1, ir-2, ir-3, and 2 more\); add the id of one"
    with pytest.raises(ir.UsageError, match=text):
        choose_launch(many, "--stacks", "")
