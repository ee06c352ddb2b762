"""--restart_scope=program: the program of a failed rank starts again, alone; the others run on and learn it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections import Counter

import pytest

import infini_run as ir
from tests.launch.test_control import ask
from tests.launch.test_program_order import port, ready  # noqa: F401
from tests.launch.test_programs import HOST, report_of, sh, two
from tests.support.command import Bell, play
from tests.support.launch_shapes import with_strace
from tests.support.processes import is_alive, is_full, marked, no_descriptor_left
from tests.support.waiting import until

ALONE = "--restart_scope=program"
NOW = "--restart_delay=0"
NEVER = "--restart_delay=1000"  # a test that waited for it would not end
STAY = "exec sleep 1000"
ATTEMPT = "$TORCHELASTIC_RESTART_COUNT"


def alone(first, second, *flags, restarts=2, delay=NOW, of_second=(), **more):
    """A job whose second program restarts alone."""
    of_second = (*of_second, f"--max_restarts={restarts}")
    return two(first, second, ALONE, delay, *flags, of_second=of_second, **more)


def kinds(path, *names):
    """The events of these kinds."""
    return [each for each in map(json.loads, path.read_text().splitlines()) if each["kind"] in names]


def counts(events):
    """How many events of each kind there are."""
    return Counter(event.kind for event in events)


@pytest.fixture
def gate(tmp_path):
    """Who reads a line of it goes on; a rank may write it, too."""
    gate = Bell(tmp_path / "gate")
    yield gate
    gate.close()


def check_leftovers_of_b_alone_end(command, bell, gate):
    """What program b leaves is gone when it starts again, and what a leaves when the job ends. Each leftover process
    rings with its program and its number; b fails when the gate opens, and rings when it starts again."""
    pids = {name: int(pid) for name, pid in map(str.split, bell.hear(2))}
    gate.ring("go")
    assert bell.hear(1) == ["again"]
    assert not is_alive(pids["b"])
    assert is_alive(pids["a"])
    command.signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert not is_alive(pids["a"])


# ---- one program, and not the others


def test_program_restarts_while_the_others_run_on(infini_run, tmp_path, bell, every_path):
    trainer = sh(f"echo pid $$; read go < {bell.path}; echo {ATTEMPT} of $TORCHELASTIC_MAX_RESTARTS")
    sampler = sh(
        f"echo {ATTEMPT} of $TORCHELASTIC_MAX_RESTARTS; "
        f'test "$RANK$TORCHELASTIC_RESTART_COUNT" = 10 && {{ echo broken >&2; exit 3; }}; '
        f'test "$RANK$TORCHELASTIC_RESTART_COUNT" = 11 && echo go > {bell.path}; {STAY}'
    )
    flags = (f"--report={tmp_path}/r", f"--events={tmp_path}/e")
    command = infini_run(*alone(trainer, sampler, *flags, counts=(1, 2), of_first=("--ends_job",)))
    assert command.wait() == 0, command.err
    pid = int(command.read_lines(b"[a 0] pid")[0][-1])
    lines = command.out.decode().splitlines()
    assert "[a 0] 0 of 0" in lines
    assert [line for line in lines if line.startswith("[b 1]")] == ["[b 1] 0 of 2", "[b 1] 1 of 2"]
    told = (
        rf"\[b 1 err\] broken\ninfini-run: b: restart 1 of 2 in 0 ms: b 1 on {HOST} failed: exit code 3 \(pid \d+, "
    )
    assert re.match(told, command.err.decode())
    assert command.err.count(b"\n") == 2
    report = report_of(tmp_path / "r")
    assert (report["exit_code"], report["restarts"], report["first_failure"]) == (0, 1, None)
    [earlier] = report["earlier_failures"]
    assert (earlier["program"], earlier["program_rank"], earlier["exit_code"]) == ("b", 1, 3)
    assert earlier["last_lines"] == ["broken"]
    assert report["ranks"][0]["pid"] == pid
    assert [each["stopped"] for each in report["ranks"]] == [False, True, True]
    started = kinds(tmp_path / "e", "started", "restarting")
    assert [each.get("program") for each in started] == ["a", "b", "b", "b", "b", "b"]
    assert started[3] == {"kind": "restarting", "time_s": started[3]["time_s"], "restarts": 1, "program": "b"}
    assert started[0]["pid"] == pid
    assert not marked(f"INFINI_RUN_ID={report['launch_id']}".encode())


def test_what_stays_and_what_is_new(infini_run, bell):
    """Address, port, and id stay: the other programs have them. The counter and the socket are new."""
    names = ("INFINI_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "JOB_PROGRAMS", "RANK", "WORLD_SIZE", "ROLE_NAME")
    shown = "; ".join(f'echo "{name}=${name}"' for name in names)
    sampler = sh(f"{shown}; echo $NOTIFY_SOCKET; test {ATTEMPT} = 0 && exit 3; exit 0")
    command = infini_run(*alone(["true"], sampler))
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert len(lines) == 2 * (len(names) + 1)
    before, after = lines[: len(names) + 1], lines[len(names) + 1 :]
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


def test_all_ranks_of_the_program_restart_and_those_that_were_done(infini_run, bell, gate):
    sampler = sh(
        f"echo {ATTEMPT}; test $RANK{ATTEMPT} = 10 || {{ echo $$ > {bell.path}; exit 0; }}; read go < {gate.path}; "
        "exit 3"
    )
    command = infini_run(*alone(sh("exit 0"), sampler, counts=(1, 3), of_second=("--ends_job",)))
    done = [int(pid) for pid in bell.hear(2)]
    until(lambda: not any(map(is_alive, done)))
    gate.ring("go")
    assert command.wait() == 0, command.err
    lines = sorted(command.out.decode().splitlines())
    assert lines == [f"[b {rank}] {attempt}" for rank in range(3) for attempt in range(2)]


def test_last_rank_of_the_job_restarts(infini_run):
    """When nothing else runs, the job waits for it."""
    command = infini_run(
        *alone(["true"], sh(f"sleep 0.2; exit $((9 + {ATTEMPT}))"), restarts=1, delay="--restart_delay=0.2")
    )
    assert command.wait() == 10
    assert f"infini-run: b 0 on {HOST} failed: exit code 10 ".encode() in command.err
    assert b"; after 1 restart\n" in command.err


def test_spent_restarts_end_the_job_with_that_failure(infini_run, tmp_path):
    sampler = sh(f"echo last words {ATTEMPT} >&2; exit 7")
    command = infini_run(*alone(sh(STAY), sampler, f"--report={tmp_path}/r"))
    assert command.wait() == 7
    assert command.err.decode().splitlines()[-2].startswith(f"infini-run: b 0 on {HOST} failed: exit code 7 (pid ")
    assert b"; 1 other was stopped; after 2 restarts\ninfini-run:   | last words 2\n" in (
        command.err.replace(b"\n  |", b"\ninfini-run:   |")
    )
    report = report_of(tmp_path / "r")
    assert (report["first_failure"], report["restarts"], len(report["earlier_failures"])) == (1, 2, 2)


def test_failure_of_a_program_without_restarts_ends_the_job(infini_run, tmp_path):
    command = infini_run(*alone(sh("exit 5"), sh(STAY), f"--report={tmp_path}/r"))
    assert command.wait() == 5
    assert command.err.startswith(f"infini-run: a 0 on {HOST} failed: exit code 5 (pid ".encode())
    assert report_of(tmp_path / "r")["restarts"] == 0


def test_each_program_has_its_own_count(infini_run, tmp_path):
    """The first part's --max_restarts is that of all programs that have none."""
    fails = f"echo {ATTEMPT} of $TORCHELASTIC_MAX_RESTARTS; test {ATTEMPT} = $1 && exit 0; exit 3"
    words = [
        ALONE,
        NOW,
        "--max_restarts=3",
        f"--report={tmp_path}/r",
        "--program=a",
        "sh",
        "-c",
        fails,
        "x",
        "2",
        ":",
    ]
    words += ["--program=b", "--max_restarts=1", "sh", "-c", fails, "x", "1"]
    command = infini_run(*words)
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == [
        "[a 0] 0 of 3", "[a 0] 1 of 3", "[a 0] 2 of 3", "[b 0] 0 of 1", "[b 0] 1 of 1",
    ]  # fmt: skip
    assert report_of(tmp_path / "r")["restarts"] == 3


