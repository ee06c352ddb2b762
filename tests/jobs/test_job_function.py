"""Functions as jobs: what `Job.result` and `Job.exception` give back, and each way for it to fail, in one line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import infini_run as ir
from infini_run.jobs.function import LARGEST
from tests.support.job_case import few_descriptors
from tests.support.waiting import until

LIMIT_S = 120  # seconds


@pytest.fixture
def submit(local):
    """ir.submit of a job of CPUs, here."""
    return functools.partial(ir.submit, scheduler="local", dir=local.path, slot_type="cpu")


def add(a, b=0):
    print("adding", a, b)
    return a + b


def rank():
    return int(os.environ["RANK"])


class Refusal(Exception):
    """An exception of a function."""


def refuse(why):
    raise Refusal(why)


def test_result_is_of_rank_0_and_results_of_all(submit):
    job = submit(rank, slots=3)
    assert job.result(LIMIT_S) == 0
    assert job.results() == [0, 1, 2]
    assert job.exception() is None
    assert ir.find_job(job.name, dir=os.path.dirname(job.path)).results() == [0, 1, 2]


def test_partial_has_its_arguments_and_name(submit):
    job = submit(functools.partial(add, 1, b=2))
    assert job.result(LIMIT_S) == 3
    assert job.status().command[-1] == "add"
    assert list(job.logs()) == ["[rank 0] adding 1 2"]


def test_function_of_main_and_closure_go_by_value(submit, local, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import infini_run as ir\n"
        "import sibling\n"
        "base = 40\n"
        "def f():\n"
        "    return base + sibling.two()\n"
        f"print(ir.submit(f, scheduler='local', slot_type='cpu', dir={str(local.path)!r}).result({LIMIT_S}))\n"
    )
    (tmp_path / "sibling.py").write_text("def two():\n    return 2\n")
    done = subprocess.run([sys.executable, script], env=local.env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_exception_comes_back_with_its_rank_and_traceback(submit):
    job = submit(functools.partial(refuse, "no"), slots=2)
    error = job.exception(LIMIT_S)
    assert (type(error), str(error)) == (Refusal, "no")
    assert (error.rank, error.host) == (job.status().rank, os.uname().nodename)
    assert isinstance(error.__cause__, ir.RemoteError)
    assert error.__cause__.trace.splitlines()[1].endswith("in refuse")  # no frames of infini-run
    with pytest.raises(Refusal):
        job.result()
    assert any("Refusal: no" in line for line in job.logs())
    assert (job.status().state, job.status().exit_code) == ("FAILED", 1)


def test_files_are_their_owners_alone_and_name_versions(submit):
    job = submit(rank)
    job.result(LIMIT_S)
    for path in (Path(job.path, "function"), Path(job.path, "0/result.0")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        versions = json.loads(path.read_bytes().split(b"\n", 1)[0])
        assert versions["python"] == "{}.{}".format(*sys.version_info)
        assert versions["infini_run"] == ir.__version__


def test_array_calls_function_with_each_item(submit):
    job = submit(add, array=["a", "b", "c"])
    with pytest.raises(TypeError, match="can only concatenate str") as caught:
        job.result(LIMIT_S)
    assert caught.value.rank == 0
    job = submit(functools.partial(add, b=1), array=[10, 20, 30])
    assert job.result(LIMIT_S) == [11, 21, 31]
    assert job.results() == [[11], [21], [31]]
    assert ir.find_job(f"{job.name}.1", dir=os.path.dirname(job.path)).result() == 21


@pytest.mark.parametrize(("array", "found"), [("4-8:2%1", [4, 6, 8]), (7, [7])])
def test_array_of_indices_calls_function_with_each_index(submit, array, found):
    assert submit(add, array=array).result(LIMIT_S) == found


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([], "array=[]: expected at least one argument, one per task"),
        ({"lr": [1]}, "array: dict is not a list; use one argument per task, or indices such as '0-9%3'"),
        (2.5, "array: float is not a list; use one argument per task, or indices such as '0-9%3'"),
        (True, "array: bool is not a list; use one argument per task, or indices such as '0-9%3'"),
        (itertools.count(), "array: expected at most 1001 arguments, one per task; let each task do several"),
    ],
)
def test_array_that_is_no_list_is_one_line(submit, local, array, message):
    with pytest.raises(ir.UsageError) as caught:
        submit(add, array=array)
    assert str(caught.value) == message
    assert local.is_empty()


@pytest.mark.parametrize(
    ("command", "hint"),
    [(add, "use functools.partial(add, ...)"), ("true", "use a list, the program and its arguments")],
)
def test_arguments_beside_command_are_refused(local, command, hint):
    with pytest.raises(TypeError) as caught:
        ir.submit(command, 0.5, slots=1, dir=local.path)
    assert str(caught.value).startswith(f"submit() takes 1 positional argument but 2 were given; {hint}")
    assert local.is_empty()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, 'no scheduler found: .* or use scheduler="local" to run it on this machine'),
        ({"scheduler": "pbs"}, 'scheduler="pbs": qsub is not on PATH; use scheduler="local" to run a job on .*'),
    ],
)
def test_missing_scheduler_names_keyword(local, monkeypatch, tmp_path, flags, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ir.UsageError) as caught:
        ir.submit(int, slots=1, dir=local.path, **flags)
    assert re.fullmatch(message, str(caught.value))
    for parameters in (flags, {"cluster": flags.get("scheduler")}):
        executor = ir.JobExecutor(local.path, **parameters)
        for submit in (lambda each: each.submit(int), lambda each: each.map_array(int, [1])):
            with pytest.raises(ir.UsageError) as caught:
                submit(executor)
            assert re.fullmatch(message.replace("scheduler=", "cluster="), str(caught.value))
    assert local.is_empty()


ONE_ITEM = "too many positional arguments; each task calls it with one argument, its item of array="
NO_ARGUMENT = "missing a required argument: 'a'; use functools.partial(FUNCTION, ARGUMENTS), or array=[...]"


@pytest.mark.parametrize(
    ("function", "array", "message"),
    [
        (add, None, f"add(a, b=0): {NO_ARGUMENT}"),
        (functools.partial(add, 1, 2), [3], f"add(): {ONE_ITEM}"),
        (rank, "0-3", f"rank(): {ONE_ITEM}"),
    ],
)
def test_call_that_cannot_work_is_one_line(submit, local, function, array, message):
    with pytest.raises(ir.UsageError) as caught:
        submit(function, array=array)
    assert str(caught.value) == f"command: {message}"
    assert local.is_empty()


@pytest.mark.parametrize("code", [0, 3])
def test_exit_leaves_no_result(submit, code):
    job = submit(functools.partial(sys.exit, code))
    with pytest.raises(
        ir.JobFailed, match=rf"^job {job.name} has no result: .*; run infini-job logs {job.name}$"
    ) as caught:
        job.result(LIMIT_S)
    assert (caught.value.exit_code, job.status().code) == (code or 1, code)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.name, again.state) == (str(caught.value), job.name, caught.value.state)


def raise_then_exit(code):
    """Raise in the first attempt of a run, and leave no result in the next one."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise Refusal("first")
    os._exit(code)


