"""Real hosts for a test run: sshd in namespaces of their own (beds/ssh.sh), on a port and in a directory of our own.

What runs there carries TEST_RUN, as what runs here does, so that `nothing_left` finds it there, too. A keeper stops
the hosts when our end of its pipe is closed: at the end of the run, or when we are killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cluster import skip_without_beds
from tests.support.paths import SUPPORT
from tests.support.processes import OURS, processes
from tests.support.waiting import LIMIT_S

BEDS = SUPPORT / "beds"
_NEEDED = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "unshare": "util-linux"}
KEY_EXCHANGE = "KexAlgorithms curve25519-sha256"  # ssh's own choice takes 0.1 s of CPU for each connection
_SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def require(needed: dict[str, str]) -> None:
    """Skip where a program is missing, with the Debian package that has it. CI is to have them all."""
    skip_without_beds()
    missing = sorted({package for program, package in needed.items() if not shutil.which(program, path=_SEARCHED)})
    problem = f"no {', '.join(missing)} here (tests/support/beds/install.sh {' '.join(missing)})" if missing else ""
    if not problem and os.geteuid() != 0:
        problem = "hosts are made of namespaces, by root"
    if problem and os.environ.get("CI"):
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.78.1", 0))
        return int(probe.getsockname()[1])


class Bed:
    """hosts: host1, host2, ... mode: uts, or netns where each has a network of its own and a cable. extra: lines for
    every sshd_config."""

    def __init__(self, hosts: int = 4, mode: str = "uts", extra: tuple[str, ...] = ()) -> None:
        require(_NEEDED)
        self.mode = mode
        self.folder = Path(tempfile.mkdtemp(prefix="bed-"))
        self.prefix = f"ir{os.getpid() % 1_000_000:x}"
        self.port = _free_port()
        lines = (
            f"SetEnv {'='.join(OURS)}",
            KEY_EXCHANGE,
            *extra,
            *([] if extra else ["MaxStartups 500", "MaxSessions 100"]),
        )
        self._env = {
            **os.environ,
            "SSH_TB_MODE": mode,
            "SSH_TB_PORT": str(self.port),
            "SSH_TB_NSPREFIX": self.prefix,
            "SSH_TB_SSHD_EXTRA": "\\n".join(lines),
        }
        keep = f'cat >/dev/null; "{BEDS}/ssh.sh" stop "{self.folder}"; rm -rf "{self.folder}"'
        self._keeper = subprocess.Popen(["setsid", "sh", "-c", keep], stdin=subprocess.PIPE, env=self._env)
        try:
            self.tell("start", hosts)
        except BaseException:
            self.close()
            raise

    def tell(self, word: str, *words: object) -> None:
        """Let the bed's script do something: host-down, host-up, cable."""
        said = self.folder.with_suffix(".said")
        with said.open("w+") as file:  # not a pipe: the hosts would hold it
            argv = [str(BEDS / "ssh.sh"), word, str(self.folder), *map(str, words)]
            code = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self._env, timeout=LIMIT_S, check=False
            ).returncode
        text = said.read_text()
        said.unlink()
        assert code == 0, f"{argv} ended with {code}: {text}"

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def under(self) -> tuple[str, ...]:
        """Words before a command that is to be where the hosts can be reached."""
        if self.mode != "netns":
            return ()
        mount = f'mount --bind "{self.folder}/hosts" /etc/hosts; exec "$@"'
        net = f"--net=/run/netns/{self.prefix}head"
        return ("nsenter", net, "unshare", "-m", "--propagation", "private", "sh", "-c", mount, "at")

    def config_with(self, name: str, text: str) -> Path:
        """The bed's ssh_config after lines of our own: the first that is said of a host holds."""
        path = self.folder / name
        path.write_text(f"{text}\n{self.config.read_text()}")
        return path

    @contextmanager
    def host_down(self, number: int) -> Iterator[None]:
        """That host dies, all of it; it is up again afterwards."""
        self.tell("host-down", number)
        try:
            yield
        finally:
            self.up(number)

    def up(self, number: int) -> None:
        self.tell("host-up", number)
        words = [*self.under, "ssh", "-F", str(self.config), "-o", "ConnectionAttempts=20", f"host{number}", "true"]
        subprocess.run(words, stdin=subprocess.DEVNULL, check=True, timeout=LIMIT_S)

    def close(self) -> None:
        self._keeper.stdin.close()
        self._keeper.wait()


def agents() -> dict[int, str]:
    """Agents of this test run, on whatever host: pid and words."""
    mark = "=".join(OURS).encode()
    found = {}
    for pid, (_, state, _) in processes().items():
        try:
            is_ours = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if is_ours and state not in "ZX" and "infini_run.multinode.agent" in words:
            found[pid] = words
    return found


def ssh_to(host: str, head: int) -> int:
    """The ssh that is the link of that process to a host."""
    for pid, (parent, state, name) in processes().items():
        if (parent, name) == (head, "ssh") and state not in "ZX":
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if host in words and not any("kill -KILL" in word for word in words):
                return pid
    raise AssertionError(f"no ssh to {host}")
