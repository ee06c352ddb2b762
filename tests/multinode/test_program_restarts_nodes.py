"""--restart_scope=program on several hosts: one program ends and restarts on all of them, the others run on."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys

import pytest

from infini_run.node.ports import free_port, let_go
from infini_run.report.hang_snapshot import BEFORE_RESTART
from tests.display.test_chrome_trace import validate
from tests.launch.test_program_order import ready
from tests.multinode.test_by_hand import node, port, told  # noqa: F401
from tests.multinode.test_control_nodes import row_of, word  # noqa: F401
from tests.multinode.test_many_ssh import bed, many, no_agent_left, own_lines  # noqa: F401
from tests.multinode.test_programs_nodes import report_of, sh, two
from tests.support.command import altered
from tests.support.hosts import agents
from tests.support.launch_shapes import with_strace
from tests.support.processes import carrying, is_full, marked, state_of
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
ALONE = "--restart_scope=program"
NOW = "--restart_delay=0"
NEVER = "--restart_delay=1000"  # a test that waited for it would not end
STAY = "exec sleep 1000"
SLACK_S = 3.0  # beyond the graces of what has to end, where it is 15 s
SLACK = altered({"multinode.head.head_state._SLACK_S": SLACK_S})
ATTEMPT = "$TORCHELASTIC_RESTART_COUNT"
LAST = f'test "$RANK" = 3 && test {ATTEMPT} = 0'  # of the four ranks of r on two hosts, in the first attempt


def alone(first, second, *flags, restarts=2, delay=NOW, of_first=(), of_second=("--nproc_per_node=2",)):
    """A job whose second program, r, restarts alone."""
    of_second = (*of_second, f"--max_restarts={restarts}")
    return two(first, second, ALONE, delay, *flags, of_first=of_first, of_second=of_second)


def on_two(many, *words, **more):  # noqa: F811
    return many(*words, nproc=1, hosts="host1,host2", **more)


def lines_with(command, text):
    return [line for line in command.out.decode().splitlines() if text in line]


# ---- one program on all its hosts, and not the others


def test_program_on_two_hosts_restarts_while_the_other_runs_on(many, bell, tmp_path):  # noqa: F811
    again = shlex.quote(f"{tmp_path}/again")
    all_again = " && ".join(f"test -e {again}.{rank}" for rank in range(4))
    trainer = sh(f'echo pid $$; test "$RANK" = 0 && read go < {shlex.quote(bell.path)}; echo {ATTEMPT} ends')
    server = sh(
        f"echo at {ATTEMPT} of $TORCHELASTIC_MAX_RESTARTS; {LAST} && {{ echo broken >&2; exit 3; }}; "
        f"test {ATTEMPT} = 0 && {STAY}; touch {again}.$RANK; "
        f'test "$RANK" = 3 && {{ until {all_again}; do sleep 0.02; done; echo go > {shlex.quote(bell.path)}; }}; '
        f"{STAY}"
    )
    flags = (f"--report={tmp_path}/r", f"--events={tmp_path}/e", f"--trace={tmp_path}/t", f"--metrics={tmp_path}/m")
    command = on_two(many, *alone(trainer, server, *flags, of_first=("--ends_job",)))
    assert command.wait() == 0, command.err
    assert len(lines_with(command, "pid ")) == 2
    assert sorted(lines_with(command, "ends")) == ["[host1:t 0] 0 ends", "[host2:t 1] 0 ends"]
    assert lines_with(command, "r 3] at") == ["[host2:r 3] at 0 of 2", "[host2:r 3] at 1 of 2"]
    (line,) = own_lines(command)
    said = r"infini-run: r: restart 1 of 2 in 0 ms: r 3 on host2 failed: exit code 3 \(pid \d+, after .*\)"
    assert re.fullmatch(said, line)
    report = report_of(tmp_path / "r")
    assert (report["exit_code"], report["restarts"], report["first_failure"]) == (0, 1, None)
    [earlier] = report["earlier_failures"]
    assert (earlier["program"], earlier["program_rank"], earlier["host"]) == ("r", 3, "host2")
    assert (earlier["exit_code"], earlier["last_lines"]) == (3, ["broken"])
    assert [each["exit_code"] for each in report["ranks"][:2]] == [0, 0]
    facts = [json.loads(text) for text in (tmp_path / "e").read_text().splitlines()]
    started = [(each["program"], each["program_rank"]) for each in facts if each["kind"] == "started"]
    assert sorted(started) == sorted([("t", 0), ("t", 1), *[("r", rank) for rank in range(4)] * 2])
    [restarting] = [each for each in facts if each["kind"] == "restarting"]
    assert restarting == {"kind": "restarting", "time_s": restarting["time_s"], "restarts": 1, "program": "r"}
    content = report_of(tmp_path / "t")
    events = validate(content)
    restarts = [each["ts"] for each in events if each["name"] == "restart 1 of r"]
    assert len(restarts) == 2  # once per host
    stops = [each["ts"] for each in events if each["name"] == "stop"]
    assert min(stops) > max(restarts)  # that of the job, and not that of r
    counted = re.findall(r'^infini_run_restarts_total\{.*program="(\w)"\} (.*)$', (tmp_path / "m").read_text(), re.M)
    assert counted == [("t", "0.0"), ("r", "1.0")]
    assert not marked(f"INFINI_RUN_ID={report['launch_id']}".encode())


def test_what_stays_and_what_is_new_on_all_hosts(many):  # noqa: F811
    names = ("INFINI_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "JOB_PROGRAMS", "RANK", "WORLD_SIZE", "GROUP_RANK")
    shown = "; ".join(f'echo "{name}=${name}"' for name in names)
    command = on_two(many, *alone(["true"], sh(f"{shown}; echo $NOTIFY_SOCKET; {LAST} && exit 3; exit 0")))
    assert command.wait() == 0, command.err
    for label in ("[host2:r 3]",):
        lines = lines_with(command, label)
        assert len(lines) == 2 * (len(names) + 1)
        before, after = lines[: len(names) + 1], lines[len(names) + 1 :]
        assert before[:-1] == after[:-1]
        assert before[-1] != after[-1]


def test_job_ends_once_all_ranks_of_all_hosts_have_exited(many, bell, tmp_path):  # noqa: F811
    """A host whose ranks all exited stays for a restart: those of the other host may fail later."""
    script = f'echo at {ATTEMPT}; test "$RANK" = 0 && exit 0; test {ATTEMPT} = 1 && exit 0; '
    words = alone(["true"], sh(f"{script} read go < {shlex.quote(bell.path)}; exit 3"), of_second=())
    command = on_two(many, f"--report={tmp_path}/r", *words)
    command.read_lines(b"[host1:r 0] at 0")
    command.read_lines(b"[host2:r 1] at 0")
    bell.ring("go")
    assert command.wait() == 0, command.err
    assert len(lines_with(command, "at 1")) == 2
    report = report_of(tmp_path / "r")
    assert (report["restarts"], [each["exit_code"] for each in report["ranks"]]) == (1, [0] * 4)


def test_each_program_restarts_on_its_own_hosts(many, tmp_path):  # noqa: F811
    fails = sh(f"echo at {ATTEMPT}; test {ATTEMPT} = 1 && exit 0; exit 3")
    words = two(fails, fails, ALONE, NOW, "--max_restarts=1", of_first=("--on_nodes=0",), of_second=("--on_nodes=1",))
    command = on_two(many, *words)
    assert command.wait() == 0, command.err
    assert sorted(re.findall(rb"run: (\w): restart 1 of 1 in", command.err)) == [b"r", b"t"]


def test_nothing_of_an_attempt_is_left_when_the_next_begins(many, bell):  # noqa: F811
    """Neither on the host of the failure nor on the other one."""
    daemon = f"LEFT={bell.path} setsid sh -c 'echo $RANK > {bell.path}; trap \"\" TERM; exec sleep 1000' & "
    server = sh(
        f"test {ATTEMPT} = 0 && {{ {daemon} test $RANK = 1 || {STAY}; read go < {bell.path}.go; exit 3; }}; "
        f"echo again $RANK > {bell.path}; {STAY}"
    )
    os.mkfifo(f"{bell.path}.go")
    command = on_two(many, *alone(sh(STAY), server, "--grace=0.2", of_second=()))
    assert sorted(bell.hear(2)) == ["0", "1"]
    until(lambda: len(carrying(f"LEFT={bell.path}".encode())) == 2)
    _write(f"{bell.path}.go")
    assert sorted(bell.hear(2)) == ["again 0", "again 1"]
    assert not carrying(f"LEFT={bell.path}".encode())
    command.signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


def test_logs_continue_after_a_line_with_the_failure(many, tmp_path):  # noqa: F811
    words = alone(["true"], sh(f"echo life {ATTEMPT}; {LAST} && exit 3; exit 0"), f"--log_dir={tmp_path}/logs")
    assert on_two(many, *words).wait() == 0
    for rank in range(4):
        lines = (tmp_path / f"logs/r/rank_{rank}.log").read_text().splitlines()
        assert lines[-1] == "life 1"
        assert sum("restart 1 of 2: r 3 on host2 failed" in line for line in lines) == 1


# ---- a failure while it restarts


def test_failure_of_the_first_host_is_the_first_one_reported(many, tmp_path):  # noqa: F811
    """Ranks that fail in answer to a failure elsewhere are none of the failures that count."""
    folder = shlex.quote(str(tmp_path))
    server = sh(
        f"test {ATTEMPT} = 1 && exit 0; "
        f'test "$RANK" = 1 && {{ until test -e {folder}/go; do sleep 0.02; done; touch {folder}/gone; exit 3; }}; '
        f"touch {folder}/go; until test -e {folder}/gone; do sleep 0.02; done; sleep 0.3; exit 4"
    )
    command = on_two(many, *alone(["true"], server, "--grace=30", f"--report={tmp_path}/r", of_second=()))
    assert command.wait() == 0, command.err
    report = report_of(tmp_path / "r")
    assert [(each["program_rank"], each["exit_code"]) for each in report["earlier_failures"]] == [(1, 3)]
    assert sum("restart 1 of 2" in line for line in own_lines(command)) == 1


def test_program_that_fails_again_at_once_restarts_again(many, tmp_path):  # noqa: F811
    server = sh(f'test "$RANK" = {ATTEMPT} && exit 3; test {ATTEMPT} = 2 && exit 0; {STAY}')
    command = on_two(many, *alone(["true"], server, f"--report={tmp_path}/r", of_second=()))
    assert command.wait() == 0, command.err
    told = [line.partition(" failed")[0] for line in own_lines(command)]
    assert told == [f"infini-run: r: restart {n + 1} of 2 in 0 ms: r {n} on host{n + 1}" for n in range(2)]
    assert report_of(tmp_path / "r")["restarts"] == 2


def test_failure_of_another_program_in_the_delay_ends_the_job(many, bell, tmp_path):  # noqa: F811
    trainer = sh(f'test "$RANK" = 1 && read go < {shlex.quote(bell.path)} && exit 4; {STAY}')
    command = on_two(many, *alone(trainer, sh(f"{LAST} && exit 3; {STAY}"), f"--report={tmp_path}/r", delay=NEVER))
    command.read_error_until(b"r: restart 1 of 2 in")
    bell.ring("go")
    assert command.wait() == 4
    assert own_lines(command)[-1].startswith("infini-run: t 1 on host2 failed: exit code 4 (pid ")
    report = report_of(tmp_path / "r")
    assert (report["first_failure"], report["restarts"]) == (1, 0)
    assert [each["program"] for each in report["earlier_failures"]] == ["r"]


def test_failure_of_another_program_during_the_end_ends_the_job(many, bell, tmp_path):  # noqa: F811
    """The ranks that end have their grace, and the failure that began it is an earlier one."""
    saves = (
        f"trap 'echo asked; read go < {bell.path}; echo saved; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    )
    server = sh(f'test "$RANK" = 0 && {{ {saves}; }}; read go < {bell.path}.fail; exit 3')
    trainer = sh(f'test "$RANK" = 1 && read go < {bell.path}.go && exit 4; {STAY}')
    for name in ("go", "fail"):
        os.mkfifo(f"{bell.path}.{name}")
    files = (f"--report={tmp_path}/r", f"--events={tmp_path}/e")
    command = on_two(many, *alone(trainer, server, "--grace=1000", *files, of_second=()))
    command.read_until(b"up")
    _write(f"{bell.path}.fail")
    command.read_until(b"asked")
    _write(f"{bell.path}.go")
    until(lambda: '"code":4' in (tmp_path / "e").read_text().replace(" ", ""))  # the head knows
    bell.ring("go")
    assert command.wait() == 4
    assert command.out.count(b"asked") == 1
    assert lines_with(command, "saved")
    report = report_of(tmp_path / "r")
    assert report["first_failure"] == 1
    assert [(each["program"], each["exit_code"]) for each in report["earlier_failures"]] == [("r", 3)]


def _write(path):
    with open(path, "w") as pipe:
        pipe.write("go\n")


def test_good_end_of_ends_job_ends_a_job_whose_program_waits(many, bell, tmp_path):  # noqa: F811
    trainer = sh(f'test "$RANK" = 1 && read go < {shlex.quote(bell.path)}; exit 0')
    words = alone(trainer, sh(f"{LAST} && exit 3; {STAY}"), delay=NEVER, of_first=("--ends_job",))
    command = on_two(many, f"--report={tmp_path}/r", *words)
    command.read_error_until(b"r: restart 1 of 2 in")
    bell.ring("go")
    assert command.wait() == 0, command.err
    assert report_of(tmp_path / "r")["first_failure"] is None


def test_restart_follows_a_look_at_its_ranks_on_all_hosts(many, tmp_path):  # noqa: F811
    """With --snapshots=failure. No rank is stopped before all hosts have looked."""
    folder = shlex.quote(str(tmp_path))
    up = " && ".join(f"test -e {folder}/up.{rank}" for rank in range(4))
    server = sh(
        f"test {ATTEMPT} = 1 && exit 0; touch {folder}/up.$RANK; "
        f'test "$RANK" = 3 && {{ until {up}; do sleep 0.02; done; exit 3; }}; {STAY}'
    )
    words = alone(
        sh(STAY),
        server,
        "--snapshots=failure",
        f"--report={tmp_path}/r",
        of_first=(),
        of_second=("--ends_job", "--nproc_per_node=2"),
    )
    command = on_two(many, *words)
    assert command.wait() == 0, command.err
    report = report_of(tmp_path / "r")
    assert (report["restarts"], report["first_failure"]) == (1, None)
    seen = {(shot["host"], shot["program"], shot["program_rank"], shot["why"]) for shot in report["snapshots"]}
    ranks = ((0, "host1"), (1, "host1"), (2, "host2"))
    assert seen == {(host, "r", rank, BEFORE_RESTART) for rank, host in ranks}


# ---- when it is no restart


@pytest.mark.parametrize("window", [(), ("--restart_window=1000",)], ids=["at once", "after its end"])
def test_spent_restarts_end_the_job_with_that_failure(many, tmp_path, window):  # noqa: F811
    """Where the report decides, the ranks of the program have ended before."""
    server = sh(f'test "$RANK" = 3 && {{ echo last words {ATTEMPT} >&2; exit 7; }}; {STAY}')
    command = on_two(many, *alone(sh(STAY), server, f"--report={tmp_path}/r", *window, restarts=1))
    assert command.wait() == 7
    first, last, words = own_lines(command)
    assert first.startswith("infini-run: r: restart 1 of 1 in 0 ms: r 3 on host2 failed: exit code 7 (pid ")
    assert last.startswith("infini-run: r 3 on host2 failed: exit code 7 (pid ")
    assert last.endswith("; after 1 restart")
    assert words == "  | last words 1"
    report = report_of(tmp_path / "r")
    assert (report["first_failure"], report["restarts"], report["exit_code"]) == (5, 1, 7)
    assert len(report["earlier_failures"]) == 1
    assert not marked(f"INFINI_RUN_ID={report['launch_id']}".encode())


@pytest.mark.parametrize("looks", [False, True])
def test_failure_of_a_program_without_restarts_ends_the_job(many, tmp_path, looks):  # noqa: F811
    """With --snapshots=failure after a look at all ranks that still run, as without the flag."""
    flags = (f"--report={tmp_path}/r", *["--snapshots=failure"] * looks)
    command = on_two(many, *alone(sh('test "$RANK" = 1 && exit 5; exec sleep 1000'), sh(STAY), *flags))
    assert command.wait() == 5
    said = next(line for line in own_lines(command) if "failed" in line)
    assert said.startswith("infini-run: t 1 on host2 failed: exit code 5 (pid ")
    assert {each["host"] for each in report_of(tmp_path / "r")["snapshots"]} == (
        {"host1", "host2"} if looks else set()
    )


def test_program_that_does_not_exist_does_not_restart(many):  # noqa: F811
    command = on_two(many, *alone(sh(STAY), sh('test "$RANK" = 3 && exit 127; exec sleep 1000')))
    assert command.wait() == 127
    assert own_lines(command)[0].endswith("; not restarted: exit code 127 means that a program does not exist")


def test_port_in_use_ends_the_job(many, bell):  # noqa: F811
    """The port is another program's by the time of the restart. The hosts of the bed share one loopback: one of them
    may be told to end the ranks before it has started them."""
    at = free_port()
    let_go(at)
    trainer = f"""