@pytest.mark.parametrize("code", [0, 3])
def test_restarted_rank_has_no_earlier_result(submit, code):
    job = submit(functools.partial(raise_then_exit, code), run_options=["--max_restarts=1"])
    error = job.exception(LIMIT_S)
    assert isinstance(error, ir.JobFailed)
    assert (error.exit_code, job.status().code) == (code or 1, code)


def without_world_size():
    del os.environ["WORLD_SIZE"]
    return 7


def test_function_may_change_variables_of_its_rank(submit):
    assert submit(without_world_size, slots=2).results(LIMIT_S) == [7, 7]


def test_cancelled_job_has_no_result(submit, turnstile):
    job = submit(functools.partial(subprocess.run, ["cat", str(turnstile.path)]))
    job.wait(changed=lambda status: status.state == "RUNNING" and job.cancel())
    error = job.exception(LIMIT_S)
    assert isinstance(error, ir.JobFailed)
    assert error.state == "CANCELLED"


def test_result_ends_wait_after_timeout(submit, turnstile):
    job = submit(functools.partial(subprocess.run, ["head", "-n1", str(turnstile.path)], check=True))
    with pytest.raises(TimeoutError, match=rf"^job {job.name} is [A-Z]+ after 0 s$"):
        job.result(0)
    turnstile.ring("")
    assert job.result(LIMIT_S).returncode == 0


