"""Asks ranks that run torch for the dump of their Flight Recorder, reads the dumps, and prints what they say.

This runs in a separate process: a dump is a pickle of a rank, in a file that it writes when it
gets to it. So this one may wait, use memory up to a limit, and be killed. It runs in any CPython, without infini_run.

Arguments: the prefixes of the pipes and of the dumps, the seconds that it may take, and ranks. Output: JSON, by rank
a list of process groups: name, description, members, the number of the last collective entered, whether it is
pending, and the names of the last few.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_DUMP = 32 << 20  # bytes: torch keeps 2,000 collectives with their stacks, some 5 MiB
MOST_MEMORY = 2 << 30
MOST_GROUPS, MOST_NAMES, MOST_TEXT = 16, 16, 80  # of a rank, of a group, of a name
_LOOK_S = 0.05  # no event says that a dump is complete


def read_dump(data: bytes) -> list[list[Any]]:
    """Return the process groups of one dump.

    Args:
        data: A pickle of dictionaries, lists, texts, and numbers. Any other object is refused, and never made.

    Raises:
        ValueError: It is none, or not complete.
    """
    import io
    import pickle

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError(f"{module}.{name} is in the dump")

    try:
        return _groups(PlainUnpickler(io.BytesIO(data)).load())
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ValueError(f"not a dump of torch's Flight Recorder: {error}") from None


def _groups(dump: Any) -> list[list[Any]]:
    members = {name: config.get("ranks", "") for name, config in dump.get("pg_config", {}).items()}
    groups: dict[str, list[Any]] = {}
    for entry in dump["entries"]:
        if entry.get("is_p2p"):
            continue
        name, about = (str(text)[:MOST_TEXT] for text in entry["process_group"])
        number = _number(entry["collective_seq_id"])
        if name not in groups and len(groups) == MOST_GROUPS:
            continue
        group = groups.setdefault(name, [name, about, _numbers(members.get(name, "")), -1, False, []])
        if number <= group[3]:
            continue  # a part of the same one
        group[3] = number
        group[4] = entry.get("state") != "completed" and not entry.get("retired")
        group[5] = [*group[5], str(entry["profiling_name"])[:MOST_TEXT]][-MOST_NAMES:]
    return list(groups.values())


def _numbers(text: str) -> list[int]:
    """The members of a group, as torch writes them: `[0, 1]`."""
    return [_number(word) for word in str(text)[: 1 << 16].strip("[] ").split(",") if word.strip().isdigit()]


def _number(value: Any) -> int:
    """Raises ValueError: it is none of torch's, which have 64 bits. A longer one would be no JSON."""
    number = int(value)
    if not -1 <= number < 1 << 63:
        raise ValueError("not a dump of torch's Flight Recorder: a number is out of bounds")
    return number


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _ask(path: str) -> bool:
    """Write to the pipe of a rank. Return whether somebody reads it."""
    from stat import S_ISFIFO

    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _read(path: str) -> list[list[Any]] | None:
    """Return what a dump says, or None if it is not complete, or too large, or somebody else's."""
    from stat import S_ISREG

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > MOST_DUMP:
            return None
        try:
            return read_dump(file.read(MOST_DUMP + 1))
        except (ValueError, MemoryError, OSError):
            return None


def main(words: list[str]) -> None:
    import json
    import resource
    import time

    pipes, dumps, limit_s = words[0], words[1], float(words[2])
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    end_s = time.monotonic() + limit_s
    before = {rank: _stamp(f"{dumps}{rank}") for rank in words[3:]}
    waiting = [rank for rank in before if _ask(f"{pipes}{rank}.pipe")]
    found: dict[str, list[list[Any]]] = {}
    while waiting and time.monotonic() < end_s:
        for rank in list(waiting):
            groups = _read(f"{dumps}{rank}") if _stamp(f"{dumps}{rank}") != before[rank] else None
            if groups is not None:
                found[rank] = groups
                waiting.remove(rank)
        if waiting:
            time.sleep(_LOOK_S)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
