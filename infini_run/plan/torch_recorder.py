"""The variables with which torch's Flight Recorder can be asked for a dump at a hang. Pure.

Of ProcessGroupNCCL.hpp and FlightRecorder.hpp, torch 2.5 to 2.13: each rank makes the pipe PREFIX<rank>.pipe, and
writes a dump to PREFIX<rank> once something is written into the pipe.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.options.launch_options import Options

_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the first one wins, and an older torch
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # reads the second alone
_ENTRIES = "2000"  # torch's default, where it has one


def is_wanted(options: Options) -> bool:
    """Return whether a hang is looked for, and with a look at the ranks."""
    return bool(options.hang_timeout_s or options.progress_timeout_s) and options.snapshots != "off"


def recorder_variables(
    options: Options, folder: str, dumps: str, environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return what ranks get, unless the user has set it.

    Args:
        options: What the user asked for.
        folder: The launch's folder. Empty: there is none, so no pipes are made.
        dumps: The folder for dumps: that of the logs, else the launch's, which goes at its end. Empty: as `folder`.
        environ: The environment of the ranks.
    """
    if not folder or not is_wanted(options):
        return ()
    found = []
    if not any(name in environ for name in _SIZE):
        found.append((_SIZE[1], _ENTRIES))
    if not any(name in environ for name in _DUMP):
        found += [(name, f"{dumps or folder}/torch_trace_") for name in _DUMP]
    if _PIPE not in environ:
        found.append((_PIPE, f"{folder}/torch_"))
    return tuple(found)


def recorder_prefixes(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the prefixes of pipes and dumps of ranks with this environment. None: no rank can be asked."""
    dump = next((environ[name] for name in _DUMP if environ.get(name)), "")
    pipe = environ.get(_PIPE, "")
    return (pipe, dump) if pipe[:1] == dump[:1] == "/" else None