def test_failure_while_another_program_waits_ends_the_job(infini_run, bell, tmp_path):
    """The first failure of the report is the one that ended the job."""
    words = alone(
        sh(f"read go < {bell.path}; exit 4"), sh("exit 3"), f"--report={tmp_path}/r", delay=NEVER, counts=(1, 2)
    )
    command = infini_run(*words)
    command.read_error_until(b"b: restart 1 of 2 in")
    bell.ring("go")
    assert command.wait() == 4
    assert f"infini-run: a 0 on {HOST} failed: exit code 4 ".encode() in command.err
    report = report_of(tmp_path / "r")
    assert (report["first_failure"], report["restarts"]) == (0, 0)


def test_good_end_of_ends_job_ends_a_job_whose_program_waits(infini_run, bell):
    words = alone(sh(f"read go < {bell.path}"), sh("exit 3"), delay=NEVER, of_first=("--ends_job",))
    command = infini_run(*words)
    command.read_error_until(b"b: restart 1 of 2 in")
    bell.ring("go")
    assert command.wait() == 0


# ---- the stop of a part


def test_ranks_get_the_stop_signal_and_their_grace(infini_run, gate):
    saves = f"trap 'echo saved; exit 0' TERM; echo up; echo go > {gate.path}; while :; do sleep 0.05; done"
    sampler = sh(f"test {ATTEMPT} = 1 && exit 0; test $RANK = 0 && {{ {saves}; }}; read go < {gate.path}; exit 3")
    command = infini_run(*alone(["true"], sampler, counts=(1, 2)))
    assert command.wait() == 0, command.err
    assert command.out.decode().splitlines() == ["[b 0] up", "[b 0] saved"]


def test_rank_that_ignores_the_signal_is_killed_after_the_grace(infini_run, gate, every_path):
    stubborn = f"trap '' TERM; echo up; echo go > {gate.path}; exec sleep 1000"
    sampler = sh(f"test {ATTEMPT} = 1 && exit 0; test $RANK = 0 && {{ {stubborn}; }}; read go < {gate.path}; exit 3")
    command = infini_run(*alone(["true"], sampler, "--grace=0.2", counts=(1, 2)))
    assert command.wait() == 0, command.err
    assert command.out == b"[b 0] up\n"


