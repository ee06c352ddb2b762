"""The control socket of a launch (csrc/io/control.c): who is found there, who may ask, and what asking changes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import select
import shlex
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
from infini_run.control.client import ask as ask_launch
from infini_run.control.launch_facts import ABOUT, ANSWER, COUNTS, REQUEST, pack_counts, read_greeting
from infini_run.errors import InfiniRunError, LinkError, UsageError
from infini_run.options.questions import Question
from infini_run.plan.model import about_text
from infini_run.plan.program import MEMORY
from infini_run.questions.choice import choose_launch
from infini_run.questions.command import _stop
from infini_run.questions.listing import render_text
from infini_run.record import replace
from infini_run.system.frames import WireDecoder, pack
from tests.launch.test_hang import PYSPY
from tests.launch.test_security import STRANGER, as_stranger, needs_root
from tests.support.command import COMMAND, Command, play
from tests.support.launch_shapes import with_strace
from tests.support.processes import is_alive, marked, processes
from tests.support.waiting import LIMIT_S, until

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


def all_listed():
    """The rows of all launches, of all tests that run now. On a busy machine some may not answer within the second
    that a list has for all of them: then it is made again."""
    for _ in range(10):
        rows = json.loads(ask("--list=json"))["launches"]
        if not any(row["state"] == "does not answer" for row in rows):
            break
    return rows


def listed(pid):
    """The row of the launch of that process."""
    return next((row for row in all_listed() if row["pid"] == pid), None)


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


def test_list_shows_highest_progress(infini_run):
    words = play("@0", f"notify=PROGRESS={2**63 - 1}", "@1", "notify=PROGRESS=7", "@*", "say=up", "wait")
    command = infini_run("--nproc_per_node=2", *words)
    until(lambda: (row := listed(command.pid)) is not None and row["progress"] == 2**63 - 1)
    heading, *rows = ask("--list").splitlines()
    line = next(row for row in rows if f" {command.pid} " in row)
    assert line[heading.index("PROGRESS") :].split()[0] == str(2**63 - 1)
    stop(command)


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
        "does not answer (suspended)"
    )
    assert time.monotonic() - begin_s < 5
    line = ask("--stop", command.pid, code=2)
    assert line.endswith(f" does not answer (suspended); run kill -CONT {command.pid}")
    command.signal(signal.SIGCONT)
    stop(command)


@pytest.mark.rows(8)
@pytest.mark.parametrize("turn", range(100))
def test_nothing_is_left_when_launcher_is_killed(running, turn):
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
        assert ask("--stop", row.launch_id, code=2).endswith(f"{row.launch_id} is lost; run infini-run --list")
    finally:
        os.unlink(f"{folder}/control")
        os.rmdir(folder)
    stop(command)


def test_launch_whose_launcher_alone_is_killed_is_in_no_list(running):
    """The guard removes the folder last, so a list sees either ranks that end or nothing."""
    command, ranks = running()
    launch = found(command.pid)
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    until(lambda: not os.path.exists(launch.folder))
    assert not any(map(is_alive, ranks.values()))
    assert launch.launch_id not in ask("--list")


@pytest.mark.parametrize("by", ["list", "running"])
def test_list_removes_lost_launch(by):
    """Not the folder of the last minute, nor one with a lock. Lists of other tests do the same at any time."""
    folders = [f"{MEMORY}/infini-run-ir-{os.urandom(6).hex()}" for _ in range(3)]
    old, new, held = (os.path.basename(folder).removeprefix("infini-run-") for folder in folders)
    locks = {}
    try:
        for name, folder in zip((old, new, held), folders, strict=True):
            os.mkdir(folder, 0o700)
            if name != new:
                locks[name] = os.open(folder, os.O_RDONLY)
                fcntl.flock(locks[name], fcntl.LOCK_SH)
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as left:
                left.bind(f"{folder}/control")
            os.utime(folder, None if name == new else (0, 0))
        assert {old, new, held} <= _lost(ask("--list"))
        assert all(map(os.path.exists, folders))
        os.close(locks.pop(old))
        ask("--list") if by == "list" else ir.running()
        until(lambda: not os.path.exists(folders[0]))  # another list that was faster has it in hand
        assert all(map(os.path.exists, folders[1:]))
        assert _lost(ask("--list")) & {old, new, held} == {new, held}
    finally:
        for lock in locks.values():
            os.close(lock)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def test_lost_parts_of_one_launch_are_one_row():
    def part(node, problem="lost"):
        return launches.FoundLaunch(folder=f"{MEMORY}/infini-run-ir-0123456789ab-{node}", uid=0, problem=problem)

    parts = [part(0), part(1), part(2, "does not answer"), part(3)]
    assert launches.own_launches(parts) == [parts[0], parts[2]]


def _lost(table):
    return {line.split()[0] for line in table.splitlines() if " lost " in line}


def test_program_in_python_finds_the_same(running):
    command, _ = running()
    row = next(each for each in ir.running() if each.pid == command.pid)
    assert row.to_json() == listed(command.pid)
    assert (row.state, row.ranks["running"], row.gpus, row.job) == ("running", 2, (), None)
    stop(command)


# ---- between two attempts


@pytest.fixture
def waiting(infini_run):
    """A launch whose ranks have failed, and restart in an hour; its row of the list."""
    words = play("notify=PROGRESS=40", "exit=3")
    command = infini_run("--max_restarts=1", "--restart_delay=3600", "--nproc_per_node=2", *words)
    until(lambda: (row := listed(command.pid)) is not None and row["state"] == "restarting")
    return command, listed(command.pid)


def test_launch_between_two_attempts_is_listed(waiting):
    command, row = waiting
    assert (row["nodes"], row["world_size"]) == (1, 2)
    assert sum(row["ranks"].values()) == 0
    assert row["progress"] == 40
    assert row["restart"] > time.time() + 1800
    line = next(line for line in ask("--list").splitlines() if f" {command.pid} " in line)
    assert "  restarting in 3" in line
    stop(command)


def test_questions_between_two_attempts_have_answers(waiting):
    command, row = waiting
    assert ask("--stacks", command.pid) == "no rank runs\n"
    for words, whom in (([], "any rank"), (["--ranks=1"], "rank 1")):
        assert ask("--send=USR1", *words, command.pid, code=2) == (
            f"{row['id']}: cannot send SIGUSR1 to {whom}: not running; run infini-run --list"
        )
    assert ask("--follow", command.pid, code=2) == (
        f"{row['id']}: no rank runs: the launch is about to restart; try again"
    )
    assert ask("--stop", command.pid).startswith(f"{row['id']}: stopping")
    assert command.wait() == 143
    assert b") asked to stop this launch\n" in command.err
    assert listed(command.pid) is None


def test_host_program_between_two_attempts_is_stopped():
    with ir.ProcessLauncher(["sh", "-c", "exit 3"], max_restarts=1, restart_delay=3600.0) as launcher:
        launcher.launch()
        until(lambda: any(event.kind == "restarting" for event in launcher.events(0.05)))
        row = next(each for each in _found_while(launcher) if each.pid == os.getpid())
        assert row.facts.restart_s > time.time() + 1800
        asked = threading.Thread(target=ask, args=("--stop", row.launch_id))
        asked.start()
        while launcher.running():
            launcher.events()
        asked.join()
        report = launcher.report()
    assert report.restarts == 0
    assert report.notices[0].endswith(") asked to stop this launch")


def test_restarting_launch_is_listed_at_every_moment(running, monkeypatch):
    """Between the first list that has it and the last one no list is without it."""
    program = '[ "$TORCHELASTIC_RESTART_COUNT" != 0 ] || { echo up $RANK $$; read go; }; exit 3'
    command, _ = running(
        "--max_restarts=30", "--restart_delay=0", nproc=1, program=("sh", "-c", program), stdin=subprocess.PIPE
    )
    folder = found(command.pid).folder
    monkeypatch.setattr(launches, "find_folders", lambda environ: [(folder, os.geteuid())])  # no other test's
    command.process.stdin.write(b"go\n")
    command.process.stdin.flush()
    rows = []
    while command.process.poll() is None:
        rows.append(next(iter(launches.find_launches(os.environ)), None))
    assert command.wait() == 3
    seen = [row for row in rows if row is not None]
    assert rows[: len(seen)] == seen
    assert all(row.facts is not None and row.pid == command.pid for row in seen)
    assert len(seen) > 1
    assert len({row.launch_id for row in seen}) == 1, "an attempt is no launch of its own"


def test_question_around_a_restart_is_asked_again(running):
    """Each attempt ends with the connections that it has; the launch continues."""
    program = '[ "$TORCHELASTIC_RESTART_COUNT" != 0 ] || { echo up $RANK $$; read go; }; sleep 0.02; exit 3'
    command, _ = running(
        "--max_restarts=1000000", "--restart_delay=0", nproc=1, program=("sh", "-c", program), stdin=subprocess.PIPE
    )
    launch = found(command.pid)
    command.process.stdin.write(b"go\n")
    command.process.stdin.flush()
    answers = {ask_launch(launch, "send", signal=int(signal.SIGCONT), ranks=None)["text"] for _ in range(200)}
    answers |= {ask_launch(launch, "facts", ranks=None, usage=False)["nodes"][0]["pid"] for _ in range(200)}
    assert answers == {"sent SIGCONT to 1 of 1 rank", command.pid}
    assert command.process.poll() is None
    stop(command)


@contextlib.contextmanager
def answering(*answers):
    """A launch that sends these answers, one per connection, the last one always; None: it ends the connection. It
    hangs up on others: a list that another test makes finds it, too."""
    folder = f"{MEMORY}/infini-run-ir-{os.urandom(6).hex()}"
    os.mkdir(folder, 0o700)
    listening, left = socket.socket(socket.AF_UNIX), list(answers)

    def serve():
        while True:
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            with peer:
                if struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] != os.getpid():
                    continue
                peer.recv(1 << 16)
                answer = left.pop(0) if left[1:] else left[0]
                if answer is not None:
                    peer.sendall(pack(ANSWER, answer))

    listening.bind(f"{folder}/control")
    listening.listen()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield launches.FoundLaunch(folder=folder, uid=os.geteuid())
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
        os.unlink(f"{folder}/control")
        os.rmdir(folder)


@pytest.mark.parametrize("endings", [1, 3])
def test_connection_that_ends_without_an_answer_is_made_again(endings):
    with answering(*[None] * endings, b'{"text": "yes"}') as launch:
        assert ask_launch(launch, "stop") == {"text": "yes"}


def test_launch_that_never_answers_is_given_up():
    with answering(None) as launch, pytest.raises(InfiniRunError, match="it ended before it answered"):
        ask_launch(launch, "stop")


@pytest.mark.parametrize("text", [b"{}", b'{"text": []}', b'{"text": 7}', b"[]"])
def test_malformed_answer_to_stop_is_one_line(text):
    question = Question(name="stop", origin="--stop", form="text", launch="x")
    with answering(text) as launch, pytest.raises(InfiniRunError, match="its answer is not what infini-run sends"):
        _stop(question, launch)


def test_folder_keeps_nothing_of_the_last_attempt(infini_run):
    program = 'touch "${NOTIFY_SOCKET%/*}/of.$TORCHELASTIC_RESTART_COUNT"; ls "${NOTIFY_SOCKET%/*}"; exit 3'
    command = infini_run("--max_restarts=1", "--restart_delay=0", "sh", "-c", program)
    assert command.wait() == 3
    found = [line for line in command.out.decode().split() if not line.startswith("notify.")]
    assert found == ["control", "of.0", "control", "of.1"]


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


def test_process_of_a_later_attempt_stands_for_its_launch(running):
    program = ("sh", "-c", "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3; sleep 1000 & echo up $RANK $!; wait")
    command, children = running("--max_restarts=1", "--restart_delay=0", nproc=1, program=program)
    launch_id = found(command.pid).launch_id
    assert ask("--stop", children[0]).startswith(f"{launch_id}: stopping")
    assert command.wait() == 143


def test_second_stop_kills(running):
    program = ("sh", "-c", "trap 'echo told' TERM; echo up $RANK $$; while :; do sleep 1000 & wait; done")
    command, _ = running(nproc=1, program=program)
    launch = found(command.pid)
    texts = [ask_launch(launch, "stop")["text"] for _ in range(2)]  # sooner than two signals of one sender count
    assert texts == ["stopping; SIGKILL in 25 s, or now if repeated", "killing what is left"]
    assert command.wait() == 143
    assert b"SIGTERM again: killing what is left" in command.err
    assert b"did not exit within" not in command.err


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


def test_report_names_who_killed_a_rank(running, tmp_path):
    """The kernel, for memory, is not to be suspected then."""
    path, message = tmp_path / "r.json", tmp_path / "message"
    command, _ = running(f"--report={path}", f"--termination_log={message}")
    ask("--send=KILL", "--ranks=1", command.pid)
    assert command.wait() == 137
    report = json.loads(path.read_text())
    sender = report["ranks"][1]["sent_by"]
    assert re.fullmatch(r".+ \(pid \d+\)", sender)
    assert report["ranks"][0]["sent_by"] is None
    for text in (command.err.decode(), message.read_text()):
        assert re.search(
            rf" failed: killed by SIGKILL \(pid \d+, after [\d.]+ m?s\), sent by {re.escape(sender)};", text
        )
        assert "dmesg" not in text


def test_rank_can_stop_its_own_launch(infini_run):
    words = shlex.join(COMMAND)
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


CREW = """
import os, subprocess, sys
import infini_run as ir
def task(ctx, number):
    return number
