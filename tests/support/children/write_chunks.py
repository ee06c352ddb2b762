"""Writes what a file asks for: one JSON list per rank of [stream, hex bytes, whether to wait].

To wait is to let the reader empty the pipe before the next chunk, so that reads end where chunks end.
"""

import fcntl
import json
import os
import struct
import sys
import termios


def held(fd):
    return struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]


with open(sys.argv[1]) as file:
    chunks = json.load(file)[int(os.environ["RANK"])]
for stream, text, wait in chunks:
    data = bytes.fromhex(text)
    while data:
        data = data[os.write(stream, data) :]
    while wait and held(stream) > 0:
        os.sched_yield()
