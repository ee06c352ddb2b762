"""What the workers of test crews do. A module of its own, so that a worker imports nothing else of the tests."""

import os
import signal
import socket
import sys
import time

from infini_run.channel.decoder import BYTES, HEAD

IDLE = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def echo(ctx, task):
    return ctx.rank, task


def obey(ctx, task):
    """Do what the task says: a word, or a word and what it is about."""
    word, *rest = task if isinstance(task, tuple) else (task,)
    return DEEDS[word](ctx, *rest)


def ring(path, *words):
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, " ".join(map(str, words)).encode() + b"\n")
    os.close(fd)


def emit(ctx, count):
    for i in range(count):
        ctx.emit(i)
    return count


def burst_and_raise(ctx, count):
    emit(ctx, count)
    raise ValueError("the last word")


def burst_and_die(ctx, count):
    emit(ctx, count)
    os.kill(os.getpid(), signal.SIGKILL)


def say_and_die(ctx):
    for i in range(100):
        print(f"line {i}", file=sys.stderr)
    print("my last words", file=sys.stderr, flush=True)
    os._exit(7)


def flood(ctx):
    while True:
        ctx.emit(b"x" * 1000)


def close_channel(ctx):
    ctx._sender._line.sock.shutdown(socket.SHUT_RDWR)
    signal.pause()


def half_a_frame(ctx):
    os.write(ctx._sender.fileno(), HEAD.pack(BYTES, 0, 64) + b" a quarter of it")
    os.kill(os.getpid(), signal.SIGKILL)


def no_message(ctx):
    ctx._sender.send_bytes(b"\0\0\0\1i am no message")
    signal.pause()


def wait_for_cancel(ctx, bell):
    ring(bell, "waiting")
    while True:
        ctx.checkpoint()
        time.sleep(0.001)


def be_slow(ctx, bell, gate):
    """Ring, then wait until the gate (a FIFO) is opened, with no sign of life."""
    ring(bell, "busy", os.getpid())
    with open(gate) as file:
        return file.read()


def until_closing(ctx, bell=None, restarts=0):
    """Ring, then wait until the crew closes; die then, but in a process that restarted so often."""
    if bell is not None:
        ring(bell, "waiting")
    while not ctx.stopping:
        time.sleep(0.001)
    if ctx.restarts < restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    return "closing"


def start_children(ctx, bell):
    """A child that ignores SIGTERM, and one in a session of its own."""
    import subprocess

    pids = []
    for extra in ({}, {"start_new_session": True}):
        child = subprocess.Popen([sys.executable, "-ISc", IDLE], stdout=subprocess.PIPE, **extra)
        child.stdout.readline()
        pids.append(child.pid)
    ring(bell, "children", *pids)
    return pids


def ping(ctx, count, pause):
    for _ in range(count):
        time.sleep(pause)
        ctx.ping()
    return "alive"


def loops(ctx):
    while True:
        pass


def no_exit(code):
    raise SystemExit(code)


ENDINGS = {
    "returned": lambda ctx: "fine",
    "raised": lambda ctx: [][0],
    "exited": lambda ctx: no_exit(3),
    "exited 0": lambda ctx: os._exit(0),
    "segv": lambda ctx: os.kill(os.getpid(), signal.SIGSEGV),
    "killed": lambda ctx: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda ctx: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs": lambda ctx: signal.pause(),
    "loops": loops,
    "closes": close_channel,
    "floods": flood,
    "half a frame": half_a_frame,
    "no message": no_message,
}

DEEDS = {
    **ENDINGS,
    "emit": emit,
    "burst and raise": burst_and_raise,
    "burst and die": burst_and_die,
    "say and die": say_and_die,
    "wait for cancel": wait_for_cancel,
    "be slow": be_slow,
    "until closing": until_closing,
    "children": start_children,
    "pid": lambda ctx: os.getpid(),
    "env": lambda ctx, name: os.environ.get(name),
    "ping": ping,
    "sleep": lambda ctx, seconds: time.sleep(seconds),
    "extend": lambda ctx, seconds, pause: (ctx.extend(seconds), time.sleep(pause), "done")[2],
    "status": lambda ctx, text: ctx.status(text),
    "progress": lambda ctx, done, of: ctx.progress(done, of),
    "unpicklable": lambda ctx: (i for i in range(3)),
    "square": lambda ctx, n: n * n,
    "restarts": lambda ctx: ctx.restarts,
    "size": lambda ctx, data: len(data),
    "bytes": lambda ctx, size: bytes(size),
    "modules": lambda ctx: sorted(sys.modules),
    "main": lambda ctx: sorted(vars(sys.modules["__main__"])),
}


def ender(where, how, bell=""):
    """A worker that ends in this way while it is starting, ready, busy or stopping: when it is told to (SIGUSR1)
    while it is ready."""

    class Ender:
        is_told = False

        def start(self, ctx):
            signal.signal(signal.SIGUSR1, lambda number, frame: setattr(self, "is_told", True))
            if where == "ready":
                # again and again: Python may have looked for signals just before it waits for the next task
                signal.signal(signal.SIGALRM, lambda number, frame: self.end_idle(frame, ctx))
                signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
            self.end("starting", ctx)

        def task(self, ctx, task):
            return self.end("busy", ctx)

        def stop(self, ctx):
            self.end("stopping", ctx)

        def end_idle(self, frame, ctx):
            """Not while it is still sending: a handler that sends as well would wait for itself."""
            while frame is not None and frame.f_code.co_name != "_do":
                frame = frame.f_back
            if self.is_told and frame is None:
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.end("ready", ctx)

        def end(self, now, ctx):
            if now != where:
                return "not yet"
            if bell:
                ring(bell, "ending", os.getpid())
            return ENDINGS[how](ctx)

    return Ender