def mine():
    return {each.launch_id for each in ir.running() if each.pid == os.getpid()}
if __name__ == "__main__":
    with ir.Crew(task, nproc=2, restart=ir.Restart(max_restarts=3)) as crew:
        first = mine()
        subprocess.run([*sys.argv[1:], "--stop", min(first)], check=True)
        next(event for event in crew if event.kind == "ready" and event.restarts)
        print(len(first), len(mine() - first), min(first) in mine(), list(crew.map([1, 2])))
"""


def test_worker_of_a_crew_that_is_stopped_counts_as_failed(tmp_path):
    """As the guide says: each worker is a launch, and the crew's policy restarts it."""
    (tmp_path / "crew.py").write_text(CREW)
    argv = [sys.executable, str(tmp_path / "crew.py"), *COMMAND]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S * 2)
    assert done.stdout.splitlines()[-1:] == ["2 1 False [1, 2]"], done.stderr


LISTS = """
import subprocess, sys
import infini_run as ir
def train(*_):
    return subprocess.run([*sys.argv[1:], "--list=json"], capture_output=True, text=True, check=True).stdout
class Trainer:
    def task(self, ctx, task):
        return None
if __name__ == "__main__":
    print(ir.Launcher(nproc_per_node=1).run(train, 1)[0])
    print(ir.Launcher(nproc_per_node=2, preload=["json"]).run(train)[0])
    with ir.Crew(Trainer, nproc_per_node=1):
        print(train())
    with ir.Pool(nproc_per_node=1) as pool:
        print(pool.run(train)[0])
"""


