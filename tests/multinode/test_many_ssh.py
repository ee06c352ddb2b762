"""Many nodes through ssh, on real sshd hosts: ranks right, one failure ends all, nothing is left anywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from infini_run.version import VERSION
from tests.support.command import CHILDREN, COMMANDS_END_SOON, NOTICES_AT_ONCE, PYTHON, Bell, play, without_waits
from tests.support.hosts import Bed, agents
from tests.support.processes import held, is_alive, is_asleep, lead_group, marked, processes, state_of
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them

SHOW = (
    "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$NNODES $(uname -n) $MASTER_ADDR:$MASTER_PORT"
)


@pytest.fixture(scope="module")
def bed():
    bed = Bed()
    yield bed
    bed.close()


@pytest.fixture(scope="module")
def cabled_bed():
    bed = Bed(mode="netns")
    yield bed
    bed.close()


@pytest.fixture(autouse=True)
def no_agent_left():
    yield
    until(lambda: not agents())


@pytest.fixture
def many(bed, infini_run):
    """Start the command on the hosts; `on`: another bed."""

    def start(*words, hosts="host[1-4]", nproc=2, config=None, on=bed, **kwargs):
        flags = (
            "--engine=ssh",
            f"--hosts={hosts}",
            f"--nproc_per_node={nproc}",
            f"--ssh_config={config or on.config}",
        )
        return infini_run(*flags, *words, under=(*on.under, *kwargs.pop("under", ())), **kwargs)

    return start


def lines_of(command):
    return command.out.decode(errors="surrogateescape").splitlines()


def own_lines(command):
    """What the launcher itself has to say."""
    lines = command.err.decode(errors="replace").splitlines()
    return [line for line in without_waits(lines) if not line.startswith("[")]


def ring(bell, then="exec sleep 1000", first=":"):
    """A rank that does `first`, and tells that it is there: `RANK PID HOST`, the pid as its host knows it."""
    return ["sh", "-c", f"{first}; echo $RANK $$ $(uname -n) > {shlex.quote(bell.path)}; {then}"]


# ---- starting


def test_every_rank_knows_its_place(many):
    command = many("sh", "-c", SHOW)
    assert command.wait() == 0, command.err
    places = {line.split("] ")[0] + "]": line.split("] ")[1].split() for line in lines_of(command)}
    meetings = {words[4] for words in places.values()}
    assert places == {
        f"[host{node + 1}:{2 * node + local}]": [
            f"{2 * node + local}/8", f"{local}/2", f"{node}/4", f"host{node + 1}", *meetings
        ]
        for node in range(4)
        for local in range(2)
    }  # fmt: skip
    assert meetings.pop().startswith("127.0.78.1:")
    assert own_lines(command) == []


def test_the_ports_and_addresses_given_are_kept(many):
    command = many("--rdzv_endpoint=host2:4711", "sh", "-c", "echo $MASTER_ADDR $MASTER_PORT", hosts="host1,host2")
    assert command.wait() == 0, command.err
    assert {line.split("] ")[1] for line in lines_of(command)} == {"host2 4711"}


def test_only_the_first_nnodes_hosts_run(many):
    command = many("--nnodes=2", "uname", "-n", nproc=1)
    assert command.wait() == 0, command.err
    assert sorted(lines_of(command)) == ["[host1:0] host1", "[host2:1] host2"]


def test_all_hosts_that_cannot_be_reached_are_named_at_once(many):
    command = many("true", "--x", hosts="host1,nowhere1.invalid,host2,nowhere2.invalid", nproc=1)
    assert command.wait() == 1
    assert len(own_lines(command)) == 1
    text = own_lines(command)[0]
    assert text.startswith("infini-run: 2 of 4 nodes did not join: node ")
    for host in ("nowhere1", "nowhere2"):
        assert f"({host}.invalid) could not be reached: ssh exited with 255: " in text
    assert "not reached yet" not in text


def test_all_hosts_that_refuse_are_named_at_once_with_those_that_have_said_nothing(bed, infini_run, tmp_path):
    """The third never says anything: it is not waited for, as long as others are."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ $(uname -n) = host3 ] && exec sleep 1000\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    flags = (f"--ssh_config={bed.config}", f"--remote_python={python}", "--nproc_per_node=1")
    command = infini_run("--hosts=host[1-3]", *flags, "no-such-program", under=bed.under)
    assert command.wait() == 127
    text = own_lines(command)[0]
    assert "2 of 3 nodes did not join: " in text
    assert "host1: no-such-program is not on PATH" in text
    assert "host2: no-such-program is not on PATH" in text
    assert text.endswith("; not reached yet: host3")


