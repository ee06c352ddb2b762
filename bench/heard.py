"""The command, and beside it when its head heard each node: `python -I heard.py FILE ARGUMENTS`.

FILE gets a record for each frame that came: the node's index and CLOCK_MONOTONIC in s. Run by bench/flood.py in the
venv that is measured.
"""

from __future__ import annotations

import os
import struct
import sys

from infini_run.cli import main
from infini_run.multinode.head import agent_set, agent_state

RECORD = struct.Struct("<id")


class Heard(agent_state.RemoteAgent):
    """One who writes down when it was heard."""

    @property
    def last_received_s(self) -> float:
        return self._last_received_s

    @last_received_s.setter
    def last_received_s(self, at_s: float) -> None:
        self._last_received_s = at_s
        os.write(FILE, RECORD.pack(self.index, at_s))


if __name__ == "__main__":
    FILE = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    agent_set.__dict__["RemoteAgent"] = Heard  # which an AgentSet makes of each host
    main()
