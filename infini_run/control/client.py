"""One question to one launch, over its control socket."""

from __future__ import annotations

from select import POLLIN, poll

from infini_run.control.launch_facts import ABOUT, ANSWER, COUNTS, LINES, REQUEST
from infini_run.control.launches import connect_to
from infini_run.errors import InfiniRunError, LinkError, UsageError, printable
from infini_run.plan.model import CONTROL_PROTOCOL
from infini_run.system.frames import WireDecoder, pack
from infini_run.system.json_codec import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from infini_run.control.launches import FoundLaunch

_ANSWER = 64 << 20  # bytes
_READ = 1 << 16
LIMIT_S = 10.0


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
        self._decoder = WireDecoder(frozenset((ABOUT, COUNTS, ANSWER, LINES)), _ANSWER)
        self._frames: list[tuple[bytes, bytes]] = []
        request = encode({"protocol": CONTROL_PROTOCOL, "question": question, **fields})
        try:
            self._socket = connect_to(launch)
            self._socket.send(pack(REQUEST, request))
        except OSError as error:
            raise InfiniRunError(f"{self._name}: cannot ask it: {error.strerror}") from None

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read` has something."""
        return self._socket.fileno()

    def frames(self, limit_s: float | None = LIMIT_S) -> Iterator[tuple[bytes, bytes]]:
        """Yield what comes, up to the answer, which is the last.

        Args:
            limit_s: For how long each piece is waited for, in seconds. None: without a limit.

        Raises:
            InfiniRunError: It did not come, or the launch ended meanwhile.
        """
        waiter = poll()
        waiter.register(self._socket.fileno(), POLLIN)
        while waiter.poll(None if limit_s is None else limit_s * 1000):
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                raise InfiniRunError(f"{self._name}: it ended before it answered")
            try:
                for kind, payload in self._decoder.feed(data):
                    if kind in (ANSWER, LINES):
                        yield kind, payload
                    if kind == ANSWER:
                        return
            except LinkError:
                raise InfiniRunError(f"{self._name}: its answer is not what infini-run sends") from None
        raise InfiniRunError(f"{self._name}: it did not answer within {limit_s:g} s")

    def answer(self, limit_s: float | None = LIMIT_S) -> dict[str, Any]:
        """Return the answer, as plain types. Raises as `frames`; UsageError: the launch refuses."""
        content: Any = None
        for _, payload in self.frames(limit_s):
            content = payload
        try:
            found = decode(content)
        except (ValueError, RecursionError):
            found = None
        if type(found) is not dict:
            raise InfiniRunError(f"{self._name}: its answer is not what infini-run sends")
        if "error" in found:
            raise UsageError(f"{self._name}: {printable(str(found['error']))}")
        return found

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