UNEVEN = ("--engine=ssh", "--hosts=host1:2,host2:3,host3:1")


def test_hosts_with_different_slots_run_so_many_ranks_each(bed, infini_run, tmp_path):
    """After a restart, too; in the report, in the logs."""
    flags = ("--max_restarts=1", "--restart_delay=0", f"--report={tmp_path}/report", f"--log_dir={tmp_path}/logs")
    script = f"""[ $TORCHELASTIC_RESTART_COUNT = 0 ] && {{ [ $RANK = 3 ] && exit 1; exec sleep 1000; }}
        {SHOW} $NPROC_PER_NODE $ROLE_RANK/$ROLE_WORLD_SIZE"""
    command = infini_run(*UNEVEN, f"--ssh_config={bed.config}", *flags, "sh", "-c", script, under=bed.under)
    assert command.wait() == 0, command.err
    places = [(0, 0, 2, 0), (1, 1, 2, 0), (2, 0, 3, 1), (3, 1, 3, 1), (4, 2, 3, 1), (5, 0, 1, 2)]
    rows = sorted(line.split("] ")[1].split() for line in lines_of(command))
    assert len({row.pop(4) for row in rows}) == 1, "all meet at one place"
    assert rows == [
        f"{rank}/6 {local}/{each} {node}/3 host{node + 1} {each} {rank}/6".split()
        for rank, local, each, node in places
    ]
    assert sorted(line.split()[0] for line in lines_of(command)) == [
        f"[host{node + 1}:{rank}]" for rank, _, _, node in places
    ]
    report = json.loads((tmp_path / "report").read_text())
    assert (report["world_size"], [rank["rank"] for rank in report["ranks"]]) == (6, list(range(6)))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"rank_{rank}.log" for rank in range(6)]
    assert "differ" not in command.err.decode(), "who gave the numbers knows them"


def test_any_rank_of_an_uneven_world_reads_what_is_typed(bed, infini_run):
    flags = (f"--ssh_config={bed.config}", "--stdin=4", "--local_ranks_filter=2")
    command = infini_run(*UNEVEN, *flags, "sh", "-c", "echo $RANK $(cat)", stdin=subprocess.PIPE, under=bed.under)
    command.process.stdin.write(b"typed")
    command.close_stdin()
    assert command.wait() == 0, command.err
    assert lines_of(command) == ["[host2:4] 4 typed"]


