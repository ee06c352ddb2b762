"""A program that may open too few descriptors is told so by an error of ours, whatever it starts."""

from __future__ import annotations

import resource

import pytest

import infini_run as ir
from infini_run.crews.capture import capture_exception


def launch():
    ir.Launcher(nproc_per_node=2, console="none").run(int)


def crew():
    ir.Crew(len, nproc_per_node=2, console="none").close()


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


def test_a_worker_that_cannot_be_executed_has_the_reason():
    too_large = {"A": "x" * 200_000}
    why = "it could not be started: executing the program: Argument list too long"
    with pytest.raises(ir.WorkerDied, match=why):
        ir.Launcher(nproc=1, env=too_large).run(int)
    with pytest.raises(ir.CrewFailed) as caught, ir.Crew(lambda crew, task: task, env=too_large) as crew:
        crew.ask(1).result()
    assert why in str(caught.value)
