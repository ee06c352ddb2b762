"""Functions as jobs on a real OpenPBS: `make pbs`, as test_job_pbs_real.py. Programs of its user submit them."""

from __future__ import annotations

import sys

import pytest

from tests.jobs.test_job_pbs_real import bare, bed, pbs, pytestmark  # noqa: F401

HEAD = """
import functools, os, signal, sys
import infini_run as ir

LIMIT_S = 100
submit = functools.partial(ir.submit, scheduler="pbs", dir=sys.argv[1], slot_type="cpu")


def where():
    return int(os.environ["RANK"]), os.uname().nodename


class Steps:
    def __init__(self, step=0):
        self.step = step

    def __call__(self, name):
        while not self.step:
            signal.pause()
        return self.step, name, os.environ["INFINI_JOB_ATTEMPT"]

    def checkpoint(self, name):
        return functools.partial(Steps(self.step + 1), name)


class Unfinished:
    def __call__(self):
        while True:
            signal.pause()

    def checkpoint(self):
        return self


"""


@pytest.fixture
def said(bed):  # noqa: F811
    """Run lines of Python as PBS's user, on the head; return what they print."""

    def run(*lines):
        program = bed.home / "program.py"
        program.write_text(HEAD + "\n".join(lines) + "\n")
        done = bed.user(sys.executable, program, bed.jobs)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


def test_function_runs_on_three_nodes_and_as_array(pbs, said):  # noqa: F811
    lines = said(
        "whole = dict(slots=6, slots_per_node=2)",
        "print(submit(where, **whole).results(LIMIT_S))",
        "error = submit(lambda: 1 // (where()[0] - 3), **whole).exception(LIMIT_S)",
        "print(type(error).__name__, error.rank, error.host)",
        "tasks = submit(lambda text: text + os.environ['INFINI_JOB_TASK'], slots=1, array=['a', 'b', 'c'])",
        "print(tasks.result(LIMIT_S))",
    )
    nodes = [(rank, f"node{rank // 2 + 1}") for rank in range(6)]
    assert lines == [str(nodes), "ZeroDivisionError 3 node2", "['a0', 'b1', 'c2']"]


@pytest.mark.parametrize("limit", ["time='5m', warn='285s'", "time='15s'"], ids=["warning", "limit"])
def test_checkpoint_says_which_call_follows(bare, said, limit):  # noqa: F811
    """Without a warning, PBS's TERM at the limit has rank 0 make it."""
    lines = said(
        f"job = submit(functools.partial(Steps(), 'llama'), slots=2, slots_per_node=1, {limit})",
        "first = job.id",
        "print(job.results(LIMIT_S), job.id != first)",
    )
    assert lines == [str([(1, "llama", "1")] * 2) + " True"]


def test_task_has_checkpoint_of_its_own(bare, said):  # noqa: F811
    lines = said(
        "job = submit(Steps(), slots=1, array=['a', 'b'], time='5m', warn='285s')",
        "print(job.result(LIMIT_S))",
    )
    assert lines == [str([(1, "a", "1"), (1, "b", "1")])]


def test_max_timeouts_ends_job_that_is_never_done(bare, said):  # noqa: F811
    lines = said(
        "executor = ir.JobExecutor(sys.argv[1], cluster='pbs', timeout_min=5, warn='285s', max_timeouts=1)",
        "job = executor.submit(Unfinished())",
        "print(type(job.exception(LIMIT_S)).__name__, job.state, job.status().attempt)",
    )
    assert lines == ["JobFailed TIMEOUT 1"]


@pytest.mark.parametrize("how", ["job.cancel()", "os.system(f'qdel {job.id}')"], ids=["cancel", "qdel"])
def test_stopped_function_saves_and_stays_cancelled(bare, said, how):  # noqa: F811
    """Its checkpoint is in the job's directory."""
    lines = said(
        "job = submit(functools.partial(Steps(), 'llama'), slots=2, slots_per_node=1)",
        f"job.wait(LIMIT_S, changed=lambda status: status.state == 'RUNNING' and {how})",
        "print(type(job.exception(LIMIT_S)).__name__, job.status().state, os.path.exists(f'{job.path}/next'))",
    )
    assert lines == ["JobFailed CANCELLED True"]