def test_large_function_and_large_result_are_one_line(submit, local):
    large = bytes(LARGEST)
    with pytest.raises(ir.UsageError, match=rf"has \d+ bytes when pickled: expected at most {LARGEST}; save large"):
        submit(lambda: len(large))
    assert local.is_empty()
    job = submit(functools.partial(bytes, LARGEST))
    with pytest.raises(ir.UsageError, match=r"^result of rank 0 has \d+ bytes when pickled: expected at most"):
        job.result(LIMIT_S)
    assert sum(line.startswith("[rank 0 err] ") for line in job.logs()) == 1


def test_what_does_not_pickle_is_named(submit, local):
    lock = threading.Lock()
    with pytest.raises(ir.UnpicklableError, match=r"^command"):
        submit(lambda: lock)
    assert local.is_empty()
    job = submit(lambda: (n for n in range(3)))
    with pytest.raises(ir.UnpicklableError, match=r"^result of rank 0 cannot be sent: "):
        job.result(LIMIT_S)


def test_coroutine_function_is_refused(submit, local):
    async def run():
        return 1

    with pytest.raises(ir.UsageError, match=r"^command: .*run is an async function"):
        submit(run)
    assert local.is_empty()


def test_missing_module_is_one_line(submit, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "only_here.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(folder)
    import only_here

    (folder / "only_here.py").unlink()
    job = submit(only_here.f)
    line = (
        f"the function of job {job.name} cannot be loaded on {os.uname().nodename}: ModuleNotFoundError: "
        "No module named 'only_here'; install what is missing there"
    )
    with pytest.raises(ir.CannotUnpickle) as caught:
        job.result(LIMIT_S)
    assert str(caught.value) == line
    assert [each for each in job.logs() if "rank 0 err" in each] == [f"[rank 0 err] infini-job: {line}"]
    sys.modules.pop("only_here")


def test_other_python_is_one_line(submit):
    job = submit(rank)
    assert job.result(LIMIT_S) == 0
    path = Path(job.path, "0/result.0")
    mine = "{}.{}".format(*sys.version_info)
    path.write_bytes(path.read_bytes().replace(f'"python":"{mine}"'.encode(), b'"python":"3.99"', 1))
    with pytest.raises(ir.CannotUnpickle) as caught:
        job.result()
    assert str(caught.value) == (
        f"{path}: Python 3.99 and infini-run {ir.__version__} made it, and {os.uname().nodename} has Python {mine} "
        f"and infini-run {ir.__version__}; use the same versions, or add --python=/PATH"
    )


@pytest.mark.parametrize("data", [b"", b"{}\n", b"[]\n", b"\x80\x05", b'{"python":"3.11"}\nx', b"{" * 5000])
def test_damaged_result_is_one_line(submit, data):
    job = submit(rank)
    assert job.result(LIMIT_S) == 0
    path = Path(job.path, "0/result.0")
    whole = path.read_bytes()
    for bad in (data, whole[:-1], whole.split(b"\n", 1)[0] + b"\n" + data):
        path.write_bytes(bad)
        error = job.exception()
        assert isinstance(error, ir.CannotUnpickle)
        assert str(error) == f"{path}: not as infini-job wrote it; check who changed it"


def test_pickle_that_others_may_write_is_not_loaded(submit):
    job = submit(rank)
    assert job.result(LIMIT_S) == 0
    path = Path(job.path, "0/result.0")
    path.chmod(0o620)
    with pytest.raises(ir.CannotUnpickle, match=r"cannot be read: another user owns it, or may write it; check"):
        job.result()
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(ir.CannotUnpickle, match=r"cannot be read: it is a symbolic link; check"):
        job.result()


def test_forgotten_job_and_command_have_no_result(submit):
    job = submit(rank)
    job.wait(LIMIT_S)
    job.forget()
    for call in (job.result, job.results, job.exception):
        with pytest.raises(ir.InfiniRunError, match=rf"^job {job.name}: its directory .* was removed$"):
            call()
    command = submit(["true"])
    with pytest.raises(ir.UsageError, match=rf"^job {command.name}: its command is not a function and has no result"):
        command.result()
    command.wait(LIMIT_S)


def test_module_that_submits_at_import_does_so_once(local, tmp_path):
    (tmp_path / "looping.py").write_text(
        "import infini_run as ir\n"
        "def f():\n"
        "    return 1\n"
        f"job = ir.submit(f, scheduler='local', slot_type='cpu', dir={str(local.path)!r})\n"
    )
    code = f"import looping; print(repr(looping.job.exception({LIMIT_S})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=local.env, capture_output=True, text=True, check=False
    )
    assert "CannotUnpickle" in done.stdout, done.stderr
    assert "a worker imports your module, which launches workers or submits a job" in done.stdout
    assert "install what is missing" not in done.stdout
    assert len(os.listdir(local.path)) == 1


