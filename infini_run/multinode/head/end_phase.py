"""The last phase of a launch: agents and the engine's commands end, and the reader of the head's output gets the
rest."""

from __future__ import annotations

import time

from infini_run.core.nonblocking_writer import CONSOLE_WAIT_S
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.engine_processes import EngineProcesses
    from infini_run.multinode.head.head_state import HeadState

_COMMANDS_END_S = 5.0  # for the engine's commands, after GOODBYE
_NOTICE_S = 5.0  # until a line reports the wait for the reader
_NEVER = float("inf")


class EndPhase:
    def __init__(self, state: HeadState, processes: EngineProcesses) -> None:
        self._state = state
        self._processes = processes
        self._commands_end_s = self._notice_s = self._reader_end_s = _NEVER
        self._is_reader_limited = False
        self._has_used_cleanup = False
        self.has_begun = False
        self.is_done = False

    @property
    def next_deadline_s(self) -> float:
        if not self.has_begun:
            return self._reader_end_s
        return min(self._reader_end_s, self._commands_end_s if self._processes.are_alive else self._notice_s)

    def postpone(self, by_s: float) -> None:
        """Move the limits by a suspension of this process, in which no command could end in time."""
        self._commands_end_s += by_s

    # ---- the reader of the head's output

    def limit_reader(self) -> None:
        """Give a reader that does not read one more second, after a stop request."""
        self._reader_end_s, self._is_reader_limited = time.monotonic() + CONSOLE_WAIT_S, True

    def end_reader(self) -> None:
        """Wait for the reader no longer."""
        self._reader_end_s = time.monotonic()

    def run_due(self, now_s: float) -> None:
        """Drop the remaining output if the reader's time is over at `now_s` (monotonic), and report that."""
        if now_s >= self._reader_end_s:
            self._reader_end_s = _NEVER
            if self._state.console.give_up():
                self._state.notice("output reader is gone; dropped the rest")

    # ---- agents and commands

    def begin(self, now_s: float, exit_code: int) -> None:
        """Dismiss the agents: nothing of the job is left on any node."""
        state = self._state
        self.has_begun = True
        state.goodbye = pack_json(protocol.GOODBYE, {"exit_code": exit_code})
        state.stop_end_s = _NEVER
        self._commands_end_s, self._notice_s = now_s + _COMMANDS_END_S, now_s + _NOTICE_S
        state.agents.send_all(state.goodbye)
        self._processes.give_up()
        if not state.engine.USES_STDIO:
            return
        silent = [agent for agent in state.agents.all if agent.is_silent]
        # the ssh of a silent one may be suspended; one that never ran anything has nothing more to send
        refused = [agent for agent in state.agents.all if agent.state == "lost" and not agent.was_running]
        self._processes.kill({agent.index for agent in (*silent, *refused)})
        self._clean_up(silent)

    def go_on(self, now_s: float) -> None:
        """Wait for the commands, and then for the reader; `is_done` at the end."""
        if now_s >= self._commands_end_s and self._processes.are_alive and not self._has_used_cleanup:
            self._has_used_cleanup = True
            alive = self._processes.alive_nodes()
            if self._clean_up([agent for agent in self._state.agents.all if agent.index in alive]):
                self._commands_end_s = now_s + _COMMANDS_END_S
        if self._processes.are_alive and now_s < self._commands_end_s:
            return
        self._state.flush_output()
        self.is_done = self._state.console.is_done
        if self.is_done or self._reader_end_s != _NEVER:
            return
        if self._is_reader_limited:
            self.limit_reader()  # it fell behind only after the stop
        elif now_s >= self._notice_s:
            self._notice_s = _NEVER
            self._state.notice("waiting until the output is read; Ctrl-C stops waiting")

    def _clean_up(self, agents: Sequence[RemoteAgent]) -> bool:
        """Have the engine end agents that do not listen: a suspended agent would leave its ranks for ever. Whether
        the engine can do anything."""
        known = [
            (agent.host, agent.index, agent.hello) for agent in agents if agent.hello and not agent.is_ended_by_engine
        ]
        for agent in agents:
            agent.is_ended_by_engine = True
        commands = self._state.engine.cleanup_commands(known, self._state.options) if known else []
        for command in commands:
            if problem := self._processes.start_cleanup(command, agents):
                self._state.notice(problem)
        return bool(commands)
