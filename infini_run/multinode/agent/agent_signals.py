"""The signals of an agent's process: the core reads them while ranks run here, and the agent itself meanwhile."""

from __future__ import annotations

import _signal

import infini_run.lean_os as os
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack_json
from infini_run.record import replace
from infini_run.system.poller import READ
from infini_run.system.signal_numbers import SIGTSTP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.core.c_structs import ProcessState
    from infini_run.core.signal_pipe import SignalPipe
    from infini_run.multinode.agent.head_link import HeadLink
    from infini_run.options.launch_options import Options
    from infini_run.system.poller import Poller


class AgentSignals:
    """Who reads the signals of this process, and what the agent does with its own.

    A launcher that the user started reports its signals to the head. An agent of a job that continues without it
    ends, as any program. The head would give up a silent launcher, so the agent acts on Ctrl-Z, too.

    Args:
        link: The Link.
        poller: It waits for signals.
        entry: What an earlier agent of this process has taken over. None: none has.
        is_manual: The user started this launcher.
        print_line: Gets a line for the user.
        may_reap: Returns whether nothing here waits for a child of this process.

    Attributes:
        entry: The state of this process before it was taken over. None: it was not.
        left_by: The signal that ends this launcher, whatever the head says; 0: none.
        is_idle: No ranks run, and the head has all that was to be reported of the last ones. Set by the agent.
        has_run: Ranks ran here. Set by the agent.
    """

    def __init__(
        self,
        link: HeadLink,
        poller: Poller,
        *,
        entry: ProcessState | None,
        is_manual: bool,
        print_line: Callable[[str], None],
        may_reap: Callable[[], bool],
    ) -> None:
        self._link = link
        self._poller = poller
        self._is_manual = is_manual
        self._print_line = print_line
        self._may_reap = may_reap
        self._pipe: SignalPipe | None = None  # of a launcher that the user has started
        self._end_signals = 0  # that came while no ranks ran here
        self.entry = entry
        self.left_by = 0
        self.is_idle = False
        self.has_run = False

    # ---- who reads them

    def give_to_core(self) -> None:
        """Let the core read the signals, while ranks run."""
        if self.entry is None:
            self.entry = _take_over_process()
        else:
            _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        self._close_pipe()  # what it has, it reports again

    def give_back(self) -> None:
        """Read the signals in the agent, while no ranks run here."""
        if self._is_manual:
            from infini_run.core.signal_pipe import SignalPipe

            self._pipe = self._pipe or SignalPipe(reaps=True)
            self._poller.watch(self._pipe.fd, READ, self._on_signals)
        elif self._link.lease is not None:
            self.restore_mask()

    def restore_mask(self) -> None:
        """Let signals do what they did before this process was taken over."""
        blocked = 0 if self.entry is None else self.entry.blocked
        _signal.pthread_sigmask(
            _signal.SIG_SETMASK, {number for number in _signal.valid_signals() if blocked >> (number - 1) & 1}
        )

    def close(self) -> None:
        """Give the signals back to a process that continues without this agent."""
        if self._is_manual and self.entry is not None:
            _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())  # none may come in between
            self._close_pipe()
            self.restore_mask()

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self._poller.unwatch(pipe.fd)
            pipe.close()

    def entry_of_ranks(self, options: Options) -> ProcessState | None:
        """Return the state that ranks start with: this process's, and the signals that they themselves unblock.

        Args:
            options: Those of the ranks.

        Returns:
            None: this process was not taken over.
        """
        if self.entry is None:
            return None
        held = sum(1 << number - 1 for number in options.blocked_signals)
        return replace(self.entry, blocked=self.entry.blocked | held)

    # ---- what the agent does with them

    def _on_signals(self) -> None:
        from infini_run.core.signal_pipe import END_SIGNALS, stop_self

        assert self._pipe is not None
        for number in self._pipe.read():
            if number == SIGTSTP:
                self._link.suspend(stop_self, self._print_line)
            elif number == _signal.SIGCHLD:
                self.reap_orphans()
            elif number in END_SIGNALS:
                self._end_by(number)

    def _end_by(self, number: int) -> None:
        """Report a stop signal to the head. A job that can do without this node continues, and the agent leaves. Else
        the head ends the job, and this agent with it, unless the user insists. Only the head may kill the ranks of
        other nodes, so that takes a third time."""
        self._end_signals += 1
        is_needed = self._link.lease is None
        is_insisted = self._end_signals > (2 if is_needed and self.has_run else 1)
        if self._link.is_lost or is_insisted or not is_needed:
            self.left_by = self.left_by or number
        if not self._link.is_lost:
            self._link.connection.send(pack_json(protocol.EVENT, {"signalled": number}))
            if is_insisted:
                self._link.give_up()

    def leave_if_due(self) -> None:
        """Leave once the head has all that it needs."""
        if self.left_by and self.is_idle and not self._link.is_lost and not self._link.connection.wants_write:
            self._link.give_up()

    def reap_orphans(self) -> None:
        """Reap the processes that a check has left, and as process 1 any: nobody needs their status. A check and the
        process of --preload are reaped by their own group."""
        while self._may_reap() and _reap_any():
            pass


def _take_over_process() -> ProcessState:
    """Let the core read this process's signals from here on, as it does for the command."""
    from infini_run.core.group import take_over_process

    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    return take_over_process(sum(1 << (number - 1) for number in before))


def _reap_any() -> bool:
    """Return whether there was a child to reap."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return False