def report_itself():
    worker = ir.this_worker()
    worker.ready()
    worker.status("adding")
    worker.progress(1, 4)
    worker.progress(7)
    ir.progress(8)
    worker.checkpoint()
    refused = []
    for call in (worker.emit, worker.extend):
        with contextlib.suppress(ir.UsageError):
            refused.append(call(60))
    assert not refused
    return worker.rank, worker.local_rank, worker.world_size, worker.restarts, worker.cancelled, worker.stopping


def test_function_reports_through_its_worker(submit):
    job = submit(report_itself, slots=2, run_options=["--ready_timeout=60s"])
    assert job.results(LIMIT_S) == [(0, 0, 2, 0, False, False), (1, 1, 2, 0, False, False)]
    report = json.loads((Path(job.path) / "0/report.json").read_text())
    assert [rank["progress"] for rank in report["ranks"]] == [8, 8]


def test_list_names_the_function(submit, local):
    job = submit(functools.partial(add, 1))
    assert job.result(LIMIT_S) == 1
    assert local.call("list").stdout.rstrip().endswith("  function add")


def test_error_of_an_array_names_its_task(submit):
    job = submit(lambda x: 1 / x, array=[1, 0])
    error = job.exception(LIMIT_S)
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__[-1] == f"task 1 of job {job.name}"
    assert ir.find_job(f"{job.name}.0", dir=os.path.dirname(job.path)).result() == 1


def test_program_alone_says_what_it_needs():
    program = Path(ir.__file__).parent / "jobs/function_start.py"
    env = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "infini-job: INFINI_JOB_FOLDER, INFINI_JOB_ATTEMPT, RANK, WORLD_SIZE: missing; only a job of ir.submit runs "
        "this program\n"
    )