def test_list_names_functions_and_crews_of_a_program(tmp_path):
    (tmp_path / "fit.py").write_text(LISTS)
    done = subprocess.run(
        [sys.executable, "fit.py", *COMMAND], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    texts = done.stdout.split("\n}\n")[:-1]
    shown = [{each["program"] for each in json.loads(text + "}")["launches"] if each["program"]} for text in texts]
    assert len(shown) == 4
    for name, programs in zip(("train()", "train()", "Crew(Trainer)", "Pool"), shown, strict=True):
        assert f"{name} in fit.py" in programs
        assert not any("worker_main" in program for program in programs if "fit.py" in program)


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


@PYSPY
@needs_root("dropping capabilities")
def test_stacks_that_may_not_be_read_have_the_reason(infini_run):
    """A rank that nobody may trace, and a launcher without capabilities."""
    script = PYTHON_UP.replace("import os, time", "import ctypes, os, time\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)")
    no_capabilities = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    command = infini_run("--nproc_per_node=1", "--console=lines", sys.executable, "-c", script, under=no_capabilities)
    command.pids_of(b"up")
    note = json.loads(ask("--stacks=json", command.pid))["stacks"][0]["python_note"]
    assert "ermission" in note, note
    assert f"  no Python stack: {note}" in ask("--stacks", command.pid).splitlines()
    stop(command)


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
        (["--stop", "\u0663"], "--stop \u0663: not a launch that runs here; run infini-run --list"),
        (["--stop", "train.py"], "--stop train.py: not a launch that runs here; run infini-run --list"),
        (["--stop", ""], "--stop: '' is not a launch; add its id, or the pid of one of its processes"),
        (["--top", ""], "--top: '' is not a launch; add its id, or the pid of one of its processes"),
        (["--bundle=b", ""], "--bundle=b: '' is not a launch; add its id, or the pid of one of its processes"),
        (["--stop", "ir-1", ""], "--stop: unexpected ''; drop it"),
        (["--list", ""], "--list: unexpected ''; drop it"),
        (["--send=KILL", "--ranks=", "1"], "--ranks=: expected all, or ranks and ranges such as 0,4-7"),
        (["--bundle=", "ir-1"], "--bundle=: expected the name of a new folder"),
        (["--list=", "ir-1"], "--list=: expected text or json"),
        (["--stacks=", "ir-1"], "--stacks=: expected text or json"),
        (["--stop=", "ir-1"], "--stop=: expected true or false"),
        # process 1; a job whose number is 1 may run in another test
        (["--stop", "01"], "--stop 01: not a launch that runs here; run infini-run --list"),
        (["--ranks=1", "true"], "--ranks=1: needs --follow, --stacks, or --send; add one, or drop --ranks=1"),
        (["--list", "--ranks=1"], "--ranks=1: needs --follow, --stacks, or --send; add one, or drop --ranks=1"),
        (
            ["--stop", "--ranks=1", "ir-1"],
            "--ranks=1: needs --follow, --stacks, or --send; add one, or drop --ranks=1",
        ),
    ],
)
def test_words_that_ask_nothing_are_refused(words, line):
    assert ask(*words, code=2) == line


