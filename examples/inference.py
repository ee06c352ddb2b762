"""A small inference server: a crew whose workers hold one model between them and stream what they write.

    python examples/inference.py --workers=2 --prompts "The " "import " --cancel-after=12

The tasks are those of EXO's runners: connect to the group, load your share, warm up, generate a chunk at a time, and
stop in mid-sentence when nobody wants the rest. The model says which letter follows which in Python's own library;
each worker has the letters of its share, and rank 0 asks the others for the rest, so that all work on each text.
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
import sys
import sysconfig
from collections import Counter, defaultdict
from itertools import accumulate, pairwise
from pathlib import Path

import infini_run as ir

CHUNK = 8  # letters
WORD = "!II"  # between workers: a letter, and a random number
STOP = "\0"  # what no text has: the end of a text, between workers


class Writer:
    """What runs in each worker, for as long as the crew lives."""

    def start(self, ctx):
        self.server = socket.create_server(("127.0.0.1", 0)) if ctx.rank == 0 else None
        self.peers = {}
        self.follows = defaultdict(Counter)
        ctx.status("idle")

    def task(self, ctx, task):
        what, *words = task
        return getattr(self, what)(ctx, *words)

    def listen(self, ctx):
        return self.server.getsockname()

    def connect(self, ctx, endpoint):
        """Rank 0 waits for the others; each says who it is."""
        ctx.status("connecting")
        if ctx.rank:
            self.peers[0] = socket.create_connection(endpoint)
            self.peers[0].sendall(bytes([ctx.rank]))
        else:
            for _ in range(ctx.world_size - 1):
                peer, _ = self.server.accept()
                self.peers[peer.recv(1)[0]] = peer
        ctx.status("connected")

    def load(self, ctx, count):
        """Our share of the model, out of `count` files. It takes as long as it takes, and says how far it is."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:count]
        ctx.status("loading")
        for done, file in enumerate(files):
            ctx.checkpoint()
            for letter, following in pairwise(file.read_text(errors="replace").replace(STOP, "")):
                if ord(letter) % ctx.world_size == ctx.rank:
                    self.follows[letter][following] += 1
            ctx.progress(done + 1, len(files))
        ctx.status("loaded")
        return len(self.follows)

    def warm_up(self, ctx):
        ctx.status("warming up")
        for letter in list(self.follows):
            self.next_letter(letter, 1 << 31)
        ctx.status("ready")

    def generate(self, ctx, prompt, length, seed):
        """Rank 0 writes, and emits what it has; the others answer it. How many letters were written."""
        if ctx.rank:
            return self.answer(self.peers[0])
        chance = random.Random(seed)
        letter, chunk, written = prompt[-1], "", 0
        try:
            while written < length:
                ctx.checkpoint()  # ends here, once nobody wants it
                letter = self.ask(ctx, letter, chance.getrandbits(32))
                chunk, written = chunk + letter, written + 1
                if len(chunk) == CHUNK or written == length:
                    ctx.emit(chunk)
                    chunk = ""
        finally:
            for peer in self.peers.values():
                peer.sendall(pack(STOP))
        return written

    def ask(self, ctx, letter, draw):
        """Whoever has the letter says what follows it."""
        peer = self.peers.get(ord(letter) % ctx.world_size)
        if peer is None:
            return self.next_letter(letter, draw)
        peer.sendall(pack(letter, draw))
        return unpack(peer)[0]

    def answer(self, peer):
        answers = 0
        while (asked := unpack(peer))[0] != STOP:
            peer.sendall(pack(self.next_letter(*asked)))
            answers += 1
        return answers

    def next_letter(self, letter, draw):
        """What follows a letter, `draw` (0 to 2**32) of its way through all that ever did."""
        counts = self.follows.get(letter, {" ": 1})
        at = draw * sum(counts.values()) >> 32
        return next(
            following for following, upto in zip(counts, accumulate(counts.values()), strict=True) if upto > at
        )

    def stop(self, ctx):
        for peer in [*self.peers.values(), *([self.server] if self.server else [])]:
            peer.close()


def pack(letter, draw=0):
    return struct.pack(WORD, ord(letter), draw)


def unpack(peer):
    letter, draw = struct.unpack(WORD, peer.recv(struct.calcsize(WORD), socket.MSG_WAITALL))
    return chr(letter), draw


def all_of(crew, *task):
    """The same task for every worker; the results, by rank."""
    asks = [crew.worker(rank).ask(task) for rank in range(crew.nproc)]
    return [ask.result() for ask in asks]


def write(crew, prompt, length, cancel_after):
    """One text, printed as it comes. Cancelled once it has `cancel_after` letters (0: never)."""
    print(f"> {prompt}", end="", flush=True)
    asks = [crew.worker(rank).ask(("generate", prompt, length, len(prompt))) for rank in range(crew.nproc)]
    written = 0
    for event in crew:
        if event.kind == "emitted" and event.task == asks[0].task:
            print(event.value.replace("\n", "\\n"), end="", flush=True)
            written += len(event.value)
            if cancel_after and written >= cancel_after:
                asks[0].cancel()
                print("... (cancelled)")
                break
            if written == length:
                print()
                break
    for ask in asks[1:]:
        ask.result()


def main():
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--files", type=int, default=20, help="of the library, for the model")
    flags.add_argument("--length", type=int, default=60, help="letters of a text")
    flags.add_argument("--prompts", nargs="*", default=["import ", "def ", "class "])
    flags.add_argument("--cancel-after", type=int, default=0, help="letters of the last text")
    flags = flags.parse_args()
    if not all(flags.prompts):
        sys.exit("--prompts: an empty prompt has no letter to go on from")

    with ir.Crew(Writer, nproc=flags.workers, watchdog_s=30) as crew:
        endpoint = crew.worker(0).ask(("listen",)).result()
        all_of(crew, "connect", endpoint)
        letters = all_of(crew, "load", flags.files)
        all_of(crew, "warm_up")
        print(f"{crew.nproc} workers are ready, with {sum(letters)} letters between them")
        for prompt in flags.prompts:
            last = prompt is flags.prompts[-1]
            write(crew, prompt, flags.length, flags.cancel_after if last else 0)


if __name__ == "__main__":
    main()