@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_function_goes_through_stand_in_of_each_scheduler(kind, request, case, tmp_path, monkeypatch):
    queue = request.getfixturevalue(f"{kind}_queue")
    for name in ("PATH", "TEST_BATCH"):
        monkeypatch.setenv(name, queue.env[name])
    submit = functools.partial(ir.submit, scheduler=kind, dir=tmp_path / "jobs", slot_type="cpu", slots=1)
    job = submit(functools.partial(add, 1, b=2))
    assert job.result(LIMIT_S) == 3
    if kind == "pbs":  # the other has no arrays; test_job_slurm_real.py has one of a real Slurm
        assert submit(functools.partial(add, b=1), array=[10, 20]).result(LIMIT_S) == [11, 21]
    queue.ended()


class Training:
    """It is warned, or stopped, in its first run, and returns in the next one."""

    def __init__(self, number, step=0):
        self.number = number
        self.step = step

    def __call__(self, name, end=9):
        print("run", self.step, name)
        if os.environ["RANK"] == "0" and not self.step:
            signal.raise_signal(self.number)
            raise AssertionError("it continues after its checkpoint")
        while not self.step:
            signal.pause()  # rank 0 ends it
        return self.step, name, end

    def checkpoint(self, name, end=9):
        return functools.partial(Training(self.number, self.step + 1), name, end=end)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_checkpoint_says_which_call_follows(submit, number):
    job = submit(functools.partial(Training(number), "a", end=7), slots=2)
    assert job.results(LIMIT_S) == [(1, "a", 7)] * 2
    assert job.status().attempt == 1
    assert sorted(line for line in job.logs(rank=0) if "run" in line) == ["[rank 0] run 0 a", "[rank 0] run 1 a"]


def test_task_has_checkpoint_of_its_own(submit):
    job = submit(Training(signal.SIGUSR2), array=["a", "b"])
    assert job.result(LIMIT_S) == [(1, "a", 9), (1, "b", 9)]


class Stateless(Training):
    """Its next run finds by itself how far it is."""

    def __call__(self):
        if os.environ["INFINI_JOB_ATTEMPT"] == "0":
            signal.raise_signal(self.number)
        return os.environ["INFINI_JOB_ATTEMPT"]

    def checkpoint(self):
        return None


class Failing(Stateless):
    """Its checkpoint cannot be made."""

    def checkpoint(self):
        raise OSError("no space")


class Unpicklable(Stateless):
    """Its checkpoint does not pickle."""

    def checkpoint(self):
        return threading.Lock().acquire


def test_checkpoint_without_call_repeats_the_first(submit):
    assert submit(Stateless(signal.SIGUSR2)).result(LIMIT_S) == "1"


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [(Failing, OSError, "^no space"), (Unpicklable, ir.UnpicklableError, "^checkpoint.* cannot be sent: ")],
)
def test_failed_checkpoint_is_the_end(submit, kind, error, text):
    job = submit(kind(signal.SIGUSR2))
    with pytest.raises(error, match=text):
        job.result(LIMIT_S)
    assert (job.status().attempt, job.status().code) == (0, 1)


def test_warning_before_limit_makes_checkpoint(submit):
    job = submit(Waiting(), time="1h", warn="59m54s", slots=2)
    assert job.result(LIMIT_S) == "checkpoint"


class Waiting:
    """It waits for the warning."""

    def __call__(self):
        while True:
            signal.pause()

    def checkpoint(self):
        return lambda: "checkpoint"


class WarnedEarly(Waiting):
    """Each rank is warned while it unpickles the call, before it has a handler."""

    def __reduce__(self):
        return warned_early, ()


def warned_early():
    os.kill(os.getpid(), signal.SIGUSR2)
    return Waiting()


@pytest.mark.parametrize("options", [[], ["--preload=json"]])
def test_warning_before_function_begins_makes_checkpoint(submit, options):
    job = submit(WarnedEarly(), slots=2, run_options=options)
    assert job.result(LIMIT_S) == "checkpoint"


class StoppedEarly(Waiting):
    """Rank 0 is asked to stop while it unpickles the call, before it has a handler."""

    def __reduce__(self):
        return stopped_early, (Waiting,)


