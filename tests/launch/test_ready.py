"""What ranks say on NOTIFY_SOCKET (sd_notify(3)): who is ready, who is late, what they are doing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infini_run as ir
from infini_run.core.c_structs import PIPE, TO_CONSOLE
from infini_run.core.group import debug_flags
from infini_run.errors import StartError
from tests.support.cluster import writes_memory
from tests.support.command import play
from tests.support.group_case import Live, spec
from tests.support.launch_shapes import strace
from tests.support.processes import descriptors, no_descriptor_left, processes
from tests.support.waiting import LIMIT_S, until

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
SYSTEMD_NOTIFY = pytest.mark.skipif(shutil.which("systemd-notify") is None, reason="systemd-notify is not installed")


def address(name):
    return f"@infini-run-test/{os.getpid()}/{name}"


def sender_to(name):
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.connect(name.replace("@", "\0", 1))
    return sender


class Lingering:
    """A connection whose last close waits for a minute, for its peer takes no more data (SO_LINGER of socket(7))."""

    def __init__(self):
        self._threads = threads()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the peer's, which else grows
            self._ours = socket.create_connection(server.getsockname())
            self._peer, _ = server.accept()
        self._ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._ours.send(bytes(1 << 20))
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))

    def give(self, sender, text):
        """Who takes the message is the last to have the connection."""
        socket.send_fds(sender, [text], [self._ours.fileno()])
        self._ours.close()

    def is_waited_for(self):
        return len(threads() - self._threads) >= 1

    def end(self):
        """A reset ends the wait."""
        self._peer.close()
        until(lambda: threads() <= self._threads)


@pytest.fixture
def lingering():
    connection = Lingering()
    yield connection
    connection.end()


def until_executed(live, ranks=1):
    """Until then they have a copy of every descriptor of ours."""
    live.settle()
    live.until(lambda: all(processes()[live.pid(rank)][2] == "sleep" for rank in range(ranks)))
    live.settle()


def threads():
    return set(os.listdir("/proc/self/task"))


def talker(rank, *words):
    return spec(rank, *play(*words), notify=address(rank), env=[f"RANK={rank}"])


def waiter(rank):
    return spec(rank, "/bin/sleep", "1000", notify=address(rank))


@pytest.fixture
def debug(every_path):
    return debug_flags(os.environ)


# ---- the core listens


def test_a_rank_is_ready_once_however_often_and_from_wherever_it_says_so(debug):
    ranks = (
        talker(0, "notify=READY=1", "notify=READY=1;STATUS=there", "wait"),
        talker(1, "group", "notify=READY=1", "done", "wait"),
        talker(2, "daemon", "notify=READY=1", "say=there", "done", "wait"),
    )
    with Live(*ranks, debug=debug) as live:
        live.until(lambda: len(live.of("ready")) == 3 and live.group.status(0) == b"there")
        assert sorted((event.rank, event.pid) for event in live.of("ready")) == [(r, live.pid(r)) for r in range(3)]
        live.group.stop()
        live.end()


@SYSTEMD_NOTIFY
def test_a_sender_that_is_gone_when_we_read_is_still_its_ranks(debug):
    script = "systemd-notify --ready --status='from a script'; exec sleep 1000"
    with Live(*(spec(r, "/bin/sh", "-c", script, notify=address(r)) for r in range(2)), debug=debug) as live:
        live.until(lambda: len(live.of("ready")) == 2)
        assert [live.group.status(r) for r in range(2)] == [b"from a script"] * 2
        live.group.stop()
        live.end()


def test_what_a_rank_said_just_before_its_end_is_heard_before_its_end(debug):
    with Live(talker(0, "notify=STATUS=last;READY=1", "exit=3"), debug=debug) as live:
        live.end()
        assert live.group.status(0) == b"last"
    kinds = [event.kind for event in live.events]
    assert kinds.index("ready") < kinds.index("exited")


def is_free(name):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as again:
        try:
            again.bind("\0" + name[1:])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def test_the_address_is_free_again_when_its_rank_has_ended(debug):
    with Live(talker(0, "exit=0"), waiter(1), debug=debug) as live:
        live.until(lambda: live.of("exited"))
        live.until(lambda: is_free(address(0)))  # until its exec rank 1 has a copy
        live.group.stop()
        live.end()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as again:
            again.bind("\0" + address(1)[1:])


@pytest.mark.parametrize("name", ["taken", "@" + "x" * 200, "/" + "x" * 107, "/nowhere/socket", "no-at-sign"])
def test_an_address_that_cannot_be_had_starts_nothing(name, debug):
    name = address("taken") if name == "taken" else name
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind("\0" + address("taken")[1:])
        with Live(size=1, debug=debug) as live, pytest.raises(StartError) as caught:
            live.spawn(spec(0, "/bin/true", notify=name))
    assert caught.value.step == "making its notify socket"


@AS_ROOT
def test_other_users_are_not_heard():
    say = "import os,socket,sys; os.setuid(int(sys.argv[1])); s=socket.socket(socket.AF_UNIX,socket.SOCK_DGRAM);"
    say += "s.sendto(b'STATUS=by '+sys.argv[1].encode(), '\\0'+sys.argv[2][1:])"
    with Live(waiter(0)) as live:
        for uid in (0, 65534):
            subprocess.run([sys.executable, "-c", say, str(uid), address(0)], check=True)
        live.settle()
        assert live.group.status(0) == b"by 0"
        live.group.stop()
        live.end()


def test_descriptors_that_come_along_are_closed_at_once():
    """What sd_notify_barrier(3) waits for."""
    with Live(waiter(0)) as live:
        until_executed(live)
        before = descriptors()
        with sender_to(address(0)) as sender:
            for count in (1, 3, 40):
                reader, writer = os.pipe()
                socket.send_fds(sender, [b"BARRIER=1"], [writer] * count)
                os.close(writer)
                live.until(lambda reader=reader: select.select([reader], [], [], 0)[0])
                assert os.read(reader, 1) == b""
                os.close(reader)
        live.until(lambda: descriptors() == before)
        live.group.stop()
        live.end()


@pytest.mark.parametrize("place", ["@", pytest.param("/dev/shm/", marks=writes_memory)])
def test_slow_close_of_sent_descriptor_delays_nothing(place, lingering):
    """Neither other ranks' messages, nor a stop, nor the end."""
    names = [f"{place}infini-run-test-{os.getpid()}-{rank}" for rank in range(2)]
    with Live(*(spec(r, "/bin/sleep", "1000", notify=name) for r, name in enumerate(names))) as live:
        until_executed(live, ranks=2)
        with sender_to(names[0]) as sender, sender_to(names[1]) as other:
            lingering.give(sender, b"STATUS=here it is")
            live.until(lambda: live.group.status(0) == b"here it is")
            other.send(b"STATUS=heard")
            live.until(lambda: live.group.status(1) == b"heard")
        until(lingering.is_waited_for)
        live.group.stop()
        live.end()
        until(lingering.is_waited_for)


