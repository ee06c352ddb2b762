"""Whether the nodes can meet: the first one listens on a free port, as rank 0 will, and the others connect to it.

`rank_zero.listen` and `rank_zero.connect` run on the nodes, in processes that end on their own limits.
"""

from __future__ import annotations

import os
import select
import sys
import time

from infini_run.doctor.finding import Finding, failing, ok
from infini_run.doctor.machine import answer
from infini_run.errors import LinkError, UsageError, counted, printable
from infini_run.multinode.link import tcp
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.options.launch_options import Options

NAME = "rank 0"
LISTEN, CONNECT = "infini_run.doctor.rank_zero.listen", "infini_run.doctor.rank_zero.connect"
_CONNECT_S = 5.0  # a firewall that drops packets answers nothing
_LISTEN_S = 15.0  # a node may take longer to start its Python


@record
class RankZeroAddress:
    """Where ranks meet.

    Args:
        address: of the first node, as the other nodes reach it.
        port: a port that is free there.
    """

    address: str
    port: int

    def to_listen(self, count: int) -> str:
        """Return the argument of `listen`, which returns after `count` connections."""
        return f"{count}:{self.port}"

    def to_connect(self) -> str:
        """Return the argument of `connect`."""
        return f"{self.address}:{self.port}"


def place_of(options: Options, facts: Mapping[str, object], name: str) -> RankZeroAddress:
    """Return where the ranks of a launch would meet.

    Args:
        options: an endpoint that was asked for is taken.
        facts: of the first node: its address, as the launcher reached it, and a free port.
        name: of the first node.

    Source: multinode/head/rendezvous.py, which does the same for a launch.
    """
    port = int(str(facts.get("port", 0)))
    if options.rdzv_explicit:
        return RankZeroAddress(address=options.master_addr, port=options.master_port or port)
    return RankZeroAddress(address=str(facts.get("address") or name), port=port)


def listen() -> None:
    """Listen on the port of the argument until the expected nodes have connected, or for 15 s."""
    answer([(NAME, lambda: [_listen(*map(int, _target().split(":")))])])


def _target() -> str:
    return next(word.partition("=")[2] for word in sys.argv if word.startswith("--link="))


def _listen(count: int, port: int) -> Finding:
    try:
        listener = tcp.listen(port)
    except UsageError as error:
        return failing(NAME, f"{error}: it was free a moment ago; another program may also take MASTER_PORT")
    end_s, came = time.monotonic() + _LISTEN_S, 0
    try:
        while came < count and select.select([listener], [], [], max(0.0, end_s - time.monotonic()))[0]:
            accepted = tcp.accept(listener)
            if accepted is not None:
                accepted[0].close()
                came += 1
    finally:
        listener.close()
    nodes = counted(count, "node")
    return ok(NAME, f"listens on port {port} of this node, as MASTER_PORT, and {came} of {nodes} connected")


def connect() -> None:
    """Connect to the address and port of the argument."""
    answer([(NAME, lambda: [_connect(_target())])])


def _connect(target: str) -> Finding:
    try:
        tcp.connect_with_retry(target, _CONNECT_S, lambda _: None).close()
    except LinkError as error:
        reason = printable(str(error)).rpartition(": ")[2]
        text = f"cannot connect to {target} from {os.uname().nodename} ({reason}): ranks cannot meet"
        return failing(
            NAME, f"{text}; open the ports between the nodes, or add --rdzv_endpoint=HOST:PORT of an open one"
        )
    return ok(NAME, f"connects to {target}, as its ranks will to MASTER_PORT")