def test_nodes_that_count_for_themselves_may_differ_and_it_is_said(bed, infini_run, tmp_path):
    """host2 may use one of our CPUs less than host1."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ $(uname -n) = host2 ] || exec {sys.executable} "$@"\n'
        f'exec taskset -c {",".join(map(str, cpus[1:]))} {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    flags = (f"--ssh_config={bed.config}", f"--remote_python={python}", "--nproc_per_node=cpu")
    command = infini_run("--hosts=host1,host2", *flags, "sh", "-c", "echo $RANK/$WORLD_SIZE", under=bed.under)
    assert command.wait() == 0, command.err
    first, second = len(cpus), len(cpus) - 1
    expected = [f"[host{1 + (rank >= first)}:{rank}] {rank}/{first + second}" for rank in range(first + second)]
    assert sorted(lines_of(command)) == sorted(expected)
    text = f"nodes run different numbers of ranks: host1:{first}, host2:{second}; {first + second} in all"
    assert own_lines(command) == [f"infini-run: {text}"]


def test_arguments_and_exported_variables_are_carried_byte_for_byte(many):
    odd = "a b\n'\"$(false)`;\\*\udcff\udc80\t"
    script = 'import os,sys; os.write(1, (ascii(sys.argv[1:])+" "+ascii(os.environ.get("ODD"))+"\\n").encode())'
    command = many(
        "--export=ODD,OTHER*", sys.executable, "-c", script, odd, "", hosts="host1,host2", nproc=1,
        env={**os.environ, "ODD": odd, "NOT": "x"},
    )  # fmt: skip
    assert command.wait() == 0, command.err
    assert {line.split("] ", 1)[1] for line in lines_of(command)} == {f"{[odd, '']!a} {odd!a}"}


def test_what_is_not_exported_stays_here(many):
    script = 'echo "${HERE-unset}"'
    command = many("sh", "-c", script, hosts="host2", nproc=1, env={**os.environ, "HERE": "1"})
    assert command.wait() == 0, command.err
    assert lines_of(command) == ["[rank 0] unset"]


def test_ranks_start_in_our_directory(many, tmp_path):
    command = many("pwd", hosts="host1,host2", nproc=1, cwd=tmp_path)
    assert command.wait() == 0, command.err
    assert {line.split("] ")[1] for line in lines_of(command)} == {str(tmp_path)}


def test_stdin_is_rank_0s(many):
    command = many("sh", "-c", "echo $(cat | wc -c)", stdin=subprocess.PIPE)
    command.process.stdin.write(b"x" * 3_000_000)
    command.close_stdin()
    assert command.wait() == 0, command.err
    assert sorted(line.split("] ")[1] for line in lines_of(command)) == ["0"] * 7 + ["3000000"]
    assert "[host1:0] 3000000" in lines_of(command)


def test_stdin_of_another_rank_is_read_there(many):
    command = many("--stdin=5", "sh", "-c", "echo $(cat | wc -c)", stdin=subprocess.PIPE)
    command.process.stdin.write(b"x" * 70_000)
    command.close_stdin()
    assert command.wait() == 0, command.err
    assert "[host3:5] 70000" in lines_of(command)
    assert sorted(line.split("] ")[1] for line in lines_of(command)) == ["0"] * 7 + ["70000"]


# ---- output


def test_output_of_all_ranks_is_whole(many):
    count = 4000
    tail = "x" * 38
    script = f"i=0; while [ $i -lt {count} ]; do echo $RANK line $i {tail}; i=$((i+1)); done"
    command = many("sh", "-c", script, nproc=4)
    assert command.wait() == 0, command.err
    seen = [0] * 16
    for line in lines_of(command):
        prefix, _, text = line.partition("] ")
        rank, _, number, tail = text.split()
        assert prefix == f"[host{int(rank) // 4 + 1}:{rank}"
        assert int(number) == seen[int(rank)]
        assert tail == "x" * 38
        seen[int(rank)] += 1
    assert seen == [count] * 16


def test_stderr_goes_to_stderr_and_a_last_line_without_end_is_kept(many):
    command = many("sh", "-c", "printf out; printf err >&2", hosts="host1,host2", nproc=1)
    assert command.wait() == 0
    assert sorted(lines_of(command)) == ["[host1:0] out", "[host2:1] out"]
    assert sorted(command.err.decode().splitlines()) == ["[host1:0 err] err", "[host2:1 err] err"]


def test_fold_shows_equal_lines_of_all_nodes_once(many, tmp_path):
    """The head is suspended while all ranks write, so that it reads their lines in one moment."""
    bell, gates = Bell(tmp_path / "bell"), [Bell(tmp_path / f"gate.{rank}") for rank in range(4)]
    meet = f"echo > {bell.path}; read go < {tmp_path}/gate.$RANK"
    say = "echo start; [ $RANK != 2 ] || echo odd; echo same; echo warned >&2; printf end"
    command = many(
        *("--console=fold", "--timestamps", "--color=always"),
        *("sh", "-c", f"{meet}; {say}; {meet}; exit 3"),
        hosts="host1,host2",
    )
    bell.hear(4)
    command.signal(signal.SIGSTOP)
    for gate in gates:
        gate.ring("go")
    bell.hear(4)
    until(_is_all_with_the_head)
    os.setpriority(os.PRIO_PROCESS, command.pid, -20)  # nobody gets the processor between two of its reads
    command.signal(signal.SIGCONT)
    for gate in gates:
        gate.ring("go")
    assert command.wait() == 3
    for each in (bell, *gates):
        each.close()
    lines = [re.fullmatch(r"(\S{23}Z) \033\[36m(\[.*\])\033\[0m (.*)", line).groups() for line in lines_of(command)]
    assert [line[1:] for line in lines][:3] == [
        ("[ranks 0-3]", "start"),
        ("[host2:2]", "odd"),
        ("[ranks 0-3]", "same"),
    ]
    assert {line[2] for line in lines[3:]} == {"end"}
    err = command.err.decode()
    assert "\033[33m[ranks 0-3 err]\033[0m warned\n" in err
    assert err.index("warned") < err.index("failed: exit code 3")


def _is_all_with_the_head():
    """Whether what the ranks have written is with the head: their pipes are empty, and all on the way sleep."""
    found, ours = processes(), agents()
    ranks = [pid for pid, (parent, _, name) in found.items() if parent in ours and name == "sh"]
    ways = [pid for pid, (_, _, name) in found.items() if name in ("ssh", "sshd", "sshd-session")]
    assert len(ranks) == 4
    return not any(held(pid, fd) for pid in ranks for fd in (1, 2)) and all(map(is_asleep, (*ours, *ways)))


def test_logs_stay_on_their_hosts(many, tmp_path):
    command = many("--console=none", f"--log_dir={tmp_path}/logs", "sh", "-c", "echo said $RANK")
    assert command.wait() == 0, command.err
    assert command.out == b""
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir() if path.suffix == ".log"} == {
        f"rank_{rank}.log": f"said {rank}\n" for rank in range(8)
    }


def test_a_reader_that_stops_holds_the_ranks_and_loses_nothing(many, bell):
    """More than all pipes and buffers hold; no silence of ours is taken for a lost node meanwhile."""
    size = 24 << 20
    script = f"head -c {size} /dev/zero | tr '\\0' x | fold -w 99; echo; echo $RANK 0 done > {shlex.quote(bell.path)}"
    command = many("--node_timeout=2", "sh", "-c", script, hosts="host1,host2", nproc=1)
    command.read_until(b"x" * 99)
    with pytest.raises(AssertionError):
        bell.hear(2, limit_s=5)
    assert command.process.poll() is None
    assert command.wait() == 0, command.err
    assert command.out.count(b"x") == 2 * size
    assert sorted(bell.hear(2)) == ["0 0 done", "1 0 done"]


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-", "0<&-", ">/dev/full"])
def test_closed_or_full_output_does_not_stop_the_job(many, bell, closed):
    words = ("sh", "-c", f'exec "$@" {closed}', "sh")
    command = many(*ring(bell, "echo said; echo complained >&2"), hosts="host1,host2", nproc=1, under=words)
    assert command.wait() == 0, command.err
    assert {line.split()[0] for line in bell.hear(2)} == {"0", "1"}
    is_lost = closed == ">/dev/full"  # what the user has closed himself is /dev/null from the start
    assert (
        command.err.count(b"the console takes no more output (No space left on device); the job continues") == is_lost
    )


def test_a_reader_that_goes_away_is_told_once(many):
    command = many("sh", "-c", "yes | head -c 1000000", hosts="host1,host2")
    command.read_until(b"y\n")
    command.process.stdout.close()
    command.process.stdout = None
    assert command.wait() == 0
    assert own_lines(command) == ["infini-run: the console takes no more output (Broken pipe); the job continues"]


def test_a_login_script_may_print(many, tmp_path):
    """Before the agent's first word, on stdout: with null bytes, and without an end of line."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf 'Welcome!\\0 to this host'; exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    command = many(f"--remote_python={python}", "echo", "said", hosts="host1,host2", nproc=1)
    assert command.wait() == 0, command.err
    assert sorted(lines_of(command)) == ["[host1:0] said", "[host2:1] said"]


