"""TCP for the Link: the head listens, agents connect. Nothing here sends a byte.

`listen` and `_connect` do what socket.create_server and socket.create_connection do. An import of `socket` takes
longer than all the rest of an agent's connection.
"""

from __future__ import annotations

import _socket as socket
import errno
import os

from infini_run.errors import LinkError, UsageError
from infini_run.multinode.link.connection import Connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_CONNECT_S = 10.0  # for one address: a host that drops packets must not block the next address
_BACKLOG = 1024  # a longer queue lets a flood go faster: joining took three times as long under load with 4096
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNHEARD_S = 30.0  # how long a head may drop connections, or its kernel packets
_NOTICE_S = 5.0  # between two lines that report the wait


def find_address(asked: str) -> str:
    """Return the address that --link_address means: itself, or the first one of the interface of that name. Raises
    UsageError."""
    interfaces = [name for _, name in socket.if_nameindex()]
    if asked in interfaces:
        found = _ipv4_of(asked) or _ipv6_of(asked)
        if not found:
            raise UsageError(f"--link_address={asked}: interface has no address")
        return found
    try:
        known = socket.getaddrinfo(asked, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        names = ", ".join(interfaces)
        raise UsageError(f"--link_address={asked}: not an address or interface; use one of {names}") from None
    return str(known[0][4][0])


def listen(port: int = 0, address: str = "") -> socket.socket:
    """Return a listening socket that does not block.

    Args:
        port: 0: one that is free.
        address: empty: all addresses, IPv6 and IPv4.

    Raises:
        UsageError: the port is in use, or the address is not one of this machine.
    """
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
            raise UsageError(f"--link_address={address}: not an address of this machine") from None
        raise UsageError(f"port {port} for the link between the nodes: {why}") from None
    listener.setblocking(False)
    return listener


def listen_if_free(port: int, asked: str = "") -> socket.socket | None:
    """Return a listening socket, as `listen` does. None: somebody already listens on the port, or is about to. Of two
    that begin at once, listen(2) may refuse both. `asked` is the value of --link_address. Raises UsageError."""
    address = find_address(asked) if asked else ""
    try:
        return listen(port, address)
    except UsageError as error:
        if isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE:
            return None
        raise


def is_own_host(name: str) -> bool:
    """Return whether a name or an address means this machine: a socket can bind one of its addresses here."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(can_bind(str(address[0])) for *_, address in found)


def can_bind(address: str) -> bool:
    """Return whether the address is one of this machine."""
    try:
        probe = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    except OSError:  # no IPv6 here
        return False
    try:
        probe.bind((address, 0))
    except OSError:
        return False
    finally:
        probe.close()
    return True


def _listen(family: int, address: str, port: int, *, is_both: bool = False) -> socket.socket:
    """Raises OSError."""
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
    """Return whether one socket can listen for IPv6 and IPv4."""
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
    """Return the next connection and the address it comes from; None: there is none now. Raises OSError: there is
    one, but no descriptor or memory for it (accept(2)); it stays in the queue."""
    try:
        fd, address = listener._accept()  # type: ignore[attr-defined]
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise
        return None  # gone again
    return _to_connection(socket.socket(fileno=fd)), str(address[0]).removeprefix("::ffff:")


def _to_connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(fd := connected.detach(), fd)


def own_addresses() -> list[str]:
    """Return the addresses at which other nodes may reach this one: those of its interfaces, its name, loopback
    last."""
    found = interface_addresses()
    far = [address for address in found if not address.startswith("127.")]
    return [*far, socket.gethostname(), *(address for address in found if address.startswith("127."))]


def interface_addresses() -> list[str]:
    """Return the first IPv4 address of each interface that has one."""
    return [address for _, interface in socket.if_nameindex() if (address := _ipv4_of(interface))]


def _ipv4_of(interface: str) -> str:
    """Return the first address of an interface; "" without one."""
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
    """Return the same for IPv6, without those of a link alone (proc(5): address, index, prefix, scope, flags,
    name)."""
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:  # no IPv6 here
        return ""
    found = [words[0] for words in lines if len(words) == 6 and words[5] == interface and words[3] != "20"]
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(found[0])) if found else ""


def connect(target: str) -> Connection:
    """Connect to the first of `HOST,HOST:PORT` that answers.

    Raises:
        Unheard: none does, and one of them has said nothing at all: the kernel drops what finds no room in the queue
            of a port.
        LinkError: none does.
    """
    from infini_run.multinode.link.handshake import Unheard

    hosts, _, port = target.rpartition(":")
    problems = []
    error_class = LinkError
    for host in hosts.split(","):
        try:
            return _to_connection(_connect(host.strip("[]"), int(port)))
        except (OSError, UnicodeError) as error:  # the latter: no name that DNS could have
            problems.append(f"{host}: {getattr(error, 'strerror', None) or error}")
            if isinstance(error, TimeoutError):
                error_class = Unheard
    raise error_class(f"the head does not respond on port {port}: {'; '.join(problems)}")


def _connect(host: str, port: int) -> socket.socket:
    """Raises OSError, UnicodeError."""
    name = (
        host.encode("ascii") if host.isascii() else host
    )  # for text the C module imports `idna` first, whatever is in it
    problem = OSError(errno.ENOENT, "no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(name, port, 0, socket.SOCK_STREAM):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(_CONNECT_S)
            connected.connect(address)
        except OSError as error:
            problem = error
            connected.close()
        else:
            return connected
    raise problem


def retry_unheard(attempt: Callable[[], int], *, is_head_there: bool) -> int:
    """Call `attempt`, which connects and serves. Retry if a head with too many unauthenticated connections dropped
    this one, or its kernel did not answer.

    Args:
        is_head_there: no other program listens in the head's place, so silence is a reason too. Where the kernel's
            queue was full, a connection may exist on this side only.

    Raises:
        LinkError: that lasted 30 s, or the reason is another one.
    """
    import time

    from infini_run.multinode.link.handshake import Silent, Unheard

    reasons = (Unheard, Silent) if is_head_there else (Unheard,)
    end_s, pause_s = float("inf"), _FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except reasons:
            now_s = time.monotonic()
            end_s = min(end_s, now_s + _UNHEARD_S)  # from the first time on: an attempt may have waited for the head
            if now_s + pause_s > end_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def connect_with_retry(
    target: str, limit_s: float, print_line: Callable[[str], None], must_give_up: Callable[[], bool] = lambda: False
) -> Connection:
    """Connect as `connect` does, again and again: no event reports that a port of another machine opens.

    Args:
        limit_s: for how long.
        print_line: called with a line every few seconds.
        must_give_up: called after each failure. True: try no longer.

    Raises:
        LinkError: the head did not answer within that time, or `must_give_up`.
    """
    import time

    now_s = time.monotonic()
    end_s, notice_s, pause_s = now_s + limit_s, now_s + _NOTICE_S, _FIRST_PAUSE_S
    while True:
        try:
            return connect(target)
        except LinkError as error:
            now_s = time.monotonic()
            if must_give_up() or now_s + pause_s > end_s:
                raise LinkError(str(error)) from None  # no Unheard: it is not to be tried yet again
            if now_s >= notice_s:
                notice_s = now_s + _NOTICE_S
                print_line(f"waiting for node 0: {error}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
