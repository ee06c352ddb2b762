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
