"""A launcher whose ranks have a lease: hold_lease.py HOW LEASE_S RENEW_S RANKS WORD...

HOW: own (the process is the launcher's own), library. RENEW_S: how often it renews the lease; 0: when told to.
WORD...: what each rank executes. It says each event on stdout ("event KIND RANK CODE SIGNAL AFTER_STOP"), and does
what lines on stdin say: renew ("renewed True"), renew AGO_S, let go (renew only when told
to), busy (compute until the next line), stop.
"""

import os
import signal
import sys
import time

from infini_run.core.c_structs import INHERIT, SpawnSpec
from infini_run.core.group import GUARD, Group, debug_flags, take_over_process
from infini_run.errors import StartError

how, lease_s, renew_s, ranks = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
words = [os.fsencode(word) for word in sys.argv[5:]]


def say(text):
    os.write(1, f"{text}\n".encode())


def spec(rank):
    made = SpawnSpec(rank, words[0], words, b"RANK=%d" % rank)
    made.stdio = [INHERIT, INHERIT, INHERIT]
    made.label = ((b"", b""), (b"", b""))
    return made


def lines():
    waiting = b""
    os.set_blocking(0, False)
    while True:
        try:
            chunk = os.read(0, 4096)
        except BlockingIOError:
            yield ""
            continue
        if not chunk:
            return
        waiting += chunk
        *whole, waiting = waiting.split(b"\n")
        yield from (line.decode() for line in whole)


def obey(line, group, commands):
    verb, _, argument = line.partition(" ")
    if verb == "renew":
        ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - float(argument) if argument else 0.0
        say(f"renewed {group.renew_lease(ago_s)}")
    elif verb == "busy":
        while next(commands) == "":
            pass
    elif verb == "stop":
        group.stop()


def main():
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()) if how == "own" else set()
    entry = take_over_process(sum(1 << number - 1 for number in blocked)) if how == "own" else None
    folder = os.environ.get("FOLDER", "")
    group = Group(
        ranks,
        mark=b"INFINI_RUN_ID=" + os.fsencode(f"lease-{os.getpid()}"),
        grace_s=10.0,
        stop_signal=15,
        stop_scope="group",
        entry=entry,
        guard=os.fsencode(os.environ["GUARD"]) if "GUARD" in os.environ else GUARD,
        folder=os.fsencode(folder) if folder else None,
        lease_s=lease_s,
        lease_since_s=float(os.environ.get("SINCE", "0")),
        debug=debug_flags(os.environ),
    )
    base = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
    base.append(os.fsencode(f"INFINI_RUN_ID=lease-{os.getpid()}"))
    try:
        say(f"started {group.spawn([spec(rank) for rank in range(ranks)], base)}")
    except StartError as error:
        group.close()
        say(f"failed {error.rank} {error.step}: {error}")
        return
    commands, every_s = lines(), renew_s
    while not group.ended:
        if every_s:
            group.renew_lease()
        group.wait(every_s or None, also=[0])
        for event in group.run_once():
            say(f"event {event.kind} {event.rank} {event.code} {event.signal} {event.after_stop}")
        for line in commands:
            if line == "":
                break
            every_s = 0 if line == "let go" else every_s
            obey(line, group, commands)
        else:
            break
    group.close()
    say("over")


main()
