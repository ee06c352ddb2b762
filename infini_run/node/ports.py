"""Free ports, for a rank 0 that will listen there some seconds from now, which nobody else is to take meanwhile.

Two kinds of others would. An outgoing connection has a port of the kernel's range (ip(7), ip_local_port_range): these
ports are from outside of it. Other launches on this machine choose in the same way. So each port has a lock, a name
in the abstract namespace (unix(7)), which goes with its process. Such a name exists once for each network, as the
ports do. A socket bound to the port itself would not do: a rank 0 that does not set SO_REUSEADDR could not listen.
"""

from __future__ import annotations

from _socket import AF_INET, AF_UNIX, SOCK_DGRAM, SOCK_STREAM, socket  # the C module: `socket` costs 5 ms

import infini_run.lean_os as os
from infini_run.core.group import forking
from infini_run.system.fork_hooks import call_for_module, close_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# below the derived ports (environments/environment.py) and those that Kubernetes gives to services
_OURS = range(16384, 29500)
_ENOUGH = 1000  # where less of them is left, the kernel's choice is the better one
_EPHEMERAL = "32768 60999"  # where /proc does not say
_TRIES = 100
_HELD = 64  # locks of one process: who takes more has done with the first
_LIMITS = "/proc/sys/net/ipv4/"

_locks: dict[int, socket] = {}


def free_port() -> int:
    """Return a port on which nobody listens, and which no other launch gets until `let_go` or the end of this
    process.

    Source: ip(7), ip_local_port_range; unix(7), abstract sockets.
    """
    with forking:  # a child that is forked meanwhile would hold the port, or its lock
        return _find()


def _find() -> int:
    choices = _choices(_read("ip_local_port_range") or _EPHEMERAL, _read("ip_local_reserved_ports"))
    for port in _rotated(choices):
        if _is_free(port) and _lock(port):
            return port
    for _ in range(_TRIES):  # all of them are the kernel's to give, or taken
        port = _of_the_kernel()
        if _lock(port):
            break
    return port  # also where somebody has taken all the locks


def let_go(port: int) -> None:
    """Give a port free for other launches. Safe twice, and for a port that is not this process's.

    Args:
        port: As `free_port` returned it.
    """
    lock = _locks.get(port)
    if lock is not None:
        close_link(lock, lambda: _forget_and_close(port))


def _forget_and_close(port: int) -> None:
    lock = _locks.pop(port, None)
    if lock is not None:
        lock.close()


def _after_fork_in_child() -> None:
    """Close only the copies in a forked child: they are the parent's."""
    for port in list(_locks):
        let_go(port)


call_for_module(_after_fork_in_child)


def _choices(ephemeral: str, reserved: str) -> Sequence[int]:
    """Return the ports to choose from; none where they are too few."""
    low, high = map(int, ephemeral.split())
    below, above = range(_OURS.start, min(low, _OURS.stop)), range(max(high + 1, _OURS.start), _OURS.stop)
    found: Sequence[int] = max(below, above, key=len)
    if reserved:
        taken = {port for item in reserved.split(",") for port in _span(item)}
        found = [port for port in found if port not in taken]
    return found if len(found) >= _ENOUGH else ()


def _span(item: str) -> range:
    low, _, high = item.partition("-")
    return range(int(low), int(high or low) + 1)


def _read(name: str) -> str:
    try:
        with open(_LIMITS + name, "rb") as file:
            return file.read().strip().decode()
    except OSError:
        return ""


def _rotated(choices: Sequence[int]) -> Iterator[int]:
    """Return all of them, from a random one on."""
    count = len(choices)
    at = int.from_bytes(os.urandom(4), "big") % max(1, count)
    return (choices[(at + step) % count] for step in range(count))


def _is_free(port: int) -> bool:
    probe = socket(AF_INET, SOCK_STREAM)
    try:
        probe.bind(("", port))
    except OSError:
        return False
    finally:
        probe.close()
    return True


def _of_the_kernel() -> int:
    probe = socket(AF_INET, SOCK_STREAM)
    try:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    finally:
        probe.close()
    return port


def _lock(port: int) -> bool:
    """Return whether the lock is this process's. Where there are no such names (a filter of system calls), it is
    nobody's."""
    lock = socket(AF_UNIX, SOCK_DGRAM)
    try:
        lock.bind(f"\0infini-run-port-{port}")
    except OSError as error:
        lock.close()
        return error.errno != os.EADDRINUSE
    _locks[port] = lock
    if len(_locks) > _HELD:
        let_go(next(iter(_locks)))
    return True
