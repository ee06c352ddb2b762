"""Hangs on one of many nodes: the rank and its stack are told, the job ends, or begins again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import sys
import threading

import pytest

from infini_run.report.hang_snapshot import BEFORE_STOP
from tests.launch.test_snapshots import HEADING, TRAIN
from tests.launch.test_terminal import terminal  # noqa: F401
from tests.launch.test_torch_records import RECORDS, SKIPPED
from tests.launch.test_waited_rank import ALL_REDUCE, BLAMED, EXPECTED, HANG, PYSPY, check
from tests.multinode.test_by_hand import node, port, ring, told  # noqa: F401
from tests.multinode.test_elastic_ssh import launcher_of
from tests.multinode.test_many_ssh import bed, many, no_agent_left, own_lines  # noqa: F401
from tests.support.command import CHILDREN, altered
from tests.support.hosts import agents
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
HANGS = ("--hang_timeout=1500ms", "--on_hang=stop", "--grace=1")
ANSWERS_S = 8.0  # for stacks of all nodes, which have 15 s
SLEEPS = "[ $RANK = 1 ] && exec sleep 1000; while :; do echo busy; sleep 0.1; done"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (HANGS, "rank 1 on host2 hung: "),
        (("--ready_timeout=4", "--grace=1"), "rank 0 on host1 was not ready after 4.0 s"),
    ],
    ids=["hang", "ready"],
)
def test_a_rank_that_hangs_on_one_host_is_told_with_what_it_waits_in(many, tmp_path, flags, words):  # noqa: F811
    if words.startswith("rank 0"):
        script = '[ $RANK = 1 ] && python3 -c \'import os, socket; socket.socket(1, 2).sendto(b"READY=1", '
        script += 'os.environ["NOTIFY_SOCKET"].replace("@", "\\0"))\'; exec sleep 1000'
    else:
        script = SLEEPS
    command = many(*flags, f"--report={tmp_path}/r", "sh", "-c", script, nproc=1, hosts="host1,host2")
    assert command.wait() == 1, command.err
    lines = own_lines(command)
    assert not any(re.match(r"infini-run: host\d: rank", line) for line in lines), "the host is named once"
    first = next(at for at, line in enumerate(lines) if line.startswith(f"infini-run: {words}"))
    assert any(line.startswith("  in: sleep (") for line in lines[first:])
    report = json.loads((tmp_path / "r").read_text())
    assert report["exit_code"] == 1
    assert report["first_failure"] == int(words.split()[1])
    assert {look["rank"] for look in report["snapshots"]} <= {0, 1}
    assert report["snapshots"][0]["processes"][0]["threads"]


def test_silent_rank_is_named_where_agents_do_not_read_output(many, tmp_path):  # noqa: F811
    """The agent counts what its ranks write."""
    report = tmp_path / "report"
    flags = ("--hang_timeout=2", "--on_hang=stop", "--grace=1", "--console=none", f"--report={report}")
    command = many(*flags, "sh", "-c", SLEEPS.replace("= 1", "= 3"), nproc=2, hosts="host1,host2")
    assert command.wait() == 1, command.err
    looks = json.loads(report.read_text())["snapshots"]
    assert {look["rank"] for look in looks if look["kind"]} == {3}
    assert any(line.startswith("infini-run: rank 3 on host2 hung: no writes and no") for line in own_lines(command))


def test_by_hand_too(node):  # noqa: F811
    commands = [node(rank, "sh", "-c", SLEEPS, nproc=1, flags=HANGS) for rank in range(2)]
    assert [command.wait() for command in commands] == [1, 1]
    assert any(line.startswith("infini-run: rank 1 on ") and " hung: " in line for line in told(commands[0]))


def test_after_a_hang_all_ranks_of_all_hosts_start_again(many, tmp_path):  # noqa: F811
    script = f"[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; {SLEEPS}"
    flags = (*HANGS, "--max_restarts=1", "--restart_delay=0", f"--report={tmp_path}/r")
    command = many(*flags, "sh", "-c", script, nproc=1, hosts="host1,host2")
    assert command.wait() == 0, command.err
    assert any("restart 1 of 1 in 0 ms: rank 1 on host2 hung: " in line for line in own_lines(command))
    report = json.loads((tmp_path / "r").read_text())
    assert (report["restarts"], report["exit_code"]) == (1, 0)
    assert report["earlier_failures"][0]["watchdog_reason"].startswith("hung: ")


# ---- whom the others wait for, over all hosts


@PYSPY
@pytest.mark.parametrize("kind", [kind for kind in EXPECTED if kind not in ("terminal", "slow_link")])
@pytest.mark.rows(5)
def test_hang_over_four_hosts_is_folded_at_the_head(many, tmp_path, kind):  # noqa: F811
    """Rank 2 is on host3; each rank is alone on its host."""
    locked, report = tmp_path / "locked", tmp_path / "report"
    flags = ("--hang_timeout=2", "--on_hang=stop", "--grace=1", f"--report={report}")
    with locked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = many(*flags, sys.executable, HANG, kind, "2", locked, nproc=1)
        assert command.wait() == 1, command.err
    lines = check("\n".join(own_lines(command)), kind)
    if EXPECTED[kind][0].startswith(BLAMED):
        assert lines[1].startswith("  rank 2 on host3 ")
        assert lines[2].startswith("  ranks 0-1,3 on 3 hosts ")
        first = json.loads(report.read_text())["first_failure"]
        assert first == 2 or kind == "left_early", "that one has not failed"


@PYSPY
def test_rank_that_failed_on_another_host_is_named(many):  # noqa: F811
    flags = ("--keep_going", "--hang_timeout=2")
    command = many(*flags, sys.executable, HANG, "failed", "2", nproc=1)
    command.read_error_until(b"all_reduce (hang.py:")
    command.signal(signal.SIGTERM)
    assert command.wait() == 3, command.err
    lines = own_lines(command)
    first = next(at for at, line in enumerate(lines) if BLAMED in line)
    assert lines[first + 1].startswith("  rank 2 on host3 "), lines
    assert "  failed (exit code 3), " in lines[first + 1], lines
    assert lines[first + 2].startswith("  ranks 0-1,3 on 3 hosts ")


@PYSPY
def test_rank_of_host_that_waits_for_the_terminal_is_named(bed, terminal):  # noqa: F811
    """What is typed at the head is for rank 2 on host3, and nobody types."""
    where = ("--hosts=host[1-4]", f"--ssh_config={bed.config}", "--stdin=2")
    terminal.run(*where, "--hang_timeout=2", "--on_hang=stop", "--grace=1", sys.executable, HANG, "terminal", "2")
    assert terminal.code() == 1
    lines = check(terminal.seen.decode().replace("\r", ""), "terminal")
    assert lines[1].startswith("  rank 2 on host3 ")
    assert lines[2].startswith("  ranks 0-1,3 on 3 hosts ")


@pytest.fixture
def root():
    """The root of a collective of four: its port. It answers when it has heard of all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = []

        def reduce():
            try:
                while len(peers) < 4:
                    peers.append(listener.accept()[0])
                    threading.Thread(target=lambda peer=peers[-1]: heard.append(peer.recv(1)), daemon=True).start()
            except OSError:
                return  # the test is over

        heard = []
        thread = threading.Thread(target=reduce)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for peer in peers:
        peer.close()
    assert len(heard) < 4 or b"" in heard, "the collective was complete: no link was slow"


