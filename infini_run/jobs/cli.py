"""The command `infini-job`: a verb and its args in, an exit code out."""

from __future__ import annotations

import _signal as signal
import os
import sys

from infini_run.errors import InfiniRunError, UsageError, counted
from infini_run.jobs.lines import drop_stream, print_answer, print_line
from infini_run.jobs.options.table import (
    ALL_FLAGS,
    OF_A_RANK,
    OTHER_VARIABLES,
    PREFIXES,
    TABLES,
    VERBS,
    defaults,
)
from infini_run.lean_os import drop_coerced_locale
from infini_run.options.grammar import parse, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.folder.records import Submission
    from infini_run.jobs.scheduler import Scheduler

_HELP = ("help", "helpfull", "h")
# What other programs call a command
_SAME = {"ls": "list", "ps": "list", "stop": "cancel", "kill": "cancel", "rm": "forget", "run": "submit"}
_REMOVAL_S = 600.0  # of a directory with all that is in it, at most
_SUBMITS_OWN = frozenset(("slots", "slots_per_node", "slot_type", "cpus_per_slot", "mem_per_slot", "single_node"))


def main() -> None:
    """Do what the arguments say, and end with its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide the exit codes of children
    _open_closed_streams()
    sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # a path may have any bytes
    drop_coerced_locale()
    try:
        code = run(sys.argv[1:], dict(os.environ))
        sys.stdout.flush()
    except InfiniRunError as error:
        for line in str(error).splitlines():
            print_line(line)
        code = error.exit_code
    except BrokenPipeError:  # the reader of logs has enough
        drop_stream(1)
        code = 0
    except OSError as error:  # of a job's directory: the disk is full, or may only be read
        print_line(f"{error.filename or 'the output'}: {error.strerror}")
        if not error.filename:
            drop_stream(1)
        code = 1
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open /dev/null as stdin, stdout, and stderr that the caller closed: no other file gets their numbers."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: fd
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Raises InfiniRunError: what is wrong, one line each."""
    if not argv or argv[0].lstrip("-") in _HELP:
        return _help(next((word for word in argv[1:2] if word in VERBS), ""))
    verb = argv[0]
    if verb.startswith("-") and verb.lstrip("-").partition("=")[0] == "completion":
        return _completion(argv, environ)
    if verb.startswith("-") and verb.lstrip("-") != "version":
        argv = _verb_first(argv)
        verb = argv[0]
    if verb.lstrip("-") == "version":
        from importlib.metadata import version

        return _print(f"infini-job {version('infini-run')}")
    if verb not in VERBS:
        from infini_run.options.hints import nearest

        near = _SAME.get(verb) or nearest(verb, VERBS)
        hint = f"did you mean {near}?" if near else f"use {', '.join(VERBS)}"
        raise UsageError(f"unknown command {quote(verb)}; {hint}")
    values, args, question = _read(verb, argv[1:], environ)
    if question:
        return _help(verb, "".join(args) if question == "help" else "")
    _warn_of_variables(environ)
    if verb == "submit" and args:
        _warn_of_late_flag(list(argv), args)
    return int(_DO[verb](values, args, environ))


def _verb_first(argv: Sequence[str]) -> list[str]:
    """Move the verb to the front. Flags may precede it: it is the first word with its name that is no value of a
    flag."""
    for verb in VERBS:
        try:
            program = parse(argv, {}, TABLES[verb]).program
        except UsageError:
            continue
        if program[:1] == (verb,):
            return [verb, *argv[: len(argv) - len(program)], *program[1:]]
    for at, word in enumerate(argv):
        if word in VERBS:  # its own error says what is wrong before it
            return [word, *argv[:at], *argv[at + 1 :]]
    text = f"{quote(argv[0])}: missing command before the flag; use {', '.join(VERBS)}"
    raise UsageError(text + ("; for the version, use --version" if argv[0] == "-V" else ""))


def _read(verb: str, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...], str]:
    """Return the flags; the other words; the flag that asks for help, or "". Then the words are the flag that the
    question is about. A word ends the flags of submit only: the program."""
    values: dict[str, Any] = defaults(verb)
    args: list[str] = []
    rest, programs = _split_programs(argv) if verb == "submit" else (tuple(argv), ())
    environ = {name: text for name, text in environ.items() if name not in OF_A_RANK}
    while True:
        parsed = parse(rest, environ, TABLES[verb], PREFIXES, _hint_of_flag if verb == "submit" else None)
        if parsed.question:
            subject = parsed.subject or "".join(parsed.program[:1])
            return values, (subject,) if "=" not in subject else (), parsed.question
        first = not args
        values |= {name: s.value for name, s in parsed.settings.items() if first or s.precedence == 0}
        if verb == "submit" or not parsed.program:
            return values, (*args, *(parsed.program if verb == "submit" else ()), *programs), ""
        args.append(parsed.program[0])
        rest = parsed.program[1:]