@pytest.mark.parametrize("scope", ["group", "leader", "mixed"])
def test_scope_of_the_stop_is_that_of_the_job(infini_run, gate, scope):
    """The child of a rank gets the signal with its rank, at half the grace, or never; in the end it is gone."""
    child = f"(trap 'echo child; exit 0' TERM; echo up; echo go > {gate.path}; while :; do sleep 0.02; done) &"
    sampler = sh(
        f"test {ATTEMPT} = 1 && exit 0; test $RANK = 0 && {{ {child} wait; }}; read go < {gate.path}; exit 3"
    )
    command = infini_run(*alone(["true"], sampler, "--grace=0.6", f"--stop_scope={scope}", counts=(1, 2)))
    assert command.wait() == 0, command.err
    assert command.out.startswith(b"[b 0] up\n")


@pytest.mark.rows(2)
def test_nothing_of_an_attempt_is_left_when_the_next_begins(infini_run, bell, gate, every_path):
    """A daemon that left its rank's session is gone, and the one of the other program lives on."""
    daemon = f"setsid sh -c 'trap \"\" TERM; echo $ROLE_NAME $$ > {bell.path}; exec sleep 1000' & "
    sampler = sh(
        f"test {ATTEMPT} = 0 && {{ {daemon} read go < {gate.path}; exit 3; }}; echo again > {bell.path}; {STAY}"
    )
    trainer = sh(f"{daemon} {STAY}")
    command = infini_run(*alone(trainer, sampler, "--grace=0.2"))
    check_leftovers_of_b_alone_end(command, bell, gate)


def test_two_programs_that_fail_at_once_both_restart(infini_run):
    fails = sh(f"test {ATTEMPT} = 1 && exit 0; exit 3")
    command = infini_run(*two(fails, fails, ALONE, NOW, "--max_restarts=1", counts=(2, 2)))
    assert command.wait() == 0, command.err
    assert sorted(re.findall(rb"(\w): restart 1 of 1 in", command.err)) == [b"a", b"b"]


def test_ranks_that_fail_together_are_one_failure(infini_run, tmp_path):
    fails = sh(f"test {ATTEMPT} = 5 && exit 0; exit 3")
    command = infini_run(*alone(["true"], fails, f"--report={tmp_path}/r", restarts=5, counts=(1, 8)))
    assert command.wait() == 0, command.err
    report = report_of(tmp_path / "r")
    assert (report["restarts"], len(report["earlier_failures"]), report["first_failure"]) == (5, 5, None)


def test_ranks_that_failed_together_are_forgotten_by_a_good_end(infini_run, bell, tmp_path):
    words = alone(sh(f"read go < {bell.path}"), sh("exit 3"), delay=NEVER, of_first=("--ends_job",), counts=(1, 4))
    command = infini_run(f"--report={tmp_path}/r", *words)
    command.read_error_until(b"b: restart 1 of 2 in")
    bell.ring("go")
    assert command.wait() == 0
    assert report_of(tmp_path / "r")["first_failure"] is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_the_delay_ends_the_job(infini_run, number, tmp_path):
    command = infini_run(
        *alone(sh("echo up $$; exec sleep 1000"), sh("exit 3"), f"--report={tmp_path}/r", delay=NEVER)
    )
    pid = int(command.read_lines(b"[a 0] up")[0][-1])
    command.read_error_until(b"b: restart 1 of 2 in")
    command.signal(number)
    assert command.wait() == 128 + number
    assert not is_alive(pid)
    report = report_of(tmp_path / "r")
    assert (report["first_failure"], report["restarts"]) == (None, 0)
    assert [each["program"] for each in report["earlier_failures"]] == ["b"]


def test_signal_during_the_stop_of_a_part_ends_all_and_asks_none_twice(infini_run, bell, gate):
    saves = (
        f"trap 'echo asked; read go < {bell.path}; echo saved; exit 0' TERM; echo up; echo go > {gate.path}; "
        "while :; do sleep 0.02; done"
    )
    sampler = sh(f"test $RANK = 0 && {{ {saves}; }}; read go < {gate.path}; exit 3")
    command = infini_run(*alone(sh(f"echo up $$; {STAY}"), sampler, counts=(1, 2)))
    command.read_until(b"asked")
    command.signal(signal.SIGTERM)
    command.read_error_until(b"SIGTERM: stopping")
    bell.ring("go")
    assert command.wait() == 128 + signal.SIGTERM
    assert command.out.count(b"asked") == 1
    assert command.out.endswith(b"[b 0] saved\n")


