"""Flags that have no effect in this launch, in words: those about other nodes, and those of a flag that is missing.
Pure.

No flag loses its effect in silence. The reader of a flag rejects what conflicts with it. One line reports what merely
does nothing here, because a script may give the same flags everywhere. That line is about the command line only: a
variable or a file of flags may be meant for other launches. A host program gives flags one by one, and gets an error.
"""

from __future__ import annotations

from infini_run.options.grammar import COMMAND_LINE
from infini_run.options.table import DEFAULTS, ENGINES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.options.grammar import Setting

LOCAL, PEER = "local", "peer"  # one launcher for itself; one of several that a token joins
_BY_TCP = ("slurm", "pbs", "mpi", PEER)
_AT: dict[str, tuple[str, ...]] = {  # where a flag has an effect
    "ssh_config": ("ssh",),
    "remote_python": ENGINES,
    "link_port": _BY_TCP,
    "link_address": _BY_TCP,
    "join_timeout": (*ENGINES, PEER),
    "node_timeout": (*ENGINES, PEER),
    "node_check": (*ENGINES, PEER),
    "node_check_timeout": (*ENGINES, PEER),
    "export": (*ENGINES, PEER, "auto"),
    "console": (LOCAL, "auto"),
}
_NEEDS = {"metrics_interval": ("metrics", "FILE"), "preload_timeout": ("preload", "NAMES")}
NAMES = frozenset((*_AT, *_NEEDS))


def ineffective_flags(given: Mapping[str, Setting], place: str, *, is_one_of_several: bool) -> str:
    """Return a sentence about those that have no effect; empty if all have one.

    Args:
        place: LOCAL, PEER, auto, or an engine.
        is_one_of_several: there are other nodes, and no token.
    """
    idle = [given[name].origin for name, places in _AT.items() if place not in places and _is_asked(name, given)]
    parts = [f"{', '.join(idle)}: no effect here: {_why(given, place, is_one_of_several)}"] if idle else []
    for name, (other, form) in _NEEDS.items():
        if _is_asked(name, given) and (other not in given or not given[other].value):
            parts.append(f"{given[name].origin}: no effect here: add --{other}={form}")
    return "; ".join(parts)


def _is_asked(name: str, given: Mapping[str, Setting]) -> bool:
    """Return whether a flag counts; of --console only what lets ranks write past infini-run."""
    if name not in given or given[name].precedence != COMMAND_LINE:
        return False
    value = given[name].value
    return bool(value == "inherit") if name == "console" else bool(value != DEFAULTS[name])


def _why(given: Mapping[str, Setting], place: str, is_one_of_several: bool) -> str:
    if place in (LOCAL, "auto") and is_one_of_several:
        return "without INFINI_RUN_TOKEN each launcher runs alone"
    if place == LOCAL:
        return "there is only one node; add --hosts=a,b for others"
    if place == "auto":
        return "there is only one node"
    if given.get("console") is not None and given["console"].value == "inherit":
        return "the head writes the lines of several nodes, marked [host:rank]"
    if place == "ssh":
        return "the link goes over ssh, without a port"
    if place == PEER:
        return "this launcher reaches no node"
    return f"{place} reaches the nodes"
