"""A link between its stdin and stdout and a port that becomes slow: slow_link.py HOST PORT FILE SECONDS.

While FILE exists, all that comes is so many seconds on its way, in both directions. For ssh's ProxyCommand, and for a
rank that is to reach its peers over such a link. (A kernel without sch_netem has no slow links of its own.)
"""

import os
import socket
import sys
import threading
import time

host, port, file, seconds = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
peer = socket.create_connection((host, port))


def carry(read, write, end):
    while data := read(65536):
        if os.path.exists(file):
            time.sleep(seconds)
        while data:
            data = data[write(data) :]
    end()


up = (lambda size: os.read(0, size), peer.send, lambda: peer.shutdown(socket.SHUT_WR))
threading.Thread(target=carry, args=up, daemon=True).start()
carry(peer.recv, lambda data: os.write(1, data), lambda: os.close(1))
