"""A worker in Python, whose stacks py-spy reads: some words of tests/c/play.c, which say what it does."""

import os
import signal
import sys

is_mine = True
for word in sys.argv[1:]:
    verb, _, argument = word.partition("=")
    if verb.startswith("@"):
        is_mine = verb[1:] in ("*", os.environ["RANK"])
    elif not is_mine:
        continue
    elif verb == "say":
        os.write(1, f"{argument} {os.environ['RANK']} {os.getpid()}\n".encode())
    elif verb == "ignore":
        signal.signal(getattr(signal, f"SIG{argument}"), signal.SIG_IGN)
    elif verb == "hold":
        while os.read(int(argument), 4096):
            pass
    elif verb == "exit":
        os._exit(int(argument))
    elif verb == "wait":
        while True:
            signal.pause()
    else:
        raise ValueError(word)
