"""`this_worker()` on a rank of a function's job. What it reports goes to the rank's launcher, as from any command.

No program waits at the other end: a job outlives the one that submitted it. So nothing arrives, and nobody reads
events.
"""

from __future__ import annotations

from infini_run.crews.protocol import Ping, Progress, Ready, StatusText, WorkerSetup
from infini_run.crews.worker.context import Context, TaskInbox
from infini_run.errors import UsageError
from infini_run.rank_messages import READY_WAIT_S, notify_launcher, send_status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.crews.protocol import Message


class RankContext(Context):
    """The context of a rank of a job.

    Args:
        environ: The variables of the rank.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        silence = environ.get("WATCHDOG_USEC", "")
        setup = WorkerSetup(
            rank=int(environ["RANK"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            world_size=int(environ["WORLD_SIZE"]),
            restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            watchdog_s=int(silence) / 1e6 if silence.isdecimal() else 0.0,
        )
        nobody: None = None
        super().__init__(setup, TaskInbox(nobody), nobody)  # type: ignore[arg-type]  # neither is used below

    def emit(self, what: object) -> None:
        """Raise UsageError: a job has no program that reads events.

        Args:
            what: any object.
        """
        raise UsageError("emit(...): a job has no program that reads events; print it, or return it")

    def extend(self, seconds: float) -> None:
        """Raise UsageError: a job has no deadline of a worker.

        Args:
            seconds: any number.
        """
        raise UsageError("extend(...): a job has no deadline to postpone; use a longer --hang_timeout")

    def _send(self, message: Message) -> None:
        self._note_sign()
        if isinstance(message, StatusText):
            send_status(message.text)
        elif isinstance(message, Progress) and isinstance(message.done, int):
            notify_launcher(f"PROGRESS={message.done}")
        elif isinstance(message, Progress):
            send_status(f"{message.done:.15g} of {message.of:.15g}")
        elif isinstance(message, Ready):
            notify_launcher("READY=1", READY_WAIT_S)
        elif isinstance(message, Ping):
            notify_launcher("WATCHDOG=1")

    def _read_inbox(self) -> None:
        self._ping_if_due()
