"""Dials a port of this machine as fast as it can and says nothing: `flooder.py PORT`. TERM: how often, on stdout.

It holds the last 500 of its connections, come about or not. A line `up` tells that the first was made.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from collections import deque

HELD = 500
FROM = "127.9.0.1"  # so that the ports of nobody else are used up


def main() -> None:
    target, held, count = ("127.0.0.1", int(sys.argv[1])), deque[socket.socket](maxlen=HELD), 0

    def tell(*_: object) -> None:
        os.write(1, b"%d\n" % count)
        os._exit(0)

    signal.signal(signal.SIGTERM, tell)
    while True:
        one = socket.socket()
        one.setblocking(False)  # where there is no room for it, the next is tried
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its port is free at once
        try:
            one.bind((FROM, 0))
            one.connect(target)
        except BlockingIOError:
            pass
        except OSError:
            one.close()
            continue
        held.append(one)
        count += 1
        if count == 1:
            os.write(1, b"up\n")


if __name__ == "__main__":
    main()
