"""How a launch ended: one Exit for each worker, the first failure, the exit code; as text and as JSON. Pure.

The first failure is the worker that failed first, and never one that the launcher had stopped before.
"""

from __future__ import annotations

from infini_run.errors import printable
from infini_run.record import record
from infini_run.report.text import headline, hint, process_count, process_names, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.report.exit import Exit, LeftoverProcess
    from infini_run.report.hang_groups import HangAnalysis
    from infini_run.report.hang_snapshot import HangSnapshot
    from infini_run.report.pace import SlowRank

TEXT_LINES = 10
_WORDS = 5  # last lines of stderr that are shown


@record
class Clock:
    """The difference between a node's clock and the head's, which was subtracted from the times of the node's report.

    Attributes:
        host: The node's name.
        offset_s: The difference in seconds.
        bound_s: The error of it, at most, in seconds.
    """

    host: str
    offset_s: float
    bound_s: float


@record
class PreloadUse:
    """What --preload did on one node for an attempt.

    Attributes:
        host: The name of the node.
        modules: What was imported. Empty: the imports did not finish.
        wall_s: For how long they were imported, in seconds.
        cpu_s: The CPU time of that, in seconds.
        fork_s: From the request to fork the ranks until they could run, in seconds; 0: they were not forked.
        cold_because: Why the ranks were not forked. Empty: they were.
    """

    host: str
    modules: tuple[str, ...]
    wall_s: float
    cpu_s: float
    fork_s: float
    cold_because: str


