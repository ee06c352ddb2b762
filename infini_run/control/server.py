"""The server of a launch's control socket: its clients, what they ask, what they are sent.

The one rule: no client slows the launch down. Nothing here waits; what a client does not read is dropped beyond a
bound, a request has a bound, and anything malformed ends that connection alone.
"""

from __future__ import annotations

from _socket import MSG_DONTWAIT, MSG_NOSIGNAL, SO_PEERCRED, SOL_SOCKET, socket
from os import environ

from infini_run.control.launch_facts import ANSWER, REQUEST, UCRED
from infini_run.errors import OTHER_CODE, InfiniRunError, LinkError, UsageError, printable
from infini_run.plan.model import CONTROL_PROTOCOL
from infini_run.system.fork_hooks import close_link
from infini_run.system.frames import WireDecoder, pack
from infini_run.system.json_codec import decode, encode
from infini_run.system.poller import READ, WRITE, Poller
from infini_run.value_types import MAX_INT, MOST_RANKS, MOST_TAIL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Asker(Protocol):
        """Who gets an answer: a Client, or a head that asks for one."""

        who: str

        @property
        def is_closed(self) -> bool:
            """Whether it has gone."""

        def finish(self, content: dict[str, object]) -> None:
            """Send the answer, which is the last."""

    class Answers(Protocol):
        """What a launch does about the questions of its clients."""

        def answer(self, client: Asker, request: dict[str, Any]) -> None:
            """Answer a request whose fields fit REQUESTS, now or later. Raises InfiniRunError: that is the answer."""


MOST_CLIENTS = 32
BACKLOG = 1 << 20  # bytes that wait for one client; an answer that is longer is still sent whole
_REQUEST = 1 << 16  # bytes
_READ = 1 << 16
_LONGEST_RANK = 80  # characters of a program's name and a number


def _is_ranks(value: Any) -> bool:
    """Return whether a value is a list of ranks, or None, which means all of them."""
    return value is None or (type(value) is list and len(value) <= MOST_RANKS and all(map(_is_rank, value)))


def _is_rank(value: Any) -> bool:
    """Return whether a value is a number, or a rank of a program (trainer:3)."""
    return 0 <= value <= MAX_INT if type(value) is int else type(value) is str and len(value) <= _LONGEST_RANK


