"""infini-run: launches, watches and takes down the processes of distributed training.

    import infini_run as ir

    report = ir.run(["python", "train.py"], nproc_per_node=8, log_dir="logs")

Names are looked up when they are asked for: the command imports this package too, and needs none of them.
"""

from _imp import extension_suffixes
from posix import stat  # built in: `os` may not be there yet


def _exists(path: str) -> bool:
    """Return whether there is such a file, asked as an import asks; access() drops capabilities."""
    try:
        stat(path)
    except OSError:
        return False
    return True


if not any(_exists(f"{__path__[0]}/_irun{suffix}") for suffix in extension_suffixes()):
    from infini_run.source_checkout import use_installed_package

    use_installed_package(__path__[0])

TYPE_CHECKING = bool()  # noqa: UP018  jedi, which completes names in editors, leaves out what `if False` has
if TYPE_CHECKING:
    from typing import Any

    from infini_run import channel as channel
    from infini_run.api import launch_local, launch_multi_node, run
    from infini_run.channel.errors import (
        CannotUnpickle,
        ChannelBroken,
        ChannelClosed,
        ChannelEnd,
        ChannelError,
        MessageTooLong,
        UnpicklableError,
    )
    from infini_run.channel.receiver import Receiver
    from infini_run.channel.sender import Sender
    from infini_run.core.c_structs import Event
    from infini_run.crews.api.crew import Crew
    from infini_run.crews.api.crew_slice import Asks, CrewSlice
    from infini_run.crews.api.crew_status import CrewStatus, WorkerStatus
    from infini_run.crews.api.executor import Executor, ExecutorFailed
    from infini_run.crews.api.handle import LaunchHandle
    from infini_run.crews.api.joblib_registration import register_joblib
    from infini_run.crews.api.launcher import Launcher, Pool
    from infini_run.crews.api.result import LaunchResult
    from infini_run.crews.api.worker_handle import WorkerHandle
    from infini_run.crews.errors import CrewClosed, CrewFailed, DrainTimeout
    from infini_run.crews.supervision.event_queue import CrewEvent
    from infini_run.crews.supervision.future import Ask
    from infini_run.crews.supervision.restart_policy import Restart
    from infini_run.crews.worker.context import Cancelled, Context, this_worker
    from infini_run.errors import (
        DeviceError,
        InfiniRunError,
        LaunchTimeout,
        LinkError,
        NodeLost,
        NotExecutable,
        ProgramError,
        ProgramMissing,
        RemoteError,
        StartError,
        UsageError,
    )
    from infini_run.jobs.errors import (
        JobFailed,
        QueryError,
        SubmitError,
    )
    from infini_run.jobs.folder.records import Submission
    from infini_run.jobs.job import Job, find_job, find_jobs, submit
    from infini_run.jobs.job_executor import AwaitableJob, ExecutorJob, JobExecutor, JobPaths
    from infini_run.jobs.request.container import Image
    from infini_run.jobs.request.job_request import JobRequest
    from infini_run.jobs.status.job_status import Status
    from infini_run.options.from_python import Program
    from infini_run.process_launcher import ProcessLauncher
    from infini_run.questions.running import RunningLaunch, running
    from infini_run.rank_messages import progress, ready, status_text
    from infini_run.report.exit import Exit, LeftoverProcess
    from infini_run.report.failures import WorkerDied, WorkerError
    from infini_run.report.hang_snapshot import HangSnapshot
    from infini_run.report.pace import SlowRank
    from infini_run.report.report import Clock, PreloadUse, Report
    from infini_run.report.torch_records import CollectiveRecord
    from infini_run.system.procfs import ProcessSnapshot, ThreadSnapshot

    __version__: str

__all__ = [
    "Ask",
    "Asks",
    "AwaitableJob",
    "Cancelled",
    "CannotUnpickle",
    "ChannelBroken",
    "ChannelClosed",
    "ChannelEnd",
    "ChannelError",
    "Clock",
    "CollectiveRecord",
    "Context",
    "Crew",
    "CrewClosed",
    "CrewEvent",
    "CrewFailed",
    "CrewSlice",
    "CrewStatus",
    "DeviceError",
    "DrainTimeout",
    "Event",
    "Executor",
    "ExecutorFailed",
    "ExecutorJob",
    "Exit",
    "HangSnapshot",
    "Image",
    "InfiniRunError",
    "Job",
    "JobExecutor",
    "JobFailed",
    "JobPaths",
    "JobRequest",
    "LaunchHandle",
    "LaunchResult",
    "LaunchTimeout",
    "Launcher",
    "LeftoverProcess",
    "LinkError",
    "MessageTooLong",
    "NodeLost",
    "NotExecutable",
    "Pool",
    "PreloadUse",
    "ProcessLauncher",
    "ProcessSnapshot",
    "Program",
    "ProgramError",
    "ProgramMissing",
    "QueryError",
    "Receiver",
    "RemoteError",
    "Report",
    "Restart",
    "RunningLaunch",
    "Sender",
    "SlowRank",
    "StartError",
    "Status",
    "Submission",
    "SubmitError",
    "ThreadSnapshot",
    "UnpicklableError",
    "UsageError",
    "WorkerDied",
    "WorkerError",
    "WorkerHandle",
    "WorkerStatus",
    "find_job",
    "find_jobs",
    "launch_local",
    "launch_multi_node",
    "progress",
    "ready",
    "register_joblib",
    "run",
    "running",
    "status_text",
    "submit",
    "this_worker",
]

