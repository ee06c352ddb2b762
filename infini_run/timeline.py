"""When each rank ran and how it ended, out of --report files or, where there is none, of what lies in a --log_dir.

Files come from disk and may hold anything: what is no report of ours is refused with a sentence.
"""

from __future__ import annotations

import json
import os

from infini_run.error_file import read_error_file
from infini_run.errors import UsageError, printable
from infini_run.kind import number
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_LARGEST = 1 << 28  # bytes of a report that are read
_LATEST_S = 1e11  # of the epoch
_HOW = "give the FILE of --report=FILE or the DIR of --log_dir=DIR, of a launch that has ended"


@record
class Bar:
    """One rank's life, in seconds since the epoch; None: not known. end: how it ended: `exit 3`, `SIGSEGV`, ...

    kind: done, failed, stopped (by us), or unknown. is_first: the first failure of its attempt.
    """

    rank: int
    start_s: float
    end_s: float
    kind: str
    end: str = ""
    ready_s: float | None = None
    is_first: bool = False


@record
class Timeline:
    """What there is to draw. what: where it comes from, in words."""

    title: str
    bars: tuple[Bar, ...]


def read_timeline(paths: Sequence[str]) -> Timeline:
    """Of one launch: a report, or a folder of logs; of several nodes, one of each. Raises UsageError."""
    if not paths:
        raise UsageError(f"--plot draws what has run: {_HOW}")
    parts = [_read(path) for path in paths]
    bars = sorted((bar for part in parts for bar in part.bars), key=lambda bar: (bar.rank, bar.start_s))
    if not bars:
        raise UsageError(f"{printable(paths[0])} tells of no rank that was started; {_HOW}")
    return Timeline(title=parts[0].title, bars=tuple(bars))


def _read(path: str) -> Timeline:
    """The border: whatever the file system refuses further in comes out here as one sentence."""
    try:
        if not os.path.isdir(path):
            return _from_report(path, _load(path))
        report = _newest_report(path)
        return _from_report(*report) if report else _from_logs(path)
    except OSError as error:
        name = printable(os.fsdecode(error.filename or path))
        raise UsageError(f"--plot: {name} cannot be read: {error.strerror}; {_HOW}") from None


def _newest_report(folder: str) -> tuple[str, dict[str, Any]] | None:
    """The newest file there that is one, with what is in it."""
    with os.scandir(folder) as entries:
        found = [(e.stat().st_mtime, e.path) for e in entries if e.name.endswith(".json") and e.is_file()]
    for _, path in sorted(found, reverse=True):
        try:
            return path, _load(path)
        except (UsageError, OSError):
            continue
    return None


def _load(path: str) -> dict[str, Any]:
    name = printable(path)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_LARGEST))
    except (ValueError, RecursionError):
        raise UsageError(f"--plot: {name} is no report of infini-run; {_HOW}") from None
    if not isinstance(content, dict) or not isinstance(content.get("ranks"), list):
        raise UsageError(f"--plot: {name} is no report of infini-run; {_HOW}")
    if content.get("format") != 1:
        raise UsageError(f"--plot: {name} is of format {content.get('format')!r}; this infini-run knows format 1")
    return content


# ---- from a report


def _from_report(path: str, content: Mapping[str, Any]) -> Timeline:
    try:
        earlier = [_restarted(_bar(rank, content)) for rank in _started(content.get("earlier_failures") or [])]
        bars = earlier + [_bar(rank, content) for rank in _started(content["ranks"])]
        world, code = int(content["world_size"]), int(content["exit_code"])
        restarts = int(content.get("restarts") or 0)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageError(f"--plot: {printable(path)} is a report that is not whole; {_HOW}") from None
    title = f"{content.get('run_id') or content.get('launch_id')} on {content.get('host')}"
    after = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
    return Timeline(title=printable(f"{title}: {world} ranks, exit code {code}{after}"), bars=tuple(bars))


