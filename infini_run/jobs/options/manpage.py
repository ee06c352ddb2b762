"""The man page infini-job(1), out of the tables of flags: the same words as --help, in man(7)'s language."""

from __future__ import annotations

from infini_run.jobs.options.help import (
    COMPLETION_TEXT,
    EXAMPLES,
    EXIT_CODES,
    GRAMMAR_TEXT,
    SHORT,
    STATES_TEXT,
    TITLES,
    USAGE,
    flags_of,
)
from infini_run.jobs.options.table import SUBMIT_GROUPS, VERBS
from infini_run.options.manpage import entry, escape, page, paragraph

_DESCRIPTION = """\
infini-job describes a distributed training job by its slots, writes a script for Slurm or PBS, and submits it.
It then reports the state of the job, what its ranks write, and which rank failed first and how. There is no daemon,
and nothing needs root: a job is a directory. On the nodes, infini-run(1) starts, watches, and stops the ranks.
"""
_FILES = """\
~/.infini-run/jobs has a directory per job, which only its owner can read: request.json, job.sh, env, id, exit,
and per run 0/log, 0/phase, 0/first_failure, and 0/report.json. Each task of an array has its own, in task/K.
"""
_ENVIRONMENT = """\
INFINI_JOB_SLOTS sets --slots, and so on. Ranks get INFINI_JOB_NAME, INFINI_JOB_ATTEMPT (the number of the run, from
0), and INFINI_JOB_FOLDER. Those of an array also get INFINI_JOB_TASK and INFINI_JOB_TASKS, the index of their task
and the number of tasks; INFINI_JOB_NAME then names the task. A job gets all variables of the shell that submits it,
except those of schedulers (SLURM_, SBATCH_, SRUN_, SALLOC_, PBS_) and those that name devices.
"""


def man_page(version: str) -> str:
    """Return the whole page as roff. version: of infini-run."""
    sections = [
        ("NAME", "infini\\-job \\- submit distributed training to Slurm, PBS, or this machine, and watch it\n"),
        ("SYNOPSIS", ".br\n".join(f".B {escape(text)}\n" for text in USAGE.values())),
        ("DESCRIPTION", paragraph(_DESCRIPTION) + ".PP\n" + paragraph(GRAMMAR_TEXT)),
        (
            "COMMANDS",
            "".join(f".TP\n.B {name}\n{paragraph(text + '.')}" for name, text in SHORT.items())
            + ".PP\n"
            + paragraph(COMPLETION_TEXT),
        ),
        ("OPTIONS OF SUBMIT", "".join(_group("submit", name) for name in (*SUBMIT_GROUPS, "flags"))),
        ("OTHER OPTIONS", "".join(_others(verb) for verb in VERBS if verb != "submit")),
        ("STATES", paragraph(STATES_TEXT)),
        ("ENVIRONMENT", paragraph(_ENVIRONMENT)),
        ("FILES", paragraph(_FILES)),
        ("EXIT STATUS", paragraph(EXIT_CODES)),
        ("EXAMPLES", f".nf\n{escape(EXAMPLES.partition(chr(10))[2])}.fi\n"),
        ("SEE ALSO", ".BR infini\\-run (1),\n.BR sbatch (1),\n.BR qsub (1)\n"),
    ]
    return page("infini-job", version, sections)


def _group(verb: str, name: str) -> str:
    return f'.SS "{escape(TITLES[name])}"\n' + "".join(entry(flag) for flag in flags_of(verb, name))


def _others(verb: str) -> str:
    return f'.SS "{verb}"\n' + "".join(entry(flag) for flag in VERBS[verb])
