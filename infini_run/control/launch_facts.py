"""What the control socket of a launch sends first: what the launch is, and the states of its ranks. Pure.

The one rule: behind `read_greeting` every value is what it should be, whoever has sent it.
"""

from __future__ import annotations

from _struct import Struct, error  # type: ignore[attr-defined]  # struct, the module, has these two alone

from infini_run.errors import LinkError, printable
from infini_run.record import record
from infini_run.system.frames import WireDecoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ABOUT, COUNTS, REQUEST, ANSWER = b"A", b"n", b"?", b"="  # kinds of frames
STATES = ("waiting", "running", "ready", "done", "failed")  # csrc/include/irun.h, ir_worker_state
GREETING = 1 << 16  # bytes at most
UCRED = Struct("3i")  # SO_PEERCRED of unix(7): process, user, group
_COUNTS = Struct(f">{len(STATES)}Iq")
_LEAST = {"protocol": 0, "nodes": 0, "node": -1, "world": 0}
_LATEST_S = 1e11  # of a time: some 3,000 years
_MOST_DIGITS = 18


@record
class LaunchFacts:
    """A launch, as its control socket describes it.

    Attributes:
        protocol: The version of the protocol that it speaks.
        launch_id: Its id.
        start_s: When it started, since the epoch.
        program: Its command line, or the name of its functions, printable.
        nodes: How many nodes it runs on.
        node: The node rank of this part of it; -1: it is the head of all.
        world: How many ranks it has on all nodes.
        ranks: The first and the last rank of this node.
        devices: The GPUs that its ranks here have been given.
        job: The name and the value of the scheduler's variable for its job. Empty: none.
        counts: How many ranks are in each of STATES.
        progress: The highest PROGRESS= of a rank. None: no rank has sent it.
        restart_s: When its next attempt begins, since the epoch. None: an attempt runs.
    """

    protocol: int
    launch_id: str
    start_s: float
    program: str
    nodes: int
    node: int
    world: int
    ranks: str
    devices: tuple[str, ...]
    job: str
    counts: dict[str, int]
    progress: int | None
    restart_s: float | None


def greeting_decoder() -> WireDecoder:
    """Return a decoder for what a launch sends first."""
    return WireDecoder(frozenset((ABOUT, COUNTS)), GREETING)


def read_greeting(about: bytes, counts: bytes) -> LaunchFacts:
    """Return what a launch says of itself.

    Args:
        about: The payload of its first frame.
        counts: That of its second one.

    Raises:
        LinkError: It is something else.
    """
    texts = dict(part.partition("=")[::2] for part in about.decode("utf-8", "surrogateescape").split("\0") if part)
    try:
        numbers = {name: _number(texts[name], least) for name, least in _LEAST.items()}
        *of_states, progress = _COUNTS.unpack(counts)
        devices = tuple(printable(name) for name in texts["devices"].split(",") if name)
        return LaunchFacts(
            **numbers,
            launch_id=printable(texts["id"]),
            start_s=_seconds(texts["start"]),
            program=printable(texts["program"]),
            ranks=printable(texts["ranks"]),
            devices=devices,
            job=printable(texts["job"]),
            counts=dict(zip(STATES, of_states, strict=True)),
            progress=None if progress < 0 else progress,
            restart_s=_seconds(texts["restart"]) if "restart" in texts else None,
        )
    except (LookupError, ValueError, error):
        raise LinkError("what came over the link is not what infini-run sends") from None


def pack_counts(counts: Mapping[str, int], progress: int) -> bytes:
    """Return the payload of the second frame.

    Args:
        counts: How many ranks are in each of STATES; what is missing is 0.
        progress: The highest PROGRESS= of a rank; -1: no rank has sent it.
    """
    return _COUNTS.pack(*(counts.get(state, 0) for state in STATES), progress)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= _LATEST_S:  # nor nan
        raise ValueError
    return value


def _number(text: str, least: int) -> int:
    value = int(text) if len(text) <= _MOST_DIGITS else least - 1
    if value < least:
        raise ValueError
    return value
