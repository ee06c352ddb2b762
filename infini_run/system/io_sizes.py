"""Sizes of single reads and writes, and of backlogs, in bytes.

A backlog is what a connection or stream was given and its reader has not taken. While it is above its limit, nothing
reads the sources of that connection.
"""

READ_CHUNK = 1 << 16  # one read of a pipe or file: the capacity of a pipe, pipe(7)
LARGE_CHUNK = 1 << 18  # one read or write of a connection: a larger one alone takes longer than a heartbeat
BACKLOG_LIMIT = 1 << 20  # a connection between two processes of infini-run
CONSOLE_BACKLOG_LIMIT = 4 << 20  # the head's stdout and stderr, which all nodes share
TERMINAL_BACKLOG_LIMIT = 1 << 16  # lines above the live table, on a terminal that takes none
