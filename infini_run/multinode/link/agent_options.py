"""The part of the head's options and environment that agents get."""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run.errors import UsageError
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.options.launch_options import Options


@record
class WorkerNeeds:
    """What workers need of each node where ranks are spawn servers, which start the workers.

    Args:
        gpus_per_proc: GPUs of each worker; 0: do not look at GPUs.
        nproc: how many workers, or gpu, cpu, auto.
        log_dir: of their logs; empty: they have none.
        environ: variables to add to their environment.
    """

    gpus_per_proc: int
    nproc: int | str
    log_dir: str
    environ: Mapping[str, str]


def working_directory() -> str:
    """Return the current directory. Raises UsageError if it is gone, or its path is unreadable."""
    try:
        return os.getcwd()
    except OSError as error:
        text = f"the current directory cannot be used: {error.strerror}; use an existing one"
        raise UsageError(text) from None


def options_of_agents(options: Options) -> Options:
    """Return the options of a node. Lines get labels, because they meet those of other nodes, unless
    --console=lines. The head folds equal lines itself."""
    from infini_run.plan.labels import is_colored

    is_folded = options.console == "fold"
    console = "prefix" if is_folded or options.console in ("auto", "inherit") else options.console
    colored = not is_folded and is_colored(options.color, (1, 2), os.own_environ())
    ours = {"engine": "local", "hosts": "", "hostfile": "", "report": "", "export": (), "trace": ""}
    ours |= {"events": "", "metrics": "", "termination_log": ""}
    ours["live"] = "on" if options.live == "on" else "off"
    ours["color"], timestamps = "always" if colored else "never", options.timestamps and not is_folded
    return replace(options, console=console, timestamps=timestamps, **ours)


def exported(patterns: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that --export names; a pattern may have * and ?."""
    if not patterns:
        return {}
    from fnmatch import fnmatchcase  # with the regular expressions that it needs

    return {name: value for name, value in environ.items() if any(fnmatchcase(name, each) for each in patterns)}
