"""Rings `up RANK` at argv[1], then `IDENTITY RANK` for every signal that it gets; SIGUSR2 ends it with code 7."""

import os
import signal
import sys

SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT}
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
bell = os.open(sys.argv[1], os.O_WRONLY)
said = "up"
while said != "SIGUSR2":
    os.write(bell, f"{said} {os.environ['RANK']}\n".encode())
    said = signal.Signals(signal.sigwait(SIGNALS)).name
sys.exit(7)
