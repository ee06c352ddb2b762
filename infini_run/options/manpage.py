"""The man page infini-run(1), out of the table of flags: the same words as --help, in man(7)'s language.

The rule: no word of the text can be a request of roff; escape() says how.
"""

from __future__ import annotations

import textwrap

from infini_run.options.grammar import GRAMMAR, Flag
from infini_run.options.help import EXAMPLES, EXIT_CODES, GRAMMAR_TEXT, TITLES, explain, usage
from infini_run.options.options import USAGE
from infini_run.options.table import FLAGS, GROUPS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 64  # of the source, before anything is escaped

_DESCRIPTION = """\
Starts the processes of a distributed training job, watches them, and stops them: nothing that the job has
started outlives it, and the first process to fail is named. Every process gets its ranks and the rendezvous endpoint
in its environment, under the names of infini_run and of torchrun.
"""

_ENVIRONMENT = """\
Each process finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT and the others
of torchrun(1); NNODES, NPROC_PER_NODE, GLOBAL_PROC_RANK, LOCAL_PROC_RANK and PROC_WORLD_SIZE; INFINI_RUN_ID, which is
unique to the launch; NOTIFY_SOCKET, for sd_notify(3). INFINI_RUN_NAME and PET_NAME in the environment of infini-run
stand for the flag NAME.
"""

_SIGNALS = """\
INT, QUIT and TERM stop the job, and kill it the second time. HUP, WINCH and CONT go to every rank's process group,
TSTP stops all, and every other signal goes to each rank's own process. When infini-run itself is killed, the job ends
with it.
"""


def man_page(version: str) -> str:
    """Return the whole page as roff. version: of infini-run."""
    sections = [
        ("NAME", "infini\\-run \\- launches, watches and takes down a distributed training job\n"),
        ("SYNOPSIS", f".B infini\\-run\n{escape(USAGE.partition(' ')[2])}\n"),
        ("DESCRIPTION", paragraph(_DESCRIPTION) + ".PP\n" + paragraph(GRAMMAR_TEXT)),
        ("OPTIONS", "".join(_group(name) for name in (*GROUPS, "flags"))),
        ("ENVIRONMENT", paragraph(_ENVIRONMENT)),
        ("SIGNALS", paragraph(_SIGNALS)),
        ("EXIT STATUS", paragraph(EXIT_CODES.partition(": ")[2])),
        ("EXAMPLES", _examples()),
        ("SEE ALSO", ".BR srun (1),\n.BR mpirun (1),\n.BR sd_notify (3)\n"),
    ]
    return page("infini-run", version, sections)


def page(command: str, version: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return the roff of a page. sections: pairs of a title and what is below it."""
    head = '.\\" Made from the table of flags by share/generate.py.\n'
    head += f'.TH {escape(command.upper())} 1 "" "infini\\-run {escape(version)}"\n'
    return head + "".join(f".SH {title}\n{text}" for title, text in sections)


def escape(text: str) -> str:
    """Escape a text for roff. It would change a backslash and four ASCII letters (groff_char(7)), and take a line
    that begins with a control character for a command."""
    for letter, name in (("\\", "\\e"), ("-", "\\-"), ("'", "\\(aq"), ("`", "\\(ga"), ("^", "\\(ha"), ("~", "\\(ti")):
        text = text.replace(letter, name)
    return "\n".join("\\&" + line if line.startswith(".") else line for line in text.split("\n"))


def paragraph(text: str) -> str:
    """Return a paragraph; roff fills it, so the lines of the source may break anywhere."""
    return escape(textwrap.fill(text, _WIDTH, break_on_hyphens=False, break_long_words=False)) + "\n"


def _group(name: str) -> str:
    flags = GRAMMAR if name == "flags" else [flag for flag in FLAGS if flag.group == name]
    return f'.SS "{escape(TITLES[name])}"\n' + "".join(entry(flag) for flag in flags)


def entry(flag: Flag) -> str:
    """Return a flag's entry: its form, and its effect."""
    text = explain(flag)
    return f".TP\n.B {escape(usage(flag))}\n{paragraph(text[0].upper() + text[1:] + '.')}"


def _examples() -> str:
    return f".nf\n{escape(EXAMPLES.partition(chr(10))[2])}.fi\n"