def _split_programs(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of a submission, and those of its programs, which begin with --program or --programs."""
    from infini_run.jobs.request.programs import names_programs

    for at, word in enumerate(argv):
        if names_programs((word,)):
            try:
                program = parse(argv[:at], {}, TABLES["submit"], PREFIXES).program
            except UsageError:  # the word is a flag's value, or the flags are wrong
                continue
            if program or "--" in argv[:at]:
                break
            return tuple(argv[:at]), tuple(argv[at:])
    return tuple(argv), ()


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    """Of variables that set no flag of any command."""
    from infini_run.options.table import unknown_variables

    prefix = PREFIXES[0].text
    names = unknown_variables(environ, prefix, ALL_FLAGS, OTHER_VARIABLES)
    if names:
        from infini_run.options.notices import of_variables

        print_line(of_variables(names, prefix, ALL_FLAGS, "infini-job submit"))


def _warn_of_late_flag(argv: Sequence[str], program: Sequence[str]) -> None:
    from infini_run.jobs.request.programs import names_programs
    from infini_run.options.options import find_late_flag

    if names_programs(program):
        return
    if ":" in program:
        from infini_run.options.notices import of_colon

        line = of_colon(program, os.environ)
        if line:
            print_line(line)
            return
    late = find_late_flag(argv, program, _SUBMITS_OWN)
    if late:
        from infini_run.options.hints import of_late_flag

        print_line(of_late_flag(program, late, "infini-job"))


def _hint_of_flag(name: str) -> str:
    from infini_run.jobs.options.hints import of_flag

    return of_flag(name)


def _help(verb: str, name: str = "") -> int:
    from infini_run.jobs.options.help import help_text

    return _print(help_text(verb, name))


def _completion(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return the shell of `--completion=SHELL` or `--completion SHELL`, and nothing else."""
    from infini_run.jobs.options.completion import script
    from infini_run.options.install_completion import SHELLS, install_completion

    name, equals, shell = argv[0].partition("=")
    rest = list(argv[1:])
    if not equals and rest:
        shell = rest.pop(0)
    if rest or shell not in (*SHELLS, "install"):
        raise UsageError(f"{quote(' '.join(argv))}: expected bash, zsh, fish, or install; use {name}=bash")
    if shell != "install":
        return _print(script(shell).rstrip("\n"))
    lines, code = install_completion("infini-job", script, environ)
    _print("\n".join(lines))
    return code


def _print(text: str) -> int:
    print_answer(text)
    return 0


def _print_json(content: object) -> int:
    import json

    return _print(json.dumps(content, indent=1))


# ---- submit


def _submit(values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.job import Job
    from infini_run.jobs.prepare import could_run, prepare
    from infini_run.jobs.submit import submit

    if not args:
        raise UsageError("missing program; use infini-job submit [flags] [--] program [args...]")
    planned, scheduler = prepare(args, values, environ, print_line=print_line)
    if planned.layout.remark:
        print_line(planned.layout.remark)
    _warn_of_program(args, values, environ)
    if values["print"]:
        print_answer(planned.text, end="")
    if values["check"]:
        could_run(planned, scheduler)
        if scheduler.name == "pbs":
            print_line(
                "PBS cannot check a script before it runs; infini-job checked the nodes, and they have what the "
                "job requests"
            )
        else:
            print_line(f"{scheduler.name} can run this job")
    if values["print"] or values["check"]:
        return 0
    folder, order = submit(planned, scheduler, environ, print_line=print_line)
    try:
        _print_submitted(folder, order, scheduler, as_json=values["json"])
    except OSError as error:
        drop_stream(1)
        raise InfiniRunError(f"the output: {error.strerror}; submitted job {order.name}") from None
    if not values["wait"]:
        return 0
    from infini_run.jobs.progress import wait

    return wait(Job(folder, scheduler))


def _warn_of_program(program: Sequence[str], values: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Warn if the program is missing. The job would report this only in its turn. The nodes may differ from here, so
    this rejects nothing."""
    from infini_run.jobs.request.programs import names_programs

    if values["container"] or values["run_options"] or values["env"]:  # then something else may be meant, or found
        return
    if names_programs(program):
        return
    from infini_run.errors import NotExecutable, ProgramMissing
    from infini_run.plan.program import find_command

    try:
        find_command(program, environ, cwd=values["cwd"])
    except (ProgramMissing, NotExecutable) as error:
        print_line(f"on this machine, {error}")
    except UsageError:  # no Python is known here; the job has one, by --python
        pass


def _print_submitted(folder: JobDir, order: Submission, scheduler: Scheduler, *, as_json: bool) -> None:
    from infini_run.jobs.tables import short_id

    if as_json:
        answer = {"name": order.name, "scheduler": scheduler.name, "id": folder.id, "folder": folder.path}
        shape = {"nodes": order.nodes, "slots_per_node": order.slots_per_node, "array": order.request.array}
        _print_json({**answer, **shape, "pool": order.pool})
    else:
        what = {"slurm": "partition", "pbs": "queue"}.get(scheduler.name, "")
        pool = f"  {what} {order.pool}" if order.pool and what else ""
        logs = f"logs: infini-job logs -f {order.name}"
        _print(f"job {order.name}  {scheduler.name} {short_id(folder.id)}  {order.whole_shape}{pool}   {logs}")


# ---- looking


def _status(values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    """Show the status of these jobs; without names, of those that have not finished."""
    from infini_run.jobs.job import find_jobs
    from infini_run.jobs.tables import statuses_text

    problems: list[str] = []
    found = find_jobs(args, dir=values["dir"], problem=problems.append)
    for text in problems:
        print_line(text)
    code = 1 if args and problems else 0
    shown = [status for status in found if args or not status.is_final]
    if values["json"]:
        _print_json([status.to_json() for status in shown])
    elif shown:
        _print(statuses_text(shown, is_long=True))
    elif not args:
        more = f"; run infini-job list to see {counted(len(found), 'finished job')}" if found else ""
        _print(f"no job is waiting or running{more}")
    return code


def _list(values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.job import find_jobs
    from infini_run.jobs.tables import statuses_text

    _refuse_args("list", args)
    problems: list[str] = []
    found = find_jobs(dir=values["dir"], problem=problems.append)
    for text in problems:
        print_line(text)
    if values["json"]:
        return _print_json([status.to_json() for status in found])
    if not found:
        return 0 if problems else _print(f"no jobs in this directory{_of_others(values, environ)}")
    return _print(statuses_text(found, is_long=False))


def _of_others(values: dict[str, Any], environ: Mapping[str, str]) -> str:
    """Return which jobs there belong to others, who alone can read them; "" without any."""
    from infini_run.jobs.folder.job_store import home, owners

    others = ", ".join(f"{count} of {user}" for user, count in owners(home(values["dir"], environ)).items())
    return others and f" are yours; only its owner can read a job ({others})"


def _logs(values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.folder.job_store import find_folder, home
    from infini_run.jobs.folder.task import tasks_of
    from infini_run.jobs.progress import SilenceReporter
    from infini_run.jobs.schedulers.detect_scheduler import scheduler_of
    from infini_run.jobs.status.logs import blocks, last_lines, narrow, scheduler_log
    from infini_run.jobs.status.status_query import query_status

    above = home(values["dir"], environ)
    named = find_folder(above, _one("logs", args)) if args else _newest(above)
    folder, tasks = narrow(named, values["task"])
    out = sys.stdout.buffer
    if values["scheduler_log"]:
        if values["follow"] or values["rank"] != -1 or values["node"] or values["attempt"] >= 0:
            raise UsageError("--scheduler_log: shows the whole job once; drop --follow, --rank, --node, --attempt")
        out.write(last_lines(scheduler_log(folder, tasks), values["tail"]))
        return 0
    scheduler = scheduler_of(folder.read_submission(), above, environ) if values["follow"] else None
    silence = SilenceReporter(tasks, print_line)
    chosen = {name: values[name] for name in ("rank", "node", "attempt", "tail")}
    for block in blocks(folder, scheduler, **chosen, tasks=tasks, changed=silence.explain):
        out.write(block)
        out.flush()
    if scheduler is None and any(not one.attempts() for one in tasks_of(folder, tasks) or (folder,)):
        silence.explain(query_status([folder], lambda order: scheduler_of(order, above, environ))[0])
    return 0


def _ask_ranks(verb: str, values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    """Ask the launch of a running job, as infini-run --top and others do."""
    from infini_run.jobs.folder.job_store import find_folder, home
    from infini_run.jobs.running_job import ask_job
    from infini_run.jobs.schedulers.detect_scheduler import scheduler_of
    from infini_run.jobs.status.status_query import query_status

    above = home(values["dir"], environ)
    folder = find_folder(above, _one(verb, args))
    status = query_status([folder], lambda order: scheduler_of(order, above, environ))[0]
    return ask_job(verb, folder.read_submission().request, status, values.get("ranks"), environ)


def _newest(above: str) -> JobDir:
    """Return the job that was submitted last. Raises UsageError without one."""
    from infini_run.jobs.job import all_folders

    found = all_folders(above, print_line)
    if not found:
        raise UsageError("missing job name, and no jobs in this directory; use infini-job logs ir-0123456789")
    print_line(f"showing logs of {found[-1].name}, the newest job")
    return found[-1]


def _cancel(values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.job import find_job
    from infini_run.jobs.request.array import split

    if not args:
        raise UsageError("missing job name; use infini-job cancel ir-0123456789, or run infini-job list")
    code = 0
    for name in dict.fromkeys(args):  # the trouble of one is not another's
        try:
            job = find_job(name, dir=values["dir"])
            if name != split(name)[0] and split(name)[0] in args:
                continue  # its array ends it: asked twice, the task would lose its grace
            if not job.cancel():
                print_line(f"job {job.name} already finished: {job.status().headline}")
        except InfiniRunError as error:
            print_line(f"{name}: {error}" if len(args) > 1 and name not in str(error) else str(error))
            code = code or error.exit_code
        except OSError as error:  # its directory cannot be written
            print_line(f"{error.filename}: {error.strerror}")
            code = code or 1
    return code


def _forget(values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    """Forget jobs, with one query for all of them to each scheduler. One wrong name keeps all."""
    from infini_run.jobs.folder.job_store import home
    from infini_run.jobs.job import find_folders, find_jobs, forget, refuse_task
    from infini_run.jobs.status.each_job import for_each, kept

    if not args:
        raise UsageError("missing job name; use infini-job forget ir-0123456789, or run infini-job list")
    above = home(values["dir"], environ)
    problems: list[str] = []
    folders = {folder.name: folder for folder in find_folders(above, args, problems.append)}
    for folder in folders.values():
        refuse_task(folder)
    found = find_jobs(list(folders), dir=values["dir"], problem=problems.append) if folders else []
    done = for_each(
        found, lambda status: forget(folders[status.name], status), lambda status: status.folder, _REMOVAL_S
    )
    codes = [1] * len(problems) + [one.exit_code for one in done if isinstance(one, InfiniRunError)]
    kept(done, problems.append)
    for text in problems:
        print_line(text)
    return max(codes, default=0)


def _clusters(values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.folder.job_store import home
    from infini_run.jobs.schedulers.detect_scheduler import facts_of, find_schedulers
    from infini_run.jobs.tables import facts_text

    _refuse_args("clusters", args)
    found = [(scheduler, facts_of(scheduler)) for scheduler in find_schedulers(home(values["dir"], environ), environ)]
    if values["json"]:
        return _print_json([facts.to_json() for _, facts in found])
    for scheduler, facts in found:
        _print(facts_text(scheduler, facts))
    return 0


def _serve(values: dict[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.folder.job_store import home_to_write

    _refuse_args("serve", args)
    if not values["socket"]:
        raise UsageError("missing --socket; use infini-job serve --socket=$XDG_RUNTIME_DIR/infini-job.sock")
    try:
        from infini_run.jobs.serve.service import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "infini_run":
            raise
        raise UsageError(f"infini-job serve: needs {error.name}; run pip install 'infini-run[serve]'") from None
    return serve(values["socket"], home_to_write(values["dir"], environ), environ)


def _one(verb: str, args: Sequence[str]) -> str:
    if len(args) != 1:
        raise UsageError(
            f"infini-job {verb}: expected one job; use infini-job {verb} ir-0123456789, or run infini-job list"
        )
    return args[0]


def _refuse_args(verb: str, args: Sequence[str]) -> None:
    if args:
        raise UsageError(f"infini-job {verb}: expected only flags, not {quote(args[0])}")


_DO = {
    "submit": _submit,
    "status": _status,
    "list": _list,
    "logs": _logs,
    "top": lambda values, args, environ: _ask_ranks("top", values, args, environ),
    "follow": lambda values, args, environ: _ask_ranks("follow", values, args, environ),
    "stacks": lambda values, args, environ: _ask_ranks("stacks", values, args, environ),
    "cancel": _cancel,
    "forget": _forget,
    "clusters": _clusters,
    "serve": _serve,
}
