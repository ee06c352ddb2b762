"""The backend of joblib that runs its batches in an Executor. Only its registration imports this, and joblib."""

from __future__ import annotations

from joblib import cpu_count
from joblib.parallel import AutoBatchingMixin, ParallelBackendBase, SequentialBackend

from infini_run.crews.api.executor import Executor
from infini_run.errors import UsageError

# What Parallel hands to any backend, mostly for memory maps and processes of multiprocessing:
_JOBLIBS = ("context", "max_nbytes", "mmap_mode", "prefer", "require", "temp_folder", "verbose")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from typing import Any


class ExecutorBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs batches in an Executor."""

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    uses_threads = False
    supports_sharedmem = False

    def __init__(self, *, executor: Executor | None = None, **options: Any) -> None:
        own = {name: options.pop(name) for name in ("nesting_level", "inner_max_num_threads") if name in options}
        super().__init__(**own)
        self._given = executor
        self._check_alone(options)
        self._options = options
        self._options_of_call: dict[str, Any] = {}
        self._executor: Executor | None = None
        self._unfinished: set[Future[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if self._given is not None:
            return self._given.max_workers
        if n_jobs == 0:
            raise UsageError("n_jobs=0: expected a number of workers, or -1 for one per CPU")
        count: int = SequentialBackend().effective_n_jobs(1) if n_jobs is None else n_jobs
        return count if count > 0 else max(1, cpu_count() + 1 + count)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        self.parallel = parallel
        self._options_of_call = {name: value for name, value in options.items() if name not in _JOBLIBS}
        self._check_alone(self._options_of_call)
        count = self.effective_n_jobs(n_jobs)
        self._executor = self._given or self._open(count)
        return count

    def _check_alone(self, options: dict[str, Any]) -> None:
        if self._given is not None and options:
            raise UsageError(f"{', '.join(options)}: conflicts with executor=; drop one of them")

    def _open(self, count: int) -> Executor:
        options = {**self._options, **self._options_of_call}
        env = {**self._prepare_worker_env(count), **(options.get("env") or {})}
        return Executor(count, **{**options, "env": env})

    def submit(self, func: Callable[[], Any], callback: Callable[[Future[Any]], object] | None = None) -> Any:
        assert self._executor is not None
        future = self._executor.submit(func)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    apply_async = submit  # of joblib before 1.5

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        self._close()
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel, **self._options_of_call)

    def terminate(self) -> None:
        self._close()
        self.reset_batch_stats()

    def _close(self) -> None:
        """End the workers; nobody waits for the calls that they still have. Those of an executor that was given stay,
        and finish these calls: cancel the ones that no worker has."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        if executor is self._given:
            for future in tuple(self._unfinished):
                future.cancel()
            return
        supervisor = executor._crew._supervisor
        if supervisor.has_work:
            supervisor.call(supervisor.kill)
        executor.shutdown()