def test_second_signal_kills_during_the_stop_of_a_part(infini_run, gate):
    stubborn = f"trap '' TERM; echo up; echo go > {gate.path}; exec sleep 1000"
    words = alone(sh(STAY), sh(f"test $RANK = 0 && {{ {stubborn}; }}; read go < {gate.path}; exit 3"), counts=(1, 2))
    command = infini_run("--grace=1000", *words)
    command.read_error_until(b"b: restart 1 of 2 in")
    command.signal(signal.SIGTERM)
    command.read_error_until(b"SIGTERM: stopping")
    command.insist(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


def test_nothing_outlives_a_killed_launcher_after_a_restart(infini_run):
    """The guard knows the ranks that started later."""
    command = infini_run(*alone(sh(STAY), sh(f"test {ATTEMPT} = 0 && exit 3; echo $INFINI_RUN_ID; {STAY}")))
    mark = command.read_lines(b"[b 0]")[0][-1]
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: not marked(f"INFINI_RUN_ID={mark}".encode()))


def test_restart_inside_a_pid_namespace(infini_run):
    command = infini_run("--isolate", *alone(["true"], sh(f"echo {ATTEMPT}; test {ATTEMPT} = 1 || exit 3")))
    assert command.wait() == 0, command.err
    assert command.out == b"[b 0] 0\n[b 0] 1\n"


# ---- programs that wait for others


def test_program_that_restarts_waits_until_another_is_up_again(infini_run, bell, gate):
    """Both have failed; the trainer starts once the server is ready again."""
    server = ready(
        first=f"echo serves; test {ATTEMPT} = 1 && read go < {bell.path}",
        then=f"test {ATTEMPT} = 1 && {STAY}; read go < {bell.path}; exit 3",
    )
    trainer = sh(
        f"echo uses; test {ATTEMPT} = 1 && exit 0; while :; do sleep 0.02; done & read go < {gate.path}; exit 4"
    )
    words = two(server, trainer, ALONE, NOW, "--max_restarts=1", of_second=("--after=a", "--ends_job"))
    command = infini_run(*words)
    command.read_lines(b"[b 0] uses")
    bell.ring("go")
    command.read_error_until(b"a: restart 1 of 1 in")
    gate.ring("go")
    command.read_error_until(b"b: restart 1 of 1 in")
    command.read_lines(b"[a 0] serves", 2)
    assert command.out.count(b"uses") == 1
    bell.ring("go")
    assert command.wait() == 0, command.err
    assert command.out.decode().splitlines().count("[b 0] uses") == 2


def test_server_that_fails_before_it_is_up_holds_the_others_until_it_is(infini_run):
    server = ready(first=f"echo {ATTEMPT}; test {ATTEMPT} = 0 && exit 3")
    words = two(
        server, sh("echo uses"), ALONE, NOW, of_first=("--max_restarts=1",), of_second=("--after=a", "--ends_job")
    )
    command = infini_run(*words)
    assert command.wait() == 0, command.err
    assert command.out.decode().splitlines() == ["[a 0] 0", "[a 0] 1", "[b 0] uses"]


def test_program_that_waits_starts_after_another_has_restarted(infini_run, bell):
    """Its arguments and pipes outlive the restart of another one."""
    fails = sh(f"test {ATTEMPT} = 1 && {{ echo go > {bell.path}; exit 0; }}; exit 3")
    server = ready(first=f"read go < {bell.path}", then="exit 0")
    waits = sh("readlink /proc/self/fd/0; echo $ROLE_NAME $TORCHELASTIC_RESTART_COUNT $RANK")
    words = [
        *two(server, fails, ALONE, NOW, "--max_restarts=1"),
        ":",
        "--program=c",
        "--nproc_per_node=2",
        "--after=a",
    ]
    command = infini_run(*words, *waits)
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == [
        "[c 0] /dev/null", "[c 0] c 0 0", "[c 1] /dev/null", "[c 1] c 0 1",
    ]  # fmt: skip


def test_port_says_again_that_a_program_is_up(infini_run, port):  # noqa: F811
    serve = f"""
import os, socket
server = socket.create_server(("127.0.0.1", {port}))
while 1:
    word = server.accept()[0].recv(9)
    if word == b"fail":
        os._exit(3)
"""
    use = f"""
import os, socket, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
connection = socket.create_connection(("127.0.0.1", {port}))
connection.sendall(b"work" if attempt == "1" else b"fail")
if attempt == "0":
    connection.recv(1)  # its end: the server has gone
print("used", attempt)
sys.exit(0 if attempt == "1" else 4)
"""
    words = two(
        [sys.executable, "-c", serve], [sys.executable, "-c", use], ALONE, NOW, "--max_restarts=1",
        of_first=(f"--ready_port={port}",), of_second=("--after=a", "--ends_job"),
    )  # fmt: skip
    command = infini_run(*words)
    assert command.wait() == 0, command.err
    assert command.out == b"[b 0] used 0\n[b 0] used 1\n"


# ---- input, output, and files


def test_logs_have_a_heading_for_each_attempt(infini_run, tmp_path):
    sampler = sh(f'printf "half {ATTEMPT}"; exit 3')
    command = infini_run(*alone(["true"], sampler, f"--log_dir={tmp_path}/logs", restarts=1))
    assert command.wait() == 3
    text = (tmp_path / "logs/b/rank_0.log").read_text()
    assert re.fullmatch(
        rf"half 0\ninfini-run: restart 1 of 1: b 0 on {HOST} failed: exit code 3 \(pid \d+, after .*\)\nhalf 1", text
    )
    assert (tmp_path / "logs/a/rank_0.log").read_text() == ""


