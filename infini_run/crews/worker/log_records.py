"""Logging records of a worker on their way up, and handed to the supervisor's loggers with rank and host.

A record becomes text where it arises, as logging.handlers.QueueHandler does: arguments and tracebacks may hold
anything, text travels.
"""

from __future__ import annotations

import logging

from infini_run.channel import Sender
from infini_run.channel.errors import ChannelError
from infini_run.crews.capture import capture_exception
from infini_run.crews.protocol import Log, dump, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.crews.protocol import Body


class _Up(logging.Handler):
    def __init__(self, sender: Sender, level: int) -> None:
        super().__init__(level)
        self._sender = sender

    def handle(self, record: logging.LogRecord) -> Any:
        """Send it without this handler's lock: the channel has one. A signal handler that logs would wait here for a
        thread, and that thread for what the signal handler interrupts."""
        passed: Any = self.filter(record)  # from Python 3.12 on, a filter may return another record
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return passed

    def emit(self, record: logging.LogRecord) -> None:
        text, error = capture_exception(self.format, record)
        if error is not None:  # as every handler of logging's: its arguments do not fit its words
            text = f"{record.msg!r}, with arguments that do not fit: {type(error).__name__}: {error}"
        fields = dict(vars(record), msg=text, message="", args=None, exc_info=None, exc_text=None)
        plain = {name: value for name, value in fields.items() if isinstance(value, (str, int, float, type(None)))}
        try:
            self._sender.send_bytes(encode(Log(body=dump(plain, "logging record", by_reference=True))))
        except ChannelError:
            return  # the supervisor is gone, or this end is closed: nobody reads records any more


def send_records(sender: Sender, level: int) -> None:
    """Send up the records of at least this level, in the worker."""
    root = logging.getLogger()
    root.addHandler(_Up(sender, level))
    root.setLevel(min(level, root.level) if root.level else level)


def take_record(body: Body, rank: int, host: str, logger: logging.Logger | None = None) -> None:
    """Pass a record, with `rank` and `host`, to the handlers of the logger of its name, or to those of `logger`, in
    the supervisor."""
    _, error = capture_exception(_hand_over, body, rank, host, logger)
    if error is not None and logging.raiseExceptions:  # the handler is the user's, and the job is not to end for it
        from infini_run.node.host_stderr import print_line  # not in a worker, which has no use for it

        print_line(f"a logging handler raised {type(error).__name__}: {error}")


def _hand_over(body: Body, rank: int, host: str, logger: logging.Logger | None) -> None:
    record = logging.makeLogRecord({**body.load(), "rank": rank, "host": host})  # type: ignore[dict-item]
    chosen = logger or logging.getLogger(record.name)
    if chosen.isEnabledFor(record.levelno):
        chosen.handle(record)
