"""When the scheduler ends this job, by the scheduler's own answer: a limit may change while a job runs.

The one rule: nobody waits for a scheduler that does not answer. Nodes take a head that is silent for dead, so the
question is a process, and its answer a descriptor.
"""

from __future__ import annotations

import os
import select
import time

from infini_run.jobs.scheduler import strip_scheduler_environment
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.jobs.request.job_request import JobRequest

NEVER = float("inf")
_ANSWER_S = 5.0  # that a question about a limit may take
_SPARE_S = 10.0  # a scheduler's clock and this node's; OpenPBS counts from before its prologue
# one line in any case
_ASK = 'squeue -h -j "$0" -o %e 2>/dev/null || echo unknown'
_ASK_PBS = """qstat -f -F dsv "$0" 2>/dev/null | tr '|' '\\n' |
sed -n '/^Resource_List.walltime=/{s/.*=//p;q}' | grep . || echo unknown"""
_FIELDS = "PreemptTime:32,TimeLeft:32"
_OVER_S = 1  # squeue prints whole seconds


@record
class EndReason:
    """Why a job ended from outside, where that is known."""

    is_late: bool = False
    is_preempted: bool = False


def slurm_id(environ: Mapping[str, str]) -> str:
    """Return the Slurm id of this job. One task of an array has the number of the whole as its own SLURM_JOB_ID."""
    array, index = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{index}" if array and index else environ.get("SLURM_JOB_ID", "")


class Deadline:
    """`at_s`: the end, in seconds since the epoch; infinite: there is no limit, or nobody has said it (yet).

    Slurm answers a query, or set SLURM_JOB_END_TIME (23.02 and later). OpenPBS counts from the start, start_s. A
    limit that nobody asked for is its queue's, so PBS answers a query too.
    """

    def __init__(self, request: JobRequest, environ: Mapping[str, str], start_s: float) -> None:
        self._is_pbs = request.scheduler == "pbs"
        self._job = environ.get("PBS_JOBID", "") if self._is_pbs else ""
        if request.scheduler == "slurm":
            self._job = slurm_id(environ)
        self._start_s = start_s
        self._environ = strip_scheduler_environment(environ)
        self.at_s = start_s + request.time_s if request.time_s else NEVER
        answer = environ.get("SLURM_JOB_END_TIME", "")
        if self._job and not self._is_pbs:
            self.at_s = float(answer) if answer.isdecimal() else NEVER
        self._text = b""
        self._pid = 0
        self.fd, self._answer_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def request(self) -> bool:
        """Ask the scheduler for the limit, without waiting: `fd` becomes readable with the answer. Return False if
        there is nothing to ask.
        """
        if not self._job:
            return False
        self._end()
        from infini_run.jobs.schedulers.scheduler_command import IGNORE_TERM, above_stdio, start

        null = above_stdio(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        words = ["sh", "-c", IGNORE_TERM + (_ASK_PBS if self._is_pbs else _ASK), self._job]
        try:
            self._pid = start(words, self._environ, (null, self._answer_fd, 2), blocks_term=True)
        except OSError:
            return False
        finally:
            os.close(null)
        return True

    def read(self) -> bool:
        """Return whether an answer arrived, which then sets `at_s`. An answer without a limit changes nothing."""
        try:
            self._text += os.read(self.fd, 4096)
        except BlockingIOError:
            return False
        line, newline, rest = self._text.partition(b"\n")
        if not newline:
            return False
        self._text = rest
        self._end()
        text = line.decode("ascii", "replace")
        if text != "unknown":
            self.at_s = self._start_s + parse_span(text) if self._is_pbs else parse(text)
        return True

    def end_reason(self, spare_s: float, limit_s: float) -> EndReason:
        """Return why the job ends. Slurm has `limit_s` seconds to answer. Without an answer, and for all others, the
        job is late at its end but for `spare_s`.

        While a job ends (COMPLETING) EndTime is now, whatever the reason, and in the grace time of a preemption
        EndTime is the end of that. TimeLeft is the rest of the limit at the time of the end. A preempted job has a
        PreemptTime in every mode (measured on 22.05.8)."""
        if not self._job or self._is_pbs:
            return EndReason(is_late=self._is_past(spare_s, limit_s))
        from infini_run.jobs.schedulers.scheduler_command import run_command

        words = ["squeue", "--noheader", "--states=all", f"--jobs={self._job}", f"--Format={_FIELDS}"]
        answer = run_command(words, self._environ, limit_s, ignores_term=True)
        words = answer.out.split() if answer.code == 0 else []
        if len(words) < 2:
            return EndReason(is_late=time.time() >= self.at_s - spare_s)
        return EndReason(is_late=_is_up(words[1]), is_preempted=words[0][:1].isdigit())

    def _is_past(self, spare_s: float, limit_s: float) -> bool:
        """Return whether the end has passed, but for `spare_s`. The query may take `limit_s` seconds."""
        if self.at_s == NEVER and self.request():
            end_s = time.monotonic() + limit_s
            while not self.read():
                if not select.select([self.fd], [], [], max(0.0, end_s - time.monotonic()))[0]:
                    break
        return time.time() >= self.at_s - spare_s

    def _end(self) -> None:
        if self._pid:
            from infini_run.jobs.schedulers.scheduler_command import kill_group, reap

            kill_group(self._pid)
            reap(self._pid)
            self._pid = 0

    def close(self) -> None:
        """Close the pipe, and end the query. Safe twice."""
        self._end()
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._answer_fd)
            self.fd = self._answer_fd = -1


