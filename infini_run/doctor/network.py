"""What ranks need to meet: a port for rank 0, an address that other nodes reach, and ssh to reach them."""

from __future__ import annotations

import _socket as socket
import os

from infini_run.doctor.finding import Finding, failing, note, ok
from infini_run.multinode.link.tcp import interface_addresses
from infini_run.node.ports import free_port, let_go
from infini_run.options.table import DEFAULTS
from infini_run.system.addresses import unreachable_reason
from infini_run.system.shell import find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def check_network(environ: Mapping[str, str]) -> list[Finding]:
    """Look for a port, an address and ssh."""
    return [
        check_port(int(str(DEFAULTS["master_port"]))),
        describe_addresses(interface_addresses()),
        check_ssh(environ),
    ]


def check_port(usual: int) -> Finding:
    """Look for a port on which rank 0 can listen. usual: the port of a launch without flags."""
    try:
        port = free_port()
        let_go(port)
    except OSError as error:
        return failing("port", f"no port is available ({error.strerror}): ranks cannot meet")
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", usual))
    except OSError as error:
        text = f"{usual}, the usual MASTER_PORT, is not available ({error.strerror})"
        return note("port", f"{text}; add --standalone, or --rdzv_endpoint=HOST:{port}")
    finally:
        probe.close()
    return ok("port", f"{usual}, the usual MASTER_PORT, is free")


def describe_addresses(addresses: list[str]) -> Finding:
    """Say at which of its addresses other nodes reach this machine. addresses: of its interfaces, no names."""
    far = [each for each in addresses if not unreachable_reason(each, "")]
    if not far:
        return note("addresses", "loopback only: ranks of this machine can meet, but other nodes cannot reach it")
    return ok("addresses", f"{', '.join(far)}: other nodes can reach rank 0 there")


def check_ssh(environ: Mapping[str, str]) -> Finding:
    """Look for the program ssh."""
    path = find_program("ssh", environ.get("PATH") or os.defpath)
    if not path:
        return note("ssh", "is not on PATH: --hosts cannot reach nodes from here; run apt-get install openssh-client")
    return ok("ssh", f"{path}: --hosts can reach nodes with it")
