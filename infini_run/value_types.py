"""The kinds of values that flags take: text in, a value out.

The one rule: what is not understood raises ValueError, and its text says what is allowed.
"""

from __future__ import annotations

from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MARKER_VARIABLE = "INFINI_RUN_ID"  # in every process of a launch: its launch id
# The outer command sets these for the inner one (--isolate): its signal mask at the start, the inner launch's id, and
# the descriptor on which the inner one asks to be suspended.
ISOLATED = "INFINI_RUN_ISOLATED"
PYTHON_FILES = (".py", ".pyc", ".pyz")  # names of programs for Python
OWN_CODE = "infini_run_own"  # in the code of a Python that infini-run starts for itself
PROBE_VARIABLE = "INFINI_RUN_PROBE"  # in a process that is asked whether it is a Python; it launches nothing
MAX_INT = 2**31 - 1
MOST_RANKS = 1 << 22  # on one node: as many processes as Linux can have (PID_MAX_LIMIT, proc(5))
MOST_TAIL = 100_000  # lines of --tail
MAX_LISTED = 2**20

STDOUT = 1
STDERR = 2


@record
class RankStreams:
    """Which streams of which local rank: STDOUT | STDERR for `ranks`, `others` for those not among them."""

    others: int = 0
    ranks: tuple[tuple[int, int], ...] = ()


def streams_of(chosen: RankStreams, local_rank: int) -> int:
    """0, STDOUT, STDERR or STDOUT | STDERR."""
    for rank, streams in chosen.ranks:
        if rank == local_rank:
            return streams
    return chosen.others


def number(text: str) -> int | None:
    """Return a whole number in plain digits, or None. int() would also take `1_000` and other scripts' digits."""
    digits = text[1:] if text[:1] == "-" else text
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None


def bounded_int(low: int, high: int = MAX_INT) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = number(text)
        if value is None or not low <= value <= high:
            raise ValueError(f"expected {low} to {high}")
        return value

    return read


def node_count(text: str) -> int | tuple[int, int]:
    """Return a number, or MIN:MAX; the number if both are the same."""
    low_text, colon, high_text = text.partition(":")
    if not colon:
        return bounded_int(1)(text)
    low, high = number(low_text), number(high_text)
    if low is None or high is None or not 1 <= low <= high <= MAX_INT:
        raise ValueError(f"expected 1 to {MAX_INT}, or MIN:MAX with MIN at most MAX")
    return high if low == high else (low, high)


def proc_count(text: str) -> int | str:
    if text in ("auto", "gpu", "cpu"):
        return text
    value = number(text)
    if value is None or not 1 <= value <= MOST_RANKS:
        raise ValueError(f"expected 1 to {MOST_RANKS}, auto, gpu, or cpu")
    return value


def thread_count(text: str) -> int:
    value = 0 if text == "auto" else number(text)
    if value is None or not 0 <= value <= MAX_INT:
        raise ValueError(f"expected auto, or 1 to {MAX_INT}")
    return value


def port(text: str) -> int:
    value = number(text)
    if value is None or not 0 <= value <= 65535:
        raise ValueError("expected a port from 0 to 65535 (0: a free one, on a single node)")
    return value


def address(text: str) -> str:
    """Return a host's name or address without a port, and without the brackets around an IPv6 address."""
    host = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text
    if not host or not host.isprintable() or any(c in " /[],@" for c in host):
        raise ValueError("expected a host name or an address")
    if host.count(":") == 1:
        raise ValueError("expected an address without a port; use --rdzv_endpoint=HOST:PORT for both")
    return host


NO_PORT = "missing port; use HOST:PORT, such as node0:29500"


def endpoint(text: str) -> tuple[str, int]:
    """HOST:PORT or [IPV6]:PORT. Without a port: -1, which only torchrun's c10d allows."""
    host, colon, digits = text.rpartition(":")
    if not colon or text[-1] == "]":
        return address(text), -1
    if not digits:
        raise ValueError(NO_PORT)
    if ":" in host and not (host[0] == "[" and host[-1] == "]"):
        raise ValueError("expected brackets around an IPv6 address with a port; use [IPV6]:PORT")
    return address(host), port(digits)


_UNITS = (("ms", 0.001), ("min", 60.0), ("sec", 1.0), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86400.0))
# What may stand before a part: a longer unit than its own.
_LEAST_PATIENCE_S = 0.1
_LONGER: dict[str, tuple[str, ...]] = {
    "s": ("m", "min", "h", "d"),
    "sec": ("m", "min", "h", "d"),
    "m": ("h", "d"),
    "min": ("h", "d"),
    "h": ("d",),
}


DESCRIPTOR = "fd:"  # before the number of an open one, in place of a file


def duration(text: str) -> float:
    """Return the seconds of a duration: 10, 0.5, 10s, 500ms, 2m, 90min, 1h, 1h30m, 1d."""
    value, rest = 0.0, text
    while rest and value >= 0:  # from the end: a part is a number and its unit, and the last one's may be missing
        name, unit_s = next(((name, each_s) for name, each_s in _UNITS if rest.endswith(name)), ("", 1.0))
        body = rest.removesuffix(name)
        above = "" if name in ("", "ms") else body.rstrip("0123456789.")
        above = above if above.endswith(_LONGER.get(name, ())) else ""
        part = _float(body[len(above) :]) * unit_s
        value, rest = (value + part if part >= 0 else -1.0), above
    if not text or not 0 <= value <= MAX_INT:
        raise ValueError(f"not a time from 0 to {MAX_INT} seconds; use 10, 10s, 500ms, 2m, 1h30m, or 1d")
    return abs(value)


