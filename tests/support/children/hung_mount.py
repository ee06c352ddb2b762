"""Be a command for which a directory hangs, as if its file server were gone: a FUSE file system nobody serves.

    unshare --mount python hung_mount.py DIRECTORY COMMAND...

Its end is that of the process, which has the only descriptor of /dev/fuse: then the kernel ends the mount.
"""

from __future__ import annotations

import ctypes
import os
import sys

path, command = sys.argv[1], sys.argv[2:]
fd = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(fd, True)
options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"hung", os.fsencode(path), b"fuse.hung", 0, options.encode()):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
os.execvp(command[0], command)