def _started(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [rank for rank in ranks if rank.get("start") is not None]


def _restarted(bar: Bar) -> Bar:
    """As the first failure of an attempt, after which all ranks were started again."""
    return replace(bar, is_first=True, end=f"{bar.end}, restarted")


def _bar(rank: Mapping[str, Any], content: Mapping[str, Any]) -> Bar:
    start_s = _seconds(rank["start"])
    end_s = _seconds(content["end"] if rank["end"] is None else rank["end"])
    ready_s = None if rank.get("ready") is None else _seconds(rank["ready"])
    failed, stopped = bool(rank["failed"]), bool(rank["stopped"])
    return Bar(
        rank=int(rank["rank"]),
        start_s=start_s,
        end_s=max(start_s, end_s),
        ready_s=ready_s,
        kind="failed" if failed else "stopped" if stopped else "unknown" if rank["end"] is None else "done",
        end=printable(str(_end(rank))),
        is_first=content.get("first_failure") is not None and content["first_failure"] == rank["rank"],
    )


def _seconds(value: Any) -> float:
    """JSON as Python reads it has NaN and infinities."""
    seconds = float(value)
    if not 0 <= seconds < _LATEST_S:
        raise ValueError
    return seconds


def _end(rank: Mapping[str, Any]) -> object:
    if rank.get("verdict"):
        return str(rank["verdict"]).partition(":")[0]
    return rank.get("signal") or f"exit {rank['exit_code']}"


# ---- from logs


def _from_logs(folder: str) -> Timeline:
    """A log is as old as its rank, and its last line was written when it was last changed: that much a folder
    without a report says, and who left an error file or was found hanging."""
    logs = {}
    for entry in os.scandir(folder):
        rank = number(entry.name.removeprefix("rank_").removesuffix(".log"))
        if entry.name == f"rank_{rank}.log" and rank is not None and rank >= 0 and entry.is_file():
            logs[rank] = (_birth_s(entry.path), entry.stat().st_mtime)
    if not logs:
        raise UsageError(f"--plot: {printable(folder)} holds no rank_N.log and no report; {_HOW}")
    first_s = min(end_s if birth_s is None else birth_s for birth_s, end_s in logs.values())
    bars = [
        Bar(
            rank=rank,
            start_s=min(end_s, first_s if birth_s is None else birth_s),
            end_s=end_s,
            **_signs(folder, rank),
        )
        for rank, (birth_s, end_s) in logs.items()
    ]
    title = f"{os.path.basename(os.path.abspath(folder))}: {len(bars)} logs, from their creation to their last line"
    return Timeline(title=printable(title), bars=tuple(_with_first(bars)))


def _signs(folder: str, rank: int) -> dict[str, Any]:
    message = read_error_file(f"{folder}/rank_{rank}.error.json")
    if message:
        return {"kind": "failed", "end": printable(message.partition("\n")[0][:60])}
    if os.path.exists(f"{folder}/hang_{rank}.txt"):
        return {"kind": "failed", "end": "hung"}
    return {"kind": "unknown"}


def _with_first(bars: list[Bar]) -> list[Bar]:
    failed = [bar for bar in bars if bar.kind == "failed"]
    first = min(failed, key=lambda bar: bar.end_s) if failed else None
    return [replace(bar, is_first=bar is first) for bar in bars]


def _birth_s(path: str) -> float | None:
    """When a file was made: statx(2), which Python 3.14 and before do not have; None where nobody knows."""
    import ctypes

    btime, at_fdcwd, needed, offset = 0x800, -100, 256, 80
    buffer = ctypes.create_string_buffer(needed)
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):  # glibc before 2.28, musl before 1.2.2
        return None
    found = statx(at_fdcwd, os.fsencode(path), 0, btime, buffer)
    if found != 0 or not int.from_bytes(buffer.raw[:4], "little") & btime:
        return None
    seconds = int.from_bytes(buffer.raw[offset : offset + 8], "little", signed=True)
    nanoseconds = int.from_bytes(buffer.raw[offset + 8 : offset + 12], "little")
    return seconds + nanoseconds / 1e9