def _is_tail(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_TAIL


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_signal(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 64


REQUESTS: dict[str, dict[str, Callable[[Any], bool]]] = {  # the fields of each question
    "stop": {},
    "send": {"signal": _is_signal, "ranks": _is_ranks},
    "stacks": {"ranks": _is_ranks},
    "report": {},
    "trace": {},
    "facts": {"ranks": _is_ranks, "usage": _is_bool},
    "follow": {"ranks": _is_ranks, "tail": _is_tail},
    "earlier": {"ranks": _is_ranks, "tail": _is_tail},
}


class Client:
    """One connection, from its request to the end of the answer.

    Attributes:
        who: The user and the process at the other end, for messages.
    """

    def __init__(self, fd: int, poller: Poller, on_request: Callable[[Client, bytes], None]) -> None:
        self._socket = socket(fileno=fd)
        self._poller = poller
        self._on_request = on_request
        self._decoder = WireDecoder(frozenset((REQUEST,)), _REQUEST)
        self._pending = bytearray()
        self._is_ending = False
        self.has_asked = False
        self.is_closed = False
        self.who = self._name_peer()
        poller.watch(fd, READ, self._on_ready)

    def _name_peer(self) -> str:
        pid, uid, _ = UCRED.unpack(self._socket.getsockopt(SOL_SOCKET, SO_PEERCRED, UCRED.size))
        # A directory of users may be slow to answer, and only root and this process's own user get here.
        name = "root" if uid == 0 else environ.get("LOGNAME") or environ.get("USER") or f"user {uid}"
        return printable(f"{name} (pid {pid})" if pid else name)

    def _on_ready(self) -> None:
        try:
            self._flush()
            data = self._socket.recv(_READ, MSG_DONTWAIT)
            if not data or self._is_ending:
                self.close()
                return
            for _, payload in self._decoder.feed(data):
                if self.has_asked:
                    raise LinkError("what came over the link is not what infini-run sends")
                self.has_asked = True
                self._on_request(self, payload)
        except BlockingIOError:
            return
        except (OSError, LinkError):
            self.close()

    # ---- what it is sent

    def send(self, kind: bytes, payload: bytes) -> bool:
        """Send a frame, as soon as there is room. Return False if too much waits already: then it is dropped."""
        if self.is_closed:
            return True
        if self._pending and len(self._pending) + len(payload) > BACKLOG:
            return False
        self._pending += pack(kind, payload)
        try:
            self._flush()
        except OSError:
            self.close()
        return True

    def finish(self, content: dict[str, object]) -> None:
        """Send the answer, and end the connection behind it."""
        self._is_ending = True
        self.send(ANSWER, encode(content))
        if not self._pending:
            self.close()

    def begin(self, content: dict[str, object]) -> None:
        """Send the answer; more frames follow."""
        self.send(ANSWER, encode(content))

    def hand_over(self, content: dict[str, object], take: Callable[[int, bytes], None]) -> None:
        """Give the connection away for what follows the answer.

        Args:
            content: The answer.
            take: Gets the descriptor, and the bytes to send first. If it raises InfiniRunError, nothing has changed.
        """
        fd = self._socket.fileno()
        first = bytes(self._pending) + pack(ANSWER, encode(content))
        self._poller.unwatch(fd)  # before: the new owner closes it at once if the other end has gone
        try:
            take(fd, first)
        except InfiniRunError:
            self._poller.watch(fd, READ, self._on_ready)
            raise
        self._socket.detach()
        self.is_closed = True

    def _flush(self) -> None:
        while self._pending:
            try:
                count = self._socket.send(self._pending[:_READ], MSG_DONTWAIT | MSG_NOSIGNAL)
            except BlockingIOError:
                break
            del self._pending[:count]
        if self._is_ending and not self._pending:
            self.close()
        elif not self.is_closed:
            self._poller.watch(self._socket.fileno(), READ | WRITE if self._pending else READ, self._on_ready)

    def close(self) -> None:
        """End the connection. Safe twice."""
        if not self.is_closed:
            self.is_closed = True
            self._poller.unwatch(self._socket.fileno())
            close_link(self._socket)

    def after_fork_in_child(self) -> None:
        """Close the copy in a forked child."""
        self.is_closed = True
        self._socket.close()


class ControlServer:
    """The clients of one launch that have asked something.

    Args:
        answers: Does what they ask.
        poller: Waits for them; `run_due` is not called then. None: the server has one.
    """

    def __init__(self, answers: Answers, poller: Poller | None = None) -> None:
        self._answers = answers
        self._own_poller = Poller() if poller is None else None
        self._poller = poller or self._own_poller or Poller()
        self._clients: list[Client] = []

    def fileno(self) -> int:
        """Return the descriptor that is readable when `run_due` has something to do."""
        return self._poller.fileno()

    def add(self, fd: int) -> None:
        """Take over a connection. One too many is closed, unless another has asked nothing so far."""
        self._clients = [client for client in self._clients if not client.is_closed]
        if len(self._clients) >= MOST_CLIENTS:
            idle = next((client for client in self._clients if not client.has_asked), None)
            if idle is None:
                close_link(socket(fileno=fd))
                return
            idle.close()
            self._clients.remove(idle)
        try:
            client = Client(fd, self._poller, self._on_request)
        except OSError:  # a limit of this process: the connection ends with its object
            return
        self._clients.append(client)

    def run_due(self) -> None:
        """Serve the clients that are ready. Never blocks."""
        self._poller.poll(0)

    def _on_request(self, client: Client, payload: bytes) -> None:
        try:
            request = _read_request(payload)
        except UsageError as error:
            client.finish({"error": str(error)})
            return
        answer_request(self._answers, client, request)

    def close(self) -> None:
        """End every connection."""
        for client in self._clients:
            client.close()
        if self._own_poller is not None:
            self._own_poller.close()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child."""
        for client in self._clients:
            client.after_fork_in_child()
        if self._own_poller is not None:
            self._own_poller.close()


def _read_request(payload: bytes) -> dict[str, Any]:
    """Raises LinkError: it is no request; UsageError: it is one of another version."""
    try:
        request = decode(payload)
    except (ValueError, RecursionError):
        raise LinkError("what came over the link is not what infini-run sends") from None
    if type(request) is not dict:
        raise LinkError("what came over the link is not what infini-run sends")
    if request.pop("protocol", None) != CONTROL_PROTOCOL:
        raise UsageError("the launch runs another version of infini-run; use the command of that version")
    check_request(request)
    return request


def check_request(request: dict[str, Any]) -> None:
    """Check the fields of a request. Raises LinkError: it is none."""
    name = request.get("question")
    fields = REQUESTS.get(name) if type(name) is str else None
    if fields is None or request.keys() != {"question", *fields}:
        raise LinkError("what came over the link is not what infini-run sends")
    if not all(fits(request[name]) for name, fits in fields.items()):
        raise LinkError("what came over the link is not what infini-run sends")


def answer_request(answers: Answers, client: Asker, request: dict[str, Any]) -> None:
    """Answer a request whose fields were checked; an error is an answer, too."""
    try:
        answers.answer(client, request)
    except (InfiniRunError, OSError) as error:
        client.finish({"error": str(error)})
    except OTHER_CODE as error:
        client.finish({"error": f"{type(error).__name__}: {error}"})
