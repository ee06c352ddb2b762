"""The way from a request to a job, once: layout, record, submission; or nothing of it is left.

The one rule: no second submission before the scheduler has said that it does not have the first. A controller that
gives no answer may have taken the job all the same (measured on Slurm 22.05). There sbatch gives up after 10 s, and
the job runs. So the next step searches for its name, which is unique.
"""

from __future__ import annotations

import os
import select
import time

from infini_run.errors import InfiniRunError, UsageError
from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.folder.job_dir import environment
from infini_run.jobs.folder.job_store import make_folder, remove
from infini_run.jobs.folder.records import Submission
from infini_run.jobs.folder.task import make_tasks
from infini_run.jobs.request.array import own_name
from infini_run.jobs.request.job_request import CPU, CUDA
from infini_run.jobs.request.script import plan as lay_out
from infini_run.jobs.request.script import render, render_node, render_srun
from infini_run.jobs.scheduler import TIMED_OUT, strip_scheduler_environment
from infini_run.record import replace
from infini_run.system.shell import joined

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.request.job_request import JobRequest
    from infini_run.jobs.request.node_shape import Layout
    from infini_run.jobs.scheduler import Facts, Scheduler

FUNCTION_START = "function_start.py"  # the program of a function's rank; or in another Python
FUNCTION_MAIN = "from infini_run.jobs.function_main import main; main()"
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # between two looks; a controller that is back is no event
_TRIES = 3
_NO_LIMIT = "--warn: no effect on this machine without a limit; add --time=TIME"


class SubmissionPlan:
    """A request with its layout and its script, before anything is written or submitted."""

    def __init__(
        self, request: JobRequest, layout: Layout, text: str, pool: str, programs: Mapping[str, str]
    ) -> None:
        self.request = request
        self.layout = layout
        self.text = text
        self.pool = pool
        self.programs = programs  # of the job's container, by their names in its directory


def plan(request: JobRequest, scheduler: Scheduler, facts: Facts) -> SubmissionPlan:
    """Lay out and render a request; write nothing.

    Args:
        request: What the user asks for.
        scheduler: Where it goes.
        facts: What the scheduler has.

    Raises:
        UsageError: All that is wrong with the request, one line each.
    """
    if scheduler.name == "local":
        request, facts = _here(request, facts)
    layout = lay_out(request, facts)
    if scheduler.name == "local" and request.warn_s and not request.time_s:
        layout = replace(layout, remark=_NO_LIMIT)
    request = replace(request, scheduler=scheduler.name, slot_type=layout.slot_type)
    pool = facts.pool(request.pool)
    if request.warn_s and not request.time_s and pool is not None and pool.default_s == 0:
        no_effect = f"--warn: no effect in {pool.name} without a limit; add --time=TIME"
        layout = replace(layout, remark="; ".join(filter(None, (layout.remark, no_effect))))
    programs = {"node": render_node(request, layout), "bin/srun": render_srun(request, layout)}
    return SubmissionPlan(
        request, layout, render(request, layout, facts), request.pool or (pool.name if pool else ""), programs
    )


def _here(request: JobRequest, facts: Facts) -> tuple[JobRequest, Facts]:
    """Return one node, which takes any request: too few CPUs are shared. Raises UsageError."""
    if request.slots_per_node not in (0, request.slots):
        raise UsageError(
            f"--slots={request.slots} --slots_per_node={request.slots_per_node}: conflicts with --scheduler=local, "
            "which is one node; "
            "drop --slots_per_node"
        )
    if request.spares:
        raise UsageError(
            f"--spares={request.spares}: needs several nodes, and --scheduler=local is one; drop --spares"
        )
    slot_type = request.slot_type or (CUDA if facts.has_gres else CPU)
    return replace(request, single_node=True, slot_type=slot_type), replace(facts, pools=())


def check(planned: SubmissionPlan, scheduler: Scheduler) -> str:
    """Ask a scheduler whether it could ever run a plan; leave nothing.

    Returns:
        Why not, in one line; "": it could, or the scheduler cannot tell.

    Raises:
        QueryError: The scheduler does not answer.
    """
    import tempfile

    with tempfile.NamedTemporaryFile("wb", prefix="infini-job-", suffix=".sh") as file:
        file.write(os.fsencode(planned.text))
        file.flush()
        return scheduler.check(file.name)


