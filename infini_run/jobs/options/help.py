"""Texts of `infini-job --help` and `infini-job VERB --help`, from the tables of flags."""

from __future__ import annotations

import textwrap

from infini_run.jobs.options.hints import of_flag
from infini_run.jobs.options.table import PREFIXES, SUBMIT_GROUPS, TABLES, VERBS
from infini_run.options.grammar import GRAMMAR
from infini_run.options.help import WIDTH, entry, flag_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.options.grammar import Flag

SHORT = {
    "submit": "submit a job and print its name",
    "status": "show the named jobs, or all unfinished ones",
    "list": "list all jobs in the directory of jobs",
    "logs": "print what the ranks of a job wrote, merged and labeled; by default the newest job",
    "top": "show the ranks of a running job in a table; q ends the view",
    "follow": "print the lines that ranks of a running job write from now on",
    "stacks": "print the stacks of the ranks of a running job",
    "cancel": "stop jobs; their ranks get their grace",
    "forget": "remove the directories of jobs that finished or are LOST",
    "clusters": "list the available schedulers and what they have",
    "serve": "serve jobs over HTTP at a Unix socket, with a page, for their owner alone",
}
USAGE = {
    "submit": "infini-job submit [flags] [--] program [args...]",
    "status": "infini-job status [flags] [JOB...]",
    "list": "infini-job list [flags]",
    "logs": "infini-job logs [flags] [JOB]",
    "top": "infini-job top [flags] JOB",
    "follow": "infini-job follow [flags] JOB",
    "stacks": "infini-job stacks [flags] JOB",
    "cancel": "infini-job cancel [flags] JOB...",
    "forget": "infini-job forget [flags] JOB...",
    "clusters": "infini-job clusters [flags]",
    "serve": "infini-job serve [flags] --socket=PATH",
}
TITLES = {
    "slots": "Size",
    "scheduler": "Scheduler",
    "job": "Job",
    "container": "Container",
    "answer": "Output",
    "flags": "Flags about flags",
}
GRAMMAR_TEXT = """\
--name=value and --name value are the same, and so are one dash or two, - and
_. A switch is --name or --noname. The variable INFINI_JOB_SLOTS sets --slots,
and so on, if the command line does not. Variables INFINI_RUN_... of the job's
environment set flags of infini-run, which starts the ranks of the job.
"""
COMPLETION_TEXT = """\
infini-job --completion=bash|zsh|fish prints a completion script for a shell;
--completion=install writes scripts to where your shells look for them.
"""
STATES_TEXT = """\
JOB is a name such as ir-7f3a91c2e4; ir-7f3a91c2e4.4 is task 4 of an array.
States: QUEUED, STARTING (it has nodes, but not all are ready), RUNNING, WARNED
(the limit is near), SUSPENDED, COMPLETED, FAILED (with code, node, and rank of
the first failure), CANCELLED, TIMEOUT, NODE_FAIL, OOM, PREEMPTED, LOST.
The time is counted from the last change of state: "for 5 min", "5 min ago".
"""
EXIT_CODES = """\
Exit code of submit --wait: that of the first rank to fail, 128+N for signal N;
143 (128 + TERM) if the job reached its limit (TIMEOUT), or was canceled after
it began; 85 if --max_timeouts ended it; 1 if it failed without a code, or was
canceled before it began. Otherwise 0; 2 for an invalid request; 1 if the
scheduler rejected the job or did not respond.
"""
EXAMPLES = """\
Examples:
  infini-job submit --slots=16 --slots_per_node=8 --time=4h -- python train.py
  infini-job submit --scheduler=local --slots=2 --wait -- python train.py
  infini-job submit --slots=16 --warn=5m --restarts=3 --print -- ./train
  infini-job submit --array=0-9%3 -- sh -c './train --seed=$INFINI_JOB_TASK'
  infini-job logs -f ir-7f3a91c2e4
  infini-job logs --task=4 --rank=0 ir-7f3a91c2e4
  infini-job status --json
"""


def help_text(verb: str, name: str = "") -> str:
    """Return the help of one verb, or of all for "". No line is longer than 79 columns.

    Args:
        verb: The command.
        name: One of its flags, to show that alone; "": all.

    Raises:
        UsageError: There is no such flag.
    """
    if verb and name:
        hint = of_flag if verb == "submit" else _no_hint
        return flag_text(name, TABLES[verb], PREFIXES[0].text, hint, f"infini-job {verb} --help")
    if verb:
        groups = [*(SUBMIT_GROUPS if verb == "submit" else sorted({flag.group for flag in VERBS[verb]})), "flags"]
        about = textwrap.fill(f"{SHORT[verb][0].upper()}{SHORT[verb][1:]}.", WIDTH) + "\n"
        more = [EXIT_CODES] if verb == "submit" else [STATES_TEXT] if verb == "status" else []
        parts = [f"usage: {USAGE[verb]}\n", about, *(_section(verb, group) for group in groups), GRAMMAR_TEXT, *more]
        return "\n".join(parts).rstrip()
    lines = [
        "usage: infini-job VERB [flags] ...\n",
        "Submit jobs to Slurm, PBS, or this machine, and watch them.\n",
    ]
    for name, text in SHORT.items():
        first, *rest = textwrap.wrap(text, WIDTH - 14)
        lines += [f"  {name:12}{first}", *(f"{'':14}{line}" for line in rest)]
    return "\n".join(
        [
            *lines,
            f"\nFor the flags of a command, run infini-job VERB --help.\n{COMPLETION_TEXT}",
            STATES_TEXT,
            EXIT_CODES,
            EXAMPLES,
        ]
    ).rstrip()


def _no_hint(name: str) -> str:
    return ""


def flags_of(verb: str, group: str) -> tuple[Flag, ...]:
    return GRAMMAR if group == "flags" else tuple(flag for flag in VERBS[verb] if flag.group == group)


def _section(verb: str, group: str) -> str:
    return f"{TITLES[group]}:\n" + "".join(entry(flag) for flag in flags_of(verb, group))
