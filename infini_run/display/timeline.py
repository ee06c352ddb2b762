"""When each rank ran and how it ended, out of --report files or, without one, of the files in a --log_dir.

Files come from disk and may hold anything: this rejects what is no report of infini-run with a sentence.
"""

from __future__ import annotations

import json
import os

from infini_run.errors import UsageError, counted, printable
from infini_run.record import record, replace
from infini_run.report.error_file import read_error_file
from infini_run.value_types import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_LARGEST = 1 << 28  # bytes of a report that are read
_LATEST_S = 1e11  # of the epoch
_HOW = "use the FILE of --report=FILE or the DIR of --log_dir=DIR, of a finished launch"


@record
class Bar:
    """One attempt of one rank. Times are seconds since the epoch; None: not known.

    Attributes:
        end: How it ended, such as `exit 3` or `SIGSEGV`.
        kind: done, failed, stopped (by the launcher) or unknown.
        is_first: It is the first failure of its attempt.
        host: Empty: not known.
        name: What people call the rank, such as `trainer 3`; empty: its number.
    """

    rank: int
    start_s: float
    end_s: float
    kind: str
    end: str = ""
    ready_s: float | None = None
    is_first: bool = False
    host: str = ""
    name: str = ""


@record
class Timeline:
    """One bar for each attempt of each rank.

    Args:
        title: Where the timeline comes from, in words.
        bars: By rank and start.
        attempts: Start and end of each attempt; empty if there was one, or the sources differ.
    """

    title: str
    bars: tuple[Bar, ...]
    attempts: tuple[tuple[float, float], ...] = ()


def read_timeline(paths: Sequence[str]) -> Timeline:
    """Read the timeline of one launch.

    Args:
        paths: A report or a directory of logs; of several nodes, one of each.

    Raises:
        UsageError: One is unreadable, or no rank started.
    """
    if not paths:
        raise UsageError(f"--plot: needs a finished launch; {_HOW}")
    parts = [_read(path) for path in paths]
    bars = sorted((bar for part in parts for bar in part.bars), key=lambda bar: (bar.rank, bar.start_s))
    if not bars:
        raise UsageError(f"{printable(paths[0])} has no rank that was started; {_HOW}")
    return Timeline(title=parts[0].title, bars=tuple(bars), attempts=_merged([part.attempts for part in parts]))


def _merged(parts: Sequence[tuple[tuple[float, float], ...]]) -> tuple[tuple[float, float], ...]:
    """Return the attempts of a launch from those that its nodes saw."""
    if len({len(part) for part in parts}) != 1 or len(parts[0]) < 2:
        return ()
    return tuple((min(start for start, _ in each), max(end for _, end in each)) for each in zip(*parts, strict=True))


def _spans(attempts: Sequence[Sequence[Bar]]) -> tuple[tuple[float, float], ...]:
    return tuple((min(bar.start_s for bar in bars), max(bar.end_s for bar in bars)) for bars in attempts if bars)


def _read(path: str) -> Timeline:
    """Read a source. This is the border: whatever the file system refuses further in comes out here as one
    sentence."""
    try:
        if not os.path.isdir(path):
            return _from_report(path, _load(path))
        report = _newest_report(path)
        return _from_report(*report) if report else _from_logs(path)
    except OSError as error:
        name = printable(os.fsdecode(error.filename or path))
        raise UsageError(f"--plot: {name} cannot be read: {error.strerror}; {_HOW}") from None


def _newest_report(folder: str) -> tuple[str, dict[str, Any]] | None:
    """Return the newest report there, with its content."""
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
        raise UsageError(f"--plot: {name}: not a report of infini-run; {_HOW}") from None
    if not isinstance(content, dict) or not isinstance(content.get("ranks"), list):
        raise UsageError(f"--plot: {name}: not a report of infini-run; {_HOW}")
    if content.get("format") != 2:
        raise UsageError(f"--plot: {name} is of format {content.get('format')!r}; expected format 2")
    return content


# ---- from a report


def _from_report(path: str, content: Mapping[str, Any]) -> Timeline:
    try:
        earlier = [_restarted(_bar(rank, content)) for rank in _started(content.get("earlier_failures") or [])]
        last = [_bar(rank, content) for rank in _started(content["ranks"])]
        world, code = int(content["world_size"]), int(content["exit_code"])
        restarts = int(content.get("restarts") or 0)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UsageError(f"--plot: {printable(path)} is an incomplete report; {_HOW}") from None
    title = f"{content.get('run_id') or content.get('launch_id')} on {content.get('host')}"
    after = f" after {counted(restarts, 'restart')}" if restarts else ""
    return Timeline(
        title=printable(f"{title}: {counted(world, 'rank')}, exit code {code}{after}"),
        bars=(*earlier, *last),
        attempts=_spans([*([bar] for bar in earlier), last]),
    )


def _started(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [rank for rank in ranks if rank.get("start") is not None]


def _restarted(bar: Bar) -> Bar:
    """Return a rank's end as the first failure of an attempt, after which all ranks restarted."""
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
        host=printable(str(rank.get("host") or "")),
        name=printable(f"{rank['program']} {rank.get('program_rank')}") if rank.get("program") else "",
    )


def _seconds(value: Any) -> float:
    """Read a number of seconds. JSON as Python reads it has NaN and infinities."""
    seconds = float(value)
    if not 0 <= seconds < _LATEST_S:
        raise ValueError
    return seconds


def _end(rank: Mapping[str, Any]) -> object:
    if rank.get("watchdog_reason"):
        return str(rank["watchdog_reason"]).partition(":")[0]
    return rank.get("signal") or f"exit {rank['exit_code']}"


# ---- from logs


