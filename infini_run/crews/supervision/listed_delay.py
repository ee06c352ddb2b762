"""A launch of a function between two attempts, as other processes find it: it is listed, and may be stopped.

While ranks run, the core has a control socket for them; their launch is over during the delay.
"""

from __future__ import annotations

from infini_run.control.listener import ControlListener
from infini_run.control.server import ControlServer
from infini_run.errors import UsageError
from infini_run.node.control_answers import BETWEEN_ATTEMPTS, stop_text
from infini_run.node.host_stderr import print_line
from infini_run.plan.model import about_text, job_in, shown_words
from infini_run.plan.program import PREFIX, folder_bases, new_launch_id
from infini_run.system.poller import READ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from infini_run.control.server import Asker
    from infini_run.options.launch_options import Options
    from infini_run.system.poller import Poller


class ListedDelay:
    """Listens until `close`. Where no folder takes a socket, the delay is not listed.

    Args:
        poller: The supervisor's.
        options: Those of the ranks, whose title names the function.
        environ: Theirs.
        world: How many ranks there are.
        start_s: When the first attempt began, since the epoch.
        restart_s: When the next one begins.
        on_stop: Called when somebody asks for the end of the launch.
    """

    def __init__(
        self,
        poller: Poller,
        options: Options,
        environ: Mapping[str, str],
        *,
        world: int,
        start_s: float,
        restart_s: float,
        on_stop: Callable[[], None],
    ) -> None:
        launch_id = new_launch_id()
        self._poller = poller
        self._grace_s = options.signal_grace_s
        self._on_stop = on_stop
        self._about = about_text(
            launch_id=launch_id,
            start_s=start_s,
            program=shown_words(options),
            nodes=1,
            node=0,
            world=world,
            ranks=(0, world - 1),
            devices=(),
            job=job_in(environ),
            restart_s=restart_s,
        )
        self._server: ControlServer | None = None
        self._listener = ControlListener()
        try:
            if self._listener.open(f"{base}/{PREFIX}{launch_id}" for base in folder_bases(environ)):
                poller.watch(self._listener.fileno(), READ, self._on_connect)
        except OSError:
            self._listener.close()
            raise

    def _on_connect(self) -> None:
        for fd in self._listener.greeted(self._about, {}, -1):
            self._server = self._server or ControlServer(self, self._poller)
            self._server.add(fd)

    def answer(self, client: Asker, request: dict[str, Any]) -> None:
        """Answer a request, as Answers.answer. Raises UsageError: it is one about ranks."""
        if request["question"] != "stop":
            raise UsageError(BETWEEN_ATTEMPTS)
        print_line(f"{client.who} asked to stop this launch")
        client.finish({"text": stop_text(False, self._grace_s)})
        self._on_stop()

    def close(self) -> None:
        """End every connection, and remove the folder. Safe twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._listener.fileno() >= 0:
            self._poller.unwatch(self._listener.fileno())
        self._listener.close()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child; the folder is the parent's."""
        if self._server is not None:
            self._server.after_fork_in_child()
        self._listener.after_fork_in_child()
