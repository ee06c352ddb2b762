"""Questions to the launch of a running job: asked on its first node, where its head is."""

from __future__ import annotations

import os
import sys

from infini_run.errors import UsageError
from infini_run.jobs.lines import print_answer
from infini_run.jobs.scheduler import QUEUED, strip_scheduler_environment
from infini_run.system.interpreter import is_foreign, own_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.jobs.request.job_request import JobRequest
    from infini_run.jobs.status.job_status import Status


def ask_job(
    verb: str, request: JobRequest, status: Status, ranks: Sequence[int | str] | None, environ: Mapping[str, str]
) -> int:
    """Ask the launch of a job, and return the exit code. On Slurm this process becomes srun.

    Args:
        verb: top, follow, or stacks.
        request: Of the job.
        status: Of the job.
        ranks: Its ranks. None: all.
        environ: The environment.

    Raises:
        UsageError: The job does not run, or is where no command reaches it.
        QueryError: Slurm does not answer.
    """
    if status.is_final or status.state == QUEUED:
        raise UsageError(f"job {status.name} does not run: {status.headline}; run infini-job status {status.name}")
    if status.tasks:
        task = next((one for one in status.tasks if not one.is_final and one.state != QUEUED), status.tasks[0])
        raise UsageError(f"job {status.name} is an array; use one of its tasks, such as {task.name}")
    words = [f"--{verb}", *([] if ranks is None else [f"--ranks={','.join(map(str, ranks))}"]), status.name]
    if request.scheduler == "pbs":
        hosts = status.nodes or ("HOST",)
        raise UsageError(f"PBS has no command for a running job; run ssh {hosts[0]} infini-run {' '.join(words)}")
    if request.scheduler == "slurm":
        python = own_python("infini_run.cli.main", request.python if is_foreign(request.python) else "")
        is_screen = verb == "top" and os.isatty(0) and os.isatty(1)
        from infini_run.jobs.schedulers.slurm import Slurm

        argv = [
            *_STEP,
            f"--jobid={Slurm(environ).number_of(status.id)}",
            "--pty" if is_screen else "--input=none",
            "--",
            *python,
            *words,
        ]
        sys.stdout.flush()
        os.execvpe(argv[0], argv, strip_scheduler_environment(environ))
    from infini_run.options.questions import Question
    from infini_run.questions.command import ask_running

    chosen = None if ranks is None else tuple(ranks)
    asked = Question(name=verb, origin=f"infini-job {verb}", form="text", launch=status.name, ranks=chosen)
    text, code = ask_running(asked, environ)
    if text:
        print_answer(text)
    return code


# Beside the job's own step, on its first node, with none of its resources. --unbuffered would be a terminal there.
_STEP = (
    *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--relative=0", "--quiet", "--quit-on-interrupt"),
    *("--mpi=none", "--gres=none", "--mem=0", "--export=ALL"),
)
