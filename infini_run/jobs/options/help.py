"""What `infini-job --help` and `infini-job VERB --help` print, out of the tables of flags."""

from __future__ import annotations

import textwrap

from infini_run.jobs.options.table import SUBMIT_GROUPS, VERBS
from infini_run.options.grammar import GRAMMAR
from infini_run.options.help import WIDTH, entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.options.grammar import Flag

SHORT = {
    "submit": "write a job down, hand it to a batch scheduler once, and say what it is called",
    "status": "how jobs are: those named, or all that have not ended",
    "list": "every job that was submitted from here",
    "logs": "what the ranks of a job, or of the newest, have written, merged and labelled",
    "cancel": "end jobs; their ranks have their grace",
    "forget": "remove the directories of jobs that have ended, or are LOST",
    "clusters": "the schedulers that are here, and what they have",
    "serve": "the same over HTTP at a Unix socket, for its owner alone, with a page",
}
USAGE = {
    "submit": "infini-job submit [flags] [--] program [args...]",
    "status": "infini-job status [flags] [JOB...]",
    "list": "infini-job list [flags]",
    "logs": "infini-job logs [flags] [JOB]",
    "cancel": "infini-job cancel JOB...",
    "forget": "infini-job forget JOB...",
    "clusters": "infini-job clusters [flags]",
    "serve": "infini-job serve --socket=PATH",
}
TITLES = {
    "slots": "What it needs",
    "scheduler": "Scheduler",
    "job": "Job",
    "container": "Container",
    "answer": "Answer",
    "flags": "Flags about flags",
}
GRAMMAR_TEXT = """\
--name=value and --name value, --name and --noname, one dash or two, - and _
are the same. A flag that is not given is taken from the variable INFINI_JOB_
and its name in capitals. Variables INFINI_RUN_... of the job's environment are
flags of infini-run, which runs its ranks.
"""
COMPLETION_TEXT = """\
infini-job --completion=bash|zsh|fish prints what makes this shell complete it;
--completion=install writes it to where your shells look for it.
"""
STATES_TEXT = """\
JOB is a name such as ir-7f3a91c2e4; ir-7f3a91c2e4.4 is task 4 of an array.
States: QUEUED, STARTING (nodes are there, not all of them ready), RUNNING,
WARNED (the limit is near), SUSPENDED, COMPLETED, FAILED (code, node and rank
of the first failure), CANCELLED, TIMEOUT, NODE_FAIL, OOM, PREEMPTED, LOST.
The time is that since the last change of the state: "for 5 min", "5 min ago".
"""
EXIT_CODES = """\
Exit code of submit --wait: that of the first rank to fail, 128+N for signal N;
143 (128 + TERM) where it reached its limit (TIMEOUT) or was cancelled;
1 where a job ended badly without one. Else 0; 2 for a request that makes no
sense; 1 where a scheduler did not take it or did not answer.
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


def help_text(verb: str) -> str:
    """Return the help of one verb, or of all for "". No line is longer than 79 columns."""
    if verb:
        groups = [*(SUBMIT_GROUPS if verb == "submit" else sorted({flag.group for flag in VERBS[verb]})), "flags"]
        about = textwrap.fill(f"{SHORT[verb][0].upper()}{SHORT[verb][1:]}.", WIDTH) + "\n"
        more = [EXIT_CODES] if verb == "submit" else [STATES_TEXT] if verb == "status" else []
        parts = [f"usage: {USAGE[verb]}\n", about, *(_section(verb, group) for group in groups), GRAMMAR_TEXT, *more]
        return "\n".join(parts).rstrip()
    lines = [
        "usage: infini-job VERB [flags] ...\n",
        "Submits jobs to Slurm, PBS or this machine, and watches them.\n",
    ]
    for name, text in SHORT.items():
        first, *rest = textwrap.wrap(text, WIDTH - 14)
        lines += [f"  {name:12}{first}", *(f"{'':14}{line}" for line in rest)]
    return "\n".join(
        [*lines, f"\ninfini-job VERB --help shows its flags.\n{COMPLETION_TEXT}", STATES_TEXT, EXIT_CODES, EXAMPLES]
    ).rstrip()


def flags_of(verb: str, group: str) -> tuple[Flag, ...]:
    return GRAMMAR if group == "flags" else tuple(flag for flag in VERBS[verb] if flag.group == group)


def _section(verb: str, group: str) -> str:
    return f"{TITLES[group]}:\n" + "".join(entry(flag) for flag in flags_of(verb, group))