def test_what_agents_say_has_their_host(many):
    command = many("--verbose", "--check_gpus=warn", "true", hosts="host1,host2", nproc=1)
    assert command.wait() == 0
    lines = own_lines(command)
    assert sorted(line.partition(" of ir-")[0] for line in lines if "started" in line) == [
        f"infini-run: host{node}: started 1 of 1 rank" for node in (1, 2)
    ]
    assert sorted(line.partition(": checked nothing")[0] for line in lines if "--check_gpus" in line) == [
        f"infini-run: host{node}: --check_gpus" for node in (1, 2)
    ]
    assert sorted(line for line in lines if "exited" in line) == [
        f"infini-run: host{rank + 1}: rank {rank} exited, exit code 0" for rank in range(2)
    ]


# ---- failing


def test_a_rank_that_fails_ends_all_and_is_told_once(many, bell):
    then = "if [ $RANK = 5 ]; then read x; echo oops >&2; exit 7; fi; exec sleep 1000"
    command = many("--stdin=5", *ring(bell, then), stdin=subprocess.PIPE)
    bell.hear(8)
    until(lambda: len(marked()) >= 8)  # what is just being executed has no environment to be known by
    command.process.stdin.write(b"\n")
    command.process.stdin.flush()
    assert command.wait() == 7
    told = own_lines(command)
    assert len(told) <= 10
    assert told[0].startswith("infini-run: rank 5 on host3 failed: exit code 7 (")
    assert told[0].endswith("7 others were stopped")
    assert told[1] == "  | oops"
    assert command.err.count(b"failed") == 1