@record
class Report:
    """How a launch ended. With restarts, all is of the last attempt, except `earlier_failures` and `lost`.

    Attributes:
        launch_id: The launch's id. After a restart, it may end in the number of restarts, such as `.1`.
        run_id: The id that the user gave (`--rdzv_id`); empty: none.
        host: The name of the launcher's host.
        world_size: The number of ranks that the launch should have.
        start_s: When the first worker was created: seconds since the epoch, by the head's clock.
        end_s: When the last process was gone.
        exits: How each worker ended, by rank.
        first_failure: The worker that failed first, or asked for another run of its job, and was not stopped before.
            None: none did.
        received_signal: The signal from outside that ended the launch; 0: none did.
        forwarded_signals: Signals from outside that were passed on to the ranks.
        user_interrupted: Ctrl-C at the terminal reached one rank alone, and ended it.
        leftover_processes: The first few processes that outlived the workers.
        leftover_count: How many there were.
        stuck: Processes that SIGKILL did not end.
        notices: Sentences that the user was shown while the job ran, but for those of other fields.
        snapshots: What ranks were doing when a rank hung, or was not ready in time.
        unanswered: The hosts that did not answer at the last hang: `snapshots` may lack their ranks.
        port_in_use: The rendezvous port, if another program listens there; else 0.
        ended_by: The program with --ends_job that exited with 0, and so ended the job. Empty: none.
        silent: The number of nodes that sent no report.
        restarts: How often all ranks restarted; with --restart_scope=program, how often programs restarted, in all.
        earlier_failures: The first failure of each earlier attempt, at most of the last 100 attempts. After the loss
            of a node, it is the node's first rank.
        not_restarted: Why no restart followed the last failure, if the reason is not plain, such as a stop request.
        clocks: With several nodes, the difference of each node's clock.
        preload: What --preload did, by node. Empty: without the flag.
        slow: The ranks that were slow in the last attempt, the worst first: 64 at most.
        error: Why the job ended, if no rank was the cause: a node was lost, or did not start. Empty: a rank was.
        error_code: The exit code for that `error`.
        lost: A sentence per lost node, at most 100. The nodes of the last attempt come first.
        advice: What to do about the first failure, with keywords of the Python API. Empty: `find_advice` has it, with
            flags of the command, if there is any.
    """

    launch_id: str
    run_id: str
    host: str
    world_size: int
    start_s: float
    end_s: float
    exits: tuple[Exit, ...]
    first_failure: Exit | None = None
    received_signal: int = 0
    forwarded_signals: tuple[int, ...] = ()
    user_interrupted: bool = False
    leftover_processes: tuple[LeftoverProcess, ...] = ()
    leftover_count: int = 0
    stuck: tuple[LeftoverProcess, ...] = ()
    notices: tuple[str, ...] = ()
    snapshots: tuple[HangSnapshot, ...] = ()
    unanswered: tuple[str, ...] = ()
    port_in_use: int = 0
    ended_by: str = ""
    silent: int = 0
    restarts: int = 0
    earlier_failures: tuple[Exit, ...] = ()
    not_restarted: str = ""
    clocks: tuple[Clock, ...] = ()
    preload: tuple[PreloadUse, ...] = ()
    slow: tuple[SlowRank, ...] = ()
    error: str = ""
    error_code: int = 0
    lost: tuple[str, ...] = ()
    advice: str = ""

    @property
    def exit_code(self) -> int:
        """The launcher's exit code.

        In this order: error_code if there is an `error`; the first failure's code; 128 + received_signal, unless
        every rank exited 0; the code of the first rank that did not exit 0, unless `ended_by` stopped it; 1 if
        something is stuck; 0.
        """
        if self.error:
            return self.error_code
        if self.first_failure is not None:
            return self.first_failure.shell_code
        if self.received_signal and (self.silent or not all(e.ended_well for e in self.exits)):
            return 128 + self.received_signal
        ended = [e for e in self.exits if e.end_s is not None and not (self.ended_by and e.stopped)]
        stopped = next((e.shell_code for e in ended if e.shell_code), 0)
        return stopped or (1 if self.stuck else 0)

    def text(self) -> str:
        """Return ten lines at most for people: who failed, how, its last output, where to look."""
        first = self._first_of_ranks()
        lines = [f"infini-run: {self.error}{self._restarted()}"] if self.error else []
        has_lost = not self.error and any(exit_.lost for exit_ in self.exits)  # in the last attempt
        others = [f"infini-run: {text}" for text in self.lost[:1]] if has_lost else []
        if first is not None and not self.user_interrupted:
            after = "" if self.error else self._restarted()
            lines.append(f"infini-run: {self._sentence(first)}{self._others(first)}{after}")
            lines += self._details(first, TEXT_LINES - len(lines) - len(others))
        lines += others
        for stray in self.stuck[: max(1, TEXT_LINES - len(lines))]:
            lines.append(
                f"infini-run: process {stray.pid} ({stray.name}) survived SIGKILL (state {stray.state}); leaving it"
            )
        lines += [f"infini-run: {text}" for text in (self.killed_text(), self.left_behind()) if text]
        if self.slow and self.slow[0].is_costly:
            lines.append(f"infini-run: {self.slow_text()}")
        return "\n".join(printable(line.expandtabs()) for line in lines[:TEXT_LINES])

    def _first_of_ranks(self) -> Exit | None:
        """Return the first failure of a rank; after the loss of a node, the first of a rank elsewhere."""
        first = self.first_failure
        if not self.error or (first is not None and not first.lost):
            return first
        failed = [e for e in self.exits if (e.is_failure or e.asked_again) and not e.lost]
        return min(failed, key=lambda e: e.end_s or 0.0, default=None)

    def headline(self) -> str:
        """Return the first failure in a sentence. Empty: there is none."""
        first = self.first_failure
        return "" if first is None else f"{self._sentence(first)}{self._others(first)}"

    @property
    def is_caused_by_rank(self) -> bool:
        """Whether the rank in `first_failure` is to blame. False: the job hung, and the ranks wait for no single one;
        `first_failure` is then the first rank that hung."""
        hang = None if self.first_failure is None else self._hang(self.first_failure)
        return hang is None or bool(hang.waited_for)

    def _sentence(self, first: Exit) -> str:
        """Return the failure in a sentence, which for a hang names whom the others wait for."""
        hang = self._hang(first)
        return headline(first) if hang is None else hang.headline

    def _hang(self, first: Exit) -> HangAnalysis | None:
        """Return the groups of the hang that ended the job. None: it was another failure, or one rank alone has
        hung."""
        if not first.watchdog_reason.startswith("hung"):
            return None
        from infini_run.report.hang_groups import analyze_hang, with_exited

        hang = analyze_hang(with_exited(self.snapshots, self.exits), self.unanswered)
        return hang if hang is not None and hang.headline else None

    def _later_hang(self, first: Exit) -> HangAnalysis | None:
        """Return the hang that ended the job after a rank had failed, with --keep_going. None: there was none."""
        if first.watchdog_reason or self.received_signal:
            return None
        hung = {shot.rank for shot in self.snapshots if shot.kind == "hung" and shot.time_s >= (first.end_s or 0.0)}
        if not hung or not all(e.stopped or e.watchdog_reason for e in self.exits if e.rank in hung):
            return None
        from infini_run.report.hang_groups import analyze_hang, with_exited

        return analyze_hang(with_exited(self.snapshots, self.exits), self.unanswered)

    def _lines_of_later_hang(self, first: Exit) -> list[str]:
        hang = self._later_hang(first)
        if hang is None:
            return []
        from infini_run.report.hang_groups import lines_after_failure

        return lines_after_failure(hang, self.snapshots, {e.rank: e.log for e in self.exits})

    def killed_text(self) -> str:
        """Return a sentence about ranks that SIGKILL ended after their grace. Empty: there were none."""
        killed = [e for e in self.exits if e.killed_after_s]
        if not killed:
            return ""
        from infini_run.report.hang_groups import ranks_text

        names = []
        for program in dict.fromkeys(e.program for e in killed):
            ranks = [e for e in killed if e.program == program]
            before = ranks[0].rank - ranks[0].program_rank if program else 0
            names.append(ranks_text([e.rank for e in ranks], program, before))
        grace_s = max(e.killed_after_s for e in killed)
        return f"{', '.join(names)} did not exit within {grace_s:g} s, and {'were' if killed[1:] else 'was'} killed"

    def left_behind(self) -> str:
        """Return a sentence about processes that outlived the workers, and ended. Empty: there were none."""
        survivors = {stray.pid for stray in self.stuck}
        ended = tuple(each for each in self.leftover_processes if each.pid not in survivors)
        if not ended:
            return ""
        count = process_count(self.leftover_count - len(self.leftover_processes) + len(ended), ended)
        return f"stopped {count} left behind: {process_names(ended)}"

    def slow_text(self) -> str:
        """Return a sentence about the slowest rank, and those of its host that are as slow. Empty: none was slow."""
        if not self.slow:
            return ""
        from infini_run.report.hang_groups import ranks_text

        places = {exit_.rank: (exit_.host, exit_.program) for exit_ in self.exits}
        worst = self.slow[0]
        host, program = places.get(worst.rank, (self.host, ""))
        like = [slow.rank for slow in self.slow if places.get(slow.rank) == (host, program) and slow.is_like(worst)]
        first = min((exit_.rank - exit_.program_rank for exit_ in self.exits if exit_.program == program), default=0)
        whose = ranks_text(sorted(like or [worst.rank]), program, first if program else 0)
        return f"{whose} on {host} {worst.text(len(like) > 1)}"

    def _restarted(self) -> str:
        after = f"; after {self.restarts} restart{'s' * (self.restarts > 1)}" if self.restarts else ""
        return after + (f"; not restarted: {self.not_restarted}" if self.not_restarted else "")

    def _details(self, first: Exit, most: int) -> list[str]:
        """Return the lines about the first failure: status, error, last output as far as it fits; then files and
        advice."""
        hang = self._hang(first)
        if hang is not None:
            from infini_run.report.hang_groups import files_lines

            status = [f"  status: {first.status}"] if first.status else []
            files = files_lines(hang, self.snapshots, {e.rank: e.log for e in self.exits})
            return [*hang.lines(), *status, *files][:most]
        own = (shot for shot in reversed(self.snapshots) if shot.kind and shot.rank == first.rank)
        snapshot = next(own, None) if first.watchdog_reason else None
        lines = snapshot.lines() if snapshot else [f"  status: {first.status}"] if first.status else []
        if first.error_message:
            lines.append(f"  error: {first.error_message}")
        last = [*self._others_before_stop(), *self._lines_of_later_hang(first)]
        last += [f"  log: {first.log}"] if first.log and not any(first.log in line for line in last) else []
        if snapshot and snapshot.file:
            from infini_run.report.hang_groups import shown_file

            last.append(f"  details: {shown_file(snapshot.file, [first.log])}")
        advice = self.advice or self._advice(first)
        if advice:
            last.append(f"  {advice}")
        room = max(0, most - len(last) - len(lines))
        words = _chosen(first.last_lines, min(_WORDS, room))
        return [*lines[: most - len(last)], *(f"  | {line}" for line in words), *last]

    def find_advice(self) -> str:
        """Return what to do about the first failure, after `next:`. Empty: there is no advice."""
        first = self._first_of_ranks()
        return "" if first is None else self.advice or self._advice(first)

    def _advice(self, first: Exit) -> str:
        known = f"next: {first.advice}" if first.advice else ""
        is_sure = bool(first.last_lines or first.error_message)
        return hint(first) or (known if is_sure else "") or self._port_hint(first) or known

    def _others_before_stop(self) -> list[str]:
        if not self.snapshots:
            return []
        from infini_run.report.hang_groups import lines_before_stop

        return lines_before_stop(self.snapshots, {exit_.rank: exit_.log for exit_ in self.exits})

    def _port_hint(self, first: Exit) -> str:
        if not self.port_in_use or first.start_failure:
            return ""
        way = (
            "add --standalone for a free one"
            if self.world_size == len(self.exits)
            else "set another --rdzv_endpoint=HOST:PORT on every node"
        )
        return f"next: port {self.port_in_use} is in use by another program; {way}"

    def _others(self, first: Exit) -> str:
        hang, later = self._hang(first), self._later_hang(first)
        waited_for = {rank for each in (hang, later) if each is not None for rank in each.waited_for}
        is_named = hang is None or first.rank in hang.waited_for
        # A first one that the sentence does not name is among those that were stopped.
        stopped = sum(e.stopped and not e.watchdog_reason and not e.lost for e in self.exits) + (not is_named)
        ended = [e for e in self.exits if (e.is_failure or e.asked_again) and not e.lost]
        others = [e for e in ended if e.rank != first.rank]
        asked = sum(e.asked_again for e in others)
        reasons = [e.watchdog_reason for e in others if not e.asked_again]
        hung = sum(reason.startswith("hung") for reason in reasons)
        named = sum(
            e.watchdog_reason.startswith("hung") for e in others if e.rank in waited_for and not e.asked_again
        )
        failed = sum(not reason for reason in reasons)
        late = len(reasons) - failed - hung
        more = ((asked, "asked"), (failed, "failed"), (hung - named, "hung"), (late, "not ready in time"))
        then = f"; then {later.headline}" if later is not None and later.headline else ""
        parts = [f"{count} more {what}" for count, what in more if count]
        if stopped:
            who = "other" if is_named else "rank"
            parts.append(f"{stopped} {f'{who} was' if stopped == 1 else f'{who}s were'} stopped")
        return then + (f"; {', '.join(parts)}" if parts else "")

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain types for JSON. `format` rises when a field changes."""
        return {
            "format": 2,
            "launch_id": self.launch_id,
            "run_id": self.run_id,
            "host": self.host,
            "world_size": self.world_size,
            "exit_code": self.exit_code,
            "start": self.start_s,
            "end": self.end_s,
            "received_signal": signal_name(self.received_signal) if self.received_signal else None,
            "first_failure": self.first_failure.rank if self.first_failure else None,
            "ended_by": self.ended_by or None,
            "error": self.error or None,
            "lost": list(self.lost),
            "ranks": [_exit_json(e) for e in self.exits],
            "restarts": self.restarts,
            "earlier_failures": [_exit_json(e) for e in self.earlier_failures],
            "not_restarted": self.not_restarted or None,
            "leftover_processes": [{"pid": stray.pid, "name": stray.name} for stray in self.leftover_processes],
            "leftover_count": max(self.leftover_count, len(self.leftover_processes)),
            "stuck": [{"pid": s.pid, "name": s.name, "state": s.state} for s in self.stuck],
            "notices": list(self.notices),
            "snapshots": [snapshot.to_json() for snapshot in self.snapshots],
            "unanswered": list(self.unanswered),
            "clocks": [{"host": c.host, "offset": c.offset_s, "bound": c.bound_s} for c in self.clocks],
            "preload": [_preload_json(use) for use in self.preload],
            "slow_ranks": [slow.to_json() for slow in self.slow],
        }


def _chosen(lines: tuple[str, ...], most: int) -> tuple[str, ...]:
    if len(lines) <= most:
        return lines
    from infini_run.report.last_lines import choose_lines

    return choose_lines(lines, most)


def _preload_json(use: PreloadUse) -> dict[str, Any]:
    return {
        "host": use.host,
        "modules": list(use.modules),
        "wall_s": use.wall_s,
        "cpu_s": use.cpu_s,
        "fork_s": use.fork_s,
        "cold_because": use.cold_because or None,
    }


def _exit_json(exit_: Exit) -> dict[str, Any]:
    return {
        "rank": exit_.rank,
        "program": exit_.program or None,
        "program_rank": exit_.program_rank,
        "local_rank": exit_.local_rank,
        "host": exit_.host,
        "pid": exit_.pid,
        "start": exit_.start_s,
        "start_method": "fork" if exit_.is_forked else "exec",
        "ready": exit_.ready_s,
        "end": exit_.end_s,
        "exit_code": exit_.code,
        "signal": signal_name(exit_.signal) if exit_.signal else None,
        "sent_by": exit_.sent_by or None,
        "dumped_core": exit_.dumped_core,
        "out_of_memory": exit_.out_of_memory,
        "failed": exit_.is_failure,
        "asked_again": exit_.asked_again,
        "stopped": exit_.stopped,
        "killed_after": exit_.killed_after_s or None,
        "stuck": exit_.stuck,
        "start_failure": exit_.start_failure or None,
        "error_message": exit_.error_message or None,
        "last_lines": list(exit_.last_lines),
        "status": exit_.status or None,
        "progress": exit_.progress,
        "progress_time": exit_.progress_s,
        "watchdog_reason": exit_.watchdog_reason or None,
        "lost": exit_.lost,
        "log": exit_.log or None,
        "rusage": {"user": exit_.user_s, "system": exit_.system_s, "max_rss_kib": exit_.max_rss_kib},
    }