def test_empty_words_reach_no_launch(running, tmp_path):
    """As a script gives them whose variable is unset; this launch may be the only one."""
    command, _ = running()
    folder = tmp_path / "b"
    for words in (
        ["--stop", ""],
        ["--send=KILL", ""],
        [f"--bundle={folder}", ""],
        ["--send=KILL", "--ranks=", command.pid],
    ):
        ask(*words, code=2)
    assert not folder.exists()
    assert listed(command.pid)["ranks"]["running"] == 2
    stop(command)
    assert b"asked" not in command.err
    assert b"sent" not in command.err


def test_beginning_of_several_ids_is_refused(running):
    commands = [running(nproc=1)[0] for _ in range(2)]
    line = ask("--stop", "ir-", code=2)
    assert line.startswith("--stop ir-: ")
    assert line.endswith("); add the id of one")
    for command in commands:
        stop(command)


def test_every_process_of_a_launch_stands_for_it(running):
    command, _ = running()
    launch_id = listed(command.pid)["id"]
    ours = {pid: name for pid, (parent, _, name) in processes().items() if parent == command.pid}
    assert "irun-guard" in ours.values()
    assert len(ours) > 1, "a rank, too"
    found = launches.find_launches(os.environ)
    for pid in (command.pid, *ours):
        assert choose_launch(found, "--stacks", str(pid)).launch_id == launch_id


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_every_process_of_an_isolated_launch_stands_for_it(running):
    """The launcher outside, which the user has the pid of, its guard, and what is in the namespace."""
    command, _ = running("--isolate")
    table = processes()
    inner = next(pid for pid, (parent, _, name) in table.items() if parent == command.pid and name != "irun-guard")
    ours = [pid for pid, (parent, _, _) in table.items() if parent in (command.pid, inner)]
    assert [name for _, _, name in map(table.get, ours)].count("irun-guard") == 1
    assert len(ours) == 4
    launch_id = listed(inner)["id"]
    seen = launches.find_launches(os.environ)
    for pid in (command.pid, *ours):
        assert choose_launch(seen, "--stacks", str(pid)).launch_id == launch_id
    with pytest.raises(UsageError, match="not a launch that runs here"):
        choose_launch(seen, "--stacks", str(os.getpid()))
    assert ask("--stop", command.pid).startswith(f"{launch_id}: stopping")
    assert command.wait() == 143