@pytest.mark.parametrize("first", [b"STATUS=first", b""])
@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen"])
def test_messages_behind_descriptor_are_heard_after_rank_exits(first, seen, lingering):
    """Also if it comes with an empty message, which the kernel passes over if it was peeked at before."""
    with Live(waiter(0)) as live, sender_to(address(0)) as sender:
        until_executed(live)
        pid = live.pid(0)
        lingering.give(sender, first)
        if seen:
            live.group.run_once()
        for message in (b"STATUS=second", b"STATUS=" + b"x" * 8000 + b"\nREADY=1", b"PROGRESS=7", b""):
            sender.send(message)
        os.kill(pid, signal.SIGKILL)
        live.end()
        assert live.group.status(0) == b"second"
        assert [event.value for event in live.of("progress")] == [7]
        assert live.of("ready") == []
        until(lingering.is_waited_for)
        with pytest.raises(BrokenPipeError):
            sender.send(b"nobody listens")


def test_rank_is_heard_again_after_descriptors_ran_out(lingering):
    with Live(waiter(0)) as live, sender_to(address(0)) as sender:
        until_executed(live)
        lingering.give(sender, b"STATUS=one")
        with no_descriptor_left():
            live.until(lambda: live.group.status(0) == b"one")
            live.settle()
        sender.send(b"STATUS=two")
        live.until(lambda: lingering.is_waited_for())
        lingering.end()
        live.until(lambda: live.group.status(0) == b"two")
        live.group.stop()
        live.end()


