"""Hosts whose cables can be cut: tests/support/beds/ssh.sh's, real sshd, each with a network and a PID namespace of
its own. They are one machine, so one clock tells when a node was lost and when a rank was exec'ed.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from many import SCRIPT, free_port
from sample import CommandFailed

COUNT = 4
HEAD = "10.78.0.1"  # of host1, in a manual launch
NAMES = [f"host{number}" for number in range(1, COUNT + 1)]
LOOK_S = 0.002


class Hosts:
    """Four hosts, and a place from which they can be reached. Whatever runs there carries a mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = f"ib{os.getpid() % 1_000_000:x}"
        self.mark = f"BENCH_MARK={os.getpid()}-{time.monotonic_ns()}"
        extra = rf"SetEnv {self.mark}\nMaxStartups 500\nMaxSessions 100"
        own = {"SSH_TB_MODE": "netns", "SSH_TB_PORT": str(free_port()), "SSH_TB_NSPREFIX": self.prefix}
        self._env = {**os.environ, **own, "SSH_TB_SSHD_EXTRA": extra}

    def tell(self, *words: object) -> None:
        """Let the bed's script do something."""
        log = self.folder.with_suffix(".log")
        with log.open("w") as file:
            word, *rest = map(str, words)
            argv = [str(SCRIPT), word, str(self.folder), *rest]
            run = partial(subprocess.run, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False)
            if run(argv, env=self._env).returncode:
                raise CommandFailed(f"{' '.join(argv)}: {log.read_text()}")

    def outside(self) -> list[str]:
        """Words before a command that is to be where the hosts can be reached, and is none of them."""
        mount = f'mount --bind "{self.folder}/hosts" /etc/hosts; exec "$@"'
        net = f"--net=/run/netns/{self.prefix}head"
        return ["/usr/bin/nsenter", net, "unshare", "-m", "--propagation", "private", "sh", "-c", mount, "at"]

    def init(self, host: int) -> int:
        """Process 1 of a host, as this machine numbers it."""
        parent = int((self.folder / f"host.{host}.pid").read_text())
        while not (found := children(parent)):  # it has only just been started
            time.sleep(LOOK_S)
        return found[0]

    def inside(self, host: int) -> list[str]:
        """Words before a command that is to be on a host."""
        return ["/usr/bin/nsenter", f"--target={self.init(host)}", "--mount", "--uts", "--net", "--pid", "--"]

    def cable(self, host: int, is_up: bool) -> None:
        self.tell("cable", host, "up" if is_up else "down")

    def cut_one_way(self, host: int, chain: str) -> None:
        """Nothing comes from a host any more (OUTPUT), or nothing to it (INPUT)."""
        self._filter(host, "--append", chain, "--jump", "DROP")

    def heal(self, host: int) -> None:
        """The network of a host is as it was."""
        self.cable(host, is_up=True)
        self._filter(host, "--flush")

    def _filter(self, host: int, *words: str) -> None:
        net = f"--net=/run/netns/{self.prefix}{host}"
        subprocess.run(["nsenter", net, "iptables", "--wait", *words], check=True)


@contextmanager
def cabled_hosts(folder: Path) -> Iterator[Hosts]:
    hosts = Hosts(folder / "cabled")
    try:
        hosts.tell("start", COUNT)
        yield hosts
    finally:
        hosts.tell("stop")


def children(pid: int) -> list[int]:
    """Of a process with one thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
