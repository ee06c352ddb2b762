"""Traces a process (ptrace(2)) and says "tracing"; keeps it, even when it has died, until stdin ends."""

import ctypes
import os
import sys

PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None) < 0:
    print(os.strerror(ctypes.get_errno()), flush=True)
    sys.exit(1)
print("tracing", flush=True)
sys.stdin.read()
