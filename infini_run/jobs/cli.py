"""The command `infini-job`: a verb and its words in, an exit code out."""

from __future__ import annotations

import _signal as signal
import os
import sys
import time

from infini_run.errors import InfiniRunError, UsageError, printable
from infini_run.jobs.options.table import OF_A_RANK, PREFIXES, TABLES, VERBS, defaults
from infini_run.options.grammar import parse, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.jobs.job import Job
    from infini_run.jobs.schedulers.scheduler import Facts, Kind, Scheduler
    from infini_run.jobs.status import Status

_ASK = ("help", "helpfull", "h")
_OUTSIDE = 3  # lines of the scheduler's that are shown
_COMMAND = 40  # characters of one that are listed


def main() -> None:
    """Do what the words say, and end with its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave no exit code of what we start
    try:
        code = run(sys.argv[1:], dict(os.environ))
        sys.stdout.flush()
    except InfiniRunError as error:
        for line in str(error).splitlines():
            print(f"infini-job: {printable(line)}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:  # who reads us has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except OSError as error:  # of a job's directory: the disk is full, or may only be read
        print(f"infini-job: {printable(str(error.filename or 'the output'))}: {error.strerror}", file=sys.stderr)
        code = 1
    sys.exit(code)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Raises InfiniRunError: what is wrong, one line each."""
    if not argv or argv[0].lstrip("-") in _ASK:
        return _help("")
    verb = argv[0]
    if verb.startswith("-") and verb.lstrip("-") != "version":
        argv = _verb_first(argv)
        verb = argv[0]
    if verb.lstrip("-") == "version":
        from importlib.metadata import version

        return _print(f"infini-job {version('infini-run')}")
    if verb not in VERBS:
        from infini_run.options.spelling import nearest

        near = nearest(verb, VERBS)
        hint = f"the nearest is {near}" if near else f"there are {', '.join(VERBS)}"
        raise UsageError(f"{quote(verb)} is nothing that infini-job does; {hint}")
    values, words, question = _read(verb, argv[1:], environ)
    if question:
        return _help(verb)
    return int(_DO[verb](values, words, environ))


def _verb_first(argv: Sequence[str]) -> list[str]:
    """Flags may stand before the verb: a word that is one, and no value of a flag of that verb."""
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
    raise UsageError(f"{quote(argv[0])} is a flag, but of what? give a verb: {', '.join(VERBS)}")


def _read(verb: str, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...], bool]:
    """The flags; what is no flag; whether help was asked for. A word ends the flags of submit only: the program."""
    values: dict[str, Any] = defaults(verb)
    words: list[str] = []
    rest = tuple(argv)
    environ = {name: text for name, text in environ.items() if name not in OF_A_RANK}
    while True:
        parsed = parse(rest, environ, TABLES[verb], PREFIXES)
        if parsed.question:
            return values, (), True
        first = not words
        values |= {name: s.value for name, s in parsed.settings.items() if first or s.level == 0}
        if verb == "submit" or not parsed.program:
            return values, (*words, *(parsed.program if verb == "submit" else ())), False
        words.append(parsed.program[0])
        rest = parsed.program[1:]


def _help(verb: str) -> int:
    from infini_run.jobs.options.help import help_text

    return _print(help_text(verb))


def _print(text: str) -> int:
    print(text, flush=True)
    return 0


def _print_json(content: object) -> int:
    import json

    return _print(json.dumps(content, indent=1))


# ---- submit


