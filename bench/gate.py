"""Two fifos between a benchmark and the ranks it has started: they say "up", it says "go".

Nobody sleeps to synchronise: a benchmark reads one byte per rank, and closing its end of GO releases all of
them.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from types import TracebackType

from sample import CommandFailed, last_stderr


class Gate:
    """Fifos in `directory`; `up_path` and `go_path` are what ranks are given."""

    def __init__(self, directory: Path) -> None:
        self.up_path = directory / "up"
        self.go_path = directory / "go"
        for path in (self.up_path, self.go_path):
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        # Held for reading and writing, so that no open on either side has to wait for the other.
        self._up = os.open(self.up_path, os.O_RDWR)
        self._go: int | None = os.open(self.go_path, os.O_RDWR)

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.go()
        os.close(self._up)

    def wait_up(self, count: int, timeout_s: float = 60.0) -> None:
        """Waits until `count` ranks have said that they are up."""
        deadline = time.monotonic() + timeout_s
        while count > 0:
            ready, _, _ = select.select([self._up], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CommandFailed(f"{count} ranks did not come up; stderr:\n{last_stderr()}")
            count -= len(os.read(self._up, count))

    def go(self) -> None:
        """Releases every rank that waits; safe twice."""
        if self._go is not None:
            os.close(self._go)
            self._go = None