def submit(
    planned: SubmissionPlan,
    scheduler: Scheduler,
    environ: Mapping[str, str],
    *,
    print_line: Callable[[str], None],
    function: bytes = b"",
) -> tuple[JobDir, Submission]:
    """Write the job's directory, and hand its script over, once.

    Args:
        planned: The job.
        scheduler: Where it goes.
        environ: The caller's, which goes with the job.
        print_line: Gets a line about each step that takes longer than it should.
        function: The pickled call that the command runs; empty: the command runs none.

    Returns:
        The directory, and the submission.

    Raises:
        UsageError: The directory is not writable; nothing is left.
        SubmitError: The scheduler did not take the job; nothing is left, unless that is unknown (`timed_out`).
    """
    request = planned.request
    folder = make_folder(os.path.dirname(request.folder), request.name)
    order = Submission(
        request=request,
        nodes=planned.layout.nodes,
        slots_per_node=planned.layout.slots_per_node,
        pool=planned.pool,
        submitted_s=time.time(),
        host=os.uname().nodename,
    )
    try:
        folder.write_submission(order, environment(strip_scheduler_environment(environ), request))
        folder.write_script(planned.text)
        make_tasks(folder)
        if function:
            folder.write_function(function)
        for name, text in planned.programs.items():
            folder.write_program(name, text)
    except OSError as error:
        remove(folder)
        raise UsageError(f"{folder.path} cannot be written: {error.strerror}; use another --dir") from None
    except BaseException:  # Ctrl-C, too: leave no job that nobody will run
        remove(folder)
        raise
    try:
        id_ = hand_over(scheduler, folder.script, request.queue_name, print_line=print_line, folder=folder)
    except SubmitError as error:
        if error.kind != TIMED_OUT:
            remove(folder)
        raise
    except OSError as error:
        remove(folder)
        raise UsageError(f"{folder.path} cannot be written: {error.strerror}; use another --dir") from None
    except (InfiniRunError, TypeError, ValueError):  # after Ctrl-C the scheduler may have it
        remove(folder)
        raise
    try:
        folder.write_id(id_)
    except OSError as error:  # the scheduler has it, and the directory stays: its name finds it
        print_line(f"{folder.path}/id cannot be written ({error.strerror}): {scheduler.name} has the job as {id_}")
    return folder, order


def hand_over(
    scheduler: Scheduler,
    script: str,
    name: str,
    *,
    print_line: Callable[[str], None],
    pauses_s: tuple[float, ...] = _PAUSES_S,
    folder: JobDir | None = None,
    before: str = "",
) -> str:
    """Submit a script until the scheduler has it, and never a second time before it has said that it does not.

    Args:
        scheduler: Where it goes.
        script: Path of the script.
        name: What the scheduler calls the job, unique.
        print_line: Gets a line about each step that takes longer than it should.
        pauses_s: Seconds between two questions after a submission without an answer.
        folder: Where the job writes its own id when it begins, which a scheduler may forget at its end (PBS); None:
            nowhere.
        before: The id of the same job's last run, which is not the one to find; "": this is its first.

    Returns:
        The scheduler's id.

    Raises:
        SubmitError: The scheduler did not take the job, or, of the kind `timed_out`, that is unknown.
    """
    for _ in range(_TRIES):
        try:
            return scheduler.submit(script, name)
        except SubmitError as error:
            if error.kind != TIMED_OUT:
                raise
            print_line(f"{scheduler.name} has not responded ({error.text}); checking whether it has the job")
        found = _search(scheduler, name, pauses_s, folder, before)
        if found:
            return found
    raise SubmitError(
        TIMED_OUT,
        f"{scheduler.name} took the job {_TRIES} times without responding, and does not know it; run the "
        "command later",
    )


def _search(scheduler: Scheduler, name: str, pauses_s: tuple[float, ...], folder: JobDir | None, before: str) -> str:
    """Return its id, by the scheduler's word or the job's own. It is "" after the scheduler has said twice, with a
    pause between, that it does not have it. Raises SubmitError without an answer."""
    answers, problem = 0, ""
    for pause_s in pauses_s:
        try:
            found = scheduler.find(name)
        except QueryError as error:
            problem = str(error)
        else:
            if found and found != before:
                return found
            answers += 1
        own = _own_id(folder, before, 0.0 if answers == 2 else pause_s)
        if own or answers == 2:
            return own
    raise SubmitError(
        TIMED_OUT,
        f"{scheduler.name} does not respond ({problem}), but may have the job; later, run infini-job status "
        f"{own_name(name)}",
    )


def _own_id(folder: JobDir | None, before: str, limit_s: float) -> str:
    """Return the id that the job writes when it begins, within `limit_s` seconds; "" without one."""
    if folder is None:
        time.sleep(limit_s)
        return ""
    try:
        _wait_for_id(folder, before, limit_s)
    except InfiniRunError:  # fs.inotify permits no more watches: time is left
        time.sleep(limit_s)
    return folder.id if folder.id != before else ""


def _wait_for_id(folder: JobDir, before: str, limit_s: float) -> None:
    """Wait for the id. A write to its directory is an event (inotify). A controller that is back is none, nor is a
    write of another machine: time ends the wait."""
    from infini_run.jobs.folder.inotify import Changes

    end_s = time.monotonic() + limit_s
    changes = Changes()
    try:
        changes.add(folder.path)
        poll = select.poll()  # not select(2): a host program may have more than 1,024 descriptors
        poll.register(changes, select.POLLIN)
        while folder.id in ("", before) and (left_s := end_s - time.monotonic()) > 0:
            poll.poll(left_s * 1000 + 1)
            changes.clear()
    finally:
        changes.close()


def shown_command(command: tuple[str, ...]) -> str:
    """Return a command as a shell reads it; of a function's job, the function's name."""
    if len(command) > 1 and command[-2].endswith((f"/jobs/{FUNCTION_START}", FUNCTION_MAIN)):
        return f"function {command[-1]}"
    return joined(command)
