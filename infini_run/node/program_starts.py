"""--after on one node: which programs are up, and which wait for that. Imported with the flag.

A head decides for several nodes (multinode/head/attempts.py). Then each counts its own ranks, and reports.
"""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.node.ready_ports import ReadyPorts
from infini_run.plan.program import is_port_in_use
from infini_run.plan.start_order import StartOrder, UpCount, awaited

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.options.launch_options import OneProgram


class ProgramStarts:
    """The programs of a launch, where some wait for others.

    Args:
        programs: All programs.
        counts: How many ranks each has here.
        on_up: Called with the name of a program whose ranks here are up.

    Raises:
        UsageError: The port of --ready_port is in use.
    """

    def __init__(
        self, programs: Sequence[OneProgram], counts: Mapping[str, int], on_up: Callable[[str], None]
    ) -> None:
        self._order = StartOrder(programs)
        names = awaited(programs)
        self._up = UpCount({name: counts[name] for name in names})
        self._on_up = on_up
        self._given = {each.name: each.ready_port for each in programs if each.name in names and counts[each.name]}
        self._ports = ReadyPorts({})
        for name in self._given:
            self.ask_port(name)

    @property
    def has_held(self) -> bool:
        """Whether programs wait for others to be up."""
        return not self._order.is_over

    def is_held(self, name: str) -> bool:
        """Return whether a program may not start yet."""
        return self._order.is_held(name)

    def take_free(self, name: str) -> list[str]:
        """Return the programs that may start because one is up."""
        return self._order.on_up(name)

    def waits_for(self, programs: Sequence[str]) -> bool:
        """Return whether one of some programs is not up."""
        return any(map(self._up.waits_for, programs))

    def note(self, name: str, rank: int) -> None:
        """Note that a rank of a program is ready, or exited with code 0."""
        if self._up.note(name, rank):
            self._on_up(name)

    def renew(self, name: str, count: int) -> None:
        """Count the ranks of a program anew, as they restart."""
        self._up.renew(name, count)

    def ask_port(self, name: str) -> None:
        """Ask from now on whether the port of an awaited program answers. Raises UsageError: it does already."""
        port = self._given.get(name, 0)
        if port and is_port_in_use(port):
            raise UsageError(f"--ready_port={port}: already in use here; stop that program, or use another port")
        if port:
            self._ports.add(name, port)

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until `run_due` has something to do, at most `asked_s`. None: there is no limit."""
        return self._ports.timeout_s(asked_s)

    def run_due(self) -> None:
        """Note the programs whose --ready_port answers."""
        for name in self._ports.run_due():
            if self._up.note_all(name):
                self._on_up(name)
