"""The batch script of a job: what the scheduler reads, and one command. Pure.

The one rule: the script does as little as can be. Its comments have what the scheduler needs to know.
infini_run.jobs.allocation_main does the work, and finds everything else in the job's directory.
"""

from __future__ import annotations

import os

from infini_run.errors import UsageError, counted
from infini_run.jobs.request import pbs_script, slurm_script
from infini_run.jobs.request.array import parse
from infini_run.jobs.request.container import Place, srun_options, wrap
from infini_run.jobs.request.container import problems as image_problems
from infini_run.jobs.request.job_request import LOG, SPOOL
from infini_run.jobs.request.node_shape import lay_out
from infini_run.record import replace
from infini_run.system.interpreter import is_foreign
from infini_run.system.shell import joined, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.jobs.request.job_request import JobRequest
    from infini_run.jobs.request.node_shape import Layout
    from infini_run.jobs.scheduler import Facts

_START = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "start.py")
_INDEX = {
    "slurm": "$SLURM_ARRAY_TASK_ID",
    "pbs": "$PBS_ARRAY_INDEX",
}  # of a task; all others: schedulers/local_queue.py says it


def plan(request: JobRequest, facts: Facts) -> Layout:
    """Return the layout of a request whose options are good as well.

    Raises:
        UsageError: All that is wrong with either, one line each.
    """
    problems = _option_problems(request, facts)
    try:
        layout = lay_out(request, facts)
    except UsageError as error:
        raise UsageError("\n".join([*str(error).splitlines(), *problems])) from None
    problems += pbs_script.misplaced(request, layout) if facts.scheduler == "pbs" and not problems else []
    if problems:
        raise UsageError("\n".join(problems))
    return layout


def render(request: JobRequest, layout: Layout, facts: Facts) -> str:
    """Return the script of a request that `plan` has found to be good.

    Args:
        request: What the user asks for.
        layout: Its nodes.
        facts: What the scheduler has.
    """
    lines = ["#!/bin/sh"]
    if facts.scheduler == "slurm":
        options = slurm_script.options(request, layout, f"{request.folder}/{LOG}")
        lines += ["#SBATCH " + " ".join(map(slurm_script.quoted, words)) for words in options]
    elif facts.scheduler == "pbs":
        options = pbs_script.options(request, layout, f"{request.folder}/{SPOOL}")
        lines += ["#PBS " + " ".join(map(pbs_script.quoted, words)) for words in options]
    lines += [f"# {request.name}: {_tasks(request.array)}{described(layout)}", ""]
    folder, index = quoted(request.folder), _INDEX.get(facts.scheduler, "") if request.array else ""
    if facts.scheduler == "pbs":  # else its output is not to be seen before the end
        log = f"{folder}/task/{index}/{LOG}" if index else quoted(f"{request.folder}/{LOG}")
        lines.append(f"exec >>{log} 2>&1")
    here = request.array and not index
    words = [request.python, "-m", "infini_run.jobs.array_main"] if here else inside_of(request.python)
    # not in the directory of the submission: Python would import a json.py from there
    lines.append(" ".join(["cd / && exec", joined(words), folder, *([index] if index else [])]))
    return "\n".join(lines) + "\n"


def render_task(text: str, index: int) -> str:
    """Return the script of one task alone, from an array's script for PBS: PBS cannot run a task of an array
    again."""
    lines = [line for line in text.split("\n") if not line.startswith("#PBS -J ")]
    return "\n".join(lines).replace(pbs_script.INDEX, str(index)).replace(_INDEX["pbs"], str(index))


def inside_of(python: str) -> list[str]:
    """Return the words that start the launcher on the first node. This interpreter starts without site."""
    if not is_foreign(python):
        return [python, "-S", _START]
    return [python, "-m", "infini_run.jobs.allocation_main"]


