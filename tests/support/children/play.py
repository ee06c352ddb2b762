"""A worker that does what its words say, one after the other.

say=TEXT          "TEXT RANK PID" on stdout, one write
ask=THING         the same, with what we see of it: cwd, foreground, pids, ...
ignore=TERM       ignore the signal
tell=USR1         say "got USR1" whenever it comes
end=TERM:3        say "got TERM" and exit 3 when it comes; `end=TERM:-SEGV`: die of SIGSEGV instead
hold=FD           wait for the end of that pipe
after=FD          read a pid there, wait for its death
pause=SECONDS     be late
read              say "read LINE" of a line from stdin
listen            the same; signals are dealt with meanwhile
name=NAME         what the process is called in /proc
daemon ... done   what is between is done by a stray (double fork, setsid); goes on once it said something
group ... done    by a child in our process group
hop, hop=FILE     fork, let the child go on in a session of its own, exit; each touches the file
notify=A;B        tell NOTIFY_SOCKET A and B in one message
pings=N           tell it WATCHDOG=1 N times
flood             tell it something as fast as it takes it, without end
spin              compute without end
threads=N         have so many threads more, which wait
slow=MIB          hold a file in memory of that size: our exit takes long after it has closed stdout
orphans=N         N double forks that end at once
reaped            wait until nothing in /proc is a zombie
wait              until a signal ends us
exit=3, die=SEGV  the end
@1 ... @*         the words between are rank 1's only
+0 ... +*         they are for the first attempt only (+1: the one after the first restart, ...)
"""

import _signal as signal  # the C module: `signal` makes enumerations, a quarter of this program's start
import os
import select
import sys
import time

HOP_S = 120.0  # beyond any test: of a run that was broken off nothing hops on for ever
RANK = os.environ.get("RANK", "-1")
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1")
waited_for = []  # of a stray: what its rank reads until the stray has said something
wake = []  # a pipe that a signal writes to: one that comes just before we wait must not wait with us


def say(text):
    os.write(1, f"{text} {RANK} {os.getpid()}\n".encode())
    while waited_for:
        os.close(waited_for.pop())


def number(name):
    return signal.SIGRTMIN + int(name[6:]) if name.startswith("RTMIN+") else getattr(signal, f"SIG{name}")


def die(name):
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if name != "KILL":
        signal.signal(number(name), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number(name)})
    os.kill(os.getpid(), number(name))


def on(name, how=""):
    def handler(*_):
        say(f"got {name}")
        if how.startswith("-"):
            die(how[1:])
        elif how:
            os._exit(int(how))

    signal.signal(number(name), handler)


def open_wake():
    while wake:
        os.close(wake.pop())
    wake.extend(os.pipe())
    os.set_blocking(wake[1], False)
    signal.set_wakeup_fd(wake[1], warn_on_full_buffer=False)


def wait(fd=None):
    """Until there is something to read; for ever. Signals are dealt with meanwhile."""
    while True:
        ready = select.select([wake[0], *([] if fd is None else [fd])], [], [])[0]
        if fd in ready:
            return
        os.read(wake[0], 4096)


def read_all(fd):
    text = b""
    while True:
        wait(fd)
        chunk = os.read(fd, 4096)
        if not chunk:
            return text
        text += chunk


def read_line():
    """Byte by byte: what a buffer held, `wait` would not see."""
    line = b""
    while not line.endswith(b"\n"):
        wait(0)
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


def outlive(pid):
    wait(os.pidfd_open(pid))


def rename(name):
    with open("/proc/self/comm", "wb") as file:
        file.write(os.fsencode(name))


def daemon(words):
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os.wait()
        read_all(told)
        os.close(told)
        return
    waited_for.append(tell)
    os.close(told)
    os.setsid()
    if os.fork():
        os._exit(0)
    play(words)
    os._exit(0)


def group(words):
    if not os.fork():
        play(words)
        os._exit(0)


