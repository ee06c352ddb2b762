"""Data-parallel training with nothing but Python: a letter model of the Python library's own source.

    infini-run --nproc_per_node=4 --console=prefix examples/bigram.py

Each rank counts which letter follows which in its share of the files; rank 0 adds the counts up and sends the
sum back (an all-reduce over one TCP connection per rank); every rank then has the same model, and the result
does not depend on how many ranks there were.
"""

import math
import os
import pickle
import socket
import struct
import sysconfig
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ENDPOINT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def send(peer: socket.socket, counts: Counter) -> None:
    data = pickle.dumps(counts)
    peer.sendall(struct.pack("!Q", len(data)) + data)


def receive(peer: socket.socket) -> Counter:
    (size,) = struct.unpack("!Q", peer.recv(8, socket.MSG_WAITALL))
    return pickle.loads(peer.recv(size, socket.MSG_WAITALL))


def connect() -> socket.socket:
    """Rank 0 may not listen yet."""
    while True:
        try:
            return socket.create_connection(ENDPOINT)
        except ConnectionRefusedError:
            time.sleep(0.02)


def all_reduce(counts: Counter) -> Counter:
    if RANK > 0:
        with connect() as rank0:
            send(rank0, counts)
            return receive(rank0)
    with socket.create_server(ENDPOINT) as server:
        peers = [server.accept()[0] for _ in range(WORLD_SIZE - 1)]
        for peer in peers:
            counts.update(receive(peer))
        for peer in peers:
            send(peer, counts)
            peer.close()
    return counts


def main() -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    mine = sorted(library.glob("*.py"))[RANK::WORLD_SIZE]
    counts = Counter()
    for path in mine:
        text = path.read_text(encoding="utf-8", errors="replace")
        counts.update(pairwise(text))
    print(f"{len(mine)} files, {counts.total():,} pairs")
    counts = all_reduce(counts)
    if RANK == 0:
        first = Counter()
        for (a, _), n in counts.items():
            first[a] += n
        bits = -sum(n * math.log2(n / first[a]) for (a, _), n in counts.items()) / counts.total()
        print(f"model: {len(counts):,} pairs of letters from {counts.total():,}; {bits:.4f} bits per letter")


main()