_HOMES = {
    "Event": "core.c_structs",
    "Clock": "report.report",
    "PreloadUse": "report.report",
    "Exit": "report.exit",
    "LeftoverProcess": "report.exit",
    "ProcessLauncher": "process_launcher",
    "Program": "options.from_python",
    "Report": "report.report",
    "HangSnapshot": "report.hang_snapshot",
    "SlowRank": "report.pace",
    "CollectiveRecord": "report.torch_records",
    "ProcessSnapshot": "system.procfs",
    "ThreadSnapshot": "system.procfs",
}
_HOMES |= dict.fromkeys(
    (
        "CannotUnpickle",
        "ChannelBroken",
        "ChannelClosed",
        "ChannelEnd",
        "ChannelError",
        "MessageTooLong",
        "UnpicklableError",
    ),
    "channel.errors",
)
_HOMES |= dict.fromkeys(("JobFailed", "QueryError", "SubmitError"), "jobs.errors")
_HOMES |= {"Receiver": "channel.receiver", "Sender": "channel.sender"}
_HOMES |= dict.fromkeys(("Cancelled", "Context", "this_worker"), "crews.worker.context")
_HOMES |= {"Ask": "crews.supervision.future", "CrewEvent": "crews.supervision.event_queue"}
_HOMES |= {"Restart": "crews.supervision.restart_policy"}
_HOMES |= {"Crew": "crews.api.crew", "WorkerHandle": "crews.api.worker_handle"}
_HOMES |= dict.fromkeys(("Asks", "CrewSlice"), "crews.api.crew_slice")
_HOMES |= dict.fromkeys(("Executor", "ExecutorFailed"), "crews.api.executor")
_HOMES |= {"register_joblib": "crews.api.joblib_registration"}
_HOMES |= dict.fromkeys(("CrewStatus", "WorkerStatus"), "crews.api.crew_status")
_HOMES |= dict.fromkeys(("Launcher", "Pool"), "crews.api.launcher")
_HOMES |= {"LaunchHandle": "crews.api.handle", "LaunchResult": "crews.api.result"}
_HOMES |= {"Job": "jobs.job", "find_job": "jobs.job", "find_jobs": "jobs.job", "submit": "jobs.job"}
_HOMES |= dict.fromkeys(("AwaitableJob", "ExecutorJob", "JobExecutor", "JobPaths"), "jobs.job_executor")
_HOMES |= {"Status": "jobs.status.job_status", "Submission": "jobs.folder.records"}
_HOMES |= {"JobRequest": "jobs.request.job_request", "Image": "jobs.request.container"}
_HOMES |= dict.fromkeys(("progress", "ready", "status_text"), "rank_messages")
_HOMES |= {"launch_local": "api", "launch_multi_node": "api", "run": "api"}
_HOMES |= dict.fromkeys(("RunningLaunch", "running"), "questions.running")
_HOMES |= dict.fromkeys(("CrewClosed", "CrewFailed", "DrainTimeout"), "crews.errors")
_HOMES |= dict.fromkeys(("WorkerDied", "WorkerError"), "report.failures")


def __getattr__(name: str) -> object:
    if name not in ("channel", "__version__", *__all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "channel":
        return _module(name)
    return _module("version").VERSION if name == "__version__" else getattr(_module(_HOMES.get(name, "errors")), name)


def load_ipython_extension(shell: "Any") -> None:
    """Add `%%ranks` and `%rank` to an IPython shell, which calls this for `%load_ext infini_run`."""
    _module("notebook_cells").load(shell)


def unload_ipython_extension(shell: "Any") -> None:
    """End the ranks of a shell, and remove its magics, for `%unload_ext infini_run`."""
    _module("notebook_cells").unload(shell)


def _module(name: str) -> "Any":
    """Import a module, without importlib: a training that only reports its progress needs none of that."""
    return __import__(f"{__name__}.{name}", fromlist=(name,))


def __dir__() -> list[str]:
    """Return what a shell completes: not the submodules, which importing them adds to the globals."""
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
