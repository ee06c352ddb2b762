"""A program that may open too few descriptors is told so by an error of ours, whatever it starts."""

from __future__ import annotations

import os
import resource

import pytest

import infini_run as ir
from infini_run.crews.capture import capture_exception
from tests.support.waiting import LIMIT_S


def launch():
    ir.Launcher(nproc_per_node=2, console="none").run(int)


def crew():
    ir.Crew(len, nproc_per_node=2, console="none").close()


def executor_of_one():
    with ir.Executor(1, console="none") as executor:
        assert executor.submit(abs, -1).result(LIMIT_S) == 1


def pool():
    with ir.Pool(nproc_per_node=2, console="none", preload=["fractions"]) as pool:
        pool.run(int)


@pytest.mark.parametrize("start", [launch, crew, pool])
def test_every_limit_on_descriptors_lets_it_work_or_is_an_error_of_ours(start):
    start()  # what is imported for it is
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends = []
    for limit in range(8, 80, 4):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            _, error = capture_exception(start)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        ends.append(type(error))
    assert set(ends) <= {ir.StartError, type(None)}
    assert (ends[0], ends[-1]) == (ir.StartError, type(None))


def test_executor_names_limit_on_descriptors_when_no_worker_starts():
    """A worker starts with the first call, in the supervisor's thread."""
    executor_of_one()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(10):
        with ir.Executor(1, console="none") as executor:
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
            try:
                error = executor.submit(abs, 1).exception(LIMIT_S)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert isinstance(error, ir.CrewFailed), spare
        assert "ulimit -n" in str(error), spare


def test_a_worker_that_cannot_be_executed_has_the_reason():
    too_large = {"A": "x" * 200_000}
    why = "it could not be started: executing the program: Argument list too long"
    with pytest.raises(ir.WorkerDied, match=why):
        ir.Launcher(nproc=1, env=too_large).run(int)
    with pytest.raises(ir.CrewFailed) as caught, ir.Crew(lambda crew, task: task, env=too_large) as crew:
        crew.ask(1).result()
    assert why in str(caught.value)
