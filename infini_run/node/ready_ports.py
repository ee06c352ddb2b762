"""--ready_port: whether something on this machine listens on the port of a program that others wait for.

No event reports a new listener, so this connects from time to time: at first often, then once a second.
"""

from __future__ import annotations

import time
from _socket import AF_INET, AF_INET6, SO_ERROR, SOCK_STREAM, SOL_SOCKET, socket
from errno import EINPROGRESS
from select import POLLOUT, poll

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_S, _LONGEST_S = 0.05, 1.0  # between two questions
_ANSWER_MS = 20
_HERE = ((AF_INET, "127.0.0.1"), (AF_INET6, "::1"))


class ReadyPorts:
    """The ports that have not answered.

    Args:
        ports: By program.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = dict(ports)
        self._pause_s = _FIRST_S
        self._due_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all have answered."""
        return not self._ports

    def add(self, name: str, port: int) -> None:
        """Ask for the port of a program again, as its ranks restart."""
        self._ports[name] = port
        self._pause_s, self._due_s = _FIRST_S, 0.0

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until `run_due` has something to do, at most `asked_s`. None: there is no limit."""
        if not self._ports:
            return asked_s
        wait_s = max(0.0, self._due_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> list[str]:
        """Ask, if that is due. Return the programs whose port has answered."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return []
        self._due_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, _LONGEST_S)
        found = [name for name, port in self._ports.items() if _answers(port)]
        for name in found:
            del self._ports[name]
        return found


def _answers(port: int) -> bool:
    """Return whether a port has a listener, on the loopback."""
    for family, address in _HERE:
        try:
            probe = socket(family, SOCK_STREAM)
        except OSError:
            continue
        try:
            probe.setblocking(False)
            error = probe.connect_ex((address, port))
            if error == EINPROGRESS:  # a busy kernel answers a little later
                waiting = poll()
                waiting.register(probe.fileno(), POLLOUT)
                error = probe.getsockopt(SOL_SOCKET, SO_ERROR) if waiting.poll(_ANSWER_MS) else error
            if error == 0:
                return True
        finally:
            probe.close()
    return False
