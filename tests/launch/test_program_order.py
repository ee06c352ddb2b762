"""--after: a program starts once another one is up, or never."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest

import infini_run as ir
from infini_run.node.ports import free_port, let_go
from infini_run.options.options import resolve
from infini_run.plan.start_order import StartOrder, UpCount
from tests.launch.test_programs import HOST, report_of, sh, two
from tests.support.launch_shapes import with_strace
from tests.support.processes import is_alive, marked
from tests.support.waiting import until

READY = "import os, socket, sys; s = socket.socket(1, 2); s.connect(os.environ['NOTIFY_SOCKET']); s.send(b'READY=1')"


def ready(then="exec sleep 1000", first=":"):
    """A rank that does `first`, says READY=1, and does `then`."""
    return sh(f'{first}; "{sys.executable}" -c "{READY}"; {then}')


@pytest.fixture
def port():
    """Free, and no other launch's meanwhile."""
    port = free_port()
    yield port
    let_go(port)


def test_program_starts_once_another_is_ready(infini_run, bell, every_path):
    server = ready(first=f"echo waits; read go < {bell.path}; echo serves")
    command = infini_run(*two(server, sh("echo uses"), of_second=("--after=a", "--ends_job"), counts=(1, 2)))
    command.read_lines(b"[a 0] waits")
    assert b"uses" not in command.out
    bell.ring("go")
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert lines.index("[a 0] serves") < lines.index("[b 0] uses")
    assert "[b 1] uses" in lines
    assert command.err == b""


def test_program_waits_for_all_ranks_of_another(infini_run, bell):
    server = ready(first=f'test "$RANK" = 0 || {{ echo waits; read go < {bell.path}; echo serves; }}')
    command = infini_run(*two(server, sh("echo uses"), of_second=("--after=a", "--ends_job"), counts=(2, 1)))
    command.read_lines(b"[a 1] waits")
    bell.ring("go")
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert lines.index("[a 1] serves") < lines.index("[b 0] uses")


def test_program_that_ended_well_is_up(infini_run):
    """A program that prepares something needs no READY=1."""
    command = infini_run(*two(sh("echo uses"), sh("echo prepares"), of_first=("--after=b",)))
    assert command.wait() == 0, command.err
    assert command.out.decode().splitlines() == ["[b 0] prepares", "[a 0] uses"]


def test_programs_start_in_any_order(infini_run, bell):
    """One that waits does not hold another: a uses c, and is up by that; b waits for a."""
    words = ["--program=a", *ready(first=f"read go < {bell.path}", then="echo a"), ":", "--program=b", "--after=a"]
    words += [*sh("echo b"), ":", "--program=d", *ready(then="echo d"), ":", "--program=c", "--after=d"]
    command = infini_run(*words, *sh(f"echo c; echo go > {bell.path}"))
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert lines.index("[d 0] d") >= 0
    assert lines.index("[c 0] c") < lines.index("[b 0] b")


def test_failure_before_it_is_up_starts_nothing(infini_run, tmp_path):
    words = two(sh("exit 5"), sh(f"touch {tmp_path}/started"), f"--report={tmp_path}/r", of_second=("--after=a",))
    command = infini_run(*words)
    assert command.wait() == 5
    assert command.err.startswith(f"infini-run: a 0 on {HOST} failed: exit code 5".encode())
    assert not (tmp_path / "started").exists()
    assert report_of(tmp_path / "r")["ranks"][1]["pid"] is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_job_that_waits(infini_run, number):
    command = infini_run(*two(sh("echo up $$; exec sleep 1000"), sh("echo started"), of_second=("--after=a",)))
    pid = int(command.read_lines(b"[a 0] up")[0][-1])
    command.signal(number)
    assert command.wait() == 128 + number
    assert b"started" not in command.out
    assert not is_alive(pid)


def test_nothing_outlives_a_killed_launcher_that_waits(infini_run, tmp_path):
    command = infini_run(*two(sh("echo $INFINI_RUN_ID; exec sleep 1000"), ["true"], of_second=("--after=a",)))
    mark = command.read_lines(b"[a 0]")[0][-1]
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: not marked(f"INFINI_RUN_ID={mark}".encode()))


def test_program_that_is_never_ready_ends_the_job(infini_run):
    command = infini_run(
        "--ready_timeout=1", "--grace=1", *two(["sleep", "1000"], ["true"], of_second=("--after=a",))
    )
    assert command.wait() == 1
    assert f"infini-run: a 0 on {HOST} was not ready after 1.0 s".encode() in command.err


def test_deadline_is_that_of_awaited_programs(infini_run):
    """A program that nobody waits for need not say READY=1."""
    words = two(ready(), sh("sleep 3.5; echo done"), "--ready_timeout=3", of_second=("--after=a", "--ends_job"))
    command = infini_run(*words)
    assert command.wait() == 0, command.err
    assert command.out == b"[b 0] done\n"