@with_strace
def test_heading_comes_before_output_of_rank_that_ends_at_once(infini_run, tmp_path):
    """It ends before the next rank has started. The first clones are the guard and three ranks."""
    tracer = ("strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", "trace=clone,clone3")
    tracer += ("-e", "inject=clone,clone3:delay_exit=300000:when=5")
    sampler = sh(f"echo life {ATTEMPT}; test $RANK{ATTEMPT} = 10 && exit 3; exit 0")
    words = alone(["true"], sampler, f"--log_dir={tmp_path}/logs", counts=(1, 2))
    command = infini_run(*words, under=tracer)
    assert command.wait() == 0, command.err
    for rank in range(2):
        heading, last = (tmp_path / f"logs/b/rank_{rank}.log").read_text().splitlines()[-2:]
        assert heading.startswith("infini-run: restart 1 of 2: b 1 on ")
        assert last == "life 1"


@pytest.mark.parametrize("stream", [1, 2])
def test_heading_ends_unended_line_of_either_stream(infini_run, tmp_path, stream):
    sampler = sh(f'printf "half {ATTEMPT}" >&{stream}; exit 3')
    command = infini_run(*alone(["true"], sampler, f"--log_dir={tmp_path}/logs", restarts=1))
    assert command.wait() == 3
    first, heading, last = (tmp_path / "logs/b/rank_0.log").read_text().split("\n")
    mark = "err: " * (stream == 2)
    assert (first, last) == (f"{mark}half 0", f"{mark}half 1")
    assert heading.startswith("infini-run: restart 1 of 1: ")


def test_unended_line_of_an_attempt_stays_its_own(infini_run):
    command = infini_run("--console=lines", *alone(["true"], sh(f'printf "half {ATTEMPT}"; exit 3'), restarts=1))
    assert command.wait() == 3
    assert command.out.rstrip(b"\n") == b"half 0\nhalf 1"


def test_rank_that_inherits_a_file_reads_it_from_its_beginning_again(infini_run, tmp_path):
    (tmp_path / "input").write_text("one\ntwo\n")
    reads = sh(f"cat; exit $((3 - 3 * {ATTEMPT}))")
    with open(tmp_path / "input") as stdin:
        words = two(reads, sh("cat; exit 0"), ALONE, NOW, of_first=("--max_restarts=1",))
        command = infini_run(*words, stdin=stdin)
        assert command.wait() == 0, command.err
    assert command.out == b"[a 0] one\n[a 0] two\n" * 2


def test_rank_with_a_copy_of_the_input_gets_what_comes_from_now_on(infini_run):
    reads = sh(f"while read word; do echo $word {ATTEMPT}; test $word = fail && exit 3; done; exit 0")
    command = infini_run("--stdin=all", *alone(sh("cat > /dev/null"), reads, restarts=1), stdin=-1)
    stdin = command.process.stdin
    for word in (b"one", b"fail"):
        stdin.write(word + b"\n")
        stdin.flush()
        command.read_until(word)
    command.read_error_until(b"restart 1 of 1")
    until(lambda: command.process.poll() is not None or _answers(command))
    command.close_stdin()
    assert command.wait() == 0, command.err
    assert b"[b 0] last 1\n" in command.out


def _answers(command):
    """Whether the new rank has got a line: one that comes before it starts is not for it."""
    command.process.stdin.write(b"last\n")
    command.process.stdin.flush()
    if select.select([command.process.stdout], [], [], 0.1)[0]:
        command.read_more()
    return b"last 1\n" in command.out


def test_restart_waits_until_a_full_console_has_taken_the_output(infini_run):
    writes = sh(f"yes {ATTEMPT} | head -c 1000000; test {ATTEMPT} = 1 || exit 3")
    command = infini_run(*alone(["true"], writes))
    until(lambda: is_full(command.process.stdout))
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert sorted(set(lines)) == ["[b 0] 0", "[b 0] 1"]
    assert lines.index("[b 0] 1") == lines.count("[b 0] 0")


def test_error_file_is_that_of_the_last_attempt(infini_run, tmp_path):
    fails = """
import json, os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    json.dump({"message": "of the first"}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(3)
"""
    command = infini_run(*alone(["true"], [sys.executable, "-c", fails], f"--report={tmp_path}/r", restarts=1))
    assert command.wait() == 3
    report = report_of(tmp_path / "r")
    assert [each["error_message"] for each in report["earlier_failures"]] == ["of the first"]
    assert report["ranks"][1]["error_message"] is None


def test_progress_is_that_of_the_last_attempt(infini_run, tmp_path):
    """It may be lower: what came after the last checkpoint is done again."""
    script = "test $TORCHELASTIC_RESTART_COUNT = 1 && exec {0} notify=PROGRESS=7; {0} notify=PROGRESS=50; exit 3"
    fails = sh(script.format(" ".join(map(str, play()))))
    command = infini_run(*alone(["true"], fails, f"--report={tmp_path}/r", restarts=1))
    assert command.wait() == 0, command.err
    assert [each["progress"] for each in report_of(tmp_path / "r")["ranks"]] == [None, 7]