def render_node(request: JobRequest, layout: Layout) -> str:
    """Return the script that starts an agent, in place of a Python, for the job's directory. It starts the job's
    container. With spares on Slurm it stays, to end the job after the loss of its first node (lost_head.py). Returns
    "" where neither applies, or the container is srun's business (pyxis)."""
    image = request.container
    has_spares = layout.spares > 0 and request.scheduler == "slurm"
    if (image is None and not has_spares) or (image is not None and image.runtime == "pyxis"):
        return ""
    words = [request.python]
    if image is not None:
        place = replace(_place(request, layout.slot_type), over_stdio=request.scheduler == "local")
        words = wrap(image, place, [image.python])
    if not has_spares:
        return f'#!/bin/sh\nexec {joined(words)} "$@"\n'
    after = joined([request.python, "-m", "infini_run.jobs.lost_head", request.folder, request.queue_name])
    after += f' "{_INDEX["slurm"]}"' if request.array else ""
    return f'#!/bin/sh\n{joined(words)} "$@" --exit_if_lost=1 && exit\ncd / && exec {after} -- "$@"\n'


def render_srun(request: JobRequest, layout: Layout) -> str:
    """Return the script that replaces srun where srun starts the container (pyxis). It goes into a directory of the
    job that is the first one of PATH, and finds the real srun in one of the others. Returns "" without such a
    container."""
    image = request.container
    if image is None or image.runtime != "pyxis":
        return ""
    words = joined(srun_options(image, _place(request, layout.slot_type)))
    return f'#!/bin/sh\nPATH=${{PATH#*:}}\nexec srun {words} "$@"\n'


def _place(request: JobRequest, slot_type: str) -> Place:
    return Place(folder=request.folder, cwd=request.cwd, slot_type=slot_type)


def described(layout: Layout) -> str:
    """Return `2 nodes x 8 gpus`, for people."""
    what = {"cpu": "cpu"}.get(layout.slot_type, "gpu")
    if not layout.nodes:
        return f"{counted(layout.slots, what)} on 1 to {counted(layout.max_nodes, 'node')}"
    spares = f" + {counted(layout.spares, 'spare')}" if layout.spares else ""
    return f"{counted(layout.nodes, 'node')} x {counted(layout.slots_per_node or layout.slots, what)}{spares}"


def _tasks(array: str) -> str:
    """Return `10 tasks (--array=0-9%3) x `; "" for a job that is no array."""
    return f"{counted(len(parse(array).tasks), 'task')} (--array={array}) x " if array else ""


def _option_problems(request: JobRequest, facts: Facts) -> list[str]:
    problems = [
        f"{name}={text!r}: expected one line of printable text"
        for name, text in (("--pool", request.pool), ("--account", request.account), ("--project", request.project))
        if not text.isprintable()
    ]
    if "\n" in request.folder:
        problems.append(
            f"{request.folder!r}: cannot use a job directory with a line break in its name; use another --dir"
        )
    if facts.scheduler == "pbs" and ":" in request.folder:
        problems.append(f"{request.folder}: PBS reads text before a : as a host; use another --dir")
    if "\\" in request.folder and facts.scheduler == "pbs":
        problems.append(f"{request.folder}: PBS cannot use a backslash in the name of a file; use another --dir")
    if "\\" in request.folder and facts.scheduler == "slurm" and request.array:
        problems.append(
            f"{request.folder}: Slurm cannot write files of tasks in a directory with a backslash; use another --dir"
        )
    if request.container is not None:
        problems += image_problems(request.container, _place(request, request.slot_type))
        if request.container.runtime == "pyxis" and facts.scheduler != "slurm":
            problems.append(
                f"--runtime=pyxis: needs srun, which --scheduler={facts.scheduler} lacks; use --runtime=apptainer, "
                "podman, or enroot"
            )
        elif request.container.runtime == "pyxis" and request.spares:
            problems.append(
                f"--spares={request.spares} with --runtime=pyxis: nothing outside the image can end the job when "
                "its first node is lost; use another --runtime"
            )
    if facts.scheduler == "slurm":
        return problems + slurm_script.user_options(request)[1]
    if facts.scheduler == "pbs":
        problems += pbs_script.array_problems(request)
        return problems + list(pbs_script.user_options(request).problems)
    return problems + [f"{text}: --scheduler={facts.scheduler} takes no options; drop it" for text in request.options]