def hop(path):
    end = time.monotonic() + HOP_S
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
        os.setsid()
        if path:
            os.utime(path)
        time.sleep(0.0005)  # a look at /proc takes longer; process 1 may reap late, and numbers of processes run out


def orphans(n):
    for _ in range(n):
        daemon([])


def notify(*messages):
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
        for message in messages:
            sender.send(message.replace(";", "\n").encode())


def notify_fd():
    """A message with a descriptor, of which a pipe's end is closed at once."""
    import socket

    reader, _ = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
        socket.send_fds(sender, [b"BARRIER=1"], [reader])


def flood():
    def endless():
        while True:
            yield "STATUS=flood"

    notify(*endless())


def spin():
    while True:
        pass


def threads(n):
    import _thread

    for _ in range(n):
        _thread.start_new_thread(select.select, ([], [], []))


def slow(mib):
    """The kernel takes the file's pages back after it has closed all descriptors, and before we are a zombie."""
    os.posix_fallocate(os.memfd_create("slow"), 0, mib << 20)


def states():
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    found.append(file.read().rpartition(")")[2].split()[0])
            except OSError:
                continue
    return found


def reaped():
    while "Z" in states():
        time.sleep(0.001)


SEEN = {
    "cwd": os.getcwd,
    "foreground": lambda: os.tcgetpgrp(0) == os.getpgrp(),
    "parent": os.getppid,
    "parents_descriptors": lambda: len(os.listdir(f"/proc/{os.getppid()}/fd")),
    "attempt": lambda: os.environ["TORCHELASTIC_RESTART_COUNT"] + "/" + os.environ["TORCHELASTIC_MAX_RESTARTS"],
    "port": lambda: os.environ["MASTER_PORT"],
    "mark": lambda: os.environ["INFINI_RUN_ID"],
    "pids": lambda: len(states()),
}
STEPS = {
    "say": say,
    "ask": lambda thing: say(f"{thing} {SEEN[thing]()}"),
    "ignore": lambda name: signal.signal(number(name), signal.SIG_IGN),
    "tell": on,
    "end": lambda how: on(*how.split(":")),
    "hold": lambda fd: read_all(int(fd)),
    "after": lambda fd: outlive(int(read_all(int(fd)))),
    "pause": lambda seconds: time.sleep(float(seconds)),
    "read": lambda _: say(f"read {sys.stdin.readline().strip()}"),
    "listen": lambda _: say(f"read {read_line()}"),
    "name": rename,
    "hop": hop,
    "notify": notify,
    "notify_fd": lambda _: notify_fd(),
    "pings": lambda n: notify(*["WATCHDOG=1"] * int(n)),
    "flood": lambda _: flood(),
    "spin": lambda _: spin(),
    "threads": lambda n: threads(int(n)),
    "slow": lambda mib: slow(int(mib)),
    "orphans": lambda n: orphans(int(n)),
    "reaped": lambda _: reaped(),
    "wait": lambda _: wait(),
    "exit": lambda code: os._exit(int(code)),
    "die": die,
}
BLOCKS = {"daemon": daemon, "group": group}


def take_block(words):
    """The words up to the `done` that belongs to a block whose first word was taken already."""
    inner, depth = [], 1
    while depth:
        inner.append(next(words))
        depth += (inner[-1] in BLOCKS) - (inner[-1] == "done")
    return inner[:-1]


def play(words):
    words, mine, now = iter(words), True, True
    for word in words:
        verb, _, argument = word.partition("=")
        if word.startswith("@"):
            mine = word[1:] in ("*", RANK)
        elif word.startswith("+"):
            now = word[1:] in ("*", ATTEMPT)
        elif word in BLOCKS:
            inner = take_block(words)
            if mine and now:
                BLOCKS[word](inner)
        elif mine and now:
            STEPS[verb](argument)


if __name__ == "__main__":
    open_wake()
    os.register_at_fork(after_in_child=open_wake)
    play(sys.argv[1:])
