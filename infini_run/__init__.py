"""infini-run: launches, watches and takes down the processes of distributed training.

    import infini_run as ir

    report = ir.run(["python", "train.py"], nproc_per_node=8, log_dir="logs")

Names are looked up when they are asked for: the command imports this package too, and needs none of them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.errors import (
        DeviceError,
        InfiniRunError,
        LaunchTimeout,
        LinkError,
        NodeLost,
        NotExecutable,
        ProgramError,
        ProgramMissing,
        QueryError,
        StartError,
        SubmitError,
        UsageError,
        WorkerError,
    )
    from infini_run.group import Event
    from infini_run.jobs.job import Job, find_job, find_jobs, submit
    from infini_run.jobs.state import Status
    from infini_run.launch import ProcessLauncher, launch_local, launch_multi_node, run
    from infini_run.look import Look
    from infini_run.report import Exit, Report

__all__ = [
    "DeviceError",
    "Event",
    "Exit",
    "InfiniRunError",
    "Job",
    "LaunchTimeout",
    "LinkError",
    "Look",
    "NodeLost",
    "NotExecutable",
    "ProcessLauncher",
    "ProgramError",
    "ProgramMissing",
    "QueryError",
    "Report",
    "StartError",
    "Status",
    "SubmitError",
    "UsageError",
    "WorkerError",
    "find_job",
    "find_jobs",
    "launch_local",
    "launch_multi_node",
    "run",
    "submit",
]

_HOMES = {"Event": "group", "Exit": "report", "ProcessLauncher": "launch", "Report": "report", "Look": "look"}
_HOMES |= {"Job": "jobs.job", "find_job": "jobs.job", "find_jobs": "jobs.job", "submit": "jobs.job"}
_HOMES |= {"Status": "jobs.state"}
_HOMES |= {"launch_local": "launch", "launch_multi_node": "launch", "run": "launch"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