@PYSPY
def test_slow_link_to_host_is_named_and_no_rank(bed, many, root, tmp_path):  # noqa: F811
    """All ranks wait in the same collective. What the head can measure is the link to their hosts."""
    is_slow = tmp_path / "slow"
    link = f"{CHILDREN}/slow_link.py"
    proxy = f"ProxyCommand {sys.executable} {link} %h %p {is_slow} 1"
    config = bed.config_with("slow_config", f"Host host3\n  {proxy}\nHost *")
    words = (sys.executable, HANG, "slow_link", "2", f"{root}:{link}:{is_slow}")
    flags = ("--hang_timeout=5", "--on_hang=stop", "--grace=1", f"--report={tmp_path}/report")
    command = many(*flags, *words, nproc=1, config=config)
    until(lambda: sum(not words.startswith("ssh ") for words in agents().values()) == 4 or command.process.poll())
    assert command.process.poll() is None, command.process.stderr.read()
    is_slow.touch()
    assert command.wait() == 1, command.err
    lines = own_lines(command)
    check("\n".join(lines), "slow_link")
    stopping = next(line for line in lines if line.endswith(": stopping"))
    assert re.search(r"; the link to host3 is slow: \d\.\d s there and back, others \d+ ms: stopping$", stopping)
    report = json.loads((tmp_path / "report").read_text())
    assert any("; the link to host3 is slow: " in notice for notice in report["notices"])


