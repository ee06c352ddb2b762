"""What --help (one screen) and --helpfull say, out of the table of flags. Imported only when somebody asks.

The one rule: no line is longer than 79 columns.
"""

from __future__ import annotations

import textwrap

from infini_run.options.grammar import GRAMMAR, Flag, metavar
from infini_run.options.options import USAGE
from infini_run.options.table import FLAGS, GROUPS

WIDTH = 79
COLUMN = 28

TITLES = {
    "job": "Job",
    "program": "Program",
    "where": "Where",
    "membership": "Nodes that come and go",
    "devices": "Devices",
    "output": "Output",
    "ending": "Ending",
    "seeing": "Seeing",
    "torchrun": "torchrun's other flags",
    "flags": "Flags about flags",
}

GRAMMAR_TEXT = """\
--name=value and --name value, --name and --noname, one dash or two, - and _
are the same. -- or the first word that is not a flag ends the flags; nothing
after the program is read. A flag NAME that is not given is taken from the
variable INFINI_RUN_NAME, then PET_NAME.
"""

EXIT_CODES = """\
Exit code: 0 when every process exited 0; else that of the first one to fail,
128+N if signal N ended it; 126 or 127 when the program cannot be executed or
is not there; 2 for a request that makes no sense; 1 for a failure of our own,
and for a job that we stopped for --ready_timeout or --hang_timeout. When we
were told to stop by signal N: 0 if every process then exited 0, else 128+N.
"""

EXAMPLES = """\
Examples:
  infini-run --nproc_per_node=8 train.py --lr=1e-3
  infini-run --standalone --nproc_per_node=gpu -m package.train
  infini-run --nnodes=2 --node_rank=0 --rdzv_endpoint=node0:29500 \\
      --nproc_per_node=8 --log_dir=logs train.py     # the same on node 1
  infini-run --nproc_per_node=4 --ranks_on_console=0 -- ./train --steps 10
  infini-run --flagfile=job.flags --dry_run train.py
"""


FIRST_EXAMPLES = """\
  infini-run --nproc_per_node=8 train.py --lr=1e-3          # eight ranks here
  infini-run --nproc_per_node=gpu --standalone -m pkg.main  # one for each GPU
  infini-run --nproc_per_node=8 --hosts=a,b ./train         # on hosts, by ssh
  infini-run --nproc_per_node=8 --engine=auto ./train       # in an allocation
  infini-run --nproc_per_node=4 --dry_run train.py          # show the plan
"""

END_OF_HELP = """\
--helpfull and the man page explain each flag, and the exit codes. The variable
INFINI_RUN_NAME sets --name; --name=value is --name value, and - in it is _.
"""


def help_text() -> str:
    """The text of --help: on one screen, what to type first, and the names of all flags but torchrun's own."""
    lines = []
    for group in (*(group for group in GROUPS if group != "torchrun"), "flags"):
        names = " ".join(f"--{flag.name}" for flag in _flags(group))
        lines += textwrap.wrap(
            names, WIDTH, initial_indent=f"{group.capitalize():12}", subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join([f"usage: {USAGE}\n", FIRST_EXAMPLES, *lines, "", END_OF_HELP])


def full_help_text() -> str:
    """The text of --helpfull: usage, every flag by group with its default, examples."""
    parts = [
        f"usage: {USAGE}\n",
        "Starts the processes of a distributed training job, watches them, and takes\nthem down.\n",
        *(f"{TITLES[group]}:\n" + "".join(map(entry, _flags(group))) for group in (*GROUPS, "flags")),
        GRAMMAR_TEXT,
        EXIT_CODES,
        EXAMPLES,
    ]
    return "\n".join(parts)


def _flags(group: str) -> list[Flag]:
    return [flag for flag in (*FLAGS, *GRAMMAR) if flag.group == group]


def entry(flag: Flag) -> str:
    """A flag's lines: how it is written, what it does, its default."""
    left = "  " + usage(flag)
    lines = textwrap.wrap(explain(flag), WIDTH - COLUMN, break_on_hyphens=False, break_long_words=False)
    if len(left) > COLUMN - 2:
        lines = ["", *lines]
    firsts = [left] + [""] * (len(lines) - 1)
    return "".join(f"{first:{COLUMN}}{line}".rstrip() + "\n" for first, line in zip(firsts, lines, strict=True))


def usage(flag: Flag) -> str:
    """How the flag is written: its short name, its own, and torchrun's."""
    short = "".join(f"-{name}, " for name in flag.aliases if len(name) == 1)
    long = "".join(f", --{name}" for name in flag.aliases if len(name) > 1)
    if flag.bare is None:
        return f"{short}--{flag.name}={metavar(flag)}{long}"
    value = f"[={metavar(flag)}]" if flag.metavar else ""
    return f"{short}--[no]{flag.name}{value}{long}"


def explain(flag: Flag) -> str:
    if flag.group in ("flags", "torchrun") and not flag.help.startswith("honoured"):
        return flag.help
    return f"{flag.help} (default: {flag.shown or flag.default})"