def test_a_rank_that_is_killed_names_the_signal(many, bell):
    command = many(*ring(bell, "[ $RANK = 2 ] && kill -SEGV $$; exec sleep 1000"), hosts="host1,host2")
    assert command.wait() == 128 + signal.SIGSEGV
    assert own_lines(command)[0].startswith("infini-run: rank 2 on host2 ")
    assert "SIGSEGV" in own_lines(command)[0]


def test_the_report_is_of_all_nodes(many, tmp_path):
    path = tmp_path / "report.json"
    command = many(f"--report={path}", "sh", "-c", "[ $RANK != 6 ] || exit 3; exec sleep 1000")
    assert command.wait() == 3
    report = json.loads(path.read_text())
    assert report["world_size"] == 8
    assert [exit_["rank"] for exit_ in report["ranks"]] == list(range(8))
    assert [exit_["host"] for exit_ in report["ranks"]] == [f"host{1 + rank // 2}" for rank in range(8)]
    assert report["first_failure"] == 6


def test_ranks_that_fail_everywhere_are_told_once(many):
    command = many("sh", "-c", "exit $((RANK + 1))")
    code = command.wait()
    assert 1 <= code <= 8
    assert len([line for line in own_lines(command) if "failed" in line]) == 1
    assert f"rank {code - 1} on host{(code - 1) // 2 + 1} failed: exit code {code}" in command.err.decode()


def test_a_program_that_is_not_there_is_one_line(many):
    command = many("/no/such/program", nproc=1)
    assert command.wait() == 127
    assert len(own_lines(command)) == 1
    assert "/no/such/program does not exist" in own_lines(command)[0]


def test_keep_going_lets_the_others_finish(many):
    command = many("--keep_going", "sh", "-c", "[ $RANK = 0 ] && exit 5; echo done", hosts="host1,host2")
    assert command.wait() == 5
    assert len(lines_of(command)) == 3


# ---- losing nodes


def test_a_host_that_dies_ends_all_and_is_named(many, bed, bell):
    command = many("--grace=1", *ring(bell))
    bell.hear(8)
    with bed.host_down(3):
        assert command.wait() == 1
    told = own_lines(command)
    assert len(told) == 1
    assert told[0].startswith("infini-run: lost node 2 (host3)")


@pytest.mark.skipif(not os.environ.get("CI") and os.geteuid() != 0, reason="namespaces are made by root")
def test_a_pulled_cable_is_a_lost_node(cabled_bed, many, bell):
    command = many("--grace=1", "--node_timeout=3", *ring(bell), on=cabled_bed, under=COMMANDS_END_SOON)
    there = bell.hear(8)
    inner = {line.split()[1] for line in there if line.endswith("host3")}
    assert len(inner) == 2
    cabled_bed.tell("cable", 3, "down")
    try:
        assert command.wait() == 1
        told = own_lines(command)
        assert told == ["infini-run: lost node 2 (host3): no message from it for 3 s (--node_timeout)"]
        until(lambda: not marked())  # the ranks there are ended by their own agent, which hears nothing either
    finally:
        cabled_bed.tell("cable", 3, "up")


def test_an_agent_that_is_killed_is_a_lost_node(many, bell):
    command = many("--grace=1", *ring(bell))
    bell.hear(8)
    victim = sorted(agents())[0]
    os.kill(victim, signal.SIGKILL)
    assert command.wait() == 1
    assert "lost node" in own_lines(command)[0]
    assert len(own_lines(command)) == 1


# ---- stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_head_stops_every_node(many, bell, number):
    command = many(*ring(bell))
    bell.hear(8)
    command.signal(number)
    assert command.wait() == 128 + number
    assert marked() == {}


def test_ranks_get_their_grace(many, bell):
    command = many("--grace=50", *play("ignore=INT", "end=TERM:0", "say=here", "wait"), hosts="host1,host2")
    command.read_until(b"here 3") and command.read_lines(b"[host", 4)
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert command.out.count(b"got TERM") == 4


