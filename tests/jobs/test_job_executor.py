"""JobExecutor: programs that are written for submitit, with another executor, and the words of its parameters."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from operator import add, truediv
from pathlib import Path

import pytest

import infini_run as ir
from infini_run.jobs.job_executor import read_parameters
from infini_run.jobs.status.logs import split_label

LIMIT_S = 120  # seconds


@pytest.fixture
def executor(local):
    """An executor whose jobs run here."""
    return ir.JobExecutor(folder=local.path, cluster="local")


def greet(name, mark="!"):
    print("hello", name)
    print("warned", name, file=sys.stderr)
    return name + mark


def test_program_of_submitit_runs_after_executor_is_renamed(local, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"""
from infini_run import JobExecutor

def product(a, b):
    return a * b

executor = JobExecutor(folder={str(local.path)!r}, cluster="local")
executor.update_parameters(timeout_min=5, slurm_partition="learn", cpus_per_task=1, name="product")
job = executor.submit(product, 6, b=7)
print(bool(job.job_id), job.result(), job.done(), job.state)
print([job.result() for job in executor.map_array(product, [1, 2, 3], [10, 20, 30])])
jobs = []
with executor.batch():
    for number in range(3):
        jobs.append(executor.submit(product, number, b=2))
print([job.result() for job in jobs])
""")
    done = subprocess.run([sys.executable, program], env=local.env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True 42 True COMPLETED\n[10, 40, 90]\n[0, 2, 4]\n", "")


def test_job_has_output_of_its_ranks(executor):
    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(greet, "[x]")
    assert job.results(LIMIT_S) == ["[x]!"] * 2
    assert (job.stdout(), job.stderr()) == ("hello [x]\n" * 2, "warned [x]\n" * 2)
    log = job.get_logs_path("stderr")
    assert (job.paths.folder, job.paths.stdout, job.paths.stderr) == (Path(job.path), log, log)
    assert {"[rank 0] hello [x]", "[rank 1 err] warned [x]"} <= set(log.read_text().splitlines())


def test_task_is_one_rank(executor):
    executor.update_parameters(tasks_per_node=3)
    job = executor.submit(lambda: print(os.environ["RANK"]) or int(os.environ["RANK"]))
    assert (job.num_tasks, job.result(LIMIT_S)) == (3, 0)
    task = job.task(2)
    assert (task.num_tasks, task.job_id) == (1, job.job_id)
    assert (task.result(), task.results(), task.stdout()) == (2, [2], "2\n")
    assert task.task(0) is task
    assert asyncio.run(task.awaitable().result()) == 2
    with pytest.raises(ir.UsageError, match=r"^task\(3\): unknown rank; use 0 to 2$"):
        job.task(3)


def test_coroutines_give_results_as_they_come(executor):
    async def run():
        jobs = [executor.submit(pow, 2, number) for number in range(3)]
        all_results = await jobs[0].awaitable().results()
        return all_results, {await each for each in asyncio.as_completed([j.awaitable().result() for j in jobs])}

    assert asyncio.run(asyncio.wait_for(run(), LIMIT_S)) == ([1], {1, 2, 4})


@pytest.mark.parametrize("folder", ["log/%j", "log/run_%A/%a", "log"])
def test_folder_with_tags_is_that_of_all_jobs(local, tmp_path, folder):
    job = ir.JobExecutor(tmp_path / folder, cluster="local").submit(add, 1, 2)
    assert job.result(LIMIT_S) == 3
    assert job.path == f"{tmp_path}/log/{job.name}"
    assert [path.name for path in tmp_path.joinpath("log").iterdir()] == [job.name]


def test_job_raises_error_of_its_function(executor):
    job = executor.submit(truediv, 1, 0)
    with pytest.raises(ZeroDivisionError):
        job.result(LIMIT_S)
    assert "ZeroDivisionError: division by zero\n" in job.stderr()


def test_array_is_one_job_with_limit(executor):
    executor.update_parameters(slurm_array_parallelism=1)
    jobs = executor.map_array(add, ["a", "b"], "xyz")
    ids = [job.job_id for job in jobs]
    assert [job.result(LIMIT_S) for job in jobs] == ["ax", "by"]
    first, second = jobs
    array = ir.find_job(first.name[:-2], dir=first.path.partition("/ir-")[0])
    assert [job.job_id for job in jobs] == ids == [f"{array.id}_0", f"{array.id}_1"]
    assert (first.name[:-2], first.name[-2:], second.name[-2:]) == (second.name[:-2], ".0", ".1")
    assert first.submission.request.array == "0-1%1"


def test_batch_takes_any_calls(executor):
    with executor.batch():
        summed = executor.submit(add, 1, 2)
        greeted = executor.submit(greet, "you", mark="?")
        mapped = executor.map_array(abs, [-3])
        for use in (repr, lambda job: job.result(), lambda job: job.done()):
            with pytest.raises(ir.UsageError, match=r"^this job is not submitted yet; use it after the with block"):
                use(summed)
        with pytest.raises(ir.UsageError, match=r"^update_parameters\(\): cannot change a batch"):
            executor.update_parameters(time="1h")
        with pytest.raises(ir.UsageError, match=r"^batch\(\): already in a batch"), executor.batch():
            pass
    assert [job.result(LIMIT_S) for job in (summed, greeted, *mapped)] == [3, "you?", 3]
    assert summed.job_id
    with pytest.raises(AttributeError, match=r"^'ExecutorJob' object has no attribute 'jobid'"):
        summed.jobid  # noqa: B018


def test_failed_or_empty_batch_submits_nothing(executor, local):
    with contextlib.suppress(KeyError), executor.batch():
        job = executor.submit(add, 1, 2)
        raise KeyError
    with pytest.raises(ir.UsageError, match=r"^this job is not submitted yet"):
        job.result()
    with executor.batch():
        pass
    assert executor.map_array(add, [], []) == []
    assert local.is_empty()


class Counter:
    """It is stopped in its first run, and continues in the next one."""

    def __init__(self):
        self.steps = 0

    def __call__(self, upto, by=1):
        while self.steps < upto:
            self.steps += by
            if self.steps == 3:
                signal.raise_signal(signal.SIGUSR2)
        return self.steps, os.environ["INFINI_JOB_ATTEMPT"]

    def checkpoint(self, *args, **kwargs):
        return functools.partial(self, *args, **kwargs)


class DelayedSubmission:
    """What a checkpoint of submitit makes: no callable."""

    def __init__(self, function, *args, **kwargs):
        self.function, self.args, self.kwargs = function, args, kwargs


class Delayed(Counter):
    """As written for submitit."""

    def checkpoint(self, *args, **kwargs):
        return DelayedSubmission(self, *args, **kwargs)


def test_checkpoint_of_submitit_says_which_call_follows(executor):
    assert executor.submit(Delayed(), 5, by=1).result(LIMIT_S) == (5, "1")


def test_checkpoint_gets_arguments_of_call(executor):
    assert executor.submit(Counter(), 5, by=1).result(LIMIT_S) == (5, "1")
    with executor.batch():
        jobs = [executor.submit(Counter(), upto, by=1) for upto in (4, 2)]
    assert [job.result(LIMIT_S) for job in jobs] == [(4, "1"), (2, "0")]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[rank 0] x", ("stdout", "x")),
        ("[rank 12 err] [rank 1] x", ("stderr", "[rank 1] x")),
        ("[node-1:3 err]   x", ("stderr", "  x")),
        ("[ranks 0-3,7 and 4 more err] x", ("stderr", "x")),
        ("2026-11-29T12:00:00.000Z [rank 0] x", ("stdout", "x")),
        ("\033[33m[rank 0 err]\033[0m x", ("stderr", "x")),
        ("[rank 0 err +] x", ("stderr", "x")),
        ("[node-1:trainer 3 +] x", ("stdout", "x")),
        ("[rank 0] ", ("stdout", "")),
        ("[1, 2] \udcff", ("stdout", "[1, 2] \udcff")),
    ],
)
def test_label_says_which_stream_has_line(line, found):
    assert split_label(line) == found


def test_done_counts_finished_jobs(executor, turnstile):
    jobs = [executor.submit(time.sleep, 0), executor.submit(subprocess.run, ["head", "-n1", str(turnstile.path)])]
    jobs[0].result(LIMIT_S)
    assert sum(job.done() for job in jobs) == 1
    turnstile.ring("")
    jobs[1].result(LIMIT_S)
    assert sum(job.done() for job in jobs) == 2


@pytest.mark.parametrize(
    ("given", "flags", "at_once"),
    [
        ({}, {"slots": 1, "slots_per_node": 1, "slot_type": "cpu"}, 0),
        (
            {"nodes": 2, "tasks_per_node": 3, "timeout_min": 0.5, "slurm_array_parallelism": 4},
            {"slots": 6, "slots_per_node": 3, "slot_type": "cpu", "time": "30s"},
            4,
        ),
        (
            {"nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8, "mem_gb": 64, "slurm_partition": "p"},
            {"slots": 16, "slots_per_node": 8, "mem_per_slot": "8192M", "pool": "p"},
            0,
        ),
        (
            {"cluster": "local", "slurm_partition": "p", "slurm_account": "a", "name": "n", "env": {"A": "1"}},
            {"scheduler": "local", "title": "n", "env": {"A": "1"}, "slots": 1, "slots_per_node": 1}
            | {"slot_type": "cpu"},
            0,
        ),
        (
            {"slots": 1, "slurm_max_num_timeout": 3, "slurm_account": "a"},
            {"slots": 1, "max_timeouts": 3, "account": "a"},
            0,
        ),
        ({"slots": 4, "time": "4h", "mem_gb": 1}, {"slots": 4, "time": "4h", "mem_per_slot": "1024M"}, 0),
    ],
)
def test_parameters_of_submitit_become_flags(given, flags, at_once):
    assert read_parameters(given) == (flags, at_once)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout_min": 1, "time": "1h"}, "timeout_min=: conflicts with time=; drop one of them"),
        ({"slots": 2, "nodes": 2}, "nodes=: conflicts with slots=; drop one of them"),
        ({"gpus_per_node": 8}, "gpus_per_node=8: needs tasks_per_node=8, as each rank has one GPU"),
        (
            {"nodes": 2, "tasks_per_node": 3, "cluster": "local"},
            'nodes=2: conflicts with cluster="local", which is one node; use nodes=1, tasks_per_node=6',
        ),
        ({"nodes": 0}, "nodes=0: expected a whole number of at least 1"),
        ({"timeout_min": "1"}, "timeout_min='1': expected a number above 0"),
    ],
)
def test_invalid_parameters_are_one_line(local, given, message):
    with pytest.raises(ir.UsageError) as caught:
        ir.JobExecutor(local.path, **given).submit(add, 1, 2)
    assert str(caught.value) == message
    assert local.is_empty()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("timeout_mins", "; did you mean timeout_min?"),
        ("slurm_qos", "; use options=WORDS to pass options to sbatch or qsub"),
        ("slurm_constraint", "; use options=WORDS to pass options to sbatch or qsub"),
        ("slurm_mem_gb", "; did you mean mem_gb?"),
        ("slurm_setup", "; run these commands before your program, whose environment ranks get"),
        ("slurm_signal_delay_s", "; use warn=TIME"),
        ("max_num_timeout", "; use max_timeouts=N to limit how often it runs again after its time limit"),
        ("array", "; use map_array()"),
    ],
)
def test_unknown_parameter_has_hint(name, hint):
    with pytest.raises(TypeError) as caught:
        ir.JobExecutor(**{name: 1})
    assert str(caught.value) == f"JobExecutor: unexpected parameter {name!r}{hint}"
