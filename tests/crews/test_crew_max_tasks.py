"""Crew(max_tasks_per_child=): a fresh process after so many tasks, and no task is lost."""

from __future__ import annotations

import os
from collections import Counter

import pytest

import infini_run as ir


class Pid:
    def task(self, ctx, n):
        return os.getpid(), ctx.rank, n

    def stop(self, ctx):
        self.ended = True


@pytest.mark.parametrize("preload", [(), ["fractions"]])
def test_a_worker_is_replaced_after_so_many_tasks(preload):
    with ir.Crew(Pid, nproc_per_node=2, max_tasks_per_child=3, preload=preload) as crew:
        results = list(crew.map(range(14)))
        assert [n for *_, n in results] == list(range(14))
        assert max(Counter(pid for pid, *_ in results).values()) <= 3
        assert {rank for _, rank, _ in results} <= {0, 1}
    assert crew.failure is None
    assert crew.close().problems == ()


def test_tasks_that_were_accepted_are_done_when_the_crew_is_closed():
    with ir.Crew(Pid, nproc_per_node=2, max_tasks_per_child=1) as crew:
        asks = [crew.worker(0).ask(n) for n in range(4)] + [crew.ask(n) for n in range(4, 8)]
    assert [ask.result()[2] for ask in asks] == list(range(8))
    assert len({ask.result()[0] for ask in asks}) == 8


class Save:
    def task(self, ctx, n):
        return n

    def stop(self, ctx):
        raise OSError(28, "no space")


@pytest.mark.parametrize(("max_tasks", "when"), [(None, "the crew was closed"), (1, "it was replaced")])
def test_a_stop_that_fails_is_a_line_on_stderr_at_the_end_of_the_block(max_tasks, when, capfd):
    with ir.Crew(Save, nproc_per_node=1, max_tasks_per_child=max_tasks) as crew:
        assert list(crew.map([1, 2])) == [1, 2]
    line, *_ = capfd.readouterr().err.splitlines()
    assert line.startswith(f"infini-run: rank 0 did not end properly when {when}: exit code 1: OSError: ")


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_what_is_no_count_is_refused(count):
    with pytest.raises(ir.UsageError, match="max_tasks_per_child"):
        ir.Crew(Pid, max_tasks_per_child=count)