def test_variables_ask_nothing(infini_run):
    asking = {"LIST": "json", "STOP": "1", "SEND": "USR1", "RANKS": "1"}
    variables = {f"{prefix}{name}": text for prefix in ("INFINI_RUN_", "PET_") for name, text in asking.items()}
    command = infini_run("echo", "ran", env={**os.environ, **variables})
    assert command.wait() == 0
    assert command.out == b"ran\n"
    known = ", ".join(f"INFINI_RUN_{name}" for name in asking)
    flags = ", ".join(f"--{name.lower()}" for name in asking)
    assert (
        command.err
        == f"infini-run: unknown variables {known}, ignored; did you mean {flags}, which have no variable?\n".encode()
    )


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


def new_folder():
    return f"{MEMORY}/infini-run-ir-{os.urandom(6).hex()}"


def greeting(launch_id, job=""):
    """What a launch of two ranks says first."""
    about = about_text(
        launch_id=launch_id,
        start_s=time.time() - 5,
        program=["forged"],
        nodes=1,
        node=-1,
        world=2,
        ranks=(0, 1),
        devices=(),
        job=job,
    )
    return pack(ABOUT, about) + pack(COUNTS, pack_counts({"running": 2}, -1))


@contextlib.contextmanager
def forged(folders, reply=b"", *, uid=STRANGER):
    """A stranger's process that listens in these new folders. Each has what it says first; None: it says nothing.
    `reply` is its answer to any question."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (len(folders) + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            _serve(folders, reply, write_fd)
        finally:
            os._exit(1)
    os.close(write_fd)
    try:
        assert os.read(read_fd, 1) == b"x"
        yield pid
    finally:
        os.close(read_fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _serve(folders, reply, write_fd):
    listeners = {}
    for folder, first in folders.items():
        os.mkdir(folder, 0o700)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/control")
        listener.listen(64)
        listeners[listener] = first
    os.write(write_fd, b"x")
    speaking = [listener for listener, first in listeners.items() if first is not None]
    while True:
        for listener in select.select(speaking, [], [])[0]:
            client = listener.accept()[0]
            with client, contextlib.suppress(OSError):
                client.sendall(listeners[listener])
                if client.recv(1 << 16):
                    client.sendall(reply)


@needs_root("becoming a stranger")
def test_stranger_cannot_take_the_id_of_a_launch(running):
    """A folder has the id in its name, whatever its launch says; and another user's launch is another one."""
    command, ranks = running()
    launch_id = found(command.pid).launch_id
    lying, same = new_folder(), f"{MEMORY}/infini-run-{launch_id}-7"
    said = greeting(launch_id, job=f"INFINI_JOB_NAME={launch_id}")
    with forged({lying: said, same: said}):
        rows = {each.folder: each for each in launches.find_launches({})}
        assert (rows[lying].facts, rows[lying].problem) == (None, "does not answer")
        assert rows[lying].launch_id == os.path.basename(lying).removeprefix("infini-run-")
        assert rows[same].uid == STRANGER
        assert [each.pid for each in launches.own_launches(list(rows.values())) if each.launch_id == launch_id].count(
            command.pid
        ) == 1
        for word in (launch_id, ranks[0], command.pid):
            assert ask("--send=CONT", word) == f"{launch_id}: sent SIGCONT to 2 of 2 ranks\n"
    stop(command)


