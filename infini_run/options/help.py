"""The texts of --help and --helpfull, from the table of flags. Imported only for them.

The one rule: no line is longer than 79 columns.
"""

from __future__ import annotations

import textwrap

from infini_run.errors import UsageError
from infini_run.options.grammar import GRAMMAR, Flag, metavar, quote
from infini_run.options.hints import nearest, of_flag
from infini_run.options.options import USAGE
from infini_run.options.table import FLAGS, GROUPS, PREFIXES, TABLE, flag_of_variable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.options.grammar import Entry

WIDTH = 79
COLUMN = 28
_SHORT = 33

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
Write --name=value or --name value, --name or --noname, one dash or two, - or _
in a name. -- or the first word that is not a flag ends the flags; infini-run
reads nothing after the program. Without flag NAME, the variable
INFINI_RUN_NAME, then PET_NAME, sets it.
"""

EXIT_CODES = """\
Exit code: 0 if every rank exited 0; else that of the first rank to fail, or
128+N if signal N ended it; 126 or 127 if the program cannot be executed or
does not exist; 2 for an invalid request; 1 for an infini-run error, or if
--ready_timeout, --hang_timeout, or --progress_timeout stopped the job. After a
request to stop by signal N: 0 if every rank then exited 0, else 128+N.
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
  infini-run --nproc_per_node=gpu --standalone -m pkg.main  # one per GPU
  infini-run --nproc_per_node=8 --hosts=a,b ./train         # on hosts, by ssh
  infini-run --nproc_per_node=8 --engine=auto ./train       # in an allocation
  infini-run --nproc_per_node=4 --dry_run train.py          # show the plan
"""

END_OF_HELP = """\
--help FLAG explains one flag; --helpfull and the man page explain all, and the
exit codes. The variable INFINI_RUN_NAME sets --name; write _ for each -.
"""


def help_text() -> str:
    """Return the text of --help: what to type first, the flags of the first group, and the names of the others."""
    first, *others = (group for group in GROUPS if group != "torchrun")
    lines = [*map(_short_entry, _flags(first)), ""]
    explained = END_OF_HELP.split()  # --help and --helpfull
    for group in (*others, "flags"):
        names = " ".join(name for flag in _flags(group) if (name := f"--{flag.name}") not in explained)
        lines += textwrap.wrap(
            names, WIDTH, initial_indent=f"{group.capitalize():12}", subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join([f"usage: {USAGE}\n", FIRST_EXAMPLES, *lines, "", END_OF_HELP])


def full_help_text() -> str:
    """Return the text of --helpfull: usage, every flag by group with its default, and examples."""
    parts = [
        f"usage: {USAGE}\n",
        "Starts the ranks of a distributed training job, watches them, and stops\nthem.\n",
        *(f"{TITLES[group]}:\n" + "".join(map(entry, _flags(group))) for group in (*GROUPS, "flags")),
        GRAMMAR_TEXT,
        EXIT_CODES,
        EXAMPLES,
    ]
    return "\n".join(parts)


def flag_text(
    name: str,
    table: Mapping[str, Entry] = TABLE,
    prefix: str = PREFIXES[0].text,
    hint: Callable[[str], str] = of_flag,
    full_help: str = "infini-run --helpfull",
) -> str:
    """Return what --help FLAG prints: the flag, its values, its default, and its variable.

    Args:
        name: The flag, as somebody wrote it.
        table: The flags.
        prefix: How their variables begin.
        hint: Returns what to use in place of an unknown flag, or "".
        full_help: The command that prints all of them.

    Raises:
        UsageError: There is no such flag.
    """
    known = name.lstrip("-").replace("-", "_")
    if known not in table:
        near = nearest(known, table)
        advice = hint(known) or (f"did you mean --{near}?" if near else f"run {full_help}")
        raise UsageError(f"--help {quote(name)}: unknown flag; {advice}")
    flag = table[known][0]
    variable = flag_of_variable(prefix, flag.name, table)
    return entry(flag).rstrip("\n") + (f"\n{' ' * COLUMN}variable: {variable}" if variable else "")


def _short_entry(flag: Flag) -> str:
    """Return one line: the form of the flag, and the first clause of its help."""
    return f"  {usage(flag, is_short=True):{_SHORT}} {flag.help.partition(';')[0]}"


def _flags(group: str) -> list[Flag]:
    return [flag for flag in (*FLAGS, *GRAMMAR) if flag.group == group]


def entry(flag: Flag) -> str:
    """Return a flag's lines: its form, its effect, and its default."""
    left = "  " + usage(flag)
    lines = textwrap.wrap(explain(flag), WIDTH - COLUMN, break_on_hyphens=False, break_long_words=False)
    if len(left) > COLUMN - 2:
        lines = ["", *lines]
    firsts = [left] + [""] * (len(lines) - 1)
    return "".join(f"{first:{COLUMN}}{line}".rstrip() + "\n" for first, line in zip(firsts, lines, strict=True))


def usage(flag: Flag, *, is_short: bool = False) -> str:
    """Return the form of the flag: its short name, its name, and torchrun's.

    Args:
        flag: The flag.
        is_short: Leave out the other names, and --no.
    """
    if is_short:
        return f"--{flag.name}" if flag.bare else f"--{flag.name}={metavar(flag)}"
    short = "".join(f"-{name}, " for name in flag.aliases if len(name) == 1)
    long = "".join(f", --{name}" for name in flag.aliases if len(name) > 1)
    if flag.bare is None:
        return f"{short}--{flag.name}={metavar(flag)}{long}"
    value = f"[={metavar(flag)}]" if flag.metavar else ""
    return f"{short}--[no]{flag.name}{value}{long}"


def explain(flag: Flag) -> str:
    """Return what a flag does, and its default."""
    if flag.group == "flags" or flag.help.startswith(("ignored: ", "refused: ")):
        return flag.help
    return f"{flag.help} (default: {flag.shown or flag.default})"
