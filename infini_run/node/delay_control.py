"""The control socket of a launch between two attempts, when the core has no ranks."""

from __future__ import annotations

from infini_run.node.control_answers import NodeControl
from infini_run.plan.model import about_launch
from infini_run.system.poller import READ, Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.control.listener import ControlListener
    from infini_run.node.launch import NodeLaunch


class DelayControl:
    """Greets and answers other processes until the next attempt. Its ranks are those of the last one.

    Args:
        run: The last attempt.
        listener: The control socket.
        restart_s: When the next attempt begins, since the epoch.
    """

    def __init__(self, run: NodeLaunch, listener: ControlListener, restart_s: float) -> None:
        self._listener = listener
        self._about = about_launch(run.plan, run.options, run.environ, listener.start_s, restart_s)
        self._run = run
        self._control: NodeControl | None = None  # once somebody connects
        self._poller = Poller()
        self._poller.watch(listener.fileno(), READ, self._on_connect)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `run_due` has something to do."""
        return self._poller.fileno()

    def run_due(self) -> None:
        """Serve the clients that are ready. Never blocks."""
        self._poller.poll(0)

    def _on_connect(self) -> None:
        for fd in self._listener.greeted(self._about, {}, self._run.progress):
            if self._control is None:
                self._control = NodeControl(self._run)
                for each in self._control.fds():
                    self._poller.watch(each, READ, self._control.run_due)
            self._control.add(fd)

    def close(self) -> None:
        """End every connection."""
        if self._control is not None:
            self._control.close()
        self._poller.close()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child."""
        if self._control is not None:
            self._control.after_fork_in_child()
        self._poller.close()