@needs_root("becoming a stranger")
def test_strangers_silent_sockets_delay_the_list_by_a_second_in_all(running):
    """Of 1500, asked 200 at a time, each would take a second of its turn. Launches of others have their turn, too."""
    command, _ = running()
    other = new_folder()
    said = greeting(os.path.basename(other).removeprefix("infini-run-"))
    silent = {new_folder(): None for _ in range(1500)}
    with forged(silent), forged({other: said}, uid=STRANGER + 1):
        begin_s = time.monotonic()
        rows = launches.find_launches({})
        assert time.monotonic() - begin_s < 4
        by_folder = {each.folder: each for each in rows}
        assert by_folder[other].facts is not None
        assert {by_folder[folder].problem for folder in silent} == {"does not answer"}
        assert next(each for each in rows if each.pid == command.pid).facts is not None
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


def test_greeting_with_values_out_of_bounds_is_refused(infini_run, monkeypatch):
    kept = []
    monkeypatch.setattr(launches, "read_greeting", lambda *parts: kept.append(parts) or read_greeting(*parts))
    command = infini_run("--nproc_per_node=1", *UP)
    command.pids_of(b"up")
    found(command.pid)
    about, counts = kept[0]
    bad = {
        b"start": (b"nan", b"inf", b"-1", b"1e300"),
        b"node": (b"-2",),
        b"nodes": (b"-1",),
        b"world": (b"-1", b"9" * 19),
    }
    for name, texts in bad.items():
        part = next(part for part in about.split(b"\0") if part.startswith(name + b"="))
        for text in texts:
            with pytest.raises(LinkError):
                read_greeting(about.replace(part, name + b"=" + text), counts)
    stop(command)


