"""The engine's commands through an ssh that is none: it runs what it is told here. For what needs many of them."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys

import pytest

import infini_run as ir
from infini_run.crews.capture import capture_exception
from infini_run.system.interpreter import own_folders, own_path
from tests.support.hosts import agents
from tests.support.processes import descriptors, marked
from tests.support.waiting import until

FAKE = """#!/bin/sh
# ssh -T -x -o X ... -- HOST COMMAND
while [ "$1" != -- ]; do shift; done
{before}
exec sh -c "$3"
"""


@pytest.fixture
def fake(tmp_path, infini_run):
    """Start the command with such an ssh; `before`: what it does first, with the host as $2."""

    def folder_of(before):
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir(exist_ok=True)
        ssh.write_text(FAKE.format(before=before))
        ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
        return str(ssh.parent)

    def start(*words, before=":", **kwargs):
        env = {**os.environ, "PATH": f"{folder_of(before)}:{os.environ['PATH']}"}
        return infini_run("--engine=ssh", *words, env=env, **kwargs)

    start.folder_of = folder_of
    yield start
    until(lambda: not agents())


def test_more_nodes_than_are_reached_at_a_time(fake):
    """A window of 64: the others come when these have."""
    command = fake("--hosts=n[1-70]", "--nproc_per_node=1", "sh", "-c", "echo $WORLD_SIZE")
    assert command.wait() == 0, command.err
    assert sorted(command.out.splitlines()) == sorted(b"[n%d:%d] 70" % (rank + 1, rank) for rank in range(70))


@pytest.mark.parametrize(
    ("first", "second", "is_told"),
    [("127.0.0.1", "10.0.0.2", True),
     ("127.0.0.1", "127.0.0.2", False)],
)  # fmt: skip
def test_an_address_that_others_cannot_use_is_told(fake, first, second, is_told):
    """As sshd says where it was reached: one host by its loopback, another from outside."""
    before = f'SSH_CONNECTION="1 2 {second} 22"; [ $2 = b ] || SSH_CONNECTION="1 2 {first} 22"; export SSH_CONNECTION'
    command = fake("--hosts=a,b", "--nproc_per_node=1", "sh", "-c", "echo $MASTER_ADDR", before=before)
    assert command.wait() == 0
    assert [line.split(b"] ")[1].decode() for line in command.out.splitlines()] == [first, first]
    told = command.err.decode().splitlines()
    assert len(told) == is_told
    assert all(f"other nodes cannot reach node 0: {first} is " in line for line in told)


@pytest.mark.parametrize("limit", [16, 20, 32, 48, 64, 80])
def test_too_few_descriptors_are_one_line_and_nothing_is_left(fake, limit):
    words = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh")
    command = fake("--hosts=n[1-20]", "--nproc_per_node=1", "sleep", "1000", under=words)
    assert command.wait() == 1
    lines = command.err.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("infini-run: ssh cannot be started: ")
    assert lines[0].endswith(
        "Too many open files; the limit on open descriptors was reached; raise ulimit -n or ulimit -Hn"
    )


def test_too_few_descriptors_leave_none_in_host_program(fake, monkeypatch):
    """Some commands have started then, and the next one has a part of what it needs."""
    monkeypatch.setenv("PATH", fake.folder_of("exec sleep 1000"), prepend=os.pathsep)
    launcher = ir.Launcher(hosts="a,b,c", nproc_per_node=1, join_timeout=0.1)
    with pytest.raises(ir.NodeLost):  # what is imported for it is
        launcher.run(int)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, kind = descriptors(), None
    for limit in range(len(before) + 2, len(before) + 80):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            kind = type(capture_exception(lambda: launcher.run(int))[1])  # whose frames have some
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()
        assert descriptors() == before, f"{limit}: {kind}"
        if kind is ir.NodeLost:
            break
    assert kind is ir.NodeLost, "all could start"


@pytest.mark.parametrize("room", [0, 3, 6, 9])
def test_clean_up_that_cannot_start_hides_no_reason_and_no_report(fake, bell, tmp_path, room):
    report = tmp_path / "report.json"
    words = ("sh", "-c", f"echo up > {bell.path}; exec sleep 1000")
    flags = ("--nproc_per_node=1", "--node_timeout=2", "--grace=1", f"--report={report}")
    command = fake("--hosts=a,b", *flags, *words)
    bell.hear(2)
    numbers = {int(name) for name in os.listdir(f"/proc/{command.pid}/fd")}
    _, hard = resource.prlimit(command.pid, resource.RLIMIT_NOFILE)
    os.kill(max(agents()), signal.SIGSTOP)
    resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (len(numbers) + 1 + room, hard))
    assert command.wait() == 1
    problem, reason = command.err.decode().splitlines()
    assert re.match(
        r"infini-run: node [01] \([ab]\): cannot end what is left there: ssh cannot be started: ", problem
    )
    assert reason.endswith("): no message from it for 2 s (--node_timeout)")
    assert json.loads(report.read_text())["exit_code"] == 1


def test_rank_that_fails_after_loss_of_a_spare_counts_against_its_node(fake, bell, tmp_path):
    """The ssh of that spare has not ended yet, so its place is not free."""
    order, gate = tmp_path / "order", tmp_path / "gate"
    os.mkfifo(order)
    os.mkfifo(gate)
    before = f"""[ "$2" = d ] && {{
        exec 4<&0; sh -c "$3" <&4 4<&- & echo $! > {tmp_path}/spare
        exec <&- >&- 4<&-; wait; read go < {gate}; exit 1; }}"""
    fails = f"[ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ] && {{ read go < {order}; exit 1; }}"
    words = ("sh", "-c", f"echo $RANK > {bell.path}; {fails}; exec sleep 1000")
    flags = ("--nproc_per_node=1", "--spares=2", "--max_restarts=1", "--restart_delay=0", "--max_node_failures=1")
    command = fake("--hosts=a,b,c,d", *flags, "--grace=1", *words, before=before)
    bell.hear(2)
    os.kill(int((tmp_path / "spare").read_text()), signal.SIGKILL)
    told = b""
    while b"lost d; no rank ran there" not in told:
        more = os.read(command.process.stderr.fileno(), 65536)
        assert more, told
        told += more
    order.write_text("go\n")
    bell.hear(2)
    gate.write_text("go\n")
    command.signal(signal.SIGTERM)
    command.wait()
    assert b"infini-run: excluded b: its ranks were the first to fail in 1 attempt\n" in command.err
    assert b"infini-run: attempt 2: c replaces b as node 1 (b is excluded)\n" in command.err


def test_a_connection_that_was_dropped_is_tried_again(fake, tmp_path):
    before = f"""[ -e "{tmp_path}/$2" ] || {{
        touch "{tmp_path}/$2"; echo "kex_exchange_identification: Connection closed" >&2; exit 255; }}"""
    command = fake("--hosts=a,b,c", "--nproc_per_node=1", "echo", "said", before=before)
    assert command.wait() == 0, command.err
    assert command.out.count(b"said") == 3
    assert all(b": waiting for " in line for line in command.err.splitlines()), command.err  # on a busy machine


def test_it_is_not_tried_for_ever(fake, tmp_path):
    before = f"""echo x >> "{tmp_path}/$2"; echo "Connection reset by peer" >&2; exit 255"""
    command = fake("--hosts=a", "true", before=before)
    assert command.wait() == 1
    assert (tmp_path / "a").read_text().count("x") == 5
    last = command.err.splitlines()[-1]  # it may take so long that it is told who is waited for
    assert last == b"infini-run: node 0 (a) could not be reached: ssh exited with 255: Connection reset by peer"


def test_what_would_fail_again_is_not_tried_again(fake, tmp_path):
    before = f"""echo x >> "{tmp_path}/$2"; echo "Permission denied (publickey)." >&2; exit 255"""
    command = fake("--hosts=a", "true", before=before)
    assert command.wait() == 1
    assert (tmp_path / "a").read_text().count("x") == 1


def test_an_agent_that_talks_nonsense_is_a_lost_node(fake):
    before = r"""[ "$2" = b ] && { printf '\0infini-run link 1\nGET / HTTP/1.1\r\n'; sleep 1000; }"""
    command = fake("--hosts=a,b", "true", before=before)
    assert command.wait() == 1
    told = b"infini-run: node 1 (b) could not be reached: what came over the link is not what infini-run sends"
    assert command.err in (told + b"\n", told + b"; not reached yet: a\n"), "on a busy machine a is slow"


@pytest.mark.parametrize("word", ["null", "[]", '{"host": 5}', '{"error": "x"}'])
def test_an_agent_whose_words_are_not_ours_is_a_lost_node(fake, word):
    size = "".join(f"\\\\{byte:03o}" for byte in len(word).to_bytes(4, "big"))
    before = f"""[ "$2" = b ] && {{ printf '\\0infini-run link 1\\nA{size}%s' '{word}'; exec sleep 1000; }}"""
    command = fake("--hosts=a,b", "true", before=before.replace("\\\\", "\\"))
    assert command.wait() == 1
    assert b"infini-run: node 1 (b) could not be reached: what" in command.err
    assert command.err.count(b"\n") == 1


def test_an_ssh_that_never_answers_is_ended_with_the_job(fake):
    command = fake("--hosts=a,b", "--join_timeout=1", "true", before='[ "$2" = b ] && exec sleep 1000')
    assert command.wait() == 1
    # on a busy machine the other one may not have come by then either
    assert re.search(rb"[12] of 2 nodes did not join within 1 s \(--join_timeout\): (a, )?b\n", command.err)
    assert marked() == {}


def test_a_rank_of_stdin_that_is_none_is_refused(fake):
    command = fake("--hosts=a,b", "--nproc_per_node=2", "--stdin=4", "true")
    assert command.wait() == 2
    assert command.err.count(b"\n") == 1
    assert b"--stdin=4" in command.err


def test_a_reader_that_never_reads_does_not_hold_a_stop(fake, bell):
    """After a signal, for a second."""
    command = fake("--hosts=a,b", "--grace=1", "sh", "-c", f"echo x > {bell.path}; exec cat /dev/zero")
    bell.hear(2)
    command.read_until(b"\0")
    command.signal(signal.SIGTERM)
    until(lambda: command.process.poll() is not None)
    command.wait()
    assert command.process.returncode == 143
    assert b"output reader is gone" in command.err


def test_agent_imports_nothing_that_makes_its_start_slow():
    """Of these, contextlib was an eighth of an agent's instructions, os a fourteenth (decision 25)."""
    heavy = {"contextlib", "collections", "functools", "re", "json", "enum", "dataclasses", "typing", "socket"}
    heavy |= {"os", "errno", "signal"}
    used = ("multinode.agent_main", "multinode.agent.old_world", "environments.launcher_variables", "plan.program",
            "node.launch", "node.ports", "node.outcome")  # fmt: skip
    code = own_path(own_folders()) + "import sys, " + ", ".join(f"infini_run.{name}" for name in used)
    argv = [sys.executable, "-S", "-c", code + "; print(*sys.modules)"]
    imported = subprocess.run(argv, cwd="/", capture_output=True, text=True, check=True).stdout.split()
    assert "infini_run.multinode.agent.agent" in imported
    assert not heavy & set(imported)
    assert not {f"infini_run.{name}" for name in ("report.hang_groups", "environments.hostlist")} & set(imported)