def _submit(values: dict[str, Any], words: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.job import Job, could_run, prepare
    from infini_run.jobs.submit import submit

    planned, scheduler = prepare(words, values, environ, say=_say)
    if planned.layout.remark:
        _say(planned.layout.remark)
    if values["print"]:
        print(planned.text, end="")
    if values["check"]:
        could_run(planned, scheduler)
        if scheduler.name == "pbs":
            _say("pbs says nothing beforehand: no more is known than that its nodes have what is asked for")
        else:
            _say(f"{scheduler.name} could run it")
    if values["print"] or values["check"]:
        return 0
    folder, order = submit(planned, scheduler, environ, say=_say)
    if values["json"]:
        said = {"name": order.name, "scheduler": scheduler.name, "id": folder.id, "folder": folder.path}
        shape = {"nodes": order.nodes, "slots_per_node": order.slots_per_node, "array": order.request.array}
        _print_json({**said, **shape, "pool": order.pool})
    else:
        what = {"slurm": "partition", "pbs": "queue"}.get(scheduler.name, "")
        pool = f"  {what} {order.pool}" if order.pool and what else ""
        logs = f"logs: infini-job logs -f {order.name}"
        _print(f"job {order.name}  {scheduler.name} {_short(folder.id)}  {order.whole_shape}{pool}   {logs}")
    return _wait(Job(folder, scheduler)) if values["wait"] else 0


def _short(id_: str) -> str:
    """Of a process its number is enough for people."""
    return id_.partition("@")[0].partition(".")[0] if "@" in id_ else id_


def _wait(job: Job) -> int:
    """A line that lives, where there is a terminal; else one for each state."""
    from infini_run.jobs.job import is_hopeless

    is_live = sys.stderr.isatty()
    said = ""

    def changed(status: Status) -> None:
        nonlocal said
        text = f"{status.name}  {status.headline}" + (f"  ({status.news})" if status.news else "")
        if is_hopeless(status):
            text += f": {status.advice or status.reason}"
        if text == said or (status.is_final and is_live):
            return
        said = text
        print(f"\r\033[K{printable(text)}" if is_live else printable(text), file=sys.stderr, flush=True,
              end="" if is_live else "\n")  # fmt: skip

    status = job.wait(changed=changed)
    if is_live:
        print("\r\033[K", end="", file=sys.stderr)
    print(printable(_sentence(status)), flush=True)
    for text in _outside(status):
        print(f"  {printable(text)}", flush=True)
    return status.exit_code


def _sentence(status: Status) -> str:
    """`FAILED 7 node2 rank 5: rank 5 on node2 failed: exit code 7 (...)`."""
    return status.headline + (f": {status.reason}" if status.reason else "")


# ---- looking


def _status(values: dict[str, Any], words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Of these jobs; of none: of those that have not ended."""
    from infini_run.jobs.job import find_jobs

    found = find_jobs(words, dir=values["dir"], problem=_say)
    if values["json"]:
        return _print_json([status.to_json() for status in found if words or not status.is_final])
    shown = [status for status in found if words or not status.is_final]
    if not shown:
        more = f"; infini-job list shows {len(found)} that have ended" if found else ""
        return _print(f"no job waits or runs{more}")
    return _show(shown, is_long=True)


def _list(values: dict[str, Any], words: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.job import find_jobs

    _refuse_words("list", words)
    found = find_jobs(dir=values["dir"], problem=_say)
    if values["json"]:
        return _print_json([status.to_json() for status in found])
    return _show(found, is_long=False) if found else _print("no job was ever submitted from here")


def _show(found: Sequence[Status], *, is_long: bool) -> int:
    rows = [row for status in found for row in (_rows(status) if is_long else [_row(status)])]
    if is_long:
        found = [one for status in found for one in (status, *status.tasks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for status, row in zip(found, rows, strict=True):
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        print(printable(line.rstrip()))
        if is_long:
            for text in _details(status):
                print(f"  {printable(text)}")
    sys.stdout.flush()
    return 0


def _row(status: Status) -> tuple[str, ...]:
    from infini_run.jobs.submit import shown_command

    command = shown_command(status.command)
    if len(command) > _COMMAND:
        command = command[: _COMMAND - 3] + "..."
    since = _ago(time.time() - status.since_s)
    return status.name, status.headline, since, f"{status.scheduler} {_short(status.id)}", status.shape, command


def _rows(status: Status) -> list[tuple[str, ...]]:
    """An array, and each of its tasks: what they have in common is not said again."""
    return [_row(status), *((*_row(task)[:4], "", "") for task in status.tasks)]


def _ago(seconds: float) -> str:
    for unit, each_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= each_s:
            return f"{seconds / each_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _outside(status: Status) -> list[str]:
    """What the scheduler itself has said of a job that ended badly, where no rank is to blame: its last lines."""
    from infini_run.jobs.job_dir import JobDir
    from infini_run.jobs.status import said_outside

    status = next((task for task in status.tasks if task.task == status.task), status)
    if not status.is_final or status.rank >= 0 or status.state in ("COMPLETED", "CANCELLED", "LOST"):
        return []
    lines = [line for line in dict.fromkeys(said_outside(JobDir(status.folder))) if line not in status.reason]
    return [f"{status.scheduler}: {line}" for line in lines[-_OUTSIDE:]]


def _details(status: Status) -> list[str]:
    if status.tasks:  # each tells its own
        return []
    found = []
    if (status.is_final and status.reason) or status.state == "LOST":
        found.append(status.reason)
    found += _outside(status)
    if status.advice:
        found.append(f"{status.hold}: {status.advice}")
    if status.attempt > 0:
        found.append(f"attempt {status.attempt}, after {status.attempt} restart{'s' * (status.attempt > 1)}")
    if status.news:
        found.append(f"no news: {status.news}")
    return found


def _logs(values: dict[str, Any], words: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.detect_scheduler import scheduler_of
    from infini_run.jobs.job_store import find_folder, home
    from infini_run.jobs.logs import blocks, narrow, scheduler_log
    from infini_run.jobs.status import query_status
    from infini_run.jobs.task import tasks_of

    above = home(values["dir"], environ)
    folder, tasks = narrow(find_folder(above, _one("logs", words)), values["task"])
    out = sys.stdout.buffer
    if values["scheduler_log"]:
        if values["follow"] or values["rank"] >= 0 or values["node"] or values["attempt"] >= 0:
            raise UsageError(
                "--scheduler_log is of the whole job, as it is now: give no --follow, --rank, --node, --attempt"
            )
        out.write(scheduler_log(folder, tasks))
        return 0
    scheduler = scheduler_of(folder.read_order(), above, environ) if values["follow"] else None
    silence = _Silence(tasks)
    chosen = {name: values[name] for name in ("rank", "node", "attempt")}
    for block in blocks(folder, scheduler, **chosen, tasks=tasks, changed=silence.explain):
        out.write(block)
        out.flush()
    if scheduler is None and any(not one.attempts() for one in tasks_of(folder, tasks) or (folder,)):
        silence.explain(query_status([folder], lambda order: scheduler_of(order, above, environ))[0])
    return 0


class _Silence:
    """Prints why a job, or a task, whose log is read has nothing to show; each reason once."""

    def __init__(self, tasks: Sequence[int]) -> None:
        self._tasks = tasks
        self._said = ""
        self._lost: set[str] = set()

    def explain(self, status: Status) -> None:
        """status: the latest, of the job or the array."""
        for one in status.tasks or (status,):
            is_chosen = not self._tasks or one.task in self._tasks
            if one.state == "LOST" and is_chosen and one.name not in self._lost:
                self._lost.add(one.name)
                _say(f"{one.name} is LOST: {one.reason}")
        text = ""
        has_begun = bool(status.tasks) and status.attempt >= 0  # of an array some task always waits
        if status.state == "QUEUED" and not status.is_final and not has_begun:
            text = f"{status.name} waits in the queue"
            text += f": {status.reason}" if status.reason else ""
            text += f" ({status.hold}: {status.advice})" if status.advice else ""
        elif status.state == "SUSPENDED":
            text = f"{status.name} is suspended by {status.scheduler}"
        if text and text != self._said:
            _say(text)
        self._said = text


def _cancel(values: dict[str, Any], words: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.array import split
    from infini_run.jobs.job import find_job

    if not words:
        raise UsageError("which job? infini-job cancel ir-0123456789; infini-job list shows yours")
    code = 0
    # each once: a task of an array that ends as well would be asked twice, and lose its grace
    names = [name for name in dict.fromkeys(words) if name == split(name)[0] or split(name)[0] not in words]
    for name in names:  # the trouble of one is not another's
        try:
            find_job(name, dir=values["dir"]).cancel()
        except InfiniRunError as error:
            _say(f"{name}: {error}" if len(words) > 1 and name not in str(error) else str(error))
            code = code or error.exit_code
    return code


def _forget(values: dict[str, Any], words: Sequence[str], environ: Mapping[str, str]) -> int:
    """One query for all of them, of each scheduler. Nothing is removed where a name is wrong."""
    from infini_run.jobs.job import find_jobs, forget, refuse_task
    from infini_run.jobs.job_store import find_folder, home

    if not words:
        raise UsageError("which job? infini-job forget ir-0123456789; infini-job list shows yours")
    above = home(values["dir"], environ)
    folders = {name: find_folder(above, name) for name in words}
    for folder in folders.values():
        refuse_task(folder)
    code = 0
    for status in find_jobs(list(folders), dir=values["dir"]):
        try:
            forget(folders[status.name], status)
        except InfiniRunError as error:
            _say(str(error))
            code = code or error.exit_code
    return code


def _clusters(values: dict[str, Any], words: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.detect_scheduler import ask, find_schedulers
    from infini_run.jobs.job_store import home

    _refuse_words("clusters", words)
    found = [(scheduler, ask(scheduler)) for scheduler in find_schedulers(home(values["dir"], environ), environ)]
    if values["json"]:
        return _print_json([{**vars(facts), "pools": [_plain(pool) for pool in facts.pools]} for _, facts in found])
    for scheduler, facts in found:
        _show_facts(scheduler, facts)
    return 0


def _plain(value: Any) -> Any:
    """A record as JSON has it."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in vars(value).items()} if hasattr(value, "_fields") else value


def _show_facts(scheduler: Scheduler, facts: Facts) -> None:
    from infini_run.jobs.schedulers.scheduler import Kind

    if facts.news:
        print(printable(f"{scheduler.name} does not answer: {facts.news}"))
        return
    about = [f"{scheduler.name} {facts.version}"]
    about += [f"select/{facts.select}"] if facts.select else []
    about.append("GPUs as a resource" if facts.has_gres else "no GPUs as a resource")
    if scheduler.name == "slurm":
        about.append("accounting" if facts.has_accounting else "no accounting")
    if scheduler.name == "pbs":
        about.append("history" if facts.has_history else "no history")
    print(printable(", ".join(about)))
    for pool in facts.pools:
        kinds = pool.kinds or (Kind(nodes=pool.nodes, cpus=pool.cpus_per_node, gpus=pool.gpus_per_node),)
        limit = f", up to {_ago(pool.limit_s)}" if pool.limit_s else ""
        default = " (default)" if pool.is_default else ""
        print(printable(f"  {pool.name}{default}: {', '.join(map(_kind, kinds))}{limit}"))


def _kind(kind: Kind) -> str:
    """`2 nodes x 8 gpus (a100) x 64 cpus`."""
    types = ", ".join(f"{count} {name}" if len(kind.gpu_types) > 1 else name for name, count in kind.gpu_types)
    gpus = f"{kind.gpus} gpus" + (f" ({types})" if types else "")
    nodes = f"{kind.nodes} node{'s' * (kind.nodes != 1)}"
    return " x ".join([nodes, *([gpus] if kind.gpus else []), f"{kind.cpus} cpus"])


def _serve(values: dict[str, Any], words: Sequence[str], environ: Mapping[str, str]) -> int:
    from infini_run.jobs.job_store import home

    _refuse_words("serve", words)
    if not values["socket"]:
        raise UsageError("where? infini-job serve --socket=$XDG_RUNTIME_DIR/infini-job.sock")
    try:
        from infini_run.jobs.serve.service import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "infini_run":
            raise
        raise UsageError(f"serve needs {error.name}: pip install 'infini-run[serve]'") from None
    return serve(values["socket"], home(values["dir"], environ), environ)


def _one(verb: str, words: Sequence[str]) -> str:
    if len(words) != 1:
        raise UsageError(f"infini-job {verb} is about one job: infini-job {verb} ir-0123456789; infini-job list")
    return words[0]


def _refuse_words(verb: str, words: Sequence[str]) -> None:
    if words:
        raise UsageError(f"infini-job {verb} takes flags only, not {quote(words[0])}")


def _say(text: str) -> None:
    print(f"infini-job: {printable(text)}", file=sys.stderr, flush=True)


_DO = {
    "submit": _submit,
    "status": _status,
    "list": _list,
    "logs": _logs,
    "cancel": _cancel,
    "forget": _forget,
    "clusters": _clusters,
    "serve": _serve,
}
