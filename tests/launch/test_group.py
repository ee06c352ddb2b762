"""The group itself: what it promises to whoever steps it, on every path of the core."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading

import pytest
from infini_run._irun import ffi, lib

from infini_run.core.c_structs import INHERIT, PIPE, STEPS, TO_CONSOLE, TO_LOG
from infini_run.core.group import debug_flags
from infini_run.errors import StartError
from tests.support.group_case import Live, spec, wait_for_line
from tests.support.processes import children, descriptors, is_full, processes
from tests.support.waiting import LIMIT_S, until

PATHS = ["", "fork", "nopidfd", "fork,nopidfd"]


@pytest.fixture(params=PATHS, ids=lambda path: path or "newest")
def debug(request):
    """Each way that the core may go, by the kernel that it finds."""
    return debug_flags({"INFINI_RUN_DEBUG": request.param})


def threads():
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True)
def no_core_thread_left():
    """The threads of the core are not Python's: they are counted in the kernel."""
    before = threads()
    yield
    until(lambda: threads() <= before)


def sleeper(rank, **kwargs):
    return spec(rank, "/bin/sleep", "1000", **kwargs)


def shell(rank, script, **kwargs):
    return spec(rank, "/bin/sh", "-c", script, **kwargs)


@contextlib.contextmanager
def no_descriptor_left():
    """Every open() of ours fails meanwhile, with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))  # 0: poll(2) would be refused, too
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- from start to end


def test_every_worker_is_told_from_start_to_end(debug):
    with Live(*(shell(rank, f"exit {rank}") for rank in range(5)), debug=debug) as live:
        live.end()
    assert [event.worker for event in live.of("started")] == list(range(5))
    assert {event.worker: event.code for event in live.of("exited")} == {rank: rank for rank in range(5)}
    assert all(live.pid(event.worker) == event.pid for event in live.of("exited"))
    assert live.events[-1].kind == "ended"
    assert not any(event.after_stop or event.status_lost for event in live.events)


def test_a_signal_that_ended_a_worker_is_told(debug):
    with Live(shell(0, "kill -SEGV $$"), shell(1, "kill -9 $$"), debug=debug) as live:
        live.end()
    assert {event.worker: event.signal for event in live.of("exited")} == {0: signal.SIGSEGV, 1: signal.SIGKILL}


def test_usage_of_a_worker_is_its_own(debug):
    with Live(
        spec(0, sys.executable, "-ISEc", "x = bytearray(200_000_000); sum(range(3_000_000))"), debug=debug
    ) as live:
        (exit_,) = [event for event in live.end() if event.kind == "exited"]
    assert exit_.max_rss_kib > 190_000
    assert exit_.user_us + exit_.system_us > 10_000


def test_workers_see_the_environment_the_arguments_and_the_directory_that_they_were_given(debug, tmp_path):
    reader, writer = os.pipe()
    one = spec(7, "/bin/sh", "-c", 'echo "$0|$1|$WORD|$PWD"', "a b", "", stdio=(INHERIT, writer, INHERIT))
    one.env = b"WORD=of its own"
    one.cwd = os.fsencode(tmp_path)
    with Live(one, debug=debug) as live:
        os.close(writer)
        assert wait_for_line(reader) == os.fsencode(f"a b||of its own|{tmp_path}\n")
        live.end()
    os.close(reader)


@pytest.mark.rows(2)
def test_three_hundred_workers_lose_no_event(debug):
    with Live(*(shell(rank, f"exit {rank % 250}") for rank in range(300)), debug=debug) as live:
        live.end()
    assert sorted(event.worker for event in live.of("started")) == list(range(300))
    assert sorted((event.worker, event.code) for event in live.of("exited")) == [(r, r % 250) for r in range(300)]


def test_no_end_is_lost_where_nobody_collects_until_the_end(debug):
    """Each worker gives nearly every event that it can, and each has its room."""
    full = os.open("/dev/full", os.O_WRONLY)
    noisy = [
        shell(r, "echo; echo >&2", stdio=(INHERIT, PIPE, PIPE), output=(TO_LOG,) * 2, log_fd=full) for r in range(40)
    ]
    failing = [shell(r, "", cwd=b"/nowhere") for r in range(40, 80)]
    others = children()
    with Live(*noisy, *failing, debug=debug) as live:
        before = len(children())
        while children().keys() - others.keys():
            lib.ir_group_run_once(live.group._handle, ffi.NULL, 0)
            live.group.wait(0.01)
        assert before > len(others)
        live.end()
    os.close(full)
    assert [event.worker for event in live.of("started")] == list(range(80))
    assert sorted(event.worker for event in live.of("exited")) == list(range(80))
    assert sorted(event.worker for event in live.of("output_lost")) == list(range(40))
    assert sorted(event.worker for event in live.of("start_failed")) == list(range(40, 80))


def test_a_group_of_none_ends_at_once(debug):
    with Live(size=3, debug=debug) as live:
        assert live.spawn() == 0
        live.end()
    assert [event.kind for event in live.events] == ["ended"]


# ---- starts that fail


@pytest.mark.parametrize(
    ("what", "step", "number"),
    [
        ("vanished", "executing the program", errno.ENOENT),
        ("not executable", "executing the program", errno.EACCES),
        ("no program", "executing the program", errno.ENOEXEC),
        ("no directory", "entering its working directory", errno.ENOENT),
        ("not a directory", "entering its working directory", errno.ENOTDIR),
        ("too long", "executing the program", errno.E2BIG),
    ],
)
def test_what_fails_between_clone_and_exec_is_told_with_its_step_and_errno(debug, tmp_path, what, step, number):
    program = tmp_path / "program"
    program.write_bytes(b"" if what == "no program" else b"#!/bin/sh\n")
    program.chmod(0o600 if what == "not executable" else 0o700)
    bad = spec(1, program)
    if what == "vanished":
        program.unlink()
    if what in ("no directory", "not a directory"):
        bad.cwd = os.fsencode(tmp_path / "nowhere" if what == "no directory" else program)
    if what == "too long":
        bad.argv = [b"program", b"x" * 200_000]  # more than MAX_ARG_STRLEN, execve(2)
    with Live(shell(0, "exit 0"), bad, shell(2, "exit 0"), debug=debug) as live:
        live.end()
    (failure,) = live.of("start_failed")
    code = 1 if bad.cwd else 127 if number == errno.ENOENT else 126  # as a shell says it
    assert (failure.worker, STEPS[failure.code], failure.signal) == (1, step, number)
    assert {event.worker: event.code for event in live.of("exited")} == {0: 0, 1: code, 2: 0}
    assert live.events.index(failure) < next(
        i for i, e in enumerate(live.events) if e.kind == "exited" and e.worker == 1
    )


WALK = """
import errno, os, resource, sys
sys.path[:0] = sys.argv[2:]
from tests.support.group_case import Live, spec
from infini_run.errors import StartError
from infini_run.core.c_structs import PIPE
for fd in range(3, 64):
    try: os.close(fd)
    except OSError: pass