@PYSPY
def test_hang_over_hosts_is_reported_once_and_the_job_continues(many):  # noqa: F811
    command = many("--hang_timeout=2", "--console=none", sys.executable, HANG, "loader", "2", nproc=1)
    command.read_error_until(b"ranks 0-1,3 on 3 hosts")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert command.err.count(b": 3 of 4 ranks wait for rank 2\n") == 1


@PYSPY
def test_host_that_does_not_answer_keeps_others_from_being_named(many):  # noqa: F811
    """Rank 2 would be named, but nobody knows what rank 3 does. The head waits for its host."""
    words = ("--hang_timeout=3", "--node_timeout=120", sys.executable, HANG, "loader", "2")
    command = many(*words, nproc=1, under=altered({"multinode.head.hang_phase.LIMIT_S": ANSWERS_S}))
    agent = launcher_of(3)
    os.kill(agent, signal.SIGSTOP)
    try:
        command.read_error_until(b"did not answer")
    finally:
        os.kill(agent, signal.SIGCONT)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert b": 3 ranks are in 2 places, and host4 did not answer\n" in command.err
    assert b"wait for rank" not in command.err


@PYSPY
def test_hang_is_reported_again_when_the_host_answers(many):  # noqa: F811
    """Rank 2 spins there, so its own host reports no hang."""
    words = ("--hang_timeout=3", "--node_timeout=120", sys.executable, HANG, "spinning", "2")
    command = many(*words, nproc=1, under=altered({"multinode.head.hang_phase.LIMIT_S": ANSWERS_S}))
    agent = launcher_of(2)
    os.kill(agent, signal.SIGSTOP)
    try:
        command.read_error_until(f": 3 ranks are in {ALL_REDUCE}, and host3 did not answer\n".encode())
    finally:
        os.kill(agent, signal.SIGCONT)
    command.read_error_until(b": 3 of 4 ranks wait for rank 2, which uses CPU\n")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@PYSPY
def test_final_report_keeps_the_host_that_did_not_answer(node, bell, tmp_path):  # noqa: F811
    """Ranks 2 and 3 are with that launcher: nothing is known of them, and rank 3 is to blame."""
    flags = ("--hang_timeout=2", "--on_hang=stop", "--grace=1", "--node_timeout=60", "--console=none")
    flags = (*flags, f"--report={tmp_path}/report")
    words = ring(bell, f"exec {sys.executable} {HANG} loader 3")
    shorter = altered({"multinode.head.hang_phase.LIMIT_S": ANSWERS_S, "multinode.head.head_state._SLACK_S": 3.0})
    head, other = (node(at, *words, flags=flags, under=shorter) for at in range(2))
    bell.hear(4)
    other.signal(signal.SIGSTOP)
    try:
        assert head.wait() == 1, head.err
    finally:
        other.signal(signal.SIGCONT)
    assert other.wait() == 1
    sentence = f": 2 ranks are in {ALL_REDUCE}, and {socket.gethostname()} did not answer"
    assert head.err.decode().count(sentence) == 2, head.err
    assert b"all 2 ranks" not in head.err
    assert json.loads((tmp_path / "report").read_text())["unanswered"] == [socket.gethostname()]


STANDS = """
import infini_run, os
def all_reduce():
    while True: pass
def load_batch():
    while True: pass
if os.environ["RANK"] == "0":
    infini_run.progress(1)
load_batch() if os.environ["RANK"] == "1" else all_reduce()
"""


@PYSPY
def test_progress_of_one_rank_stands_for_all_hosts(many, tmp_path):  # noqa: F811
    """Rank 0 alone reports progress, and rank 1 on another host is waited for: all of them spin."""
    (tmp_path / "train.py").write_text(STANDS)
    flags = ("--progress_timeout=3", "--on_hang=stop", "--grace=1")
    command = many(*flags, sys.executable, tmp_path / "train.py", nproc=1, hosts="host[1-3]")
    assert command.wait() == 1, command.err
    lines = own_lines(command)
    assert ": 2 of 3 ranks wait for rank 1; 2 others were stopped" in lines[-3]
    assert lines[-2].startswith("  rank 1 on host2 ")