def test_socket_is_left_open_when_nothing_can_take_its_descriptor(lingering):
    """To close it would wait for the descriptor's sender. The end of the process does not."""
    before = descriptors()
    with Live(waiter(0)) as live, sender_to(address(0)) as sender:
        until_executed(live)
        lingering.give(sender, b"STATUS=last")
        os.kill(live.pid(0), signal.SIGKILL)
        with no_descriptor_left():
            live.until(lambda: live.of("exited"))
        assert live.group.status(0) == b"last"
        live.end()
    (left,) = descriptors().keys() - before.keys()
    lingering.end()
    os.close(int(left))


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, to refuse an option")
@pytest.mark.parametrize("rights", [(), ("notify_fd",)], ids=["plain", "descriptor"])
def test_last_messages_are_heard_where_kernel_cannot_skip_any(infini_run, tmp_path, rights):
    """A sandbox that does not know SO_PEEK_OFF; the launch's second option of a socket is the first of these."""
    inject = ("-e", "trace=setsockopt", "-e", "inject=setsockopt:error=ENOPROTOOPT:when=2+")
    words = play("notify=STATUS=last words", *rights, "exit=3")
    command = infini_run(f"--report={tmp_path}/r", *words, under=strace(tmp_path / "trace", *inject))
    assert command.wait() == 3
    assert "SO_PEEK_OFF" in (tmp_path / "trace").read_text()
    assert json.loads((tmp_path / "r").read_text())["ranks"][0]["status"] == "last words"


def test_socket_in_folder_is_removed_with_its_rank(tmp_path):
    path = tmp_path / "socket"
    with Live(spec(0, "/bin/sleep", "1000", notify=path)) as live:
        assert path.stat().st_mode & 0o777 == 0o600
        live.settle()
        os.kill(live.pid(0), signal.SIGKILL)
        live.until(lambda: live.of("exited"))
        assert not path.exists()
        live.end()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=600) | st.sampled_from([b"READY=0", b"READY=1 ", b"STATUS", b"\n\n", b""])))
def test_messages_that_mean_nothing_to_us_do_nothing(messages):
    with Live(waiter(0)) as live, sender_to(address(0)) as sender:
        for message in messages:
            sender.send(message.replace(b"READY=1\n", b"").replace(b"WATCHDOG", b""))
            live.settle()
        assert live.of("triggered") == []
        sender.send(b"STOPPING=1\nEXTEND_TIMEOUT_USEC=9\nSTATUS=still here\nREADY=1")
        live.until(lambda: live.of("ready"))
        assert live.group.status(0) == b"still here"
        live.group.kill()
        live.end()


def test_a_status_is_the_last_one_and_bounded_and_too_long_a_message_is_none():
    with Live(waiter(0)) as live, sender_to(address(0)) as sender:
        for message in (b"STATUS=a", b"STATUS=" + b"x" * 2000, b"STATUS=", b"STATUS=" + b"y" * 2000):
            sender.send(message)
            live.settle()
        assert live.group.status(0) == b"y" * 512
        sender.send(b"READY=1\nSTATUS=" + b"z" * 5000)
        live.settle()
        assert live.group.status(0) == b"y" * 512
        assert live.of("ready") == []
        live.group.stop()
        live.end()


def test_a_rank_that_waits_for_the_console_is_not_silent():
    """Its output is not read while the console is full: it is we who keep it waiting."""
    reader, writer = os.pipe()
    yes = spec(0, "/usr/bin/yes", stdio=(-1, PIPE, -1), output=(TO_CONSOLE, 0))
    with Live(yes, waiter(1), console=(writer, -1)) as live:
        live.until(lambda: live.settle() or live.group.activity(0) < live.group.activity(0))
        now = time.monotonic_ns()
        assert live.group.activity(0)[0] >= now
        assert live.group.activity(1) == (0, 0)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_flood_of_messages_holds_up_no_signal_and_no_exit(infini_run, every_path, number):
    command = infini_run("--nproc_per_node=3", *play("@0", "flood", "@*", "say=up", "wait"))
    command.read_lines(b"up", 2)
    command.signal(number)
    assert command.wait() == 128 + number


# ---- too late