def stopped_early(make):
    if rank() == 0:
        signal.raise_signal(signal.SIGTERM)
    return make()


@pytest.mark.parametrize("options", [[], ["--preload=json"]])
def test_stop_before_function_begins_makes_checkpoint(submit, options):
    job = submit(StoppedEarly(), slots=2, run_options=options)
    assert job.result(LIMIT_S) == "checkpoint"


class Noted:
    """Each rank is asked to stop while it unpickles a call without a checkpoint, and notes what comes after that."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return stopped_and_noted, (self.path,)

    def __call__(self):
        pass


def stopped_and_noted(path):
    signal.raise_signal(signal.SIGTERM)
    Path(path).touch()
    return Noted(path)


def test_stop_ends_imports_when_nothing_is_saved(submit, tmp_path):
    job = submit(Noted(str(tmp_path / "loaded")))
    assert isinstance(job.exception(LIMIT_S), ir.JobFailed)
    assert job.status().code == 128 + signal.SIGTERM
    assert not tmp_path.joinpath("loaded").exists()


class Unfinished(Waiting):
    """It asks for another run at each warning."""

    def checkpoint(self):
        return self


def test_max_timeouts_ends_job_that_is_never_done(submit):
    job = submit(Unfinished(), time="1h", warn="59m59s", max_timeouts=1, restarts=3)
    error = job.exception(LIMIT_S)
    assert isinstance(error, ir.JobFailed)
    status = job.status()
    assert (status.state, status.attempt, status.code) == ("TIMEOUT", 1, 85)
    assert status.reason.endswith("; --max_timeouts=1 permits no further run")
    assert any(line.endswith("; --max_timeouts=1 permits no further run") for line in job.logs())


def test_max_timeouts_leaves_runs_for_other_reasons(submit):
    job = submit(functools.partial(Training(signal.SIGUSR2), "a"), max_timeouts=0)
    assert job.result(LIMIT_S) == (1, "a", 9)


def test_rank_has_no_signal_blocked(submit):
    assert submit(functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [])).result(LIMIT_S) == set()


def test_await_gives_results_of_several_jobs(submit):
    async def run():
        return await asyncio.gather(*(asyncio.wait_for(submit(functools.partial(add, n)), LIMIT_S) for n in (1, 2)))

    assert asyncio.run(run()) == [1, 2]


def test_submission_without_descriptors_leaves_nothing(submit, local):
    submit(functools.partial(add, 1)).wait(LIMIT_S)  # what is imported for it is
    before = os.listdir(local.path)
    for count in range(2, 5):  # enough to remove a directory, and too few for a command of a scheduler
        with few_descriptors(count), pytest.raises((ir.UsageError, ir.SubmitError)):
            submit(functools.partial(add, 1))
        assert os.listdir(local.path) == before


def test_await_works_beside_many_descriptors(submit, many_descriptors):
    async def run(job):
        return await job

    assert asyncio.run(run(submit(functools.partial(add, 1)))) == 1  # an exception in its thread would fail this


def test_await_raises_what_the_function_raised(submit):
    async def run(job):
        await job

    with pytest.raises(Refusal):
        asyncio.run(run(submit(functools.partial(refuse, "no"))))
    with pytest.raises(ir.UsageError, match="its command is not a function"):
        asyncio.run(run(submit(["true"])))


def waits_for_job():
    return any(thread.name == "infini-job-wait" for thread in threading.enumerate())


def test_cancelled_await_leaves_job_alone(submit, turnstile):
    job = submit(functools.partial(subprocess.run, ["head", "-n1", str(turnstile.path)], check=True))

    async def run():
        task = asyncio.ensure_future(asyncio.wait_for(job, LIMIT_S))
        while not waits_for_job():
            await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    until(lambda: not waits_for_job())
    assert not job.status().is_final
    turnstile.ring("")
    assert job.result(LIMIT_S).returncode == 0