def test_metrics_and_trace_have_the_restarts(infini_run, tmp_path):
    flags = (f"--metrics={tmp_path}/m", f"--trace={tmp_path}/t")
    command = infini_run(*alone(sh("sleep 0.3"), sh(f"test {ATTEMPT} = 1 || exit 3"), *flags))
    assert command.wait() == 0, command.err
    counted = re.findall(r'^infini_run_restarts_total\{.*program="(\w)"\} (.*)$', (tmp_path / "m").read_text(), re.M)
    assert counted == [("a", "0.0"), ("b", "1.0")]
    names = [each["name"] for each in json.loads((tmp_path / "t").read_text())["traceEvents"]]
    assert "restart 1 of b" in names


def test_trace_has_no_stop_when_one_program_restarts(infini_run, tmp_path, bell):
    """What is stopped is a rank of that program; the job runs, and so does the other program."""
    sampler = f"test $RANK{ATTEMPT} = 01 && echo go > {bell.path}; test {ATTEMPT} = 1 && exit 0"
    words = alone(
        sh(f"read go < {bell.path}"),
        sh(f"{sampler}; test $RANK = 1 && exit 3; {STAY}"),
        f"--trace={tmp_path}/t",
        counts=(1, 2),
    )
    command = infini_run(*words)
    assert command.wait() == 0, command.err
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    slices = [(each["name"], each["pid"]) for each in events if each["ph"] == "X"]
    pids = {name: pid for name, pid in slices if name.startswith(("a", "b"))}
    assert {name for name, _ in slices} >= {"spawn", "run", "sweep", "b 0, attempt 1"}
    assert [pid for name, pid in slices if name in ("stop", "stopping")] == [pids["b 0"]]


# ---- when it is no restart


def test_program_that_does_not_exist_any_more_does_not_restart(infini_run, tmp_path):
    """As for all ranks: exit codes 126 and 127 are no accident."""
    (tmp_path / "x").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "x").chmod(0o755)
    command = infini_run(*alone(sh(STAY), [f"{tmp_path}/x"]))
    assert command.wait() == 127
    assert b"; not restarted: exit code 127 means that a program does not exist\n" in command.err


@pytest.mark.parametrize("starts", range(4))
@with_strace
def test_stop_while_ranks_restart_starts_no_more_of_them(infini_run, tmp_path, starts):
    """Those that did not start again are none of the new attempt, which is none without a rank.

    The first clones are the guard and four ranks. The signal comes with that of the last rank that starts; before the
    first one, with the removal of an error file.
    """
    way = ("-P", f"{tmp_path}/logs/b/rank_0.error.json", "-e", "trace=unlink", "-e", "inject=unlink:signal=TERM")
    if starts:
        way = ("-e", "trace=clone,clone3", "-e", f"inject=clone,clone3:signal=TERM:when={5 + starts}")
    sampler = sh(f"echo life {ATTEMPT}; test $RANK{ATTEMPT} = 10 && exit 3; test {ATTEMPT} = 0 || {STAY}")
    flags = (f"--log_dir={tmp_path}/logs", f"--report={tmp_path}/r", f"--events={tmp_path}/e", "--grace=1")
    tracer = ("strace", "-f", "-qq", "-o", str(tmp_path / "trace"), *way)
    command = infini_run(*alone(sh(STAY), sampler, *flags, counts=(1, 3)), under=tracer)
    assert command.wait() == 128 + signal.SIGTERM, command.err
    logs = [(tmp_path / f"logs/b/rank_{rank}.log").read_text().count("restart 1 of 2") for rank in range(3)]
    assert logs == [1] * starts + [0] * (3 - starts)
    report = report_of(tmp_path / "r")
    assert (report["restarts"], report["first_failure"]) == (min(1, starts), None)
    assert [(each["program"], each["exit_code"]) for each in report["earlier_failures"]] == [("b", 3)]
    assert [each["signal"] for each in report["ranks"][:1]] == ["SIGTERM"]
    assert len(kinds(tmp_path / "e", "started")) == 4 + starts
    assert not marked(f"INFINI_RUN_ID={report['launch_id']}".encode())


@with_strace
def test_rank_that_cannot_start_again_counts_as_one_that_failed(infini_run, tmp_path):
    """The first clones are the guard and two ranks; the next one is that of the restart, and fails once."""
    tracer = ("strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", "trace=clone,clone3")
    tracer += ("-e", "inject=clone,clone3:error=EAGAIN:when=4")
    sampler = ["sh", "-c", f"echo {ATTEMPT}; test {ATTEMPT} = 0 && exit 3; exit 0"]
    command = infini_run(*alone(["sleep", "1"], sampler), under=tracer)
    assert command.wait() == 0, command.err
    assert b"b: restart 2 of 2 in 0 ms: rank 1 cannot be started: creating the process: Resource temp" in command.err


def test_hang_restarts_the_program_of_the_rank(infini_run, tmp_path):
    hangs = sh(
        f'test {ATTEMPT} = 1 && {{ touch {tmp_path}/again; exit 0; }}; "{sys.executable}" -c "{WATCHED}"; {STAY}'
    )
    flags = ("--hang_timeout=1", "--on_hang=stop", "--grace=1", "--snapshots=off")
    pings = sh(f"until test -e {tmp_path}/again; do echo on; sleep 0.1; done")
    command = infini_run(*alone(pings, hangs, *flags))
    assert command.wait() == 0, command.err
    assert re.search(rb"b: restart 1 of 2 in 0 ms: b 0 on \S+ hung: ", command.err)


