"""Every way in which a function can end, on workers that are started and on workers that are forked: what the caller
has then, and that nothing is left."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import infini_run as ir
from infini_run.channel.decoder import BYTES, HEAD, PICKLE
from infini_run.crews.worker import worker_main
from tests.support.command import CHILDREN
from tests.support.launch_shapes import with_strace
from tests.support.processes import GUARD, is_alive, marked, processes
from tests.support.waiting import LIMIT_S, until

WAYS = {"exec": (), "fork": ["fractions"]}


@pytest.fixture(params=WAYS)
def preload(request):
    return WAYS[request.param]


@pytest.fixture
def run(preload):
    def run(function, *args, nproc=2, **flags):
        return ir.Launcher(nproc_per_node=nproc, preload=preload, **flags).run(function, *args)

    return run


def rank():
    return int(os.environ["RANK"])


def idle():
    """Until it is stopped."""
    signal.pause()


def others_idle(function):
    """The function on rank 1; the others would never end."""

    def either():
        return function() if rank() == 1 else idle()

    return either


class Mine(Exception):
    def __init__(self, message, code):
        super().__init__(message)
        self.code = code

    def __reduce__(self):
        return Mine, (self.args[0], self.code)


class Lost(Exception):
    """It cannot be made again from what pickle keeps: the arguments of Exception."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Slotted(Exception):
    __slots__ = ()

    def __setattr__(self, name, value):
        raise AttributeError("no")


class ConnectFailed(Exception):
    def __init__(self, host):
        super().__init__(host)
        self.host = host


class Placed(Exception):
    """Its rank cannot be set."""

    @property
    def rank(self):
        return "of its own"


class ByKeyword(Exception):
    def __init__(self, *, text):
        super().__init__(text)


def fail(error):
    raise error


# ---- it raises


def test_an_exception_comes_back_as_itself_while_the_others_would_never_end(run):
    with pytest.raises(Mine, match="bad luck") as caught:
        run(others_idle(lambda: fail(Mine("bad luck", 3))), nproc=3)
    error = caught.value
    assert (error.code, error.rank, error.host) == (3, 1, os.uname().nodename)
    (note,) = error.__notes__
    assert note.startswith(f"on rank 1, {error.host}:\nTraceback (most recent call last):\n")
    assert "in fail\n    raise error" in note
    assert "infini_run/crews" not in note
    assert isinstance(error.__cause__, ir.RemoteError)
    assert (error.__cause__.rank, error.__cause__.kind) == (1, "tests.crews.test_function_ends.Mine")


def test_one_that_cannot_be_made_again_comes_as_its_words(run):
    with pytest.raises(ir.RemoteError, match=r"^tests\.crews\.test_function_ends\.Lost: 1 and 2\n") as caught:
        run(others_idle(lambda: fail(Lost(1, 2))))
    assert (caught.value.rank, caught.value.kind) == (1, "tests.crews.test_function_ends.Lost")
    assert "raise error" in caught.value.trace
    assert pickle.loads(pickle.dumps(caught.value)).rank == 1


def test_one_that_forbids_attributes_is_raised_all_the_same(run):
    with pytest.raises(Slotted):
        run(others_idle(lambda: fail(Slotted())))


def test_a_rank_and_a_host_of_its_own_stay_as_they_are(run):
    with pytest.raises(ConnectFailed) as caught:
        run(others_idle(lambda: fail(ConnectFailed("db.example.com"))))
    assert (caught.value.host, caught.value.rank) == ("db.example.com", 1)
    assert (caught.value.__cause__.host, caught.value.__cause__.rank) == (os.uname().nodename, 1)
    with pytest.raises(Placed) as caught:
        run(others_idle(lambda: fail(Placed())))
    assert (caught.value.rank, caught.value.host) == ("of its own", os.uname().nodename)
    assert caught.value.__cause__.rank == 1


def test_an_error_of_a_launch_within_a_rank_has_the_place_of_that_rank(run):
    def launch():
        ir.Launcher(nproc_per_node=1).run(fail, KeyError("inner"))

    with pytest.raises(KeyError) as caught:
        run(others_idle(launch))
    assert (caught.value.rank, caught.value.host) == (1, os.uname().nodename)


def test_an_interrupt_that_a_function_raises_ends_its_process(run):
    with pytest.raises(ir.WorkerDied, match="killed by SIGINT"):
        run(others_idle(lambda: fail(KeyboardInterrupt())))


def test_one_of_a_class_that_the_caller_made_in_a_function_comes_back(run):
    class Local(ValueError):
        pass

    with pytest.raises(ValueError, match="here") as caught:
        run(others_idle(lambda: fail(Local("here"))))
    assert type(caught.value).__name__ == "Local"