def test_ranks_that_ignore_term_are_killed_after_the_grace(many, bell):
    command = many("--grace=0.5", *ring(bell, "while :; do sleep 1000; done", "trap '' TERM"), hosts="host1,host2")
    bell.hear(4)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_told_again_it_kills_at_once(many, bell):
    command = many("--grace=1000", *play("ignore=TERM", "say=here", "wait"), hosts="host1,host2")
    command.read_lines(b"[host", 4)
    command.signal(signal.SIGTERM)
    command.read_error_until(b"stopping")
    command.insist(signal.SIGTERM)
    assert command.wait() == 143
    assert marked() == {}


def test_strays_are_ended_on_every_node(many):
    stray = play("ignore=TERM", "daemon", "ignore=TERM", "say=stray", "wait", "done", "say=here", "wait")
    command = many("--grace=1", *stray, hosts="host1,host2")
    until(lambda: (command.read_more(), command.out.count(b"stray") == 4 and command.out.count(b"here") == 4)[1])
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert marked() == {}


def test_nothing_outlives_a_killed_head(many):
    stray = play("ignore=TERM", "daemon", "ignore=TERM", "say=stray", "wait", "done", "say=here", "wait")
    command = many(*stray)
    until(lambda: (command.read_more(), command.out.count(b"stray") == 8 and command.out.count(b"here") == 8)[1])
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: not marked())
    until(lambda: not agents())


def test_a_head_that_is_told_while_it_reaches_the_hosts_leaves_nothing(many, bed):
    with socket.create_server(("127.0.78.99", 0)) as deaf:
        config = bed.config_with("deaf", f"Host deaf\n  HostName 127.0.78.99\n  Port {deaf.getsockname()[1]}")
        command = many("sleep", "1000", hosts="host1,deaf", config=config)
        until(agents)
        command.signal(signal.SIGTERM)
        assert command.wait() == 143


def test_ctrl_z_stops_every_rank_and_fg_goes_on(many, bell):
    command = many("--node_timeout=2", *ring(bell), hosts="host1,host2", preexec_fn=lead_group)
    bell.hear(4)
    until(lambda: list(marked().values()).count("sleep") == 4)
    ranks = [pid for pid, name in marked().items() if name == "sleep"]
    command.signal(signal.SIGTSTP)
    until(lambda: state_of(command.pid) == "T")
    until(lambda: all(state_of(pid) == "T" for pid in ranks))
    subprocess.run(["sleep", "3"], check=True)  # longer than --node_timeout: that silence is our own
    assert all(state_of(pid) == "T" for pid in ranks)
    command.signal(signal.SIGCONT)
    until(lambda: all(state_of(pid) == "S" for pid in ranks))
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.parametrize("name", ["USR1", "HUP", "XCPU", "URG"])  # as on one node: test_faults_run.py, PASSED
def test_other_signals_are_passed_on(many, name):
    command = many(*play(f"tell={name}", "say=here", "wait"), hosts="host1,host2")
    command.read_lines(b"[host", 4)
    command.signal(getattr(signal, f"SIG{name}"))
    until(lambda: (command.read_more(), command.out.count(f"got {name}".encode()) == 4)[1])
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_a_hangup_of_the_head_goes_to_the_process_groups_and_usr1_to_the_leaders(many):
    words = ["tell=USR1", "tell=HUP", "end=TERM:0", "group", "say=here", "wait", "done", "say=here", "wait"]
    command = many(*play(*words), hosts="host1,host2", nproc=1)
    command.read_lines(b"[host", 4)
    command.signal(signal.SIGHUP)
    until(lambda: (command.read_more(), command.out.count(b"got HUP") == 4)[1])
    command.signal(signal.SIGUSR1)
    until(lambda: (command.read_more(), command.out.count(b"got USR1") == 2)[1])
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert command.out.count(b"got USR1") == 2


# ---- hosts that cannot be reached


def refused(command, *texts, code=1):
    """It ends with that code, and says all of it in one line."""
    assert command.wait() == code, command.err
    told = own_lines(command)
    assert len(told) == 1, told
    for text in texts:
        assert text in told[0]
    assert command.out == b""


def test_a_host_that_does_not_resolve(many):
    refused(
        many("true", hosts="host1,nowhere.invalid"), "node 1 (nowhere.invalid)", "Could not resolve", "ssh_config"
    )