def test_hang_of_a_rank_is_not_that_of_its_next_attempt(infini_run, tmp_path, bell, gate):
    """The look at b 1, which begins with py-spy here, lasts until b 0 has failed and both have restarted."""
    (tmp_path / "py-spy").write_text(f"#!/bin/sh\necho go > {gate.path}\n")
    (tmp_path / "py-spy").chmod(0o755)
    hangs = f"import time; {WATCHED.replace('=1', '=trigger')}; time.sleep(1000)"
    server = f'test {ATTEMPT} = 1 && {STAY}; test $RANK = 1 && exec "{sys.executable}" -c "{hangs}"'
    words = alone(
        sh(f"read go < {bell.path}"),
        sh(f"{server}; read go < {gate.path}; exit 3"),
        "--on_hang=stop",
        counts=(1, 2),
        of_first=("--ends_job",),
    )
    command = infini_run(*words, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    command.read_error_until(b"hung")
    bell.ring("go")
    assert command.wait() == 0, command.err
    assert re.findall(rb"b: restart .* in 0 ms: (b \d)", command.err) == [b"b 0"]


def test_late_rank_is_not_late_after_its_restart(infini_run, tmp_path, bell, gate):
    """The first py-spy of the look at b 0 lasts until b 1 has failed, and both have restarted."""
    (tmp_path / "py-spy").write_text(
        f"#!/bin/sh\nmkdir {tmp_path}/once || exit 1\necho go > {gate.path}\nread go < {bell.path}\n"
    )
    (tmp_path / "py-spy").chmod(0o755)
    ready = f"{LATER}; s.send(b'READY=1')"
    steps = f"""{LATER}
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and rank == "0":
    time.sleep(1000)
s.send(b"READY=1")
if attempt == "0":
    open("{gate.path}").readline()
    raise SystemExit(3)
if rank == "1":
    open("{bell.path}", "w").write("go\\n")
time.sleep(1000)
"""
    words = alone(
        [sys.executable, "-c", f"{ready}; time.sleep(1000)"],
        [sys.executable, "-c", steps],
        "--ready_timeout=5",
        "--grace=1",
        counts=(1, 2),
    )
    command = infini_run(*words, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    command.read_error_until(b"b 0 on", b"was not ready")

    def states_of_b():
        rows = [row.split() for row in ask("--top", command.pid).splitlines()]
        return [row[:3] for row in rows if row[0] == "b"]

    until(lambda: states_of_b() == [["b", "0", "ready"], ["b", "1", "ready"]])
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


LATER = "import os, socket, time; s = socket.socket(1, 2); s.connect(os.environ['NOTIFY_SOCKET'])"
WATCHED = "import os, socket; s = socket.socket(1, 2); s.connect(os.environ['NOTIFY_SOCKET']); s.send(b'WATCHDOG=1')"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((ALONE, "true"), f"{ALONE}: needs programs with names; add --program=NAME"),
        ((ALONE, *two(["true"], ["true"])), f"{ALONE}: no program may restart; add --max_restarts=N"),
        (
            (ALONE, "--max_restarts=1", "--one_world", *two(["true"], ["true"])),
            f"{ALONE}: conflicts with --one_world: all ranks are in one world; drop one of them",
        ),
        (
            (ALONE, "--max_restarts=1", "--keep_going", *two(["true"], ["true"])),
            f"{ALONE}: conflicts with --keep_going: a failure stops no rank then; drop one of them",
        ),
        (
            two(["true"], ["true"], of_second=("--max_restarts=1",)),
            "--max_restarts=1: cannot hold for one of several programs; add --restart_scope=program, or move it",
        ),
        (
            two(["true"], ["true"], of_second=(ALONE,)),
            f"{ALONE}: cannot hold for one of several programs; move it to the job's flags",
        ),
        ((ALONE[:-1], "true"), f"{ALONE[:-1]}: expected job or program"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_starts(infini_run, words, line):
    command = infini_run(*words)
    assert command.wait() == 2
    assert command.err.decode().startswith(f"infini-run: {line}")
    assert command.err.count(b"\n") == 1
    assert command.out == b""


# ---- from Python, and from outside


def test_python_program_restarts_alone(tmp_path):
    fails = ["sh", "-c", f"test {ATTEMPT} = 2 && exit 0; exit 3"]
    report = ir.run(
        [ir.Program(["sleep", "0.5"], name="a"), ir.Program(fails, name="b", nproc_per_node=2, max_restarts=2)],
        restart_scope="program", restart_delay=0, console="none",
    )  # fmt: skip
    assert (report.exit_code, report.restarts) == (0, 2)
    assert {each.program for each in report.earlier_failures} == {"b"}


def test_library_leaves_nothing_of_an_attempt(tmp_path):
    """Where orphans go to another process, leftovers are known by their variables; the host's own stay."""
    own = subprocess.Popen(["sleep", "1000"])
    script = f"""
        test {ATTEMPT} = 1 && {{ grep -qs "^State:.[RSDT]" /proc/$(cat {tmp_path}/pid)/status && exit 9; exit 0; }}
        setsid sh -c 'echo $$ > {tmp_path}/pid; trap "" TERM; exec sleep 1000' > /dev/null 2>&1 &
        until test -s {tmp_path}/pid; do sleep 0.01; done; exit 3"""
    report = ir.run(
        [ir.Program(["sleep", "1"], name="a"), ir.Program(["sh", "-c", script], name="b", max_restarts=1)],
        restart_scope="program", restart_delay=0, console="none", grace=0.2, check=False,
    )  # fmt: skip
    assert (report.exit_code, report.restarts) == (0, 1), report.text()
    assert [process.name for process in report.leftover_processes] in (["sleep"], ["sh"])
    assert own.poll() is None
    own.kill()
    own.wait()


@pytest.mark.parametrize("spare", [0, 1, 2, 3, 5, 8, 13, 16])
def test_restart_without_descriptors_is_tried_again(spare, bell):
    """Whatever it has opened is closed again, and a later attempt has all it needs."""
    script = f"test {ATTEMPT} = 0 && exit 3; test {ATTEMPT} = 1 || exit 0; echo up > {bell.path}.up; "
    script += f"read go < {bell.path}; exit 3"
    os.mkfifo(f"{bell.path}.up")
    up = os.open(f"{bell.path}.up", os.O_RDWR | os.O_CLOEXEC)
    programs = [
        ir.Program(["sleep", "1000"], name="a"),
        ir.Program(["sh", "-c", script], name="b", nproc_per_node=2, ends_job=True, max_restarts=1000),
    ]
    flags = {"restart_scope": "program", "restart_delay": 0.01, "console": "prefix", "max_no_progress": 0}
    with ir.ProcessLauncher(programs, **flags) as launcher:
        launcher.launch()
        seen = []
        until(lambda: seen.extend(launcher.events(1)) or counts(seen)["started"] == 5)
        os.read(up, 3), os.read(up, 3)
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(spare)]
        with no_descriptor_left():
            for fd in held:
                os.close(fd)
            bell.ring("go")
            bell.ring("go")
            until(
                lambda: (
                    seen.extend(launcher.events(1)) or counts(seen)["restarting"] > 2 or counts(seen)["started"] > 6
                )
            )
        assert launcher.wait(60)
        report = launcher.report()
    assert report.exit_code == 0
    assert report.restarts > 2 or spare, (report, seen)
    os.close(up)


def test_launcher_has_the_event_and_stops_in_the_delay():
    programs = [ir.Program(["sleep", "1000"], name="a"), ir.Program(["false"], name="b")]
    flags = {"max_restarts": 3, "restart_scope": "program", "restart_delay": 1000, "console": "none"}
    with ir.ProcessLauncher(programs, **flags) as launcher:
        launcher.launch()
        seen = []
        until(lambda: seen.extend(launcher.events(1)) or any(each.kind == "restarting" for each in seen))
        [event] = [each for each in seen if each.kind == "restarting"]
        assert (event.name, event.code) == ("b", 1)
        assert launcher.running()
        launcher.terminate()
        assert launcher.wait(60)
        assert launcher.report().first_failure is None


def test_list_shows_a_job_whose_program_restarts_as_running(infini_run):
    command = infini_run(*alone(sh(STAY), sh("exit 3"), delay=NEVER))
    command.read_error_until(b"b: restart 1 of 2 in")
    asked = infini_run("--list")
    assert asked.wait() == 0
    [row] = [line for line in asked.out.decode().splitlines() if f" {command.pid} " in line]
    assert " 1 waiting, 1 running " in row
    command.signal(signal.SIGTERM)
    command.wait()


def test_other_program_connects_to_the_same_port_again(infini_run):
    """A trainer with the first JOB_PROGRAMS finds the server after its restart."""
    serve = """
import os, socket
server = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
while 1:
    connection = server.accept()[0]
    connection.sendall(os.environ["TORCHELASTIC_RESTART_COUNT"].encode())
    if connection.recv(9) == b"fail":
        os._exit(3)
"""
    ask = """
import json, os, socket, time
server = next(each for each in json.loads(os.environ["JOB_PROGRAMS"]) if each["name"] == "b")
seen = []
while seen != ["0", "1"]:
    try:
        with socket.create_connection((server["addr"], server["port"])) as connection:
            seen.append(connection.recv(9).decode())
            connection.sendall(b"fail" if seen == ["0"] else b"work")
    except ConnectionError:
        time.sleep(0.01)
    if seen == ["0", "1"]:
        print("both")
"""
    client, server = ([sys.executable, "-c", text] for text in (ask, serve))
    command = infini_run(*alone(client, server, restarts=2, of_first=("--ends_job",)))
    assert command.wait() == 0, command.err
    assert command.out == b"[a 0] both\n"
    assert socket.gethostname()


def test_plain_job_of_programs_has_no_part_of_it(infini_run, tmp_path):
    """Whoever does not ask for it imports nothing of it."""
    command = infini_run(*two(["true"], ["true"]), env={**os.environ, "PYTHONVERBOSE": "1"})
    assert command.wait() == 0
    assert not any(name in command.err for name in (b"program_restarts", b"program_parts", b"headed_programs"))