@pytest.mark.parametrize(
    ("second", "later"),
    [
        (lambda: OSError("second"), "rank 0: OSError: second"),
        (lambda: ByKeyword(text="second"), "rank 0: tests.crews.test_function_ends.ByKeyword: second"),
    ],
)
def test_the_first_failure_in_time_is_raised_and_tells_of_the_later_one(run, tmp_path, second, later):
    for name in "ab":
        os.mkfifo(tmp_path / name)

    def work():
        if rank() == 1:
            (tmp_path / "a").read_text()
            (tmp_path / "b").write_text(str(os.getpid()))
            raise KeyError("first")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "a").write_text("ready")
        with contextlib.suppress(ProcessLookupError):  # it has gone already
            select.select([os.pidfd_open(int((tmp_path / "b").read_text()))], [], [])
        raise second()

    with pytest.raises(KeyError) as caught:
        run(work)
    assert caught.value.__notes__[-1] == f"later: {later}"


def test_without_stopping_all_the_others_go_on_and_the_first_failure_is_raised(run, tmp_path):
    def work():
        if rank() == 1:
            raise KeyError("first")
        time.sleep(0.1)
        (tmp_path / "done").write_text("")

    with pytest.raises(KeyError):
        run(work, keep_going=True)
    assert (tmp_path / "done").exists()


def test_a_result_that_cannot_be_pickled_is_told_with_its_rank_and_type(run):
    with pytest.raises(
        ir.UnpicklableError, match=r"^result of rank 1 cannot be sent: a generator does not pickle"
    ) as caught:
        run(others_idle(lambda: (n for n in ())))
    assert caught.value.rank == 1


def test_a_result_that_cannot_be_made_again_here_is_told(run):
    class Bad:
        def __reduce__(self):
            return fail, (ValueError("not here"),)

    with pytest.raises(
        ir.RemoteError, match=r"the result of rank 1 on .* cannot be unpickled here: ValueError: not here"
    ):
        run(others_idle(Bad))


def test_one_that_says_it_was_cancelled_is_a_failure_and_not_waited_for(run):
    with pytest.raises(ir.RemoteError, match=r"rank 1 on .* raised infini_run\.Cancelled") as caught:
        run(others_idle(lambda: fail(ir.Cancelled())))
    assert caught.value.rank == 1


# ---- its process ends


def close_stdout():
    sys.stdout.close()


def delete_stdout():
    del sys.stdout


def print_to_a_file():
    with open(os.devnull, "w") as file:
        sys.stdout = sys.stderr = file
        print("step 1")


@pytest.mark.parametrize("spoil", [close_stdout, delete_stdout, print_to_a_file])
def test_a_stdout_that_was_closed_fails_no_function(spoil, run):
    assert list(run(lambda: spoil() or 42, nproc=1)) == [42]


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("leave", [os._exit, sys.exit])
def test_an_end_without_a_result_is_a_failure_whatever_the_exit_code(run, leave, code):
    with pytest.raises(ir.WorkerDied, match=f"rank 1 on .* ended without a result: exit code {code} ") as caught:
        run(others_idle(lambda: leave(code)))
    assert (caught.value.rank, caught.value.exit_code, caught.value.signal) == (1, code, 0)
    assert isinstance(caught.value, ir.WorkerError)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM])
def test_an_end_by_a_signal_is_told_by_its_name(run, number):
    with pytest.raises(ir.WorkerDied, match=f"killed by {number.name}") as caught:
        run(others_idle(lambda: os.kill(os.getpid(), number)))
    assert (caught.value.rank, caught.value.signal) == (1, number)


