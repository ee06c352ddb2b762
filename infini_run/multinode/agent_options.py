"""The part of the head's options and environment that agents get."""

from __future__ import annotations

from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.options.options import Options


def options_of_agents(options: Options) -> Options:
    """Return the options of a node. Lines get labels, because they meet those of other nodes, unless
    --console=lines."""
    console = "prefix" if options.console in ("auto", "inherit") else options.console
    ours = {"engine": "local", "hosts": "", "hostfile": "", "report": "", "export": (), "trace": ""}
    ours["live"] = "on" if options.live == "on" else "off"
    return replace(options, console=console, **ours)


def exported(patterns: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that --export names; a pattern may have * and ?."""
    from fnmatch import fnmatchcase

    return {name: value for name, value in environ.items() if any(fnmatchcase(name, each) for each in patterns)}
