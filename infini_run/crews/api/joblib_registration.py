"""`register_joblib`: what it needs of joblib, it imports when it is called."""

from __future__ import annotations

from infini_run.errors import UsageError


def register_joblib() -> None:
    """Register the backend "infini_run" of joblib. You may call it again.

    Within parallel_config("infini_run", n_jobs=4, hosts=["a", "b"]), each Parallel has its own Executor with these
    keywords. Within parallel_config("infini_run", executor=executor), each Parallel uses your executor, which stays
    open.

    Raises:
        UsageError: joblib is missing, or too old.
    """
    try:
        from joblib import register_parallel_backend

        from infini_run.crews.api.joblib_backend import ExecutorBackend
    except ImportError as error:
        raise UsageError(f"register_joblib(): needs joblib; run pip install joblib ({error})") from None
    register_parallel_backend("infini_run", ExecutorBackend)
