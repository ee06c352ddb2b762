"""The reference pages of the documentation that come from the tables of flags, and the list of decisions."""

from __future__ import annotations

import re
from pathlib import Path

from keywords import COMMAND_ONLY, SUBMIT_COMMAND_ONLY, python_type

from infini_run.jobs.options import help as job_help
from infini_run.jobs.options.table import SUBMIT_GROUPS, VERBS
from infini_run.options.grammar import GRAMMAR, Flag
from infini_run.options.help import TITLES, usage
from infini_run.options.table import FLAGS, GROUPS

NOTE = "<!-- Made from the table of flags by share/generate.py. -->\n"
_FLAG = re.compile(r"(?<![\w-])--(\[no\])?([a-z][a-z_-]*)(=[^\s,;)]*[^\s,;:).])?")
_VARIABLE = re.compile(r"(?<![\w`/=])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?:=\w+)?|\b[A-Z]+=\w+")
_CODE = re.compile(r"(`[^`]*`)")

_COMMAND_HEAD = """\
# Flags of infini-run

```text
infini-run [flags] [--] program [args...]
```

`--name=value` and `--name value` are the same; so are one dash and two, and `-` and `_` in a name. `--noname` turns a
boolean off. The first word that is not a flag, or `--`, ends the flags: what follows belongs to the program.
There are no abbreviations.

The value comes from the first of these sources that has one: the command line with its flag files, the variable
`INFINI_RUN_<NAME>`, the variable `PET_<NAME>`, the cluster environment with [`--engine=auto`](#--engine), and the
default. If the command line has a flag twice, the last one counts.

In Python, a flag whose entry has a Python type is a keyword argument of that name ([of which
functions](keywords.md)). There, variables such as `INFINI_RUN_<NAME>` have no effect.

A flag without a variable in its entry counts only on the command line.
"""
_JOB_HEAD = """\
# Flags of infini-job

The grammar is that of [infini-run](infini-run.md). An absent flag takes its value from the variable
`INFINI_JOB_<NAME>`. Variables `INFINI_RUN_<NAME>` of the job's environment set flags of infini-run, which starts the
ranks of the job.

If the command line has a flag twice, the last one counts. But `--bind`, `--container_options`, `--env`, `--options`,
and `--run_options` add up.
"""
_DECISIONS_HEAD = """\
# Decisions

Each page has a decision that a reader of the code would question: context, choice, consequence.

| | |
|---:|---|
"""


def command_page() -> str:
    """docs/reference/infini-run.md"""
    linked = {flag.name for flag in (*FLAGS, *GRAMMAR)}
    parts = [NOTE + _COMMAND_HEAD]
    for group in (*GROUPS, "flags"):
        flags = GRAMMAR if group == "flags" else [flag for flag in FLAGS if flag.group == group]
        parts.append(f"## {TITLES[group]}\n")
        parts += [
            _entry(flag, linked, "INFINI_RUN_", flag.has_variable, _keyword(flag, COMMAND_ONLY)) for flag in flags
        ]
    return "\n".join(parts)


def job_page() -> str:
    """docs/reference/infini-job.md"""
    parts, seen = [NOTE + _JOB_HEAD], set[str]()
    linked = {flag.name for flags in VERBS.values() for flag in flags}
    for verb, flags in VERBS.items():
        about = job_help.SHORT[verb]
        parts.append(f"## infini-job {verb}\n\n```text\n{job_help.USAGE[verb]}\n```\n")
        parts.append(_text(f"{about[0].upper()}{about[1:]}.", linked) + "\n")
        groups = SUBMIT_GROUPS if verb == "submit" else ("",)
        for group in groups:
            parts += [f"### {job_help.TITLES[group]}\n"] if group else []
            for flag in flags:
                if group in ("", flag.group):
                    python = _keyword(flag, SUBMIT_COMMAND_ONLY) if verb == "submit" else ""
                    suffix = f" of {verb}" if flag.name in seen else ""
                    parts.append(_entry(flag, linked, "INFINI_JOB_", flag.has_variable, python, suffix))
                    seen.add(flag.name)
    return "\n".join(parts)


def decisions_page(folder: Path) -> str:
    """docs/decisions/README.md"""
    lines = []
    for path in sorted(folder.glob("[0-9]*.md")):
        title = path.read_text().partition("\n")[0].lstrip("# ").strip()
        number, _, words = title.partition(" ")
        lines.append(f"| {number.rstrip('.:')} | [{words}]({path.name}) |")
    return _DECISIONS_HEAD + "\n".join(lines) + "\n"


def _keyword(flag: Flag, left_out: set[str]) -> str:
    if flag.name in left_out or flag.group == "flags" or flag.help.startswith(("ignored", "refused")):
        return ""
    return f"`{flag.name}: {python_type(flag)}`"


def _entry(flag: Flag, linked: set[str], prefix: str, has_variable: bool, python: str, suffix: str = "") -> str:
    text = _text(flag.help[0].upper() + flag.help[1:] + ".", linked)
    has_value = not flag.help.startswith(("ignored", "refused")) and flag.group != "flags"
    facts = [f"`{usage(flag)}`"]
    facts += [f"default `{_default(flag)}`"] if has_value else []
    facts += [f"variable `{prefix}{flag.name.upper()}`"] if has_variable else []
    facts += [f"Python {python}"] if python else []
    return f"### `--{flag.name}`{suffix}\n\n{text}\n\n{' · '.join(facts)}\n"


def _default(flag: Flag) -> str:
    return flag.shown or str(flag.default)


def _text(text: str, linked: set[str]) -> str:
    """Prose of the table as Markdown: flags and variables as code, each flag with a link to its own entry."""

    def flag(match: re.Match[str]) -> str:
        code = f"`{match[0]}`"
        return f"[{code}](#--{match[2]})" if match[2] in linked else code

    pieces = _CODE.split(_FLAG.sub(flag, text))
    for at in range(0, len(pieces), 2):
        pieces[at] = _VARIABLE.sub(lambda match: f"`{match[0]}`", _plain(pieces[at]))
    return "".join(pieces)


def _plain(text: str) -> str:
    return re.sub(r"<(\w[\w ]*)>", r"&lt;\1&gt;", text).replace("*", "\\*")
