"""Whether other nodes can use an address. The text of an address and /etc/hosts show what never leaves a machine.

The one rule: ask no name server. It may not answer for a minute, and it does not give out loopback addresses. A line
of /etc/hosts makes a node's own name one (Debian: 127.0.1.1).
"""

from __future__ import annotations

from _socket import AF_INET, AF_INET6, inet_pton  # the C module: `socket` costs 5 ms

HOSTS = "/etc/hosts"
_MAPPED = bytes(10) + b"\xff\xff"


def read_hosts() -> str:
    """Return the text of /etc/hosts; empty if it is unreadable."""
    try:
        with open(HOSTS, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def unreachable_reason(address: str, hosts: str) -> str:
    """Return why other nodes cannot use an address; empty if they may be able to. Asks no name server.

    Args:
        address: a host name or a numeric address.
        hosts: the text of /etc/hosts.
    """
    why = _local_only_reason(address)
    if why:
        return f"{address} is {why}"
    name = address.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761
        return f"{address} is the loopback name of every machine"
    known = _known(name, hosts)
    reasons = [_local_only_reason(each) for each in known]
    if known and all(reasons):
        return f"{address} is {known[0]} in {HOSTS}, {reasons[0]}"
    return ""


def _known(name: str, hosts: str) -> list[str]:
    """Return the addresses that /etc/hosts has for a name (hosts(5))."""
    rows = (line.partition("#")[0].lower().split() for line in hosts.splitlines())
    return [row[0] for row in rows if name in row[1:]]


def _local_only_reason(address: str) -> str:
    """Return why a numeric address stays within one machine or link; empty for any other, and for a name."""
    packed = _packed(address)
    if packed[:12] == _MAPPED:
        packed = packed[12:]
    if (packed[:1] == b"\x7f" and len(packed) == 4) or packed == bytes(15) + b"\1":
        return "a loopback address"
    if packed in (bytes(4), bytes(16)):
        return "the address of every interface"
    if (len(packed) == 4 and packed[:2] == b"\xa9\xfe") or (
        len(packed) == 16 and packed[:1] == b"\xfe" and packed[1] >> 6 == 2
    ):
        return "a link-local address, which is valid only on its own link"
    return ""


def _packed(address: str) -> bytes:
    text = address.partition("%")[0]
    try:
        return bytes(inet_pton(AF_INET6 if ":" in text else AF_INET, text))
    except (OSError, ValueError):  # ValueError: a NUL, or no ASCII
        return b""
