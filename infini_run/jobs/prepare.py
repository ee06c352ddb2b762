"""From the flags of `submit` to a plan and its scheduler. Nothing here writes or submits."""

from __future__ import annotations

import os

from infini_run.errors import UsageError
from infini_run.jobs.errors import SubmitError
from infini_run.jobs.folder.job_store import home_to_write, new_name
from infini_run.jobs.options.table import PREFIXES, TABLES, defaults
from infini_run.jobs.request.container import RUNTIMES, Image
from infini_run.jobs.request.job_request import JobRequest
from infini_run.jobs.request.programs import check_programs, names_programs, with_absolute_file
from infini_run.jobs.schedulers.detect_scheduler import choose
from infini_run.jobs.submit import check, plan
from infini_run.options.from_python import check_command, check_words
from infini_run.system.interpreter import find_python
from infini_run.system.shell import joined
from infini_run.value_types import DESCRIPTOR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.jobs.scheduler import Scheduler
    from infini_run.jobs.submit import SubmissionPlan

_OF_ONE_LAUNCH = ("report", "termination_log", "trace", "metrics")  # each replaces a file


def read_flags(flags: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Any]:
    """Read Python's names and values by the command's own grammar.

    Args:
        flags: By name; True and False are `--name` and `--noname`, a list is one word per item (of `array` one
            index), None means no flag.
        environ: Where `INFINI_JOB_NAME` stands for the flag NAME.

    Returns:
        The value of every flag of submit.

    Raises:
        UsageError: A name or a value is wrong.
    """
    from infini_run.options.grammar import parse

    words = []
    for name, value in flags.items():
        if value is True or value is False:
            words.append(f"--{'' if value else 'no'}{name}")
        elif isinstance(value, (list, tuple, range)):
            words.append(f"--{name}={','.join(map(str, value)) if name == 'array' else joined(map(str, value))}")
        elif value is not None:
            words.append(f"--{name}={value}")
    parsed = parse(check_words("flags", words), environ, TABLES["submit"], PREFIXES)
    if parsed.question or parsed.program:
        raise UsageError(f"{', '.join(flags)}: --{parsed.question or parsed.program[0]} is not a flag of a job")
    return defaults("submit") | {name: setting.value for name, setting in parsed.settings.items()}


def prepare(
    command: Sequence[str],
    values: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    print_line: Callable[[str], None],
) -> tuple[SubmissionPlan, Scheduler]:
    """Make a plan of flags; write nothing yet.

    Args:
        command: What each rank runs.
        values: The value of every flag of submit.
        environ: The caller's.
        print_line: Gets the error of a scheduler that does not answer and is skipped.

    Returns:
        The plan, and the scheduler to submit it to.

    Raises:
        UsageError: All that is wrong with the request, one line each.
        QueryError: The scheduler does not answer.
    """
    words = check_command(command)
    above = home_to_write(values["dir"], environ)
    scheduler, facts = choose(values["scheduler"], above, environ, print_line=print_line)
    planned = plan(make_request(words, values, above), scheduler, facts)
    if names_programs(words):
        nodes = max(planned.layout.nodes, planned.layout.max_nodes)
        check_programs(planned.request.command, planned.request.run_options, nodes)
    if planned.request.run_options:
        _check_launch(planned)
    return planned, scheduler


def make_request(command: Sequence[str], values: Mapping[str, Any], above: str) -> JobRequest:
    """Freeze what the flags ask for.

    Args:
        command: What each rank runs.
        values: The value of every flag of submit.
        above: The directory of all jobs.

    Raises:
        UsageError: The working directory is not there, `--warn` comes before the start, no container runtime is, or
            `--run_options` are not infini-run's, or the job's own.
    """
    try:
        cwd = os.path.abspath(values["cwd"] or ".")
    except FileNotFoundError:
        raise UsageError("the current directory was removed; add --cwd=/DIR for the ranks") from None
    if not os.path.isdir(cwd):
        raise UsageError(f"--cwd={cwd} is not a directory")
    has_programs = names_programs(command)
    run_options = _with_whole_flag_files(values["run_options"])
    _check_run_options(
        run_options, spares=values["spares"], has_programs=has_programs, is_array=bool(values["array"])
    )
    if has_programs:
        if values["spares"]:
            raise UsageError(f"--spares={values['spares']}: conflicts with several programs; drop one of them")
        command = with_absolute_file(command, cwd)
    warn_signal, warn_s = values["warn"]
    if warn_s and values["time"] and warn_s >= values["time"]:
        raise UsageError(f"--warn: expected less than the limit of --time ({values['time']} s), not {warn_s} s")
    name = new_name()
    same = ("slots", "scheduler", "slots_per_node", "slot_type", "gpu_type", "tres", "gres", "layout", "single_node",
            "round_up", "spares", "pool", "account", "project", "cpus_per_slot", "options", "env",
            "array", "restarts", "max_timeouts", "title")  # fmt: skip
    return JobRequest(
        name=name,
        folder=os.path.join(above, name),
        command=tuple(command),
        cwd=cwd,
        run_options=run_options,
        python=values["python"] or find_python(),
        time_s=values["time"],
        mem_mb_per_slot=values["mem_per_slot"],
        container=_image(values),
        warn_s=warn_s,
        warn_signal=warn_signal,
        **{field: values[field] for field in same},
    )


