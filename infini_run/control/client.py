"""One question to one launch, over its control socket."""

from __future__ import annotations

from select import POLLIN, poll

from infini_run.control.launch_facts import ABOUT, ANSWER, COUNTS, REQUEST
from infini_run.control.launches import connect_to
from infini_run.control.line_frames import END, LINES, LOST, SHOWN
from infini_run.errors import InfiniRunError, LinkError, UsageError, printable
from infini_run.plan.model import CONTROL_PROTOCOL
from infini_run.system.frames import WireDecoder, pack
from infini_run.system.json_codec import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from infini_run.control.launches import FoundLaunch

_ANSWER = 64 << 20  # bytes
_READ = 1 << 16
_AGAIN = 8  # connections more: an attempt ends with those that it has, and the next one has the same socket
LIMIT_S = 10.0
NODES_S = 20.0  # longer than a head waits for its nodes


class Conversation:
    """A question to a launch, and what comes back. Use it in a `with` block.

    Args:
        launch: The launch.
        question: One of REQUESTS in control/server.py.
        fields: Its fields.

    Raises:
        InfiniRunError: The launch cannot be asked any more.
    """

    def __init__(self, launch: FoundLaunch, question: str, **fields: object) -> None:
        self._name = launch.launch_id
        self._launch = launch
        self._request = pack(REQUEST, encode({"protocol": CONTROL_PROTOCOL, "question": question, **fields}))
        try:
            self._connect()
        except OSError as error:
            raise InfiniRunError(f"{self._name}: cannot ask it: {error.strerror}") from None

    def _connect(self) -> None:
        """Connect, and send the question. Raises OSError."""
        self._decoder = WireDecoder(frozenset((ABOUT, COUNTS, ANSWER, LINES, SHOWN, LOST, END)), _ANSWER)
        self._socket = connect_to(self._launch)
        try:
            self._socket.send(self._request)
        except ConnectionError:  # it has closed the connection; `answer` connects again
            return

    def frames(self, limit_s: float | None = LIMIT_S, output_fd: int = -1) -> Iterator[tuple[bytes, bytes]]:
        """Yield what comes behind the greeting, until the launch ends the connection.

        Args:
            limit_s: For how long each piece is waited for, in seconds. None: without a limit.
            output_fd: Where the caller writes what comes. -1: nowhere.

        Raises:
            InfiniRunError: It did not come, or is not what a launch sends.
            BrokenPipeError: The reader of that output has gone.
        """
        try:
            yield from self._decoded(b"")
            while data := self._receive(limit_s, output_fd):
                yield from self._decoded(data)
        except LinkError:
            raise InfiniRunError(f"{self._name}: its answer is not what infini-run sends") from None

    def _decoded(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        return (frame for frame in self._decoder.feed(data) if frame[0] not in (ABOUT, COUNTS))

    def _receive(self, limit_s: float | None, output_fd: int = -1) -> bytes:
        """The next bytes; empty: there are no more."""
        waiter = poll()
        waiter.register(self._socket.fileno(), POLLIN)
        if output_fd >= 0:
            waiter.register(output_fd, 0)  # what comes unasked says that the reader has gone (poll(2))
        while ready := waiter.poll(None if limit_s is None else limit_s * 1000):
            if any(fd == output_fd for fd, _ in ready):
                raise BrokenPipeError
            try:
                return self._socket.recv(_READ)
            except BlockingIOError:
                continue
            except OSError:
                return b""
        raise InfiniRunError(f"{self._name}: it did not answer within {limit_s:g} s")

    def answer(self, limit_s: float | None = LIMIT_S) -> dict[str, Any]:
        """Return the answer, as plain types. Raises as `frames`; UsageError: the launch refuses."""
        content = self._first_answer(limit_s)
        for _ in range(_AGAIN):
            if content is not None:
                break
            self._socket.close()
            try:
                self._connect()
            except OSError:
                break
            content = self._first_answer(limit_s)
        if content is None:
            raise InfiniRunError(f"{self._name}: it ended before it answered")
        try:
            found: Any = decode(content)
        except (ValueError, RecursionError):
            found = None
        if type(found) is not dict:
            raise InfiniRunError(f"{self._name}: its answer is not what infini-run sends")
        if "error" in found:
            raise UsageError(f"{self._name}: {printable(str(found['error']))}")
        return found

    def _first_answer(self, limit_s: float | None) -> bytes | None:
        """None: the connection ended without one, so the launch has done nothing about the question."""
        return next((payload for kind, payload in self.frames(limit_s) if kind == ANSWER), None)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def ask(launch: FoundLaunch, question: str, *, limit_s: float = LIMIT_S, **fields: object) -> dict[str, Any]:
    """Ask one question, and return the answer. Raises as Conversation and its `answer`.

    Args:
        launch: The launch.
        question: One of REQUESTS in control/server.py.
        limit_s: For how long each piece of the answer is waited for, in seconds.
        fields: The fields of the question.
    """
    with Conversation(launch, question, **fields) as conversation:
        return conversation.answer(limit_s)


def dicts_in(value: Any) -> list[Mapping[str, Any]]:
    """Return the mappings in a list of an answer; anything else is dropped."""
    return [each for each in value if type(each) is dict] if type(value) is list else []