def test_more_sockets_than_descriptors_do_not_hide_a_launch(running, tmp_path):
    """300 folders that look like a launch's, none of which answers."""
    command, _ = running()
    made = []
    try:
        for _ in range(300):
            folder = Path(MEMORY) / f"infini-run-ir-{os.urandom(6).hex()}"
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
    assert struct.unpack(">5Iq", frames[1][1]) == (0, 2, 0, 0, 0, -1)
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
    many = [replace(here, folder=f"{MEMORY}/infini-run-ir-{number}") for number in range(6)]
    text = r"--stacks: 6 launches run here \(ir-0, ir-1, ir-2, ir-3, and 2 more\); add the id of one"
    with pytest.raises(ir.UsageError, match=text):
        choose_launch(many, "--stacks", "")


@pytest.mark.parametrize("job", ["SLURM_JOB_ID=2147483647", "PBS_JOBID=2147483647.head.example"])
def test_number_of_a_job_names_its_launches(running, job):
    command, _ = running()
    here = found(command.pid)
    stop(command)
    here = replace(here, facts=replace(here.facts, job=job))
    text = rf"^--stop 2147483647: not a launch, but the job in which one runs; use {here.launch_id}$"
    with pytest.raises(ir.UsageError, match=text):
        choose_launch([here], "--stop", "2147483647")


# ---- many launches


@with_strace
def test_list_makes_six_system_calls_per_launch(running, tmp_path):
    """With socket(2), and the status of its folder. What it polls is for all launches together."""
    commands = [running(nproc=1)[0] for _ in range(8)]
    folders = [found(command.pid).folder for command in commands]
    subprocess.run(["strace", "-o", tmp_path / "calls", *COMMAND, "--list"], check=True, stdout=subprocess.DEVNULL)
    calls = (tmp_path / "calls").read_text().splitlines()
    for folder in folders:
        at = next(at for at, call in enumerate(calls) if call.startswith("connect(") and f'"{folder}/' in call)
        fd = re.match(r"connect\((\d+),", calls[at])[1]
        after = re.compile(rf"(\w+)\({fd}[,)]")
        names = [match[1] for call in calls[at:] if (match := after.match(call))]
        assert names[: names.index("close") + 1] == ["connect", "getsockopt", "recvfrom", "close"]
        about = [call for call in calls if f'"{folder}"' in call or f'"{folder}/' in call]
        assert [call.partition("(")[0] for call in about] == ["newfstatat", "connect"]
    for command in commands:
        stop(command)


@pytest.mark.slow
def test_list_has_two_hundred_launches(infini_run):
    """More are asked than one turn takes (_AT_ONCE), if other tests have some."""
    commands = []
    for _ in range(25):  # a few at a time: whoever else runs tests here needs some of the machine
        few = [infini_run("--console=inherit", "sh", "-c", "echo up; exec sleep 1000") for _ in range(8)]
        for command in few:
            command.read_until(b"up\n")
        commands += few
    rows = {}

    def have_all_answered():
        """Not within the second of one list, on a busy machine."""
        rows.update({row["pid"]: row for row in json.loads(ask("--list=json"))["launches"] if row["ranks"]})
        return all(command.pid in rows for command in commands)

    until(have_all_answered)
    assert all(rows[command.pid]["ranks"]["running"] == 1 for command in commands)
    assert len({rows[command.pid]["id"] for command in commands}) == 200
    assert len(ask("--list").splitlines()) > 200
    for begin in range(0, 200, 8):
        few = commands[begin : begin + 8]
        for command in few:
            command.signal(signal.SIGTERM)
        assert {command.wait() for command in few} == {143}
