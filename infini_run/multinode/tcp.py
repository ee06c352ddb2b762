"""TCP, for the Link: the head listens, agents dial. Nothing is said here; what may be said is the Link's affair."""

from __future__ import annotations

import _socket as socket  # the C module: `socket` costs 5 ms
import errno
import os

from infini_run.errors import LinkError, UsageError
from infini_run.multinode.connection import Connection, Unheard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_CONNECT_S = 10.0  # for one address; a node that drops packets must not hold the next address up for ever
_BACKLOG = 1024
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNHEARD_S = 10.0  # that a head may take our connection and drop it
_SAY_S = 5.0  # between two lines about who is waited for


def find_address(asked: str) -> str:
    """An address of ours: as it was given, or the first of the interface of that name. Raises UsageError."""
    interfaces = [name for _, name in socket.if_nameindex()]
    if asked in interfaces:
        found = _ipv4_of(asked) or _ipv6_of(asked)
        if not found:
            raise UsageError(f"--link_address={asked}: this interface has no address")
        return found
    try:
        known = socket.getaddrinfo(asked, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        names = ", ".join(interfaces)
        raise UsageError(f"--link_address={asked}: neither an address nor an interface (here: {names})") from None
    return str(known[0][4][0])


def listen(port: int = 0, address: str = "") -> socket.socket:
    """A socket that listens there (nothing: on all addresses, IPv6 and IPv4), and does not block. Raises UsageError:
    taken, or not ours."""
    try:
        if address:
            listener = _listen(socket.AF_INET6 if ":" in address else socket.AF_INET, address, port)
        elif _has_both():
            listener = _listen(socket.AF_INET6, "", port, is_both=True)
        else:
            listener = _listen(socket.AF_INET, "", port)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--link_address={address}: no address of this machine") from None
        raise UsageError(f"port {port} for the link between the nodes: {why}") from None
    listener.setblocking(False)
    return listener


def _listen(family: int, address: str, port: int, *, is_both: bool = False) -> socket.socket:
    """As socket.create_server does. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_both)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _has_both() -> bool:
    """Whether one socket can listen for IPv6 and IPv4."""
    try:
        probe = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        return False
    try:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        return False
    finally:
        probe.close()
    return True


def accept(listener: socket.socket) -> tuple[Connection, str] | None:
    """The next that has dialled, and its address; None: nobody now. Raises OSError: it is there, and cannot be taken
    for want of a descriptor or of memory (accept(2)); it will be there the next time, too."""
    try:
        fd, address = listener._accept()  # type: ignore[attr-defined]
    except OSError as error:
        if error.errno in _SHORT:
            raise
        return None  # gone again
    return _wire(socket.socket(fileno=fd)), str(address[0]).removeprefix("::ffff:")


def _wire(connection: socket.socket) -> Connection:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(fd := connection.detach(), fd)


def own_addresses() -> list[str]:
    """How other nodes may reach us: our name first, then the addresses of our interfaces; loopback last."""
    name = socket.gethostname()
    found = [address for _, interface in socket.if_nameindex() if (address := _ipv4_of(interface))]
    far = [address for address in found if not address.startswith("127.")]
    return [*far, name, *(address for address in found if address.startswith("127."))]


def _ipv4_of(interface: str) -> str:
    """Its first address; "" where it has none."""
    import fcntl
    from struct import pack

    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        answer = fcntl.ioctl(probe.fileno(), 0x8915, pack("256s", interface.encode()[:15]))
    except OSError:
        return ""
    finally:
        probe.close()
    return socket.inet_ntoa(answer[20:24])  # SIOCGIFADDR, netdevice(7)


def _ipv6_of(interface: str) -> str:
    """The same, of those that are no link's own (proc(5): address, index, prefix, scope, flags, name)."""
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:  # no IPv6 here
        return ""
    found = [words[0] for words in lines if len(words) == 6 and words[5] == interface and words[3] != "20"]
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(found[0])) if found else ""


def connect(target: str) -> Connection:
    """Connect to the first of `HOST,HOST:PORT` that answers. Raises LinkError: none does."""
    hosts, _, port = target.rpartition(":")
    problems = []
    for host in hosts.split(","):
        try:
            return _wire(_connect(host.strip("[]"), int(port)))
        except (OSError, UnicodeError) as error:  # the latter: no name that DNS could have
            problems.append(f"{host}: {getattr(error, 'strerror', None) or error}")
    raise LinkError(f"the head does not answer on port {port}: {'; '.join(problems)}")


def _connect(host: str, port: int) -> socket.socket:
    """As socket.create_connection does. Raises OSError, UnicodeError."""
    name = host.encode("ascii") if host.isascii() else host  # of text `idna` is imported first, whatever is in it
    problem = OSError(errno.ENOENT, "no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(name, port, 0, socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_CONNECT_S)
            connection.connect(address)
        except OSError as error:
            problem = error
            connection.close()
        else:
            return connection
    raise problem


def join(attempt: Callable[[], int]) -> int:
    """Dial, and serve; again, where a head that is full of strangers let us go before it said a word. Raises
    LinkError: that went on for too long, or it is something else."""
    import time

    end_s, pause_s = time.monotonic() + _UNHEARD_S, _FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except Unheard:
            if time.monotonic() + pause_s > end_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def connect_with_retry(target: str, limit_s: float, say: Callable[[str], None]) -> Connection:
    """The same, again and again: the head may not be there yet, and nothing tells when another machine's port opens.
    say: gets a line every few seconds. Raises LinkError: not within the time."""
    import time

    now_s = time.monotonic()
    end_s, say_s, pause_s = now_s + limit_s, now_s + _SAY_S, _FIRST_PAUSE_S
    while True:
        try:
            return connect(target)
        except LinkError as error:
            now_s = time.monotonic()
            if now_s + pause_s > end_s:
                raise
            if now_s >= say_s:
                say_s = now_s + _SAY_S
                say(f"waiting for node 0: {error}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
