"""Reads stdin to its end, and says how much it was and which bytes: `RANK SIZE SHA256`. An argument: read so much."""

import hashlib
import os
import sys

wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 62
digest, size = hashlib.sha256(), 0
while size < wanted and (data := os.read(0, min(65536, wanted - size))):
    digest.update(data)
    size += len(data)
os.close(0)
os.write(1, b"%s %d %s\n" % (os.environb[b"RANK"], size, digest.hexdigest().encode()))