class TimeLimitTimer:
    """What is due before the end: a warning, and the end itself where nobody else keeps the limit. Armed, not polled.

    `fd`: readable when the caller should check before `due_s` (by time.time).
    """

    def __init__(self, request: JobRequest, environ: Mapping[str, str], start_s: float, *, is_ours: bool) -> None:
        """Arm the timer. is_ours: nobody else ends the job at its limit."""
        self._deadline = Deadline(request, environ, start_s)
        self.fd = self._deadline.fd
        self._warn_s = request.warn_s
        self._limit_s = start_s + request.time_s if is_ours and request.time_s else NEVER
        self._answer_by_s = NEVER  # the limit of the second query, whether the limit moved
        if self._warn_s:
            self._deadline.request()

    @property
    def due_s(self) -> float:
        warn_at_s = self._deadline.at_s - self._warn_s if self._warn_s else NEVER
        return min(self._limit_s, self._answer_by_s if self._answer_by_s != NEVER else warn_at_s)

    def check(self, now_s: float) -> tuple[float, bool]:
        """Return what is due.

        Args:
            now_s: Seconds since the epoch.

        Returns:
            The seconds to go if the ranks have to be warned at this time (else 0), once; and whether the limit is
            reached, once.
        """
        has_answer = self._deadline.read()
        is_over = now_s >= self._limit_s
        if is_over:
            self._limit_s = NEVER
        left_s = self._deadline.at_s - now_s
        if not self._warn_s or left_s > self._warn_s:
            if has_answer:
                self._answer_by_s = NEVER
            return 0.0, is_over
        if self._answer_by_s == NEVER and self._deadline.request():
            self._answer_by_s = now_s + _ANSWER_S
        elif self._answer_by_s == NEVER or has_answer or now_s >= self._answer_by_s:
            self._warn_s, self._answer_by_s = 0, NEVER
            return max(left_s, 1.0), is_over
        return 0.0, is_over

    def end_reason(self) -> EndReason:
        """Return why the job ended, as far as its scheduler or clocks show."""
        return self._deadline.end_reason(_SPARE_S, _ANSWER_S)

    def close(self) -> None:
        """Close the pipe, and end the query. Safe twice."""
        self._deadline.close()


def parse_span(text: str) -> float:
    """Read `01:30:00`, as PBS writes it, in seconds; anything else is no limit."""
    from infini_run.jobs.schedulers.pbs_output import span_s

    return float(span_s(text.strip())) or NEVER


def _is_up(left: str) -> bool:
    """Return whether the limit is up. left: as squeue has TimeLeft; below zero it is INVALID. UNLIMITED and NOT_SET
    are no limit."""
    from infini_run.jobs.schedulers.slurm import span_s

    return left == "INVALID" or (left[:1].isdigit() and span_s(left) <= _OVER_S)


def parse(text: str) -> float:
    """Read `2026-11-21T23:15:02`, as squeue writes it in the local zone, as seconds since the epoch; anything else is
    no limit."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return NEVER