def test_last_words_before_a_crash_are_all_kept(run, tmp_path):
    def crash():
        faulthandler.enable()
        for number in range(2000):
            print(f"line {number}")
        os.write(2, b"straight to descriptor 2\n")
        ctypes.string_at(0)

    with pytest.raises(ir.WorkerDied) as caught:
        run(others_idle(crash), log_dir=tmp_path, console="none")
    lines = (tmp_path / "rank_1.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("err: ")] == [f"line {number}" for number in range(2000)]
    assert "err: straight to descriptor 2" in lines
    assert any("Segmentation fault" in line for line in lines)
    assert any("in crash" in line for line in caught.value.last_lines)
    assert "| " in str(caught.value)
    assert f"log: {tmp_path}/rank_1.log" in str(caught.value)


def test_death_shows_message_when_its_stack_follows(run):
    def abort():
        frames = [f"frame #{number}: c10::f() + 0x7f (0x7f0c in libc10.so)" for number in range(10)]
        os.write(2, "\n".join(["  what():  boom", *frames, ""]).encode())
        os._exit(7)

    with pytest.raises(ir.WorkerDied) as caught:
        run(others_idle(abort), console="none")
    assert "\n  |   what():  boom" in str(caught.value)
    assert "frame #" not in str(caught.value)


def test_a_failure_after_the_result_is_one(run):
    def work():
        import atexit

        atexit.register(os._exit, 7)

    with pytest.raises(ir.WorkerDied, match="failed after it returned: exit code 7"):
        run(others_idle(work))


def test_what_was_registered_to_be_done_at_the_end_is_done(run, tmp_path):
    def work():
        import atexit

        atexit.register((tmp_path / f"left-{rank()}").write_text, "")
        threading.Thread(target=lambda: (time.sleep(0.05), (tmp_path / f"thread-{rank()}").write_text(""))).start()
        sys.stdout.write("no newline")

    run(work, console="none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left-0", "left-1", "thread-0", "thread-1"]


# ---- what it leaves


@pytest.mark.parametrize("session", [False, True], ids=["same session", "own session"])
@pytest.mark.parametrize("end", ["returns", "raises", "dies"])
def test_grandchildren_are_ended(run, end, session):
    def work():
        child = subprocess.Popen(["sleep", "600"], start_new_session=session, stdout=-3, stderr=-3)
        if end == "dies":
            os._exit(1)
        return fail(ValueError("bad")) if end == "raises" else child.pid

    if end == "returns":
        run(work)
    else:
        with pytest.raises((ValueError, ir.WorkerDied)):
            run(work)
    assert marked() == {}


def test_a_daemon_that_was_only_forked_is_ended(run, tmp_path):
    """/proc shows the environment that its process was started with: of a forked worker that of the zygote."""

    def work():
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(writer, b"%d" % os.getpid())
                for fd in range(3):
                    os.close(fd)
                signal.pause()
            os._exit(0)
        os.wait()
        return int(os.read(reader, 100))

    pid = run(work, nproc=1)[0]
    assert not is_alive(pid)


# ---- something is written into a worker's channel


def channel_number():
    """The descriptor of this worker's channel, as one that is out of date may be."""
    return worker_main._kept[0].fileno()


STRANGE = {
    "text": b"hello",
    "a-number": (1).to_bytes(8, "little"),  # as eventfd_write(3) writes it
    "zeros": bytes(3000),
    "ones": b"\xff" * 3000,
    "an-object": HEAD.pack(PICKLE, 0, 0) + b"\1",
    "no-message": HEAD.pack(BYTES, 0, 2) + b"ok\1",
    "nothing": HEAD.pack(BYTES, 0, 0) + b"\1",
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE)
def test_what_is_written_into_a_worker_s_channel_is_told_with_its_rank(run, data):
    def work():
        if rank() == 1:
            os.write(channel_number(), data)
        return rank()

    with pytest.raises(ir.WorkerDied, match=r"rank 1 on .* wrote into the channel") as caught:
        run(work, timeout_s=LIMIT_S)
    assert caught.value.rank == 1


def test_a_worker_whose_channel_is_torn_ends_though_its_function_would_not(run):
    def work():
        if rank() == 1:
            os.write(channel_number(), b"hello")
            idle()
        return rank()

    with pytest.raises(ir.WorkerDied, match="rank 1 on "):
        run(work, timeout_s=LIMIT_S, keep_going=True)


# ---- the caller ends

CALLER = """
import os, signal, sys
import infini_run as ir

def work(bell):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        os.setsid()
    with open(bell, "w") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        signal.pause()

launcher = ir.Launcher(nproc_per_node=2, preload=PRELOAD, grace=0.2)
launcher.run(work, sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_the_caller_is_ended_nothing_is_left(preload, number, bell):
    words = [sys.executable, "-c", CALLER.replace("PRELOAD", repr(preload)), bell.path]
    caller = subprocess.Popen(words, stderr=subprocess.PIPE)
    try:
        pids = [int(word) for word in bell.hear(4)]
        caller.send_signal(number)
        _, err = caller.communicate(timeout=LIMIT_S)
    finally:
        caller.kill()
        caller.wait()
        caller.stderr.close()
    assert caller.returncode == -number
    if number == signal.SIGINT:
        assert b"KeyboardInterrupt" in err
    until(lambda: not any(map(is_alive, pids)))
    until(lambda: marked() == {})


@with_strace
def test_when_the_caller_is_killed_before_the_inner_guard_is_executed_nothing_is_left(bell):
    """The guard of the processes that are forked is executed late, as on a busy machine; that of the process that
    forks them is there, and could take it for a leftover."""
    guard = Path(ir.__file__).parent / "irun-guard"
    slow = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(guard), "-e", "trace=execve"]
    slow += ["-e", "inject=execve:delay_enter=2000000"]
    words = [sys.executable, "-c", CALLER.replace("PRELOAD", "['after_guard']"), bell.path]
    tracer = subprocess.Popen([*slow, *words], env={**os.environ, "PYTHONPATH": str(CHILDREN)})
    pids = []
    try:
        pids += [int(word) for word in bell.hear(4)]
        (caller,) = [pid for pid, (parent, _, _) in processes().items() if parent == tracer.pid]
        is_early = GUARD in marked().values()  # one that is executed has no environment
        os.kill(caller, signal.SIGKILL)
        until(lambda: not any(map(is_alive, pids)))
        assert tracer.wait(LIMIT_S) == -signal.SIGKILL
        until(lambda: marked() == {})
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
        tracer.kill()
        tracer.wait()
    if not is_early:
        pytest.skip("the ranks needed longer than the inner guard")
