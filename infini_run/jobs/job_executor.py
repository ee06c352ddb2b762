"""`JobExecutor`: `submit` behind submitit's interface, for programs that are written for it.

A function's arguments come after it, parameters stay for all later jobs, and jobs have submitit's words. Below is
`submit` (docs/decisions/0092-a-job-executor-has-submitits-words.md).
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from pathlib import Path

from infini_run.errors import UsageError
from infini_run.jobs.errors import QueryError
from infini_run.jobs.folder.task import Task
from infini_run.jobs.function import indices_of
from infini_run.jobs.job import Generic, Job, R, find_job, submit, submit_function
from infini_run.jobs.options.hints import of_flag
from infini_run.jobs.options.table import TABLES
from infini_run.jobs.request.array import task_id
from infini_run.jobs.status.logs import split_label
from infini_run.number_arguments import LONGEST_S, read_count
from infini_run.options.from_python import make_environment
from infini_run.options.hints import nearest
from infini_run.public_names import public_names
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, NoReturn

    from typing_extensions import ParamSpec, Unpack

    from infini_run.jobs.options.keywords import SubmitOptions

    P = ParamSpec("P")

    class JobParameters(SubmitOptions, total=False):
        """Keywords of `submit`, and of submitit."""

        env: Mapping[str, str] | None
        inherit_env: bool
        cwd: str | os.PathLike[str] | None
        cluster: str | None
        nodes: int
        tasks_per_node: int
        gpus_per_node: int
        cpus_per_task: int
        mem_gb: float
        timeout_min: float
        name: str
        slurm_partition: str
        slurm_account: str
        slurm_array_parallelism: int
        slurm_max_num_timeout: int


_OWN = ("env", "inherit_env", "cwd")
_SAME = {  # parameters of submitit, by the flag that means the same
    "cpus_per_task": "cpus_per_slot",
    "name": "title",
    "slurm_account": "account",
    "slurm_max_num_timeout": "max_timeouts",
    "slurm_partition": "pool",
}
_INSTEAD = {  # what replaces other parameters of submitit
    "array": "use map_array()",
    "gres": "use gpus_per_node=N",
    "additional_parameters": "use options=WORDS to pass options to sbatch or qsub",
    "setup": "run these commands before your program, whose environment ranks get",
    "signal_delay_s": "use warn=TIME",
    "stderr_to_stdout": "drop it, as a job has one log of both",
}
_TAGS = ("%j", "%t", "%A", "%a")  # of submitit's folders: ids of job, task, array, and index
_NO_COUNTS = ("cluster", "mem_gb", "timeout_min")
_MEANT = (*_NO_COUNTS, "nodes", "tasks_per_node", "gpus_per_node", "slurm_array_parallelism")


class JobExecutor:
    """Submits functions as jobs, with the calls of submitit's AutoExecutor.

    Args:
        folder: The directory of all jobs; "": ~/.infini-run/jobs. Each job makes its own directory there, so
            infini-run drops a part with a tag of submitit, such as `%j`, and all parts after it.
        parameters: Keywords of `submit`, such as `slots=16, time="4h"`, or submitit's, such as `nodes=2,
            timeout_min=240`; `update_parameters` lists those.

    Raises:
        TypeError: There is no such parameter.
    """

    def __init__(self, folder: str | os.PathLike[str] = "", **parameters: Unpack[JobParameters]) -> None:
        self._parameters: dict[str, Any] = {"dir": _without_tags(os.fsdecode(folder))} if folder else {}
        self._batch: list[tuple[ExecutorJob[Any], Callable[[], Any]]] | None = None
        self.update_parameters(**parameters)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._parameters.items() if value)
        return f"JobExecutor({given})"

    def __dir__(self) -> list[str]:
        return public_names(self)

    def update_parameters(self, **parameters: Unpack[JobParameters]) -> None:
        """Set what later jobs ask for; other parameters stay as they are.

        Args:
            parameters: Keywords of `submit`: `slots=16, slots_per_node=8, time="4h", env={...}`. Or submitit's:
                nodes=, tasks_per_node=, gpus_per_node=, cpus_per_task=, mem_gb=, timeout_min=, name=, cluster=,
                slurm_partition=, slurm_account=, slurm_array_parallelism=, the tasks of an array at a time, and
                slurm_max_num_timeout=, how often a job runs again after its time limit (any number of times).

        Raises:
            TypeError: There is no such parameter.
            UsageError: A batch is open.
        """
        if self._batch is not None:
            raise UsageError("update_parameters(): cannot change a batch; call it before batch()")
        for name in parameters:
            _check_name(name)
        self._parameters |= parameters

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> ExecutorJob[R]:
        """Submit `function(*args, **kwargs)` as a job, and return the job.

        Args:
            function: What each rank calls.
            args, kwargs: Its arguments.

        Raises:
            UsageError: The request or the call is invalid, or there is no scheduler; nothing is left.
            UnpicklableError: The call does not pickle; nothing is left.
            SubmitError: The scheduler did not take the job; nothing is left, unless its `kind` is `timed_out`.
            QueryError: The scheduler does not answer; nothing is left.
        """
        call = partial(function, *args, **kwargs)
        if self._batch is not None:
            job: ExecutorJob[R] = ExecutorJob()
            self._batch.append((job, call))
            return job
        flags, _ = read_parameters(self._parameters)
        with _words_of_submitit():
            return ExecutorJob(submit(call, **flags))

    def map_array(self, function: Callable[..., R], /, *iterables: Iterable[Any]) -> list[ExecutorJob[R]]:
        """Submit one job array with a task per call `function(a, b)`, and return its tasks as jobs.

        Args:
            function: What each task calls.
            iterables: The first argument of each call, the second, and so on. The shortest one ends the array.

        Raises:
            UsageError: The request or the call is invalid, or there is no scheduler; nothing is left.
            UnpicklableError: The call does not pickle; nothing is left.
            SubmitError: The scheduler did not take the job; nothing is left, unless its `kind` is `timed_out`.
            QueryError: The scheduler does not answer; nothing is left.
        """
        with nullcontext() if self._batch is not None else self.batch():
            return [self.submit(function, *args) for args in zip(*iterables, strict=False)]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Submit what the `with` block submits as one job array when the block ends. Its jobs are usable after that.

        Raises:
            UsageError: A batch is open, the request or a call is invalid, or there is no scheduler; nothing is left.
            UnpicklableError: The call does not pickle; nothing is left.
            SubmitError: The scheduler did not take the job; nothing is left, unless its `kind` is `timed_out`.
            QueryError: The scheduler does not answer; nothing is left.
        """
        if self._batch is not None:
            raise UsageError("batch(): already in a batch; drop the inner one")
        begun: list[tuple[ExecutorJob[Any], Callable[[], Any]]] = []
        self._batch = begun
        try:
            yield
        finally:
            self._batch = None
        if not begun:
            return
        flags, at_once = read_parameters(self._parameters)
        calls = tuple(call for _, call in begun)
        flags["array"] = indices_of(calls) + (f"%{at_once}" if at_once else "")
        env = flags.pop("env", None)
        environ = make_environment(env, flags.pop("inherit_env", True))
        with _words_of_submitit():
            array = submit_function(None, calls, flags, environ, env, flags.pop("cwd", None))
        for index, (job, _) in enumerate(begun):
            job._become(find_job(f"{array.name}.{index}", dir=os.path.dirname(array.path)))


class ExecutorJob(Job[R]):
    """A job of a `JobExecutor`, a task of its array, or a rank of either: a `Job` with submitit's words, too.

    Args:
        job: The submitted job; None: the job is submitted later, at the end of a batch.
    """

    _is_rank = False  # whether it stands for `_rank` alone

    def __init__(self, job: Job[R] | None = None) -> None:
        if job is not None:
            self._become(job)

    def _become(self, job: Job[R]) -> None:
        Job.__init__(self, job._folder, job._scheduler)

    if not TYPE_CHECKING:  # for a type checker, any name would exist

        def __getattr__(self, name: str) -> NoReturn:
            if name[:2] == "__" or "_folder" in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise UsageError("this job is not submitted yet; use it after the with block of batch()")

    @property
    def job_id(self) -> str:
        """The scheduler's id of the job; of a task of an array on this machine, the array's with the task's index. It
        is "" if unknown."""
        folder = self._folder
        whole = folder.array.id if isinstance(folder, Task) else ""
        if isinstance(folder, Task) and whole and not task_id(whole, folder.index):
            return f"{whole}_{folder.index}"  # a task gets its own id when it starts, and this one must not change
        return self.id

    @property
    def state(self) -> str:
        """Its state, by at most one query of its scheduler."""
        return self.status().state

    def done(self) -> bool:
        """Return whether it is finished."""
        return self.status().is_final

    def stdout(self) -> str:
        """Return what all ranks have printed, without their labels."""
        return self._printed(is_stderr=False)

    def stderr(self) -> str:
        """Return what all ranks have written to stderr, without their labels."""
        return self._printed(is_stderr=True)

    @property
    def paths(self) -> JobPaths:
        """The paths of its directory, and of the log of its latest run."""
        log = self.get_logs_path()
        return JobPaths(folder=Path(self.path), stdout=log, stderr=log)

    def get_logs_path(self, name: str = "stdout") -> Path:
        """Return the path of the log of its latest run, which has the lines of all ranks, each with its label.

        Args:
            name: "stdout" or "stderr"; it is the same file.
        """
        return Path(self._folder.log(max(0, self._folder.attempts() - 1)))

    @property
    def num_tasks(self) -> int:
        """How many ranks it has."""
        order = self.submission
        return 1 if self._is_rank else order.nodes * order.slots_per_node or order.request.slots

    def task(self, task_id: int) -> ExecutorJob[R]:
        """Return one rank of it as a job: `result`, `results`, `stdout`, and `stderr` are this rank's.

        Args:
            task_id: The rank.

        Raises:
            UsageError: There is no such rank.
        """
        count = self.num_tasks
        if type(task_id) is not int or not 0 <= task_id < count:
            raise UsageError(f"task({task_id!r}): unknown rank; use 0 to {count - 1}")
        if self._is_rank:
            return self
        found = ExecutorJob(self)
        found._rank, found._is_rank = task_id, True
        return found

    def results(self, timeout_s: float | None = None) -> list[R]:
        return [self.result(timeout_s)] if self._is_rank else super().results(timeout_s)

    def awaitable(self) -> AwaitableJob[R]:
        """Return the object whose `result()` and `results()` are coroutines."""
        return AwaitableJob(self)

    def _printed(self, *, is_stderr: bool) -> str:
        lines = map(split_label, self.logs(rank=self._rank if self._is_rank else None))
        return "".join(f"{text}\n" for name, text in lines if (name == "stderr") is is_stderr)


@record
class JobPaths:
    """The paths of a job.

    Args:
        folder: Its directory.
        stdout, stderr: The log of its latest run, which has both.
    """

    folder: Path
    stdout: Path
    stderr: Path


class AwaitableJob(Generic[R]):
    """A job for asyncio: `await job.awaitable().result()`, which is `await job`.

    Args:
        job: The job.
    """

    def __init__(self, job: ExecutorJob[R]) -> None:
        self._job = job

    async def result(self) -> R:
        """Await what `result` of the job returns."""
        return await self._job

    async def results(self) -> list[R]:
        """Await what `results` of the job returns."""
        await self._job
        return self._job.results()


def _without_tags(folder: str) -> str:
    """Return the folder of all jobs: without what submitit puts an id into."""
    parts = os.path.abspath(os.path.expanduser(folder)).split("/")
    return "/".join(takewhile(lambda part: not any(tag in part for tag in _TAGS), parts)) or "/"


@contextmanager
def _words_of_submitit() -> Iterator[None]:
    try:
        yield
    except (QueryError, UsageError) as error:
        error.args = (str(error).replace('scheduler="', 'cluster="'),)
        raise


def read_parameters(given: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the keywords of `submit`, and how many tasks of an array may run at a time; 0: any number.

    Args:
        given: Keywords of `submit`, or submitit's.

    Raises:
        UsageError: Two of them say the same, or a value is wrong.
    """
    meant = {name: value for name, value in given.items() if name in _MEANT and value is not None}
    flags = {name: value for name, value in given.items() if name not in _MEANT and name not in _SAME}
    if cluster := meant.get("cluster"):
        _set(flags, "scheduler", cluster, "cluster")
    is_slurm = flags.get("scheduler") in (None, "auto", "slurm")
    for name, flag in _SAME.items():
        if name in given and (is_slurm or not name.startswith("slurm_")):  # as with submitit
            _set(flags, flag, given[name], name)
    if "timeout_min" in meant:
        limit_s = 60 * _amount("timeout_min", meant["timeout_min"])
        _set(flags, "time", f"{max(1, round(limit_s))}s", "timeout_min")
    counts = {
        name: read_count(name, value, least=int(name in ("nodes", "tasks_per_node")))
        for name, value in meant.items()
        if name not in _NO_COUNTS
    }
    if flags.get("scheduler") == "local" and counts.get("nodes", 1) > 1:
        total = counts["nodes"] * counts.get("tasks_per_node", 1)
        raise UsageError(
            f'nodes={counts["nodes"]}: conflicts with cluster="local", which is one node; use nodes=1, '
            f"tasks_per_node={total}"
        )
    if "slots" not in flags:
        _set_slots(flags, counts)
    elif sizes := counts.keys() & {"nodes", "tasks_per_node", "gpus_per_node"}:
        raise UsageError(f"{min(sizes)}=: conflicts with slots=; drop one of them")
    if "mem_gb" in meant:
        size_mb = 1024 * _amount("mem_gb", meant["mem_gb"]) / (flags.get("slots_per_node") or 1)
        _set(flags, "mem_per_slot", f"{max(1, round(size_mb))}M", "mem_gb")
    return flags, counts.get("slurm_array_parallelism", 0)


def _set_slots(flags: dict[str, Any], counts: Mapping[str, int]) -> None:
    per_node, gpus = counts.get("tasks_per_node", 1), counts.get("gpus_per_node", 0)
    if gpus and gpus != per_node:
        raise UsageError(f"gpus_per_node={gpus}: needs tasks_per_node={gpus}, as each rank has one GPU")
    flags["slots"] = counts.get("nodes", 1) * per_node
    _set(flags, "slots_per_node", per_node, "tasks_per_node")
    if not gpus:
        flags.setdefault("slot_type", "cpu")


def _set(flags: dict[str, Any], flag: str, value: object, name: str) -> None:
    if flags.get(flag) is not None:
        raise UsageError(f"{name}=: conflicts with {flag}=; drop one of them")
    flags[flag] = value


def _amount(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LONGEST_S:
        raise UsageError(f"{name}={value!r}: expected a number above 0")
    return value


def _check_name(name: str) -> None:
    known = [*TABLES["submit"], *_OWN, *_SAME, *_MEANT]
    if name in known and name != "array":
        return
    flag = name.removeprefix("slurm_")
    near = flag if flag in known else nearest(name, known)
    hint = _INSTEAD.get(flag) or (flag not in known and of_flag(flag)) or (near and f"did you mean {near}?")
    raise TypeError(f"JobExecutor: unexpected parameter {name!r}" + (hint and f"; {hint.replace('--', '')}"))