def _with_whole_flag_files(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words with whole paths of flag files: the job reads them in another directory."""
    whole = []
    for before, word in zip(("", *words), words, strict=False):
        name, is_joined, path = word.partition("=")
        if is_joined and name.lstrip("-") == "flagfile":
            word = f"{name}={os.path.abspath(path)}"
        elif before.lstrip("-") == "flagfile":
            word = os.path.abspath(word)
        whole.append(word)
    return tuple(whole)


def _check_run_options(words: Sequence[str], *, spares: int, has_programs: bool, is_array: bool) -> None:
    """Raises UsageError: there is no such flag of infini-run, its value is wrong, or it is the job's own."""
    from infini_run.jobs.request.launch_words import CONSOLE, NO_DESCRIPTOR, OF_THE_JOB, ONE_FILE
    from infini_run.options.grammar import parse, quote
    from infini_run.options.table import TABLE

    try:
        parsed = parse([*words, "--"], {}, TABLE)
    except UsageError as error:
        raise UsageError(f"--run_options: {error}") from None
    if parsed.question:
        raise UsageError(f"--run_options: --{parsed.question}: starts no ranks; run infini-run --{parsed.question}")
    if parsed.program or "--" in words:  # the job's own flags come after these words
        word = parsed.program[0] if parsed.program else "--"
        raise UsageError(f"--run_options: {quote(word)} is not a flag of infini-run")
    problems = [
        f"--run_options: {setting.origin}: {OF_THE_JOB[name]}"
        for name, setting in parsed.settings.items()
        if name in OF_THE_JOB and not (name == "one_world" and has_programs)
    ]
    values = {name: setting.value for name, setting in parsed.settings.items()}
    others = {
        "events": NO_DESCRIPTOR if values.get("events", "").startswith(DESCRIPTOR) else "",
        "console": CONSOLE if values.get("console") == "inherit" else "",
        **{name: ONE_FILE for name in _OF_ONE_LAUNCH if is_array and values.get(name)},
    }
    problems += [f"--run_options: {parsed.settings[name].origin}: {why}" for name, why in others.items() if why]
    if spares and "keep_going" in parsed.settings and parsed.settings["keep_going"].value:
        problems.append(
            f"--spares={spares}: conflicts with --run_options=--keep_going: a failure ends all ranks, or none; "
            "drop one of them"
        )
    if problems:
        raise UsageError("\n".join(problems))


def _check_launch(planned: SubmissionPlan) -> None:
    """Read the flags of the launch as the job will. Raises UsageError: two of them conflict, or one has no effect."""
    from infini_run.jobs.request.launch_words import launch_words
    from infini_run.options.options import resolve

    request, layout = planned.request, planned.layout
    count = (layout.nodes or layout.max_nodes or 1) + request.spares
    hosts = [f"node{number}" for number in range(count)]  # the scheduler chooses them, and any are as good here
    try:
        asked = resolve(launch_words(request, layout.slots_per_node, hosts), {})
    except UsageError as error:
        raise UsageError(f"--run_options: {error}") from None
    idle = asked.without_effect.partition(": no effect here: ")[0]
    if idle:
        raise UsageError(f"--run_options: {idle}: no effect with --scheduler={request.scheduler}; drop it")
    if request.container is not None and asked.options is not None and asked.options.remote_python:
        raise UsageError(
            f"--run_options: --remote_python={asked.options.remote_python}: conflicts with --container; use "
            "--container_python"
        )


def _image(values: Mapping[str, Any]) -> Image | None:
    if not values["container"]:
        return None
    import shutil

    found = values["runtime"] or next((name for name in RUNTIMES if shutil.which(name)), "")
    if not found:
        raise UsageError(
            f"--container: none of {', '.join(RUNTIMES)} is on PATH; add --runtime=NAME for the runtime of the nodes"
        )
    return Image(
        name=values["container"],
        runtime=found,
        binds=values["bind"],
        options=values["container_options"],
        python=values["container_python"],
    )


def could_run(planned: SubmissionPlan, scheduler: Scheduler) -> None:
    """Check a plan with its scheduler. Raises SubmitError: as it is, the job could never run; QueryError."""
    why = check(planned, scheduler)
    if why:
        raise SubmitError("refused", f"--check: {scheduler.name} can never run this job: {why}")
