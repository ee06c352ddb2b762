"""The offset between the clocks of a node and of the head, estimated over the Link as NTP does. A heartbeat asks, the
agent answers with its clocks, and half of the round trip is the largest possible error."""

from __future__ import annotations

import time
from _struct import Struct

from infini_run.errors import LinkError
from infini_run.multinode.link.protocol import HEARTBEAT, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.report.report import Report

_DRIFT = 2e-4  # seconds a second: how fast two clocks may part while one of them is being corrected
_FIRST_QUESTIONS = 3  # in a row: the first answer waits for the end of the agent's start
_QUESTION = Struct(">q")  # the head's CLOCK_MONOTONIC, ns
_ANSWER = Struct(">qqq")  # the question's time, the agent's wall clock, the agent's CLOCK_MONOTONIC, ns


def clock_question() -> bytes:
    """Return the heartbeat frame of the head, which asks for an agent's clocks."""
    return pack(HEARTBEAT, _QUESTION.pack(time.monotonic_ns()))


def clock_answer(question: bytes) -> bytes:
    """Return the heartbeat frame of an agent.

    Args:
        question: payload of the head's heartbeat; empty, from a fork in place of the head: it asks nothing.

    Raises:
        LinkError: it is no such payload.
    """
    if not question:
        return pack(HEARTBEAT)
    if len(question) != _QUESTION.size:
        raise LinkError("what came over the link is not what infini-run sends: a heartbeat of another length")
    asked_ns = _QUESTION.unpack(question)[0]
    return pack(HEARTBEAT, _ANSWER.pack(asked_ns, time.time_ns(), time.monotonic_ns()))