for room in range(1, 40):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 + room, 4096))
    live = None
    try:
        live = Live(size=3, debug=int(sys.argv[1]), stdin_fd=0)
        live.spawn(*(spec(r, "/bin/true", stdio=(PIPE, PIPE, PIPE)) for r in range(3)))
        live.end()
        how = "whole" if [e.code for e in live.of("exited")] == [0, 0, 0] else "torn"
    except StartError as error:
        how = errno.errorcode[error.errno]
    finally:
        if live is not None: live.close()
    while len(os.listdir("/proc/self/task")) > 1: os.sched_yield()  # threads that waited have a descriptor each
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    try: child = os.waitpid(-1, 0)
    except ChildProcessError: child = "none"
    print(room, how, child, len(os.listdir("/proc/self/fd")) - 1)
"""


@pytest.mark.rows(1)  # twice it waits for 5 s, until it gives up to look for leftovers in a /proc that it cannot open
def test_a_start_without_descriptors_works_whole_or_not_at_all(debug):
    """Wherever the limit strikes: nothing runs afterwards, and nothing is left open."""
    words = [sys.executable, "-c", WALK, str(debug), *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    hows = []
    for room, line in enumerate(done.stdout.splitlines(), 1):
        number, how, child, count = line.split()
        assert (number, child, count) == (str(room), "none", "3"), line
        assert how in ("whole", "EMFILE", "EAGAIN"), line
        hows.append(how)
    assert hows[0] == "EMFILE"
    assert hows[-1] == "whole"
    assert len(hows) == 39


def test_a_group_is_spawned_once(debug):
    with Live(shell(0, "exit 0"), debug=debug) as live:
        with pytest.raises(StartError):
            live.spawn(shell(1, "exit 0"))
        live.end()
    assert len(live.of("started")) == 1


@pytest.mark.parametrize(("config"), [{"stop_signal": 0}, {"stop_signal": 65}, {"grace_s": 10.0, "stop_signal": -1}])
def test_a_config_that_makes_no_sense_is_refused(config):
    with pytest.raises(StartError):
        Live(size=1, **config)


# ---- the order of death


def die_in_order(live, order):
    """Each is dead, and a zombie of ours, before the next is killed; nobody steps meanwhile."""
    for worker in order:
        os.kill(live.pid(worker), signal.SIGKILL)
        until(lambda: processes()[live.pid(worker)][1] == "Z")  # noqa: B023


@pytest.mark.parametrize("path", ["", "fork"])
def test_deaths_are_told_in_the_order_in_which_they_happened(path):
    with Live(*(sleeper(rank) for rank in range(12)), debug=debug_flags({"INFINI_RUN_DEBUG": path})) as live:
        live.settle()
        order = random.Random(path).sample(range(12), 12)
        die_in_order(live, order)
        live.end()
    assert [event.worker for event in live.of("exited")] == order


def test_the_first_failure_is_the_first_to_die_though_the_launcher_slept(infini_run):
    """Stopped, the launcher sees both deaths at once; a higher rank that died first is still the first."""
    command = infini_run("--nproc_per_node=4", "/bin/sh", "-c", "echo $RANK $$; exec sleep 1000")
    pids = dict(wait_for_line(command.process.stdout.fileno()).split() for _ in range(4))
    command.signal(signal.SIGSTOP)
    until(lambda: processes()[command.pid][1] == "T")
    for rank, number in ((b"2", signal.SIGSEGV), (b"0", signal.SIGABRT), (b"3", signal.SIGBUS)):
        os.kill(int(pids[rank]), number)
        until(lambda: processes()[int(pids[rank])][1] == "Z")  # noqa: B023
    command.signal(signal.SIGCONT)
    assert command.wait() == 128 + signal.SIGSEGV
    assert b"rank 2" in command.err.splitlines()[0]


def test_failed_start_is_told_when_others_start_right_after(debug, tmp_path):
    """The arena of the second start has nothing of the first one."""
    specs = [spec(0, tmp_path / "missing"), shell(1, "exit 0")]
    for each in specs:
        each.held = True
    with Live(*specs, debug=debug, stays=True) as live:
        for worker in range(2):
            assert live.group.part_start(specs, [live.mark], [worker]) == 1
        live.until(lambda: len(live.of("exited")) == 2)
        [failed] = live.of("start_failed")
        assert (failed.worker, STEPS[failed.code], failed.signal) == (0, "executing the program", errno.ENOENT)


@pytest.mark.parametrize("path", ["", "fork"])
def test_the_end_of_a_worker_that_a_tracer_held_is_told_when_it_lets_go(trace, path):
    """Nothing but its pidfd is needed for that: no thread, no further descriptor."""
    before = threads()
    with Live(sleeper(0), sleeper(1), debug=debug_flags({"INFINI_RUN_DEBUG": path})) as live:
        live.settle()
        tracer = trace(live.pid(0))
        os.kill(live.pid(0), signal.SIGKILL)
        until(lambda: processes()[live.pid(0)][1] == "Z")
        with no_descriptor_left():
            live.settle()
        assert not live.group.wait(0), "it would spin"
        assert not live.of("exited")
        assert threads() <= before  # one of a test before may still have been ending
        tracer.let_go()
        live.until(lambda: live.of("exited"))
        assert [(event.worker, event.signal) for event in live.of("exited")] == [(0, signal.SIGKILL)]
        live.group.stop()
        live.end()


# ---- steering


def test_a_signal_reaches_one_worker_or_all(debug):
    script = "trap 'exit 5' USR1; echo up; while :; do sleep 0.01; done"
    reader, writer = os.pipe()
    with Live(*(shell(r, script, stdio=(INHERIT, writer, INHERIT)) for r in range(3)), debug=debug) as live:
        os.close(writer)
        for _ in range(3):
            wait_for_line(reader)
        assert live.group.signal(1, signal.SIGUSR1) == 1
        live.until(lambda: live.of("exited"))
        assert [event.worker for event in live.of("exited")] == [1]
        assert live.group.signal(1, signal.SIGUSR1) == 0, "it is gone"
        assert live.group.signal(-1, 0) == 2
        assert live.group.signal(-1, signal.SIGUSR1) == 2
        live.end()
    os.close(reader)
    assert all(event.code == 5 and not event.after_stop for event in live.of("exited"))


def test_a_signal_that_makes_no_sense_is_refused(debug):
    with Live(sleeper(0), debug=debug) as live:
        for worker, number in ((0, -1), (0, 65), (1, 15), (99, 15)):
            with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
                live.group.signal(worker, number)
        live.group.kill()
        live.end()


@pytest.mark.parametrize("scope", ["group", "leader", "mixed"])
def test_stop_ends_every_worker_and_says_that_it_was_us(debug, scope):
    with Live(*(sleeper(rank) for rank in range(4)), debug=debug, stop_scope=scope) as live:
        live.group.stop()
        live.group.stop(signal.SIGINT)
        live.end()
    assert [(event.signal, event.after_stop) for event in live.of("exited")] == [(signal.SIGTERM, True)] * 4


def test_stop_kills_what_ignores_it_when_the_grace_is_over(debug):
    reader, writer = os.pipe()
    stubborn = shell(0, "trap '' TERM; echo up; while :; do sleep 0.01; done", stdio=(INHERIT, writer, INHERIT))
    with Live(stubborn, debug=debug, grace_s=0.05) as live:
        os.close(writer)
        wait_for_line(reader)
        live.group.stop()
        live.end()
    os.close(reader)
    assert [event.signal for event in live.of("exited")] == [signal.SIGKILL]


@pytest.mark.parametrize("is_told", [False, True])
def test_a_stop_that_a_signal_asked_for_has_a_grace_of_its_own(is_told):
    """The shorter one ends it: the other is beyond any test."""
    graces = {"grace_s": 1000.0 if is_told else 0.05, "signal_grace_s": 0.05 if is_told else 1000.0}
    reader, writer = os.pipe()
    stubborn = shell(0, "trap '' TERM; echo up; while :; do sleep 0.01; done", stdio=(INHERIT, writer, INHERIT))
    with Live(stubborn, **graces) as live:
        os.close(writer)
        wait_for_line(reader)
        live.group.stop(by_signal=is_told)
        live.end()
    os.close(reader)
    assert [event.signal for event in live.of("exited")] == [signal.SIGKILL]


def test_stop_before_the_spawn_is_nothing(debug):
    with Live(size=1, debug=debug) as live:
        live.group.stop()
        assert live.spawn(shell(0, "exit 3")) == 1
        live.end()
    assert [event.code for event in live.of("exited")] == [3]


def test_everything_is_allowed_after_the_end_and_does_nothing(debug):
    with Live(shell(0, "exit 0"), debug=debug) as live:
        live.end()
        for _ in range(2):
            live.group.stop()
            live.group.kill()
            live.group.print_line("nobody listens")
            assert live.group.signal(0, signal.SIGTERM) == 0
            assert live.group.run_once() == []
            assert live.group.wait()
            assert live.group.tail(0) == b""
            live.close()


def test_tail_is_the_last_of_stderr(debug):
    script = "seq 9000 >&2; printf 'the last' >&2; echo out"
    with Live(shell(0, script, stdio=(INHERIT, PIPE, PIPE)), shell(1, "exit 0"), debug=debug) as live:
        live.end()
        text = live.group.tail(0)
        assert live.group.tail(1) == b""
        assert live.group.tail(7) == b""
    whole = b"".join(b"%d\n" % n for n in range(1, 9001)) + b"the last"
    assert text == whole[-16384:]


def test_the_last_line_is_that_of_the_stream_that_wrote_last_whole_or_not(debug):
    steps = [
        ("printf 'one\\ntwo\\n'", b"two\n"),
        ("printf 'ten\\neleven\\n' >&2", b"eleven\n"),
        ("printf 'unended'", b"unended"),
        ("printf ' line\\n'", b"unended line\n"),
        ("printf ' 10%%\\r 20%%\\r'", b" 20%\r"),
        ("printf '%0600d\\n' 7", b"0" * 510 + b"7\n"),
        ("printf '%070000d' 8", (b"0" * 511 + b"8")),
    ]
    reader, writer = os.pipe()
    sizes = [0, 0]
    script = "; ".join(f"read x; {step}" for step, _ in steps)
    worker = shell(0, script, stdio=(reader, PIPE, PIPE))
    with Live(worker, shell(1, "exit 0"), debug=debug) as live:
        os.close(reader)
        assert live.group.line(0) == b""
        assert live.group.volume(0) == (0, 0)
        for step, line in steps:
            os.write(writer, b"go\n")
            live.until(lambda line=line: live.group.line(0) == line)
            sizes["2" in step[-3:]] += len(
                subprocess.run(["sh", "-c", step.replace(" >&2", "")], capture_output=True).stdout
            )
            live.until(lambda: live.group.volume(0) == tuple(sizes))
        os.close(writer)
        live.end()
        assert live.group.line(0).endswith(b"08")  # kept after its end
        assert live.group.line(1) == b""
        assert live.group.volume(1) == (0, 0)
        assert live.group.line(7) == b""


def test_lines_of_ours_stand_between_those_of_workers_and_never_overrun_the_console():
    """A console that nobody reads fills up: then a line of ours is dropped, not written past its buffer."""
    reader, writer = os.pipe()
    flood = shell(
        0, "yes 0123456789012345678901234567890123456789", stdio=(INHERIT, INHERIT, PIPE), output=(0, TO_CONSOLE)
    )
    flood.argv[2] += b" >&2"
    with Live(flood, console=(-1, writer)) as live, open(reader, "rb", buffering=0, closefd=False) as console:
        live.until(lambda: is_full(console) and not live.group.wait(0))
        said = 0
        while live.group.dropped_lines < 10:
            assert said < 10_000, "nothing is dropped, however much is said"
            live.group.print_line(f"ours {said} " + "x" * 100)
            said += 1
            live.settle()
        live.group.signal(0, signal.SIGKILL)
        live.until(lambda: live.of("exited"))
        dropped = live.group.dropped_lines
        os.set_blocking(reader, False)
        text = os.read(reader, 1 << 20)
        live.settle()
        live.group.print_line(f"ours {said}")
        while not live.group.ended:
            try:
                text += os.read(reader, 1 << 20)
            except BlockingIOError:
                live.group.wait(1.0)
            live.settle()
    os.close(writer)
    while chunk := os.read(reader, 1 << 20):
        text += chunk
    os.close(reader)
    lines = text.splitlines()
    assert b"... %d lines were dropped here: the console was not read" % dropped in lines
    lines = [line for line in lines if not line.startswith(b"... ")]
    ours = [int(line.split()[1]) for line in lines if line.startswith(b"ours ")]
    assert ours[:5] == list(range(5))
    assert ours == sorted(ours)
    assert ours[-1] == said
    assert len(ours) + dropped == said + 1
    flooded = {line for line in lines if not line.startswith(b"ours ")}
    assert flooded <= {b"[rank 0 err] " + b"0123456789" * 4, *lines[-1:]}


# ---- close


def test_close_ends_what_lives(debug):
    live = Live(*(sleeper(rank) for rank in range(5)), debug=debug)
    live.settle()
    pids = [live.pid(rank) for rank in range(5)]
    live.close()
    live.close()
    assert not set(pids) & set(processes())


@pytest.mark.parametrize("stage", ["made", "stopped", "killed", "spawn failed"])
def test_a_half_made_group_can_be_closed(debug, stage):
    before = descriptors()
    if stage == "spawn failed":
        live = Live(size=1, debug=debug)
        with pytest.raises(StartError):
            live.spawn(sleeper(0), sleeper(1))
    elif stage == "made":
        live = Live(size=1, debug=debug)
    else:
        live = Live(sleeper(0), debug=debug)
        getattr(live.group, {"stopped": "stop", "killed": "kill"}[stage])()
    live.close()
    until(lambda: descriptors() == before)  # a thread that waited for a worker closes its own a little later


@pytest.mark.parametrize("stage", ["made", "running", "console blocked"])
def test_close_wakes_a_thread_that_waits(debug, stage):
    reader, writer = os.pipe()
    if stage == "made":
        live = Live(size=1, debug=debug)
    elif stage == "running":
        live = Live(sleeper(0), debug=debug)
        live.until(lambda: processes()[live.pid(0)][2] == "sleep")
    else:
        yes = spec(0, "/usr/bin/yes", stdio=(INHERIT, PIPE, INHERIT), output=(TO_CONSOLE, 0))
        live = Live(yes, debug=debug, console=(writer, -1))
        live.until(lambda: live.settle() or processes()[live.pid(0)][1] == "S")
    live.settle()
    woken, closed = [], threading.Event()

    def wait_until_closed():  # something may be ready that is not the end
        while live.group.wait() and not closed.is_set():
            live.group.run_once()
        woken.append(True)

    waiter = threading.Thread(target=wait_until_closed, daemon=True)
    waiter.start()
    until(lambda: live.group._waiting == 1)
    closer = threading.Thread(target=live.close, daemon=True)
    closer.start()
    closer.join(LIMIT_S / 2)
    closed.set()
    waiter.join(LIMIT_S / 2)
    assert not closer.is_alive()
    assert woken == [True]
    os.close(reader)
    os.close(writer)


# ---- beside a host program


def test_a_status_that_the_host_took_is_told_as_lost(debug):
    reader, writer = os.pipe()
    with Live(shell(0, "read x; exit 3", stdio=(reader, INHERIT, INHERIT)), sleeper(1), debug=debug) as live:
        live.settle()
        os.close(reader)
        os.write(writer, b"go\n")
        os.close(writer)
        assert os.waitpid(live.pid(0), 0)[1] == 3 << 8  # nobody steps meanwhile
        live.until(lambda: live.of("exited"))
        (exit_,) = live.of("exited")
        assert (exit_.worker, exit_.status_lost, exit_.code, exit_.signal) == (0, True, 0, 0)
        live.group.stop()
        live.end()
    assert [event.status_lost for event in live.of("exited")] == [True, False]


def test_a_host_that_ignores_sigchld_loses_statuses_but_no_ends(debug):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Live(*(shell(rank, "exit 3") for rank in range(4)), debug=debug) as live:
            live.end()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert sorted(event.worker for event in live.of("exited")) == [0, 1, 2, 3]
    assert all(event.status_lost for event in live.of("exited"))


def test_the_hosts_own_children_are_not_touched(debug):
    with subprocess.Popen(["/bin/sleep", "1000"], stdin=subprocess.DEVNULL) as own:
        quick = subprocess.Popen(["/bin/sh", "-c", "exit 4"])
        with Live(shell(0, "exit 0"), sleeper(1), debug=debug) as live:
            live.group.stop()
            live.end()
        assert own.poll() is None
        own.kill()
    assert quick.wait() == 4


# ---- strays of a library


@pytest.mark.parametrize("size", [0, 1, 8000, 8150, 8191, 8192, 8193, 40_000, 100_000])
def test_a_stray_is_known_by_its_mark_wherever_in_its_environment_that_stands(size, tmp_path):
    """/proc/PID/environ is read in pieces of 8 KiB; the mark may lie across two."""
    ready = tmp_path / "ready"
    script = f"setsid sh -c 'echo > {ready}; exec sleep 1000' & until test -e {ready}; do :; done"
    for shift in range(0, 60, 7):
        filler = b"FILLER=" + b"x" * max(0, size - 60 + shift)
        ready.unlink(missing_ok=True)
        with Live(size=1) as live:
            live._env.insert(0, filler)
            live.spawn(shell(0, script))
            live.end()
        assert [event.name in ("sh", "sleep") for event in live.of("leftover")] == [True]


def test_a_stray_that_could_not_be_looked_for_is_looked_for_again(debug, tmp_path):
    """Without a descriptor /proc cannot be read: that is not the same as nobody being there."""
    ready = tmp_path / "ready"
    reader, writer = os.pipe()
    script = f"setsid sh -c 'echo > {ready}; exec sleep 1000' & until test -e {ready}; do :; done; read gate"
    with Live(shell(0, script, stdio=(reader, INHERIT, INHERIT)), debug=debug, grace_s=0.1) as live:
        os.close(reader)
        until(ready.exists)
        os.close(writer)
        with no_descriptor_left():
            live.until(lambda: live.of("exited"))
        assert not live.group.ended
        live.end()
    assert len(live.of("leftover")) == 1


# ---- many


@pytest.mark.rows(2)
def test_many_groups_at_once_from_many_threads_each_end(debug):
    """A child of one thread's spawn holds copies of another's descriptors until its exec: a watch on one of
    them that outlives its close would spin, or speak of somebody else's worker."""
    errors = []

    def rounds(number):
        try:
            for round_ in range(12):
                code = (number * 7 + round_) % 100
                out = os.memfd_create("out")
                specs = [
                    shell(r, f"echo {r}; exit {code}", stdio=(PIPE, PIPE, PIPE), output=(TO_CONSOLE, TO_CONSOLE))
                    for r in range(4)
                ]
                source = os.open("/dev/null", os.O_RDONLY)
                with Live(*specs, debug=debug, console=(out, out), stdin_fd=source) as live:
                    live.end()
                text = os.pread(out, 4096, 0)
                os.close(out)
                os.close(source)
                assert sorted(text.splitlines()) == [b"[rank %d] %d" % (r, r) for r in range(4)]
                assert [event.code for event in live.of("exited")] == [code] * 4
        except BaseException as error:
            errors.append(error)
            raise

    workers = [threading.Thread(target=rounds, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LIMIT_S)
        assert not worker.is_alive()
    assert errors == []


MANY = """
import os, sys
sys.path[:0] = sys.argv[2:]
from infini_run.core.c_structs import PIPE, TO_CONSOLE
from tests.support.group_case import Live, spec
def rss_kib():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGESIZE') // 1024
def once():
    null = os.open("/dev/null", os.O_RDWR)
    piped = [spec(r, "/bin/echo", "x", stdio=(PIPE, PIPE, PIPE), output=(TO_CONSOLE, TO_CONSOLE)) for r in range(4)]
    with Live(*piped, debug=int(sys.argv[1]), console=(null, null), stdin_fd=null) as live:
        live.end()
    os.close(null)
for _ in range(30):
    once()
before = rss_kib()
for _ in range(100):
    once()
print(rss_kib() - before)
"""


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="AddressSanitizer keeps freed memory in quarantine")
@pytest.mark.rows(2)
def test_many_groups_one_after_the_other_keep_no_memory(debug):
    """In a small process of its own, whose forks copy little."""
    words = [sys.executable, "-c", MANY, str(debug), *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) < 3000, "a group of four with its buffers is 700 KiB"


