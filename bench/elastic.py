"""What the trials of membership.py are made of: jobs that may lose a node, and ranks that tell of themselves
(member.c)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bed import Bed
from cabled import COUNT, HEAD, LOOK_S, NAMES, Hosts, children
from sample import CommandFailed, start

READ_SIZE = 1 << 20
START_S = 60.0
END_S = 40.0
SETTLE_S = 1.0  # for what is dying


@dataclass(frozen=True)
class Marked:
    """A process of a job. rank: -1 if it is none."""

    pid: int
    parent: int
    name: str
    namespace: int
    rank: int
    attempt: str


def marked(mark: str) -> list[Marked]:
    """The processes that carry the mark and live, on whatever host."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            strings = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            if mark.encode() not in strings:
                continue
            stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            namespace = os.stat(f"/proc/{entry}/ns/pid").st_ino
        except OSError:
            continue
        name, _, rest = stat.partition("(")[2].rpartition(")")
        variables = dict(string.decode(errors="replace").partition("=")[::2] for string in strings)
        rank = int(variables.get("RANK", -1)) if name == "member" else -1
        state, parent = rest.split()[:2]
        if state not in "ZX":
            attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "")
            found.append(Marked(int(entry), int(parent), name, namespace, rank, attempt))
    return found


def kill(pids: Sequence[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


# ---- jobs


@dataclass(frozen=True)
class Start:
    """A rank has been exec'ed."""

    world: int
    rank: int
    size: int
    host: str
    pid: int
    at_ns: int


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A launcher: `commands` makes, out of hosts and a program, the command line for each host (0: outside).
    `is_ours`: it numbers worlds, and its guard ends the ranks of a launcher that was killed."""

    name: str
    commands: Callable[[Hosts, list[str]], list[tuple[int, list[str]]]]
    is_ours: bool
    is_by_hand: bool = True


def by_ssh(bed: Bed, *flags: str) -> Kind:
    def commands(hosts: Hosts, program: list[str]) -> list[tuple[int, list[str]]]:
        shape = ["--engine=ssh", f"--hosts={','.join(NAMES)}", f"--ssh_config={hosts.folder}/ssh_config"]
        return [(0, [bed.infini_run, *shape, "--nproc_per_node=1", *flags, *program])]

    return Kind(name="ssh", commands=commands, is_ours=True, is_by_hand=False)


def by_hand(bed: Bed, *flags: str) -> Kind:
    def commands(_hosts: Hosts, program: list[str]) -> list[tuple[int, list[str]]]:
        shape = ["--nproc_per_node=1", f"--rdzv_endpoint={HEAD}:29500"]
        return [(host, [bed.infini_run, *shape, *flags, *program]) for host in range(1, COUNT + 1)]

    return Kind(name="manual", commands=commands, is_ours=True)


def torch_like(name: str, path: str, *flags: str) -> Kind:
    """torchrun, or what takes its flags."""

    def commands(_hosts: Hosts, program: list[str]) -> list[tuple[int, list[str]]]:
        shape = ["--nnodes=3:4", "--nproc_per_node=1", "--max_restarts=100", "--no-python"]
        meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint={HEAD}:29500", "--rdzv_id=bench"]
        return [(host, [path, *shape, *meet, *flags, *program]) for host in range(1, COUNT + 1)]

    return Kind(name=name, commands=commands, is_ours=False)


class Job:
    """One launcher's job of three nodes (torchrun: four) of the four hosts, with one rank on each node.

    Args:
        words: of member.c.
    """

    def __init__(self, bed: Bed, hosts: Hosts, kind: Kind, folder: Path, *words: str) -> None:
        self.hosts, self.kind, self._folder = hosts, kind, folder
        path = folder / "told"
        self._file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._read = 0
        self._starts: list[Start] = []
        self._old: set[tuple[str, int]] = set()
        self._has_begun = False
        self._world_of: dict[tuple[str, int], int] = {}
        self._newest = -1
        self.late_writes = 0  # of an old world, after the first line of a new one
        token = {"INFINI_RUN_TOKEN": os.urandom(16).hex()} if kind.is_by_hand else {}
        self._env = {**bed.env, **token, **dict([hosts.mark.split("=", 1)])}
        self._lines = kind.commands(hosts, [bed.program("member"), str(path), *words])
        self._pids: dict[int, list[int]] = {}
        for host, _ in self._lines:
            self.start_on(host)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_on(self, host: int) -> None:
        """Start the command of a host, once more if it has ended."""
        where = self.hosts.inside(host) if host else self.hosts.outside()
        command = next(command for at, command in self._lines if at == host)
        log = os.open(self._folder / f"stderr.{host}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._pids.setdefault(host, []).append(start([*where, *command], self._env, {2: log}))
        os.close(log)

    def said(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("stderr.*")))

    def close(self) -> None:
        """Kill all of it."""
        while rest := marked(self.hosts.mark):
            kill([process.pid for process in rest])
            time.sleep(LOOK_S)
        for pids in self._pids.values():
            for pid in pids:
                os.waitpid(pid, 0)
        self._pids = {}
        for path in self._folder.glob("stderr.*"):
            path.unlink()
        os.close(self._file)

    # ---- what its ranks have told

    def starts(self) -> list[Start]:
        """All that have been exec'ed, in their order. Counts writes of the old world on the way."""
        data = os.pread(self._file, READ_SIZE, self._read)
        while (end := data.rfind(b"\n") + 1) > 0:
            self._read += end
            for line in data[:end].decode().splitlines():
                self._note(line.split())
            data = os.pread(self._file, READ_SIZE, self._read)
        return self._starts

    def _note(self, words: list[str]) -> None:
        if words[0] == "start":
            world, rank, size, host, pid, at_ns = words[1:]
            self._starts.append(Start(int(world), int(rank), int(size), host, int(pid), int(at_ns)))
            self._world_of[host, int(pid)] = int(world)
            self._newest = max(self._newest, int(world))
            self._has_begun = True
        elif self._is_late((words[1], int(words[2]))):
            self.late_writes += 1

    def _is_late(self, who: tuple[str, int]) -> bool:
        """Whether a rank that has just written is of an old world, after the first line of a new one. What is not
        ours does not number its worlds: there it is one that was there at the last mark."""
        if self.kind.is_ours:
            return self._world_of[who] < self._newest
        return self._has_begun and who in self._old

    def mark(self) -> int:
        """From now on all ranks that there are are those of an old world. Returns how many have started."""
        self._old = {(start.host, start.pid) for start in self.starts()}
        self._has_begun = False
        return len(self._starts)

    def world(self, since: int, limit_s: float) -> list[Start] | None:
        """The ranks of the first world that is complete, after so many starts; None: there was none in time."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            by_world: dict[tuple[int, int], dict[int, Start]] = {}
            for each in self.starts()[since:]:
                key = (each.world if self.kind.is_ours else 0, each.size)
                by_world.setdefault(key, {})[each.rank] = each
            for (_, size), ranks in sorted(by_world.items()):
                if len(ranks) == size:
                    return [ranks[rank] for rank in range(size)]
            time.sleep(LOOK_S)
        return None

    def first_world(self) -> list[Start]:
        world = self.world(0, START_S)
        if world is None:
            raise CommandFailed(f"{self.kind.name}: no first world: {self.said()[-1500:]}")
        return world

    # ---- who there is

    def ranks(self) -> list[Marked]:
        return [process for process in marked(self.hosts.mark) if process.rank >= 0]

    def agent_of(self, start: Start) -> int:
        """The launcher of a rank's node."""
        for rank in self.ranks():
            if (rank.rank, rank.attempt) == (start.rank, str(start.world)):
                return rank.parent
        raise CommandFailed(f"rank {start.rank} of world {start.world} does not run")

    def head(self) -> int:
        """The command, where it is on none of the hosts."""
        return self._pids[0][-1]

    def kill_node(self, start: Start) -> int:
        """SIGKILL to the launcher of a rank, and when. What is not ours leaves its ranks behind: there all of the
        node is killed, and the ranks of other nodes fail, as in a collective whose peer has gone."""
        if self.kind.is_ours:
            pid = self.agent_of(start)
            at_ns = time.monotonic_ns()
            kill([pid])
            return at_ns
        namespace = os.stat(f"/proc/{self.hosts.init(int(start.host[4:]))}/ns/pid").st_ino
        found = marked(self.hosts.mark)
        at_ns = time.monotonic_ns()
        kill([process.pid for process in found if process.namespace == namespace])
        kill([each.pid for each in found if each.rank >= 0 and each.namespace != namespace], signal.SIGUSR1)
        return at_ns

    def finish(self, lost: int) -> int:
        """All ranks exit with 0, and the job ends: how many processes are left a moment later. A launcher that was
        cut off cannot know of the end: it is told to stop.

        Args:
            lost: the host that was lost.
        """
        kill([rank.pid for rank in self.ranks()], signal.SIGUSR2)
        self.wait_end(lost)
        end_s = time.monotonic() + SETTLE_S
        while (left := len(marked(self.hosts.mark))) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        return left

    def wait_end(self, lost: int) -> None:
        """Until the commands have ended; that of the host that was lost is told to."""
        end_s = time.monotonic() + END_S
        heads = [pid for host, pids in self._pids.items() if host != lost for pid in pids[-1:]]
        while not all(_has_ended(pid) for pid in heads):
            if time.monotonic() > end_s:
                raise CommandFailed(f"{self.kind.name} did not end: {self.said()[-1500:]}")
            time.sleep(LOOK_S)
        kill([pid for pid in self._pids.get(lost, []) for pid in children(pid)], signal.SIGTERM)
        while not all(_has_ended(pid) for pid in self._pids.get(lost, [])) and time.monotonic() < end_s:
            time.sleep(LOOK_S)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