class ClockOffset:
    """The offset between the clocks of a node and of the head. A wall-clock time of the node less `offset_s`, or a
    CLOCK_MONOTONIC time less `monotonic_s`, is the head's time to within `bound_s`. Without an estimate the bound is
    infinite and the offsets are 0.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.monotonic_s = 0.0
        self.bound_s = float("inf")
        self.round_trip_s = 0.0  # of the last question and its answer; 0: there was none
        self._known_s = 0.0
        self._questions = 1

    @property
    def is_known(self) -> bool:
        return self.bound_s != float("inf")

    def add_answer(self, payload: bytes) -> float:
        """Use an answer that has just come.

        Returns:
            When its question was asked, by the head's CLOCK_MONOTONIC; -inf: in the future.

        Raises:
            LinkError: it is no answer.
        """
        if len(payload) != _ANSWER.size:
            raise LinkError("what came over the link is not what infini-run sends: a heartbeat of another length")
        now_ns, our_wall_ns = time.monotonic_ns(), time.time_ns()
        asked_ns, wall_ns, monotonic_ns = _ANSWER.unpack(payload)
        half_ns = (now_ns - asked_ns) // 2
        if half_ns < 0:
            return -float("inf")
        self.round_trip_s = 2 * half_ns / 1e9
        offset_s = (wall_ns - (our_wall_ns - half_ns)) / 1e9
        monotonic_s = (monotonic_ns - (now_ns - half_ns)) / 1e9
        self.add(offset_s, monotonic_s, half_ns / 1e9, now_ns / 1e9)
        asked_s: float = asked_ns / 1e9
        return asked_s

    def add(self, offset_s: float, monotonic_s: float, bound_s: float, now_s: float) -> None:
        """Use one estimate, if it is as sure as the last one is by now, or shows that somebody set a clock.

        Args:
            bound_s: the largest possible error of both offsets.
            now_s: time of the estimate, by the head's CLOCK_MONOTONIC.
        """
        old_s = self.bound_s + _DRIFT * (now_s - self._known_s)
        if bound_s <= old_s or abs(offset_s - self.offset_s) > bound_s + old_s:
            self.offset_s, self.monotonic_s = offset_s, monotonic_s
            self.bound_s, self._known_s = bound_s, now_s

    def latest_s(self, time_ns: int, age_ns: int) -> float:
        """Return the latest time at which something happened on the node, by the head's CLOCK_MONOTONIC. So the head
        knows the first of two failures though it reads both late.

        Args:
            time_ns: when it happened, by the node's CLOCK_MONOTONIC.
            age_ns: how long ago that was when the node reported it, in a frame that was just read here.
        """
        return min(time.monotonic() - age_ns / 1e9, time_ns / 1e9 - self.monotonic_s + self.bound_s)

    def needs_more(self) -> bool:
        """Return whether the next question is due at once, as the first few are."""
        self._questions += 1
        return self._questions <= _FIRST_QUESTIONS

    def to_our_time(self, report: Report) -> Report:
        """Return a node's report with its times by the head's clock, and with the offset that this took off them."""
        from infini_run.record import replace
        from infini_run.report.report import Clock

        if not self.is_known:
            return report

        def ours(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - self.offset_s

        exits = {
            exit_.rank: replace(
                exit_,
                start_s=ours(exit_.start_s),
                ready_s=ours(exit_.ready_s),
                progress_s=ours(exit_.progress_s),
                end_s=ours(exit_.end_s),
            )
            for exit_ in report.exits
        }
        first = report.first_failure
        return replace(
            report,
            start_s=ours(report.start_s),
            end_s=ours(report.end_s),
            exits=tuple(exits.values()),
            first_failure=None if first is None else exits.get(first.rank, first),
            snapshots=tuple(
                replace(
                    look,
                    time_s=ours(look.time_s),
                    output_s=ours(look.output_s),
                    idle_s=ours(look.idle_s),
                    progress_s=ours(look.progress_s),
                )
                for look in report.snapshots
            ),
            clocks=(Clock(host=report.host, offset_s=self.offset_s, bound_s=self.bound_s),),
        )


class OwnAbsence:
    """A detector of times when the nodes were without this head's heartbeats. A signal suspended this process, or it
    slept with its machine (then CLOCK_MONOTONIC stands still and CLOCK_BOOTTIME does not). The silence of nodes was
    then its own.

    Args:
        limit_s: longer without a heartbeat is an absence, in seconds of CLOCK_BOOTTIME.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last_s = _clocks()  # after the last wait
        self.noticed_s = -float("inf")  # when the last absence was noticed, by CLOCK_MONOTONIC
        self.heartbeat_s = self._last_s[1]  # the last one that was sent, by CLOCK_BOOTTIME
        self.since_s = 0.0  # when the last absence began, by CLOCK_BOOTTIME
        self.away_s = 0.0  # how long it was, as far as it is known

    def note(self, wait_s: float) -> float:
        """Call after each wait that was to end within `wait_s`. Return for how long it lasted beyond that, in
        seconds of CLOCK_MONOTONIC."""
        before, self._last_s = self._last_s, _clocks()
        return max(0.0, self._last_s[0] - before[0] - wait_s)

    def on_heartbeat(self) -> None:
        """Note the time of a heartbeat to the nodes."""
        self.notice()
        self.heartbeat_s = _clocks()[1]

    def excuse(self) -> None:
        """Excuse a suspension since the last wait, in which a fork sent heartbeats: only a machine that slept
        meanwhile is an absence."""
        before, self._last_s = self._last_s, _clocks()
        slept_s = (self._last_s[1] - before[1]) - (self._last_s[0] - before[0])
        self.heartbeat_s = self._last_s[1] - slept_s
        self.notice()

    def is_recent(self, within_s: float) -> bool:
        """Return whether there is an absence at present, or one ended within the last `within_s` seconds."""
        self.notice()
        return time.monotonic() - self.noticed_s <= within_s

    def notice(self) -> None:
        """Remember an absence that there is now."""
        now_s, boot_s = _clocks()
        if boot_s - self.heartbeat_s > self._limit_s:
            self.noticed_s, self.since_s, self.away_s = now_s, self.heartbeat_s, boot_s - self.heartbeat_s


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