CLOSED = """
import os, sys
sys.path[:0] = sys.argv[2:]
from tests.support.group_case import Live, spec
from tests.support.processes import descriptors
before = descriptors()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(100):
    with Live(spec(0, "/bin/true"), debug=int(sys.argv[1])) as live:
        live.end()
    assert descriptors() == before, descriptors()
"""


def test_a_group_that_is_closed_has_nothing_open(debug):
    """Not even for a moment: a fork of the host program just then would keep it. On one core who tells of an end
    has no time for more before we go on."""
    words = [sys.executable, "-c", CLOSED, str(debug), *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("nproc", [1, 20])
def test_the_command_works_on_every_path(infini_run, how, nproc):
    script = "echo out $RANK; setsid sleep 1000 & exit $((RANK % 3 * 2))"
    environ = {**os.environ, "INFINI_RUN_DEBUG": how}
    command = infini_run(
        f"--nproc_per_node={nproc}", "--keep_going", "--console=prefix", "/bin/sh", "-c", script, env=environ
    )
    code = command.wait()
    assert code in ((0,) if nproc == 1 else (2, 4))
    assert sorted(command.out.splitlines()) == sorted(b"[rank %d] out %d" % (r, r) for r in range(nproc))


def test_a_stopped_worker_does_not_spin_or_hold_the_stop(debug):
    with Live(shell(0, "kill -STOP $$"), debug=debug) as live:
        live.settle()
        until(lambda: processes()[live.pid(0)][1] == "T")
        live.settle()
        assert not live.group.wait(0)
        live.group.stop()
        live.end()
    assert [event.signal for event in live.of("exited")] == [signal.SIGTERM]


def test_a_console_that_is_not_open_shows_nothing_and_harms_nothing(debug):
    with Live(
        shell(0, "echo x", stdio=(INHERIT, PIPE, PIPE), output=(TO_CONSOLE,) * 2), debug=debug, console=(987, -1)
    ) as live:
        live.end()
    assert [event.code for event in live.of("exited")] == [0]


def test_what_is_asked_of_workers_that_are_not_there_is_answered_with_nothing():
    with Live(size=2, message_fd=-1) as live:
        assert live.group.signal(-1, signal.SIGTERM) == 0
        with pytest.raises(OSError, match="Invalid argument"):
            live.group.signal(99, signal.SIGTERM)
        for worker in (-2, 2, 99):
            assert live.group.activity(worker) == (0, 0)
            assert live.group.status(worker) == b""
            assert live.group.tail(worker) == b""
        live.spawn(spec(0, "true"), spec(1, "true"))
        live.end()
        assert live.group.signal(0, signal.SIGTERM) == 0
        assert live.group.signal(-1, signal.SIGTERM) == 0
        assert [live.group.status(worker) for worker in (0, 1)] == [b"", b""]