def test_port_of_a_program_may_say_that_it_is_up(infini_run, port):
    here = f"(('127.0.0.1', {port}))"
    server = f"import socket; server = socket.create_server{here}\nwhile 1: server.accept()"
    client = f"import socket; socket.create_connection{here}; print('got it')"
    server, client = ([sys.executable, "-c", text] for text in (server, client))
    words = two(server, client, of_first=(f"--ready_port={port}",), of_second=("--after=a", "--ends_job"))
    command = infini_run(*words)
    assert command.wait() == 0, command.err
    assert command.out == b"[b 0] got it\n"


def test_port_that_another_program_has_is_refused(infini_run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = two(["true"], ["true"], of_first=(f"--ready_port={port}",), of_second=("--after=a",))
        command = infini_run(*words)
        assert command.wait() == 2
    assert command.err.startswith(f"infini-run: --ready_port={port}: already in use here; ".encode())


@with_strace
@pytest.mark.parametrize("which", [3, 4], ids=["first", "second"])
def test_rank_that_cannot_start_later_ends_all(infini_run, tmp_path, which):
    """The first clone is the guard, the second the rank that others wait for."""
    tracer = ("strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", "trace=clone,clone3")
    tracer += ("-e", f"inject=clone,clone3:error=EAGAIN:when={which}+")
    words = two(["true"], ["sleep", "1000"], counts=(1, 2), of_second=("--after=a",))
    command = infini_run(*words, under=tracer)
    assert command.wait() == 1
    assert b" cannot be started: creating the process: Resource temporarily unavailable" in command.err
    assert command.err.count(b"infini-run: ") == 1


def test_restart_waits_again(infini_run, tmp_path):
    uses = sh(f"echo uses $TORCHELASTIC_RESTART_COUNT; mkdir {tmp_path}/once 2> /dev/null && exit 3; exit 0")
    flags = ("--max_restarts=1", "--restart_delay=0")
    server = ready(first="echo serves $TORCHELASTIC_RESTART_COUNT")
    command = infini_run(*two(server, uses, *flags, of_second=("--after=a", "--ends_job")))
    assert command.wait() == 0, command.err
    assert command.out.decode().splitlines() == [
        "[a 0] serves 0", "[b 0] uses 0", "[a 0] serves 1", "[b 0] uses 1",
    ]  # fmt: skip


def test_program_that_waits_has_the_descriptors_and_the_folder_of_the_launcher(infini_run, tmp_path):
    read_fd, write_fd = os.pipe()
    os.set_inheritable(write_fd, True)
    uses = sh(f"pwd > /proc/self/fd/{write_fd}")
    words = two(sh("true"), uses, of_second=("--after=a",))
    command = infini_run(*words, cwd=tmp_path, pass_fds=(write_fd,))
    assert command.wait() == 0, command.err
    os.close(write_fd)
    with open(read_fd) as pipe:
        assert pipe.read() == f"{tmp_path}\n"


def test_program_that_waits_has_no_input(infini_run):
    """Its stdin is /dev/null, which the launcher has open until then."""
    command = infini_run(*two(["true"], sh("readlink /proc/self/fd/0"), of_second=("--after=a",)))
    assert command.wait() == 0, command.err
    assert command.out == b"[b 0] /dev/null\n"


def test_dry_run_shows_who_waits(infini_run):
    command = infini_run("--dry_run", *two(["true"], ["true"], of_second=("--after=a",)))
    assert command.wait() == 0
    assert b"programs: a (1), b (1) after a\n" in command.out


def test_run_of_programs_that_wait():
    report = ir.run(
        [
            ir.Program(["sh", "-c", "exit 0"], name="a"),
            ir.Program(["sh", "-c", "exit 0"], name="b", after="a", nproc_per_node=2),
        ]
    )
    assert report.exit_code == 0
    first, *others = report.exits
    assert all(each.start_s >= first.end_s for each in others)


def test_order_is_that_of_what_is_up():
    words = ("--program=a", "--after=b,c", "x", ":", "--program=b", "--after=c", "x", ":", "--program=c", "x")
    order = StartOrder(resolve(words, {}).options.programs)
    assert [order.is_held(name) for name in "abc"] == [True, True, False]
    assert order.on_up("b") == []
    assert order.on_up("c") == ["a", "b"]
    assert order.is_over


def test_rank_counts_once():
    up = UpCount({"a": 2})
    assert [up.note("a", 0), up.note("a", 0), up.note("b", 1)] == [False, False, False]
    assert up.waits_for("a")
    assert up.note("a", 1)
    assert not up.note_all("a")
