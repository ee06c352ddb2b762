"""What agents get of the options and of the environment of the head."""

from __future__ import annotations

from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.options.options import Options


def options_of_agents(options: Options) -> Options:
    """What a node is told: its own part. Output is labelled where it meets that of others, unless --console=lines."""
    console = "prefix" if options.console in ("auto", "inherit") else options.console
    ours = {"engine": "local", "hosts": "", "hostfile": "", "report": "", "export": (), "trace": ""}
    ours["live"] = "on" if options.live == "on" else "off"
    return replace(options, console=console, **ours)


def exported(patterns: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ours that --export names; * and ? stand for any."""
    from fnmatch import fnmatchcase

    return {name: value for name, value in environ.items() if any(fnmatchcase(name, each) for each in patterns)}