import os, socket, time
if os.environ["RANK"] == "1":
    open({bell.path!r}).readline()
    server = socket.create_server(("127.0.0.1", {at}))
    open({bell.path + ".go"!r}, "w").write("go")
time.sleep(1000)
"""
    server = f"""
import os, socket, time
if os.environ["RANK"] == "1":
    open({bell.path!r}, "w").write("go\\n")
    open({bell.path + ".go"!r}).read()
    os._exit(3)
time.sleep(1000)
"""
    os.mkfifo(f"{bell.path}.go")
    of_second = (f"--ready_port={at}",)
    words = alone([sys.executable, "-c", trainer], [sys.executable, "-c", server], of_second=of_second)
    command = on_two(many, *words, ":", "--program=waits", "--after=r", "true")
    assert command.wait() == 3, command.err
    *_, last = (line for line in own_lines(command) if line.startswith("infini-run: "))
    assert last.startswith("infini-run: r 1 on host2 failed: exit code 3 (pid ")
    assert f"; not restarted: --ready_port={at}: already in use here; " in last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_the_delay_ends_the_job(many, number, tmp_path):  # noqa: F811
    words = alone(sh(f"echo up $$; {STAY}"), sh(f"{LAST} && exit 3; {STAY}"), f"--report={tmp_path}/r", delay=NEVER)
    command = on_two(many, *words)
    command.read_error_until(b"r: restart 1 of 2 in")
    command.signal(number)
    assert command.wait() == 128 + number
    report = report_of(tmp_path / "r")
    assert (report["first_failure"], report["restarts"], report["received_signal"]) == (None, 0, number.name)
    assert [each["program"] for each in report["earlier_failures"]] == ["r"]
    assert not marked(f"INFINI_RUN_ID={report['launch_id']}".encode())


def test_signal_during_the_end_stops_all_and_asks_none_twice(many, bell, tmp_path):  # noqa: F811
    saves = (
        f"trap 'echo asked; read go < {bell.path}; echo saved; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    )
    os.mkfifo(f"{bell.path}.fail")
    server = sh(f'test "$RANK" = 0 && {{ {saves}; }}; read go < {bell.path}.fail; exit 3')
    command = on_two(many, *alone(sh(STAY), server, "--grace=1000", f"--report={tmp_path}/r", of_second=()))
    command.read_until(b"up")
    _write(f"{bell.path}.fail")
    command.read_until(b"asked")
    command.signal(signal.SIGTERM)
    command.read_error_until(b"SIGTERM: stopping")
    bell.ring("go")
    assert command.wait() == 128 + signal.SIGTERM
    assert command.out.count(b"asked") == 1
    assert lines_with(command, "saved")
    report = report_of(tmp_path / "r")
    assert report["first_failure"] is None
    assert [(each["program"], each["exit_code"]) for each in report["earlier_failures"]] == [("r", 3)]


def test_second_signal_kills_during_the_end(many, bell):  # noqa: F811
    os.mkfifo(f"{bell.path}.fail")
    stubborn = "trap 'echo asked' TERM; echo up; while :; do sleep 0.02; done"
    server = sh(f'test "$RANK" = 0 && {{ {stubborn}; }}; read go < {bell.path}.fail; exit 3')
    command = on_two(many, *alone(sh(STAY), server, "--grace=1000", of_second=()))
    command.read_until(b"up")
    _write(f"{bell.path}.fail")
    command.read_until(b"asked")
    command.signal(signal.SIGTERM)
    command.read_error_until(b"SIGTERM: stopping")
    command.insist(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


def test_node_that_is_lost_in_the_delay_ends_the_job(many):  # noqa: F811
    command = on_two(many, *alone(sh(STAY), sh(f"{LAST} && exit 3; {STAY}"), delay=NEVER))
    command.read_error_until(b"r: restart 1 of 2 in")
    os.kill(next(iter(agents())), signal.SIGKILL)
    assert command.wait() == 1, command.err
    assert any("lost node" in line for line in own_lines(command))


@pytest.mark.parametrize(("when", "grace", "delay"), [("end", 1000, NOW), ("delay", 1, NEVER), ("next", 1, NOW)])
def test_nothing_outlives_a_head_that_is_killed(many, tmp_path, when, grace, delay):  # noqa: F811
    """While the ranks of a program end, while it waits, and after its restart."""
    up = shlex.quote(f"{tmp_path}/up")
    trap = "trap 'echo asked' TERM; " * (when == "end")
    server = sh(
        f"{trap} echo at {ATTEMPT}; {LAST} && {{ until test -e {up}; do sleep 0.02; done; exit 3; }}; "
        f'test "$RANK" = 0 && touch {up}; while :; do sleep 0.02; done'
    )
    command = on_two(many, *alone(sh(f"echo $INFINI_RUN_ID; {STAY}"), server, f"--grace={grace}", delay=delay))
    mark = f"INFINI_RUN_ID={command.read_lines(b'[host1:t 0]')[0][-1]}".encode()
    if when == "end":
        command.read_until(b"asked")
    elif when == "delay":
        command.read_error_until(b"r: restart 1 of 2 in")
    else:
        command.read_lines(b"[host2:r 3] at 1")
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: not agents())
    until(lambda: not marked(mark))


def test_list_counts_the_ranks_of_the_new_attempt(many, word):  # noqa: F811
    server = sh(f"echo at {ATTEMPT}; {LAST} && exit 3; {STAY}")
    command = on_two(many, *alone([*sh(STAY), word], server))
    command.read_lines(b"[host1:r 0] at 1")
    command.read_lines(b"[host2:r 3] at 1")
    row = row_of(word)
    assert (row["state"], row["ranks"]["running"], row["ranks"]["failed"]) == ("running", 6, 0)
    command.signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


def test_restart_waits_until_a_full_console_has_taken_the_output(many):  # noqa: F811
    writes = sh(f"yes {ATTEMPT} | head -c 1000000; test {ATTEMPT} = 1 || exit 3")
    command = on_two(many, *alone(["true"], writes, of_second=("--on_nodes=1",)))
    until(lambda: is_full(command.process.stdout))
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert sorted(set(lines)) == ["[host2:r 0] 0", "[host2:r 0] 1"]
    assert lines.index("[host2:r 0] 1") == lines.count("[host2:r 0] 0")


# ---- programs that wait for others, and hangs


def test_program_that_restarts_waits_until_another_is_up_again(many, bell):  # noqa: F811
    """Both have failed; the client starts, on its host, once the server on the other host is ready again."""
    server = ready(
        first=f"echo serves {ATTEMPT}; test {ATTEMPT} = 1 && read go < {bell.path}", then="sleep 0.3; exit 3"
    )
    server = sh(server[2].replace("sleep 0.3; exit 3", f"test {ATTEMPT} = 1 && {STAY}; sleep 0.3; exit 3"))
    client = sh(
        f"echo uses {ATTEMPT}; test {ATTEMPT} = 1 && exit 0; while :; do sleep 0.02; done & sleep 0.5; exit 4"
    )
    words = two(
        server, client, ALONE, NOW, "--max_restarts=1",
        of_first=("--on_nodes=1",), of_second=("--after=t", "--ends_job", "--on_nodes=0"),
    )  # fmt: skip
    command = on_two(many, *words)
    command.read_error_until(b"r: restart 1 of 1 in")
    command.read_lines(b"[host2:t 0] serves 1")
    assert not lines_with(command, "uses 1")
    bell.ring("go")
    assert command.wait() == 0, command.err
    assert lines_with(command, "uses 1") == ["[host1:r 0] uses 1"]


def test_program_that_waits_for_its_restart_does_not_start_with_another(many, bell):  # noqa: F811
    """Both began later than the job did: one waits for its restart, and the other for a program that gets ready."""
    server = ("--program=r", "--after=t", "--on_nodes=0", "--max_restarts=1", *sh(f"echo at {ATTEMPT}; exit 3"))
    slow = ("--program=x", *ready(first=f"read go < {shlex.quote(bell.path)}"))
    last = ("--program=u", "--after=x", "--ends_job", *sh("echo uses; sleep 0.3"))
    words = [ALONE, NEVER, "--program=t", *ready(), ":", *server, ":", "--on_nodes=0", *slow, ":", *last]
    command = on_two(many, *words)
    command.read_error_until(b"r: restart 1 of 1 in")
    bell.ring("go")
    assert command.wait() == 0, command.err
    assert len(lines_with(command, "uses")) == 2
    assert lines_with(command, "at ") == ["[host1:r 0] at 0"]


def test_hang_restarts_the_program_of_the_rank(many, tmp_path):  # noqa: F811
    again = shlex.quote(f"{tmp_path}/again")
    hangs = sh(f"test {ATTEMPT} = 1 && touch {again} && exit 0; echo up; {STAY}")
    works = sh(f"until test -e {again}; do echo works; sleep 0.1; done")
    flags = ("--hang_timeout=1", "--on_hang=stop", "--grace=1", "--snapshots=off")
    command = on_two(many, *alone(works, hangs, *flags, of_second=("--on_nodes=1",)))
    assert command.wait() == 0, command.err
    assert re.search(rb"r: restart 1 of 2 in 0 ms: r 0 on host2 hung: ", command.err)


def test_program_that_hung_restarts_without_second_look(many, tmp_path):  # noqa: F811
    """All hosts have looked at their ranks for the hang, before --snapshots=failure asks for it."""
    hangs = sh(f"test {ATTEMPT} = 1 && exit 0; echo up; {STAY}")
    flags = ("--hang_timeout=1", "--on_hang=stop", "--grace=1", "--snapshots=failure", f"--report={tmp_path}/r")
    command = on_two(many, *alone(sh("for i in $(seq 60); do echo $i; sleep 0.1; done"), hangs, *flags))
    assert command.wait() == 0, command.err
    report = report_of(tmp_path / "r")
    assert report["restarts"] == 1
    seen = {(shot["host"], shot["program"]) for shot in report["snapshots"]}
    assert {(host, "r") for host in ("host1", "host2")} <= seen
    assert BEFORE_RESTART not in {shot["why"] for shot in report["snapshots"]}


def test_rank_that_is_not_ready_in_time_restarts_its_program(many):  # noqa: F811
    server = sh(f'test "$RANK{ATTEMPT}" = 10 && {STAY}; {ready()[2]}')
    flags = ("--ready_timeout=5", "--grace=1", "--snapshots=off", "--max_restarts=1")
    command = on_two(many, *two(server, sh("echo uses"), ALONE, NOW, *flags, of_second=("--after=t", "--ends_job")))
    assert command.wait() == 0, command.err
    assert re.search(rb"t: restart 1 of 1 in 0 ms: t 1 on host2 was not ready after ", command.err)
    assert len(lines_with(command, "uses")) == 2


# ---- other ways to start nodes


def test_by_hand_is_the_same(node, tmp_path):  # noqa: F811
    server = sh(f"echo at {ATTEMPT}; test $RANK{ATTEMPT} = 10 && exit 3; exit 0")
    words = alone(sh("sleep 0.5"), server, f"--report={tmp_path}/r", of_second=())
    commands = [node(rank, *words, nproc=1) for rank in range(2)]
    for command in commands:
        assert command.wait() == 0, command.err
    assert len(lines_with(commands[0], "at 1")) == 2
    assert report_of(tmp_path / "r")["restarts"] == 1


@pytest.mark.slow
@pytest.mark.xdist_group("a stop of one program that takes too long")
def test_node_that_does_not_end_a_program_in_time_is_lost(node, bell, tmp_path):  # noqa: F811
    """Its launcher is suspended, and silence alone makes no node lost so soon: two graces and SLACK_S do."""
    fails = f'test "$RANK" = 0 && {{ read go < {bell.path}.go; exit 3; }}; {STAY}'
    os.mkfifo(f"{bell.path}.go")
    server = sh(f"echo $RANK > {bell.path}; {fails}")
    flags = ("--grace=0.1", "--node_timeout=1000", f"--report={tmp_path}/r")
    words = alone(sh(STAY), server, *flags, of_second=())
    commands = [node(rank, *words, nproc=1, under=SLACK) for rank in range(2)]
    assert sorted(bell.hear(2)) == ["0", "1"]
    commands[1].signal(signal.SIGSTOP)
    until(lambda: state_of(commands[1].pid) == "T")
    try:
        _write(f"{bell.path}.go")
        assert commands[0].wait() == 1
    finally:
        commands[1].signal(signal.SIGCONT)
    assert commands[1].wait() == 1
    assert any("lost node 1 " in line and line.endswith("it did not stop in time") for line in told(commands[0]))
    report = report_of(tmp_path / "r")
    assert report["restarts"] == 0
    until(lambda: not marked(f"INFINI_RUN_ID={report['launch_id']}".encode()))


@pytest.mark.slow
@pytest.mark.xdist_group("a stop of one program while nobody reads")
def test_console_that_nobody_reads_makes_no_node_lost(node, bell, tmp_path):  # noqa: F811
    """The head reads no message then, and so cannot know whether the ranks of a program ended in time: two graces and
    SLACK_S are over before somebody reads."""
    saves = f"trap 'exec yes saving' TERM; echo 1 > {bell.path}; while :; do sleep 0.02; done"
    fails = f'test "$RANK" = 1 && {{ {saves}; }}; echo 0 > {bell.path}; read go < {bell.path}.go; exit 3'
    too_long = f"sleep {2 + SLACK_S + 1}"
    waits = f'test "$RANK" = 0 && {{ read go < {bell.path}.full; {too_long}; echo later > {bell.path}; }}; exit 0'
    for name in ("go", "full"):
        os.mkfifo(f"{bell.path}.{name}")
    flags = ("--grace=1", f"--report={tmp_path}/r")
    words = alone(sh(waits), sh(f"test {ATTEMPT} = 1 && exit 0; {fails}"), *flags, of_second=())
    commands = [node(rank, *words, nproc=1, under=SLACK) for rank in range(2)]
    assert sorted(bell.hear(2)) == ["0", "1"]
    _write(f"{bell.path}.go")
    until(lambda: is_full(commands[0].process.stdout))
    _write(f"{bell.path}.full")
    assert bell.hear(1) == ["later"]
    assert [command.wait() for command in commands] == [0, 0], commands[0].err
    assert not any("lost node" in line for line in told(commands[0]))
    report = report_of(tmp_path / "r")
    assert (report["restarts"], report["first_failure"]) == (1, None)
    assert len(lines_with(commands[0], "saving")) > 1000


@with_strace
@pytest.mark.parametrize(("restarts", "code"), [(2, 0), (1, 3)], ids=["restarts", "spent"])
def test_rank_that_cannot_start_again_counts_as_one_that_failed(node, tmp_path, restarts, code):  # noqa: F811
    """The first clones there are the guard and two ranks; the next one is that of the restart, and fails once."""
    tracer = ("strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", "trace=clone,clone3")
    tracer += ("-e", "inject=clone,clone3:error=EAGAIN:when=4")
    server = sh(f"echo at {ATTEMPT}; test $RANK{ATTEMPT} = 10 && exit 3; test {ATTEMPT} = 2 && exit 0; {STAY}")
    words = alone(sh(STAY), server, f"--report={tmp_path}/r", restarts=restarts, of_second=("--ends_job",))
    commands = [node(0, *words, nproc=1), node(1, *words, nproc=1, under=tracer)]
    assert [command.wait() for command in commands] == [code] * 2, commands[0].err
    report = report_of(tmp_path / "r")
    problem = "rank 3 cannot be started: creating the process: Resource temporarily unavailable"
    if code:
        assert report["not_restarted"].startswith(problem)
        assert (report["first_failure"], report["earlier_failures"]) == (3, [])
    else:
        assert f"r: restart 2 of 2 in 0 ms: {problem}".encode() in commands[0].err
        assert len(lines_with(commands[0], "at 2")) == 2


@with_strace
def test_stop_while_ranks_of_one_node_restart_ends_the_job(node, tmp_path):  # noqa: F811
    """There only the first of its two ranks starts again: the signal comes with its clone, after those of the guard
    and of three ranks."""
    tracer = ("strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", "trace=clone,clone3")
    tracer += ("-e", "inject=clone,clone3:signal=TERM:when=5")
    server = sh(f"echo life {ATTEMPT}; {LAST} && exit 3; {STAY}")
    flags = (f"--report={tmp_path}/r", f"--log_dir={tmp_path}/logs", "--grace=1")
    words = alone(sh(STAY), server, *flags)
    commands = [node(0, *words, nproc=1), node(1, *words, nproc=1, under=tracer)]
    assert [command.wait() for command in commands] == [128 + signal.SIGTERM] * 2, commands[0].err
    report = report_of(tmp_path / "r")
    assert (report["restarts"], report["first_failure"], report["received_signal"]) == (1, None, "SIGTERM")
    assert [(each["program"], each["exit_code"]) for each in report["earlier_failures"]] == [("r", 3)]
    logs = [(tmp_path / f"logs/r/rank_{rank}.log").read_text().count("restart 1 of 2") for rank in (2, 3)]
    assert logs == [1, 0]


def test_by_hand_another_scope_is_refused(node):  # noqa: F811
    words = two(["true"], ["true"], "--max_restarts=1")
    commands = [node(0, ALONE, *words, nproc=1), node(1, *words, nproc=1)]
    assert [command.wait() for command in commands] == [2, 2]
    line = "--restart_scope=job here, program on node 0; use the same on every node"
    assert any(line in each for each in told(*commands))
