"""Where the Python of a rank was when it crashed or hung: in the error, for ranks that are started and forked."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest

import infini_run as ir

WAYS = {"exec": (), "fork": ["fractions"]}


@pytest.fixture(params=WAYS)
def preload(request):
    return WAYS[request.param]


def crash(how):
    if how == "abort":
        os.abort()  # the place
    ctypes.string_at(0)


def hang():
    time.sleep(3600)


@pytest.mark.parametrize(("how", "number"), [("abort", signal.SIGABRT), ("segv", signal.SIGSEGV)])
def test_a_crash_names_the_python_line(preload, how, number):
    with pytest.raises(ir.WorkerDied) as caught:
        ir.Launcher(nproc_per_node=2, preload=preload).run(crash, how)
    assert caught.value.signal == number
    assert f'File "{__file__}"' in str(caught.value)
    assert any(frame.endswith("in crash") for frame in caught.value.exit.python_stack)


def test_a_hang_is_told_as_one_with_its_stack(preload):
    with pytest.raises(ir.WorkerDied, match=r"hung: no output and no CPU used for .*; stopped") as caught:
        ir.Launcher(nproc_per_node=2, preload=preload, hang_timeout=1, on_hang="stop", timeout_s=60).run(hang)
    assert any(frame.endswith("in hang") for frame in caught.value.exit.python_stack)
    assert "killed by SIGTERM" not in str(caught.value)


def test_a_crash_of_a_crews_worker_names_the_line(preload):
    crew = ir.Crew(lambda ctx, task: crash(task), preload=preload, restart=ir.Restart())
    with crew, pytest.raises(ir.WorkerDied, match="in crash"):
        crew.ask("abort").result()


@pytest.mark.parametrize("limit", [{"watchdog_s": 1}, {"hang_timeout": 1}])
def test_a_worker_of_a_crew_that_hangs_is_told_with_its_stack(preload, limit):
    with ir.Crew(lambda ctx, task: hang(), preload=preload, restart=ir.Restart(), **limit) as crew:
        with pytest.raises(ir.WorkerDied, match=r"hung: .*; stopped") as caught:
            crew.ask(0).result()
        died = next(event for event in crew if event.kind == "died")
        assert "in hang" in str(caught.value)
        assert str(died.error) == str(caught.value)
        assert any(frame.endswith("in hang") for frame in died.error.exit.python_stack)
        assert "killed by SIGTERM" not in str(caught.value)


def test_a_worker_that_is_not_ready_in_time_is_told_with_its_stack(preload):
    class Slow:
        def start(self, ctx):
            hang()

        def task(self, ctx, task): ...

    crew = ir.Crew(Slow, preload=preload, ready_timeout_s=5)  # not while it imports
    with pytest.raises(ir.CrewFailed, match=r"(?s)was not ready after .*; stopped.* in hang"), crew:
        crew.ask(0).result()


def test_a_hung_worker_that_does_not_obey_is_told_before_its_grace_is_over(preload):
    def obstinate(ctx, task):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang()

    begin_s = time.monotonic()
    crew = ir.Crew(obstinate, preload=preload, watchdog_s=1, grace=60, restart=ir.Restart())
    try:
        with pytest.raises(ir.WorkerDied, match=r"hung: no sign of life for .*; stopped"):
            crew.ask(0).result()
        assert time.monotonic() - begin_s < 60
    finally:
        crew.signal(signal.SIGKILL)
        crew.close(drain=False)


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_an_end_that_is_no_crash_shows_no_stack_and_leaves_no_file(tmp_path, preload, how):
    def end():
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)

    with pytest.raises(ir.WorkerDied) as caught:
        ir.Launcher(preload=preload, log_dir=tmp_path).run(end)
    assert caught.value.exit.python_stack == ()
    ir.Launcher(preload=preload, log_dir=tmp_path).run(int)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".stack")] == []


def test_a_worker_of_a_preloading_crew_that_says_watchdog_by_itself_is_alive():
    """sd_notify(3), from a process of the worker: the zygote passes it on."""

    def serve(ctx, seconds):
        import socket

        end_s = time.monotonic() + seconds
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            address = os.environ["NOTIFY_SOCKET"]
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            while time.monotonic() < end_s:
                sock.send(b"WATCHDOG=1")
                time.sleep(0.2)
        return "alive"

    with ir.Crew(serve, preload=["fractions"], watchdog_s=1) as crew:
        assert crew.ask(3).result() == "alive"
