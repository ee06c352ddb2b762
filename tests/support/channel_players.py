"""Two processes, each with one side of a channel, that do what they are told, one thing at a time."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import warnings

from infini_run import channel
from infini_run.channel.errors import ChannelBroken, ChannelError

REPLY_LIMIT_S = 60.0  # after that it counts as hung


class Bomb:
    """Pickles well, and does not unpickle."""

    def __reduce__(self):
        return int, ("no number",)


def things(number, size):
    """What a message is: the same in every process."""
    return number, bytes([number % 256]) * size


def open_descriptors():
    return {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


def fork(play, *args):
    """A child that plays and leaves by _exit, whatever happens. Its pid."""
    with warnings.catch_warnings():  # under pytest-xdist there is a thread, which does nothing of ours
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        play(*args)
        code = 0
    finally:
        os._exit(code)


class Player:
    """A child with a side of a channel (its socket is `fd`). `ask` has it do something, and returns how that went."""

    def __init__(self, fd, others=()):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(REPLY_LIMIT_S)
        self._ours = ours
        self.pid = fork(self._play, fd, theirs, [ours, *others])
        theirs.close()
        self.is_alive = True

    def tell(self, what, *args):
        self._ours.send(pickle.dumps((what, *args)))

    def hear(self):
        return pickle.loads(self._ours.recv(1 << 16))

    def ask(self, what, *args):
        self.tell(what, *args)
        return self.hear()

    def hear_last(self):
        """What it has to say; None: it died instead."""
        said = self._ours.recv(1 << 16)
        return pickle.loads(said)[1] if said else None

    def kill(self):
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def reap(self):
        self.is_alive = False
        status = os.waitpid(self.pid, 0)[1]
        self._ours.close()
        return os.waitstatus_to_exitcode(status)

    def _play(self, fd, replies, not_ours):
        for other in not_ours:
            other.close()
        before = open_descriptors() - {fd}
        tx, rx = channel.connect(fd)
        acts = {
            "send": lambda *args: tx.send(things(*args[:2]), *args[2:]),
            "bomb": lambda *_: tx.send(Bomb(), timeout_s=0),
            "mute": lambda *_: tx.send(threading.Lock(), timeout_s=0),
            "recv": lambda timeout_s=0: rx.recv(timeout_s),
            "close tx": lambda: tx.close(linger_s=0),
            "close rx": rx.close,
            "play": lambda *script: _talk(tx, rx, before, *script),
            "leaks": lambda: sorted(open_descriptors() - before),
        }
        while True:
            what, *args = pickle.loads(replies.recv(1 << 16))
            if what == "leave":
                return
            try:
                reply = "ok", acts[what](*args)
            except (ChannelError, TimeoutError) as error:
                reply = type(error).__name__, str(error)
            if what == "recv" and reply[0] == "ok":
                number, data = reply[1]
                assert data == things(number, len(data))[1]
                reply = "ok", number
            replies.send(pickle.dumps(reply))


def _talk(tx, rx, before, sizes, reads, how):
    """Send `sizes` and receive `reads` messages (None: all), at the same time, and end."""
    story = {"came": [], "end": "closed", "sent": 0}
    receiving = threading.Thread(target=_listen, args=(rx, reads, story))
    receiving.start()
    try:
        for number, size in enumerate(sizes):
            tx.send(things(number, size))
            story["sent"] += 1
    except ChannelBroken:
        pass
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    tx.close(REPLY_LIMIT_S)
    if how == "leave":  # without reading what is left
        rx.close()
    receiving.join()
    rx.close()
    return {**story, "leaks": sorted(open_descriptors() - before)}


def _listen(rx, reads, story):
    try:
        while reads is None or len(story["came"]) < reads:
            number, data = rx.recv()
            assert data == things(number, len(data))[1]
            story["came"].append(number)
        rx.close()
    except ChannelError as error:
        story["end"] = type(error).__name__


def two_players():
    """Two children that share a channel, of which nothing is left here."""
    (tx, rx), (their_tx, their_rx) = channel.pair()
    fds = [os.dup(tx.fileno()), os.dup(their_tx.fileno())]  # a forked child owns none of our ends, only these
    for half in (tx, rx, their_tx, their_rx):
        half.close_copy()
    first = Player(fds[0], others=[_Fd(fds[1])])
    second = Player(fds[1], others=[_Fd(fds[0]), first._ours])
    for fd in fds:
        os.close(fd)
    return first, second


class _Fd:
    def __init__(self, fd):
        self._fd = fd

    def close(self):
        os.close(self._fd)