@pytest.mark.parametrize("path", ["", "fork,nopidfd"])
def test_a_rank_that_is_not_ready_in_time_is_the_first_failure(infini_run, path, tmp_path):
    words = ("notify=STATUS=loading shard 7", "@1", "notify=READY=1", "@*", "wait")
    report = tmp_path / "report"
    command = infini_run(
        "--nproc_per_node=2",
        "--ready_timeout=2",
        f"--report={report}",
        *play(*words),
        env={**os.environ, "INFINI_RUN_DEBUG": path},
    )
    assert command.wait() == 1
    text = command.err.decode()
    assert f"infini-run: rank 0 on {os.uname().nodename} was not ready after 2.0 s" in text
    assert "1 other was stopped" in text
    assert "  status: loading shard 7\n" in text
    assert len(text.splitlines()) <= 11
    content = json.loads(report.read_text())
    late, ready = content["ranks"]
    assert (content["first_failure"], content["exit_code"]) == (0, 1)
    assert (late["watchdog_reason"], late["ready"], late["failed"]) == ("was not ready after 2.0 s", None, True)
    assert (ready["watchdog_reason"], ready["failed"], ready["stopped"]) == (None, False, True)
    assert ready["start"] <= ready["ready"] <= ready["end"]
    assert [(look["rank"], look["kind"]) for look in content["snapshots"]] == [(0, "late"), (1, None)]


def test_ranks_that_are_ready_in_time_are_left_alone(infini_run, gate, every_path):
    until_told = gate()
    words = play("notify=READY=1", f"hold={until_told}", "exit=0")
    command = infini_run("--nproc_per_node=2", "--ready_timeout=30", "--verbose", *words, gates=(until_told,))
    for rank in (0, 1):
        command.read_error_until(f"infini-run: rank {rank} is ready\n".encode())
    until_told.open()
    assert command.wait() == 0


def test_a_rank_that_has_ended_is_not_late(infini_run):
    script = "[ $RANK = 1 ] || exit 0; exec sleep 1000"
    command = infini_run("--nproc_per_node=2", "--ready_timeout=2", "sh", "-c", script)
    assert command.wait() == 1
    assert b"rank 1 on " in command.err
    assert b"rank 0" not in command.err


def test_ready_after_the_stop_began_changes_nothing(infini_run):
    words = play("end=TERM:7", "say=up", "wait")
    command = infini_run("--ready_timeout=60", *words)
    command.read_lines(b"up")
    command.signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


def test_ready_while_being_stopped_is_heard_and_harmless(debug):
    script = f'trap "{sys.executable} -c \\"$SAY\\"; exit 5" TERM; echo up; while :; do sleep 0.01; done'
    say = "import os,socket; socket.socket(1,2).sendto(b'READY=1', os.environ['NOTIFY_SOCKET'].replace('@', chr(0)))"
    reader, writer = os.pipe()
    rank = spec(0, "/bin/sh", "-c", script, env=[f"SAY={say}"], notify=address(0), stdio=(-1, writer, -1))
    with Live(rank, debug=debug) as live:
        os.close(writer)
        assert os.read(reader, 3) == b"up\n"
        os.close(reader)
        live.group.stop()
        live.end()
    (exit_,) = live.of("exited")
    assert len(live.of("ready")) == 1
    assert (exit_.code, exit_.after_stop) == (5, True)


# ---- who started us