def test_a_host_where_nothing_listens(many, bed):
    with socket.socket() as closed:
        closed.bind(("127.0.78.98", 0))
        config = bed.config_with("closed", f"Host shut\n  HostName 127.0.78.98\n  Port {closed.getsockname()[1]}")
        refused(many("true", hosts="host1,shut", config=config), "node 1 (shut)", "Connection refused", "sshd")


def test_a_key_that_is_refused(many, bed):
    key = bed.folder / "other"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = bed.config_with("refused", f"Host host2\n  IdentityFile {key}\n  IdentitiesOnly yes")
    text = config.read_text().replace("Host *\n", "Host * !host2\n  IdentityFile none\nHost *\n", 1)
    config.write_text(text.replace(f"IdentityFile {bed.folder}/id\n", f"IdentityFile {key}\n"))
    refused(many("true", hosts="host2", config=config), "node 0 (host2)", "Permission denied", "ssh-copy-id host2")


def test_a_host_key_that_has_changed(many, bed):
    known = bed.folder / "changed_hosts"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(bed.folder / "changed")], check=True)
    key = " ".join((bed.folder / "changed.pub").read_text().split()[:2])
    known.write_text(f"[127.0.78.2]:{bed.port} {key}\n")
    config = bed.config_with("changed_config", f"Host host2\n  UserKnownHostsFile {known}")
    refused(many("true", hosts="host1,host2", config=config), "node 1 (host2)", "host key", "ssh-keygen -R")


def test_a_host_key_that_is_not_known(many, bed):
    config = bed.config_with("unknown", "Host host2\n  UserKnownHostsFile /dev/null")
    refused(
        many("true", hosts="host1,host2", config=config),
        "node 1 (host2)",
        "host key is unknown here",
        "run ssh host2 once",
    )


def test_no_python_there(many):
    refused(many("--remote_python=/no/such", "true", hosts="host1"), "node 0 (host1)", "/no/such", "--remote_python")


def test_no_infini_run_there(many):
    bare = sys._base_executable  # the interpreter that the tests' environment was made of
    refused(many(f"--remote_python={bare}", "true", hosts="host1"), "No module named", "install infini-run there")


def test_another_version_there(many, tmp_path):
    """A copy of the package that says another version, run by a wrapper."""
    import shutil

    import infini_run

    shutil.copytree(Path(infini_run.__file__).parent, tmp_path / "infini_run")
    (tmp_path / "infini_run" / "version.py").write_text('"""v"""\n\nVERSION = "9.9.9"\n')
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = many(f"--remote_python={python}", "true", hosts="host1,host2")
    refused(command, "infini-run 9.9.9 is on host", f"{VERSION} on the head", code=2)


def test_a_host_that_hangs_at_connect_is_named(many, bed):
    with socket.create_server(("127.0.78.99", 0)) as deaf:
        config = bed.config_with("deaf2", f"Host deaf\n  HostName 127.0.78.99\n  Port {deaf.getsockname()[1]}")
        command = many("--join_timeout=5", "true", hosts="host[1-3],deaf", config=config)
        assert command.wait() == 1
        assert own_lines(command)[-1] == "infini-run: 1 of 4 nodes did not join within 5 s (--join_timeout): deaf"


def test_who_is_missing_is_said_while_waiting(many, bed):
    with socket.create_server(("127.0.78.99", 0)) as deaf:
        config = bed.config_with("deaf3", f"Host deaf\n  HostName 127.0.78.99\n  Port {deaf.getsockname()[1]}")
        command = many("true", hosts="host1,deaf", config=config, under=NOTICES_AT_ONCE)
        command.read_error_until(b"infini-run: waiting for 1 of 2 nodes: deaf\n")
        command.signal(signal.SIGTERM)
        assert command.wait() == 143


def test_a_directory_that_is_not_there(many, bed):
    """Hidden from the host by a mount of its own."""
    here = bed.folder / "only-here"
    (here / "work").mkdir(parents=True, exist_ok=True)
    words = ["ssh", "-F", str(bed.config), "host2", f"mount -t tmpfs none {here}"]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    try:
        command = many("true", hosts="host1,host2", cwd=here / "work")
        refused(command, "host2", str(here / "work"), "No such file or directory", code=2)
    finally:
        words[-1] = f"umount {here}"
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def test_a_host_that_takes_few_connections_at_a_time_is_tried_again(infini_run):
    """MaxStartups drops what comes beyond; 8 names of one host."""
    bed = Bed(hosts=1, extra=("MaxStartups 2:100:3", "MaxSessions 100"))
    try:
        names = [f"alias{number}" for number in range(8)]
        config = bed.config_with("aliases", f"Host {' '.join(names)}\n  HostName 127.0.78.1")
        command = infini_run(
            "--engine=ssh",
            f"--hosts={','.join(names)}",
            "--nproc_per_node=1",
            f"--ssh_config={config}",
            "echo",
            "said",
        )
        assert command.wait() == 0, command.err
        assert len(lines_of(command)) == 8
    finally:
        bed.close()


