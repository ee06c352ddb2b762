"""Writes numbered lines of varying size, to stdout and to stderr in turn: `STREAM NUMBER x...x`."""

import os
import sys

rank, count, longest = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
for number in range(count):
    for stream in (1, 2):
        size = (number * 7919 + rank * 104729 + stream * 31) % longest
        data = b"%d %d %s\n" % (stream, number, b"x" * size)
        while data:
            data = data[os.write(stream, data) :]