def patience(text: str) -> float:
    """Return the seconds after which something gives up."""
    value = duration(text)
    if value < _LEAST_PATIENCE_S:
        raise ValueError("expected at least 100ms; use 10, 10s, 500ms, or 2m")
    return value


def _float(text: str) -> float:
    """-1.0: it is no number in plain digits."""
    try:
        return float(text) if text.strip("0123456789.+-e") == "" else -1.0
    except ValueError:
        return -1.0


def timeout(text: str) -> float:
    """Return the seconds of a duration, or 0 for off."""
    return 0.0 if text == "off" else duration(text)


def ranks(text: str) -> tuple[int, ...] | None:
    """`0,4-7` in rising order, each once; None for all of them."""
    if text in ("", "all"):
        return None
    found: set[int] = set()
    for part in text.split(","):
        low_text, dash, high_text = part.partition("-")
        low = number(low_text)
        high = number(high_text) if dash else low
        if low is None or high is None or high < low:
            raise ValueError("expected all, or ranks and ranges such as 0,4-7")
        if high - low + len(found) >= MAX_LISTED or high > MAX_INT:
            raise ValueError(f"expected at most {MAX_LISTED} ranks, none above {MAX_INT}")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def node_ranks(text: str) -> tuple[int, ...] | str | None:
    """As `ranks`, for nodes: `0-2,4`; None for all of them, and `rest` as it is."""
    if text == "rest":
        return text
    try:
        return ranks(text)
    except ValueError:
        raise ValueError("expected all, rest, or nodes and ranges such as 0,4-7") from None


def named_ranks(text: str) -> tuple[int | str, ...] | None:
    """As `ranks`, and ranks of programs: `trainer:0-1` are `trainer:0` and `trainer:1`, behind the numbers."""
    named = [part for part in text.split(",") if ":" in part]
    if not named:
        return ranks(text)
    numbers = ",".join(part for part in text.split(",") if ":" not in part)
    found: dict[int | str, None] = dict.fromkeys((numbers and ranks(numbers)) or ())
    for part in named:
        name, _, span = part.rpartition(":")
        its = ranks(span)
        if not name or not its or len(found) + len(its) > MAX_LISTED:
            raise ValueError("expected all, or ranks and ranges such as 0,4-7, or trainer:0-3 of a program")
        found |= dict.fromkeys(f"{name}:{rank}" for rank in its)
    return tuple(found)


def one_rank(text: str) -> int | str:
    """A rank by its number, or `trainer:0` by that of its program."""
    name, colon, digits = text.rpartition(":")
    rank = number(digits)
    if rank is None or rank > MAX_INT or bool(name) != bool(colon):
        raise ValueError(f"expected a rank from 0 to {MAX_INT}, or trainer:0 of a program")
    return f"{name}:{rank}" if name else rank


def streams(text: str) -> RankStreams:
    """torchrun's: one of 0 to 3 for every local rank, or `0:3,10:1` for those named and 0 for the others."""
    every = number(text)
    if every is not None and 0 <= every <= 3:
        return RankStreams(others=every)
    chosen: dict[int, int] = {}
    for part in text.split(","):
        left, _, right = part.partition(":")
        rank, value = number(left), number(right)
        if rank is None or value is None or not 0 <= rank <= MAX_INT or not 0 <= value <= 3:
            raise ValueError("expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:0-3,...")
        chosen[rank] = value
    return RankStreams(ranks=tuple(sorted(chosen.items())))


def stdin_reader(text: str) -> int | str:
    """Return the rank that reads the terminal, all, or none; `trainer:0` is a rank of a program."""
    name, colon, digits = text.rpartition(":")
    if text in ("all", "none") or (colon and name and number(digits) is not None):
        return text
    value = 0 if text == "rank0" else number(text)
    if value is None or not 0 <= value <= MAX_INT:
        raise ValueError("expected rank0, all, none, or a rank")
    return value


def stop_signal(text: str) -> int:
    """TERM, SIGTERM, 15, RTMIN+3: any signal that a process can catch (signal(7))."""
    known, value = _signals(), any_signal(text)
    if value in (known["KILL"], known["STOP"]):
        raise ValueError("cannot be caught by a process; use --grace to set the time until KILL")
    return value


def any_signal(text: str) -> int:
    """TERM, SIGTERM, 15, RTMIN+3: any signal (signal(7))."""
    known = _signals()
    value = number(text)
    if value is None:
        value = _signal_number(text.upper(), known)
    # between 31 and RTMIN are the C library's own; Python 3.10 has no name for 16
    if value not in range(1, 32) and value not in range(known["RTMIN"], known["RTMAX"] + 1):
        raise ValueError(f"expected a signal, such as TERM, RTMIN+3, or a number up to {known['RTMAX']}")
    assert value is not None
    return value


def _signals() -> dict[str, int]:
    import _signal  # signal itself imports enum

    return {
        name[3:]: int(value)
        for name, value in vars(_signal).items()
        if name.startswith("SIG") and name[3:4] != "_" and isinstance(value, int)
    }


def _signal_number(name: str, known: dict[str, int]) -> int | None:
    name = name.removeprefix("SIG")
    for base in ("RTMIN", "RTMAX"):
        rest = name.removeprefix(base)
        if rest != name and rest[:1] in ("+", "-"):
            value = known[base] + (number(rest.removeprefix("+")) or 0)
            return value if known["RTMIN"] <= value <= known["RTMAX"] else None
    return known.get(name)