# ---- the user's own ssh


def test_a_connection_that_is_open_already_is_used_and_left_open(many, bed):
    path = bed.folder / "master-%h"
    config = bed.config_with("mux", f"Host *\n  ControlMaster no\n  ControlPath {path}")
    masters = []
    try:
        for name in ("host1", "host2"):
            words = ["ssh", "-F", str(config), "-o", "ControlMaster=yes", "-N", name]
            masters.append(subprocess.Popen(words, stdin=subprocess.DEVNULL))
        sockets = [bed.folder / f"master-127.0.78.{number}" for number in (1, 2)]
        until(lambda: all(at.exists() and stat.S_ISSOCK(at.stat().st_mode) for at in sockets))
        (bed.folder / "id").rename(bed.folder / "id.away")  # no new connection can be made without it
        command = many("echo", "said", hosts="host1,host2", nproc=1, config=config)
        assert command.wait() == 0, command.err
        assert all(is_alive(master.pid) for master in masters)
    finally:
        if (bed.folder / "id.away").exists():
            (bed.folder / "id.away").rename(bed.folder / "id")
        for master in masters:
            master.terminate()
            master.wait()


def test_a_connection_that_ssh_keeps_for_later_is_no_stray_of_ours(many, bed):
    config = bed.config_with(
        "persist", f"Host *\n  ControlMaster auto\n  ControlPath {bed.folder}/kept-%h\n  ControlPersist 60"
    )
    words = ["ssh", "-F", str(config), "-O"]
    try:
        command = many("echo", "said", hosts="host1,host2", nproc=1, config=config)
        assert command.wait() == 0, command.err
        assert own_lines(command) == []
        for name in ("host1", "host2"):
            assert subprocess.run([*words, "check", name], capture_output=True, check=False).returncode == 0
    finally:
        for name in ("host1", "host2"):
            subprocess.run([*words, "exit", name], capture_output=True, check=False)


def test_ssh_that_is_not_installed_is_one_line(many, tmp_path):
    command = many("true", hosts="host1", env={**os.environ, "PATH": str(tmp_path)})
    refused(command, "ssh is not on PATH", code=127)


def test_nothing_secret_is_on_a_command_line(many, bell):
    command = many("--export=SECRET", *ring(bell), hosts="host1", env={**os.environ, "SECRET": "hunter2"})
    bell.hear(2)
    assert not any("hunter2" in words for words in agents().values())
    command.signal(signal.SIGTERM)
    command.wait()


# ---- in Python


def test_run_on_hosts(bed, tmp_path):
    script = f"""
import infini_run as ir
report = ir.run(["sh", "-c", "echo $RANK > {tmp_path}/$RANK"], hosts=["host1", "host2"], nproc_per_node=2,
                ssh_config="{bed.config}")
assert report.exit_code == 0 and len(report.exits) == 4, report
try:
    ir.run(["sh", "-c", "[ $RANK != 3 ] || exit 9; sleep 1000"], hosts=["host1", "host2"], nproc_per_node=2,
           ssh_config="{bed.config}")
except ir.WorkerError as error:
    assert (error.rank, error.exit_code) == (3, 9), error
else:
    raise AssertionError
try:
    ir.run(["true"], hosts=["host1", "nowhere.invalid"], ssh_config="{bed.config}")
except ir.NodeLost as error:
    assert error.host == "nowhere.invalid" and error.node == 1, vars(error)
else:
    raise AssertionError
"""
    done = subprocess.run([*PYTHON, "-c", script], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


# ---- a real training


@pytest.mark.torch
def test_pytorch_ddp_over_gloo(many):
    command = many("--export=GLOO_*,OMP_NUM_THREADS", str(CHILDREN / "train_ddp.py"), hosts="host1,host2")
    assert command.wait(300) == 0, command.err
    assert [line.split("] ")[1] for line in lines_of(command)] == ["same True of 4"] * 4