@record
class _RankLog:
    """The files of a rank of one attempt. created_s: when its file was made; None: unknown."""

    rank: int
    created_s: float | None
    end_s: float
    error_file: str
    hang_file: str


def _from_logs(folder: str) -> Timeline:
    """Return the bars from logs. A log is as old as its rank, and its last change is the time of its last line. A
    folder without a report shows that much, and which ranks left an error file or hung."""
    name, what, attempts = folder, "logs", [_flat_logs(folder)]
    if not attempts[0]:
        name, attempts = _newest_run(folder)
        what = "pairs of logs of local ranks"
    if not attempts:
        raise UsageError(f"--plot: {printable(folder)} holds no log of a rank and no report; {_HOW}")
    found = [_bars(attempts[-1])]
    for logs in reversed(attempts[:-1]):
        earlier = _bars(logs, until_s=min(bar.start_s for bar in found[0]))
        found.insert(0, [_restarted(bar) if bar.is_first else bar for bar in earlier])
    bars = [bar for attempt in found for bar in attempt]
    title = f"{os.path.basename(os.path.abspath(name))}: {len(bars)} {what}, from their creation to their last line"
    return Timeline(title=printable(title), bars=tuple(bars), attempts=_spans(found))


def _flat_logs(folder: str) -> list[_RankLog]:
    """Return the logs rank_R.log."""
    return [
        _log(rank, [path], f"{folder}/rank_{rank}.error.json", f"{folder}/hang_{rank}.txt")
        for rank, path in _numbered(folder, "rank_", ".log")
        if os.path.isfile(path)
    ]


def _newest_run(folder: str) -> tuple[str, list[list[_RankLog]]]:
    """Return the newest run of torchrun's layout, in this folder or the folder itself, and its attempts."""
    with os.scandir(folder) as entries:
        runs = [entry.path for entry in entries if "_" in entry.name and entry.is_dir()]
    found = [(run, _attempts(run, folder)) for run in runs]
    found.append((folder, _attempts(folder, os.path.join(folder, os.pardir))))
    return max(found, key=lambda run: max((log.end_s for logs in run[1] for log in logs), default=0.0))


def _attempts(run: str, log_dir: str) -> list[list[_RankLog]]:
    """Return the logs of each attempt: RUN/attempt_N/R/stdout.log and stderr.log. With several nodes these are
    RUN/node_K/attempt_N/R/..., whose local ranks count on from node to node. log_dir: where looks at a hang are."""
    attempts: dict[int, list[_RankLog]] = {}
    first = 0
    for node in [path for _, path in sorted(_numbered(run, "node_")) if os.path.isdir(path)] or [run]:
        ranks = {first - 1}
        for count, attempt in _numbered(node, "attempt_"):
            logs = _attempt_logs(attempt, log_dir, first) if os.path.isdir(attempt) else []
            if logs:
                attempts.setdefault(count, []).extend(logs)
            ranks |= {log.rank for log in logs}
        first = max(ranks) + 1
    return [attempts[count] for count in sorted(attempts)]


def _attempt_logs(attempt: str, log_dir: str, first: int) -> list[_RankLog]:
    """Return the logs of one attempt on one node. first: the rank of its local rank 0."""
    logs = []
    for local_rank, inner in _numbered(attempt):
        rank = first + local_rank
        files = [path for path in (f"{inner}/stdout.log", f"{inner}/stderr.log") if os.path.isfile(path)]
        if files:
            logs.append(_log(rank, files, f"{inner}/error.json", f"{log_dir}/hang_{rank}.txt"))
    return logs


def _numbered(folder: str, before: str = "", after: str = "") -> list[tuple[int, str]]:
    """Return what has such a name there, with its number from 0."""
    with os.scandir(folder) as entries:
        named = [(number(entry.name.removeprefix(before).removesuffix(after)), entry) for entry in entries]
    return [(n, e.path) for n, e in named if n is not None and n >= 0 and e.name == f"{before}{n}{after}"]


def _log(rank: int, paths: Sequence[str], error_file: str, hang_file: str) -> _RankLog:
    created = [created_s for path in paths if (created_s := _created_s(path)) is not None]
    return _RankLog(
        rank=rank,
        created_s=min(created, default=None),
        end_s=max(os.stat(path).st_mtime for path in paths),
        error_file=error_file,
        hang_file=hang_file,
    )


def _bars(logs: Sequence[_RankLog], until_s: float = float("inf")) -> list[Bar]:
    """Return the bars of one attempt, which begins with the first of its logs. until_s: when the next one began."""
    first_s = min(log.end_s if log.created_s is None else log.created_s for log in logs)
    bars = []
    for log in logs:
        start_s = min(log.end_s, first_s if log.created_s is None else log.created_s)
        bars.append(Bar(rank=log.rank, start_s=start_s, end_s=log.end_s, **_signs(log, start_s, until_s)))
    return _with_first(bars)


def _signs(log: _RankLog, start_s: float, until_s: float) -> dict[str, Any]:
    message = read_error_file(log.error_file)
    if message:
        return {"kind": "failed", "end": printable(message.partition("\n")[0][:60])}
    if os.path.exists(log.hang_file) and start_s <= os.stat(log.hang_file).st_mtime < until_s:
        return {"kind": "failed", "end": "hung"}
    return {"kind": "unknown"}


def _with_first(bars: list[Bar]) -> list[Bar]:
    failed = [bar for bar in bars if bar.kind == "failed"]
    first = min(failed, key=lambda bar: bar.end_s) if failed else None
    return [replace(bar, is_first=bar is first) for bar in bars]


def _created_s(path: str) -> float | None:
    """Return a file's creation time in seconds, or None if unknown. Python lacks statx(2) through 3.14."""
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