@pytest.fixture
def service(tmp_path):
    """A socket as systemd gives one to a Type=notify service."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(LIMIT_S)
        yield listener


def test_who_started_us_is_told_when_the_last_rank_is_ready(infini_run, gate, service):
    last = gate()
    words = play("@1", f"hold={last}", "@*", "notify=READY=1", "wait")
    environ = {**os.environ, "NOTIFY_SOCKET": service.getsockname()}
    command = infini_run("--nproc_per_node=2", "--verbose", *words, gates=(last,), env=environ)
    command.read_error_until(b"rank 0 is ready")
    service.setblocking(False)
    with pytest.raises(BlockingIOError):
        service.recv(100)
    service.settimeout(LIMIT_S)
    last.open()
    assert service.recv(100) == b"READY=1"
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_rank_that_restarts_is_counted_once_as_ready(infini_run, gate, service):
    """Its program alone has restarted; the rank of the other one is not ready yet."""
    last = gate()
    words = ["--restart_scope=program", "--restart_delay=0", "--verbose", "--program=a"]
    words += [*play(f"hold={last}", "notify=READY=1", "wait"), ":", "--program=b", "--max_restarts=1"]
    words += play("notify=READY=1", "+0", "exit=3", "+*", "wait")
    environ = {**os.environ, "NOTIFY_SOCKET": service.getsockname()}
    command = infini_run(*words, gates=(last,), env=environ)
    command.read_error_until(b"restart 1 of 1")
    _, _, command.err = command.err.partition(b"restart 1 of 1")
    command.read_error_until(b"b 0 is ready")
    service.setblocking(False)
    with pytest.raises(BlockingIOError):
        service.recv(100)
    service.settimeout(LIMIT_S)
    last.open()
    assert service.recv(100) == b"READY=1"
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_an_outer_launch_is_ready_when_the_inner_one_is(infini_run, every_path):
    inner = [sys.executable, "-m", "infini_run", "--nproc_per_node=2", *play("notify=READY=1", "wait")]
    command = infini_run("--verbose", *inner)
    command.read_error_until(b"infini-run: rank 0 is ready\n")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_a_socket_of_ours_that_cannot_be_told_is_named_and_the_job_goes_on(infini_run, tmp_path):
    environ = {**os.environ, "NOTIFY_SOCKET": f"{tmp_path}/nobody"}
    command = infini_run(*play("notify=READY=1", "exit=0"), env=environ)
    assert command.wait() == 0
    assert (
        f"infini-run: READY=1 cannot be sent to NOTIFY_SOCKET={tmp_path}/nobody: No such file" in command.err.decode()
    )


# ---- in Python


def test_wait_ready_waits_for_all(gate):
    last = gate()
    os.set_inheritable(last.fd, True)
    words = play("@1", f"hold={last}", "@*", "notify=STATUS=here;READY=1", "wait")
    with ir.ProcessLauncher(words, nproc_per_node=2) as launcher:
        launcher.launch()
        until(lambda: launcher.status()[0].ready_s)
        assert launcher.wait_ready(0.0) is False
        last.open()
        assert launcher.wait_ready() is True
        assert launcher.wait_ready(0.0) is True
        exits = launcher.status()
        assert all(exit_.start_s <= exit_.ready_s for exit_ in exits)
        assert [exit_.status for exit_ in exits] == ["here", "here"]


@pytest.mark.parametrize("how", ["exit=0", "exit=4"])
def test_wait_ready_does_not_wait_for_what_can_never_come(how):
    with ir.ProcessLauncher(play("@0", "notify=READY=1", "wait", "@1", how), nproc_per_node=2) as launcher:
        launcher.launch()
        assert launcher.wait_ready() is False
        assert launcher.exit_code(1) == int(how[-1])


def test_wait_ready_is_false_when_another_thread_closes_the_launch():
    answers = []
    with ir.ProcessLauncher(play("wait"), grace=0) as launcher:
        launcher.launch()
        thread = threading.Thread(target=lambda: answers.append(launcher.wait_ready()))
        thread.start()
        until(lambda: launcher._launch._wakers)
        launcher.close()
        thread.join(LIMIT_S)
    assert answers == [False]


def test_threads_that_wait_for_ready_hear_what_another_one_takes(gate):
    for _ in range(20):
        start = gate()
        os.set_inheritable(start.fd, True)
        with ir.ProcessLauncher(play(f"hold={start}", "notify=READY=1", "wait"), grace=0) as launcher:
            launcher.launch()
            answers, kinds = [], []

            def follow(launcher=launcher, kinds=kinds):
                while launcher.running():
                    kinds.extend(event.kind for event in launcher.events())

            threads = [threading.Thread(target=lambda: answers.append(launcher.wait_ready())) for _ in range(3)]  # noqa: B023
            follower = threading.Thread(target=follow)
            for thread in (*threads, follower):
                thread.start()
            until(lambda: len(launcher._launch._wakers) == 4)  # that of the follower, too
            start.open()
            for thread in threads:
                thread.join(LIMIT_S)
            launcher.terminate()
            follower.join(LIMIT_S)
            kinds.extend(event.kind for event in launcher.events())  # that came after its last look
        assert answers == [True] * 3
        assert kinds.count("ready") == 1


def test_wait_ready_sleeps_after_events_of_other_ranks(gate):
    first = gate()
    os.set_inheritable(first.fd, True)
    with ir.ProcessLauncher(
        play("@0", f"hold={first}", "notify=READY=1", "@*", "wait"), nproc_per_node=2
    ) as launcher:
        launcher.launch()
        waiting = threading.Thread(target=launcher.wait_ready)
        waiting.start()
        until(lambda: launcher._launch._wakers)
        (waker,) = launcher._launch._wakers
        first.open()
        kinds = []
        while "ready" not in kinds:
            kinds += [event.kind for event in launcher.events(LIMIT_S)]
        until(lambda: not select.select([waker], [], [], 0)[0], LIMIT_S / 4)  # else it would go round without end
        assert waiting.is_alive()
        launcher.close()
        waiting.join(LIMIT_S)
    assert not waiting.is_alive()


def test_a_late_rank_ends_a_launch_of_the_library_too():
    with pytest.raises(ir.WorkerError, match=r"rank 1 .* was not ready after 2\.0 s") as caught:
        ir.run(play("@0", "notify=READY=1", "@*", "wait"), nproc_per_node=2, ready_timeout=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


# ---- progress


def test_progress_is_told_when_it_is_higher_than_ever(debug):
    with (
        Live(waiter(0), waiter(1), debug=debug) as live,
        sender_to(address(0)) as first,
        sender_to(address(1)) as other,
    ):
        for text in ("PROGRESS=7", "PROGRESS=3", "PROGRESS=7"):
            first.send(text.encode())
        live.until(lambda: live.of("progress"))
        live.settle()
        assert [(event.rank, event.value) for event in live.of("progress")] == [(0, 7)]
        other.send(b"STATUS=on\nPROGRESS=0\n")
        first.send(b"PROGRESS=9223372036854775807")
        live.until(lambda: len(live.of("progress")) == 3)
        told = {(event.rank, event.value) for event in live.of("progress")}
        assert told == {(0, 7), (1, 0), (0, 2**63 - 1)}
        assert {event.pid for event in live.of("progress")} == {live.pid(0), live.pid(1)}
        live.group.kill()
        live.end()


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", " 1", "1 ", "1.5", "0x1", "one", "9223372036854775808", "1" * 400, "\0", "1\0"]
)
def test_progress_that_is_no_number_is_ignored(text, debug):
    with Live(waiter(0), debug=debug) as live, sender_to(address(0)) as sender:
        sender.send(f"PROGRESS={text}".encode())
        sender.send(b"progress=5\nPROGRESS 5\nREADY=1")
        live.until(lambda: live.of("ready"))
        live.settle()
        assert not live.of("progress")
        live.group.kill()
        live.end()


def test_progress_without_end_is_one_event_a_look_with_the_highest(debug):
    with Live(waiter(0), debug=debug) as live, sender_to(address(0)) as sender:
        live.settle()
        sent, looks = 0, 0
        sender.setblocking(False)
        while sent < 5000:
            try:
                sent += 1
                sender.send(b"PROGRESS=%d" % sent)
            except BlockingIOError:
                sent -= 1
                before = len(live.of("progress"))
                live.events += live.group.run_once()
                looks += 1
                assert len(live.of("progress")) <= before + 1
        live.settle()
        values = [event.value for event in live.of("progress")]
        assert values[-1] == 5000
        assert values == sorted(values)
        live.group.kill()
        live.end()


def test_event_of_several_progresses_has_the_time_of_the_last(debug):
    with Live(waiter(0), debug=debug) as live, sender_to(address(0)) as sender:
        live.settle()
        sender.send(b"PROGRESS=1")
        sender.send(b"PROGRESS=2")
        live.until(lambda: live.of("progress"))
        (event,) = live.of("progress")
        assert (event.value, event.time_ns) == (2, live.group.activity(0)[0])
        live.group.kill()
        live.end()


def test_what_a_rank_said_last_is_heard_when_it_has_ended(debug):
    with Live(talker(0, "notify=PROGRESS=12", "exit=0"), debug=debug) as live:
        live.end()
        kinds = [event.kind for event in live.events]
        assert kinds.index("progress") < kinds.index("exited")


def test_a_host_that_reads_no_events_keeps_the_highest_progress_of_each_rank():
    words = play(*[f"notify=PROGRESS={i}" for i in range(60)], "exit=0")
    with ir.ProcessLauncher(words, nproc_per_node=2) as launcher:
        launcher.launch()
        launcher.wait()
        told = [(event.rank, event.value) for event in launcher.events(0) if event.kind == "progress"]
    assert sorted(told) == [(0, 59), (1, 59)]