@PYSPY
def test_records_of_torch_are_compared_over_hosts(many, tmp_path):  # noqa: F811
    flags = ("--hang_timeout=2", "--on_hang=stop", "--grace=1", f"--report={tmp_path}/report")
    command = many(*flags, sys.executable, RECORDS, "skips", nproc=1)
    assert command.wait() == 1, command.err
    lines = own_lines(command)
    assert SKIPPED in lines
    assert any(": 3 of 4 ranks wait for rank 2; " in line for line in lines)
    assert json.loads((tmp_path / "report").read_text())["first_failure"] == 2


# ---- before a stop


@PYSPY
def test_failure_on_one_host_shows_where_ranks_of_all_hosts_were(many, tmp_path):  # noqa: F811
    flags = ("--snapshots=failure", "--grace=1", f"--report={tmp_path}/report")
    for _ in range(5):  # on a busy machine a look may need more than the second that it has
        command = many(*flags, sys.executable, TRAIN, "loader", tmp_path / "go", nproc=1)
        while command.out.count(b" up ") < 4:
            command.read_more()
        (tmp_path / "go").touch()
        assert command.wait() == 1, command.err
        if b"all_reduce (train.py:" in command.err and b"  rank 1 on host2 " in command.err:
            break
        (tmp_path / "go").unlink()
    lines = own_lines(command)
    at = lines.index(f"{HEADING}:")
    assert lines[at + 1].startswith("  rank 1 on host2       loader (train.py:")
    assert lines[at + 2].startswith("  ranks 2-3 on 2 hosts  all_reduce (train.py:")
    content = json.loads((tmp_path / "report").read_text())
    assert content["first_failure"] == 0
    assert [shot["rank"] for shot in content["snapshots"]] == [1, 2, 3]
    assert all(shot["frames"] for shot in content["snapshots"])
    assert all(rank["stopped"] for rank in content["ranks"][1:])


LATE = """
import infini_run, os, time
if os.environ["RANK"] != "1":
    infini_run.ready()
time.sleep(1000)
"""


def test_late_rank_on_one_host_makes_all_hosts_look(many, tmp_path):  # noqa: F811
    (tmp_path / "train.py").write_text(LATE)
    flags = ("--snapshots=failure", "--ready_timeout=4", "--grace=1", f"--report={tmp_path}/report")
    command = many(*flags, sys.executable, tmp_path / "train.py", nproc=1, hosts="host[1-3]")
    assert command.wait() == 1, command.err
    content = json.loads((tmp_path / "report").read_text())
    assert (content["first_failure"], content["ranks"][1]["watchdog_reason"]) == (1, "was not ready after 4.0 s")
    assert {shot["rank"] for shot in content["snapshots"] if shot["why"] == BEFORE_STOP} == {0, 1, 2}
    assert all(rank["stopped"] for rank in content["ranks"])


@pytest.mark.parametrize("flag", ["--restart_delay=0", "--spares=1"])
def test_restart_of_all_hosts_follows_a_look(many, tmp_path, flag):  # noqa: F811
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && exit 3; exec sleep 1000"
    flags = ("--snapshots=failure", flag, "--max_restarts=1", f"--report={tmp_path}/report")
    command = many(*flags, "sh", "-c", script, nproc=1, hosts="host[1-3]")
    assert command.wait() == 0, command.err
    assert json.loads((tmp_path / "report").read_text())["restarts"] == 1


PARTS = """
[ $RANK = 0 ] && trap 'echo got TERM; exit 0' TERM
echo up; while [ ! -e "$1" ]; do sleep 0.05; done
[ $RANK = 1 ] && exit 3
while :; do sleep 0.05; done
"""


def test_host_that_does_not_look_keeps_others_from_stopping_for_a_moment_only(many, tmp_path):  # noqa: F811
    """The agent of host3 is suspended: the ranks there end once it continues."""
    flags = ("--snapshots=failure", "--node_timeout=120", "--grace=1")
    command = many(*flags, "sh", "-c", PARTS, "sh", tmp_path / "go", nproc=1, hosts="host[1-3]")
    until(lambda: command.read_more() or command.out.count(b" up\n") == 3)
    agent = launcher_of(2)
    os.kill(agent, signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        command.read_until(b"got TERM")
    finally:
        os.kill(agent, signal.SIGCONT)
    assert command.wait() == 3
