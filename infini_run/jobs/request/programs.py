"""Several programs as the command of a job: words of infini-run, from --program or --programs on.

They are checked when the job is submitted, for as many nodes as it gets; the devices of each node once it runs.
"""

from __future__ import annotations

import os

from infini_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_FLAGS = ("program", "programs")


def names_programs(command: Sequence[str]) -> bool:
    """Return whether a command is a list of programs, and no program with its arguments."""
    word = command[0] if command else ""
    return word.startswith("-") and word.lstrip("-").partition("=")[0] in _FLAGS


def with_absolute_file(command: Sequence[str], cwd: str) -> tuple[str, ...]:
    """Return a list of programs with the absolute path of its file, if it has one.

    Args:
        command: The words, from --program or --programs on.
        cwd: The directory of the job.
    """
    from infini_run.options.grammar import parse
    from infini_run.options.table import TABLE

    parsed = parse(command, {}, TABLE)
    if "programs" not in parsed.settings:
        return tuple(command)
    return f"--programs={os.path.join(cwd, parsed.settings['programs'].value)}", *parsed.program


def check_programs(command: Sequence[str], run_options: Sequence[str], nodes: int) -> None:
    """Check a list of programs.

    Args:
        command: The words, from --program or --programs on.
        run_options: The other flags of infini-run.
        nodes: How many nodes the job gets.

    Raises:
        UsageError: One line with what was given and what is allowed.
    """
    from infini_run.options.grammar import parse
    from infini_run.options.options import resolve
    from infini_run.options.programs import OF_ONE
    from infini_run.options.table import TABLE

    for name, setting in parse(command, {}, TABLE).settings.items():
        if name not in OF_ONE and name not in _FLAGS:
            raise UsageError(f"{setting.origin}: a flag of the job; use --run_options={setting.origin}")
    if resolve([*run_options, f"--hosts=node[1-{nodes}]", *command], {}).options is None:
        raise UsageError(f"{' '.join(command)}: starts no ranks; run infini-run for an answer")
