"""Seconds and counts of the Python API: a wrong one is one error of ours, where it enters."""

from __future__ import annotations

from fractions import Fraction

import pytest

import infini_run as ir
from infini_run import channel
from infini_run.number_arguments import read_count, read_seconds, read_wait

pytestmark = pytest.mark.xdist_group("number_arguments")  # one crew for all

WRONG = ["5s", b"5", True, float("nan"), [1], 1j]


@pytest.fixture(scope="module")
def crew():
    with ir.Crew(lambda ctx, n: n, nproc_per_node=1) as crew:
        crew.ask(0).result()  # it is up: what starts during a test has to end with it
        yield crew


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_no_number_of_seconds_is_refused_by_its_name(crew, wrong):
    launcher = ir.ProcessLauncher(["true"])
    launcher.launch()
    (tx, rx), theirs = channel.pair()
    ask = crew.ask(1)
    with launcher, ir.Launcher().start(int) as handle:
        waits = {
            "timeout_s": [
                launcher.wait, launcher.events, launcher.wait_ready, handle.wait, handle.result, crew.events,
                rx.recv, rx.recv_bytes, lambda given: tx.send(1, given), lambda given: tx.send_bytes(b"", given),
                lambda given: crew.map([1], timeout_s=given),
                lambda given: ir.run(["true"], timeout_s=given),
                lambda given: ir.Launcher(timeout_s=given),
            ],
            "timeout": [ask.result, ask.exception],
            "linger_s": [tx.close],
            "agent_timeout_s": [lambda given: ir.Launcher(agent_timeout_s=given)],
            "worker_timeout_s": [lambda given: ir.Launcher(worker_timeout_s=given)],
            "watchdog_s": [lambda given: ir.Crew(print, watchdog_s=given)],
            "ready_timeout_s": [lambda given: ir.Crew(print, ready_timeout_s=given)],
            "drain_s": [lambda given: ir.Crew(print, drain_s=given)],
            "within_s": [lambda given: ir.Crew(print, restart=ir.Restart(within_s=given))],
            "max_delay_s": [lambda given: ir.Crew(print, restart=ir.Restart(max_delay_s=given))],
        }  # fmt: skip
        for name, calls in waits.items():
            for call in calls:
                with pytest.raises(ir.UsageError, match=f"{name}=.*: (give|expected) a number of seconds"):
                    call(wrong)
        handle.wait()
    for endpoint in (tx, rx, *theirs):
        endpoint.close()


@pytest.mark.parametrize("wrong", ["2", 1.5, True, None, 0, -1], ids=repr)
def test_what_is_no_count_is_refused_by_its_name(crew, wrong):
    calls = {
        "chunksize": [lambda given: crew.map([1], chunksize=given)],
        "max_events": [lambda given: ir.Crew(print, max_events=given)],
        "limit": [channel.pair, lambda given: channel.connect(-1, given)],
    }
    if wrong is not None:  # which is a default
        calls |= {
            "buffersize": [lambda given: crew.map([1], buffersize=given)],
            "max_tasks_per_child": [lambda given: ir.Crew(print, max_tasks_per_child=given)],
        }
    if wrong != 0:
        calls["max_restarts"] = [lambda given: ir.Crew(print, restart=ir.Restart(max_restarts=given))]
    for name, given in calls.items():
        for call in given:
            with pytest.raises(ir.UsageError, match=f"{name}=.*: expected a whole number of at least"):
                call(wrong)


def test_every_kind_of_number_is_one(crew):
    assert crew.ask(2).result(Fraction(60)) == 2
    assert crew.events(0) is not None
    assert read_seconds("s", Fraction(1, 2)) == 0.5
    assert read_seconds("s", 10**400) == float("inf")

    class Index:
        def __index__(self):
            return 3

    assert read_count("n", Index()) == 3


@pytest.mark.parametrize("long_s", [2.0**31, 1e12, 1e308, float("inf"), 10**400])
def test_a_wait_beyond_any_clock_is_one_without_a_limit(crew, long_s):
    (tx, rx), theirs = channel.pair()
    theirs[0].send(1)
    assert rx.recv(long_s) == 1
    tx.send(1, long_s)
    assert crew.ask(2).result(long_s) == 2
    assert crew.worker(0).send(3) >= 0
    assert crew.events(long_s)
    assert ir.Launcher(nproc_per_node=1).start(int).result(long_s)[0] == 0
    for endpoint in (tx, rx, *theirs):
        endpoint.close(*([long_s] if isinstance(endpoint, ir.Sender) else []))
    launcher = ir.ProcessLauncher(["true"])
    with launcher:
        launcher.launch()
        assert launcher.wait(long_s)


def test_a_wait_below_zero_is_one_that_is_over():
    assert read_wait("s", -1) == 0.0
    with pytest.raises(ir.UsageError, match="0 or more"):
        read_seconds("s", -1)
