"""(g) Many nodes: ssh to four hosts of this machine, and manual ssh in the same rounds; a head with 1,024 agents.

The hosts are tests/support/beds/ssh.sh's: real sshd, each in namespaces of its own. The agents of the last rows are
simulated by one process beside the head (agents.py): what is measured is the head, which is the real command.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from sample import Case, CommandFailed, expect, finish, interleave, raw, start, time_command

HOSTS = [f"host{number}" for number in range(1, 5)]
SCRIPT = Path(__file__).parent.parent / "tests" / "support" / "beds" / "ssh.sh"
SSH = shutil.which("ssh") or "/usr/bin/ssh"
ROUNDS, FAIL_ROUNDS, SCALE_ROUNDS = 12, 8, 3
SIMULATED = 1024
IDLE_S = 5.0
LIMIT_S = 60.0


@contextmanager
def hosts(folder: Path) -> Iterator[Path]:
    """Four hosts; the folder with their ssh_config, and ssh_config.mux for connections that stay open."""
    with socket.socket() as probe:
        probe.bind(("127.0.78.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "SSH_TB_PORT": str(port), "SSH_TB_SSHD_EXTRA": r"MaxStartups 500\nMaxSessions 100"}
    log = folder / "bed.log"
    try:
        with log.open("w") as file:
            run = partial(subprocess.run, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, check=False)
            if run([str(SCRIPT), "start", str(folder / "bed"), "4"]).returncode:
                raise CommandFailed(f"the hosts did not start: {log.read_text()}")
            yield folder / "bed"
    finally:
        subprocess.run([str(SCRIPT), "stop", str(folder / "bed")], env=env, capture_output=True, check=False)


def ours(bed: Bed, config: Path, *words: str) -> list[str]:
    flags = ["--engine=ssh", f"--hosts={','.join(HOSTS)}", "--nproc_per_node=2", f"--ssh_config={config}"]
    return [bed.infini_run, *flags, *words]


def by_hand(config: Path) -> list[str]:
    each = " & ".join(f"{SSH} -F {config} {host} /bin/true" for host in HOSTS)
    return ["/bin/sh", "-c", f"{each} & wait"]


def bare(bed: Bed, config: Path) -> list[str]:
    """As many Pythons as a launch has, one here and then one on each host, which do nothing."""
    each = " & ".join(f"{SSH} -F {config} {host} exec {bed.python} -S -c pass" for host in HOSTS)
    return ["/bin/sh", "-c", f"{bed.python} -c pass; {each} & wait"]


def launch_cases(bed: Bed, folder: Path) -> list[Case]:
    cases = []
    for name, config in (("ssh", folder / "ssh_config"), ("ssh, open", folder / "ssh_config.mux")):
        rounds = bed.rounds(ROUNDS)
        measure = partial(time_command, ours(bed, config, "/bin/true"), bed.env)
        cases.append(Case(name=f"4 hosts x 2, {name}", measure=measure, rounds=rounds))
        cases.append(
            Case(name=f"manual, {name}", measure=partial(time_command, by_hand(config), bed.env), rounds=rounds)
        )
    open_config = folder / "ssh_config.mux"
    measure = partial(time_command, bare(bed, open_config), bed.env)
    cases.append(Case(name="bare, ssh, open", measure=measure, rounds=rounds))
    return cases


# ---- a rank fails


def free_port() -> int:
    """One that nobody has, and nor has anybody the next one, which is the link's. Not of those that the kernel gives
    out by itself: a socket that asks whether the link's is open could be given that port, and meet itself."""
    while True:
        port = random.randrange(12000, 32000)
        try:
            for number in (port, port + 1):
                socket.create_server(("127.0.0.1", number)).close()
        except OSError:
            continue
        return port


def ranks_alive(mark: bytes) -> dict[int, int]:
    """rank: pid, of the processes that carry the mark and wait."""
    found = {}
    for entry in os.listdir("/proc"):
        try:
            strings = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") if entry.isdigit() else []
            comm = Path(f"/proc/{entry}/comm").read_text() if mark in strings else ""
        except OSError:
            continue
        if comm in ("sleep\n", "sh\n"):
            rank = next(string for string in strings if string.startswith(b"RANK="))
            found[int(rank[5:])] = int(entry)
    return found


def time_failure(commands: list[list[str]], env: Mapping[str, str], mark: bytes, count: int) -> int:
    """From the death of rank 1, which reads the first command's stdin, to the last death of all, in ns."""
    read_fd, write_fd = os.pipe()
    pids = [start(command, env, {0: read_fd}) for command in commands]
    os.close(read_fd)
    try:
        end = time.monotonic() + LIMIT_S
        while len(ranks := ranks_alive(mark)) < count:
            if time.monotonic() > end:
                raise CommandFailed("not all ranks came up")
            time.sleep(0.01)
        fds = {os.pidfd_open(ranks[rank]): rank for rank in ranks}
        os.write(write_fd, b"\n")
        died = {}
        while len(died) < count:
            if not (ready := select.select([fd for fd in fds if fd not in died], [], [], LIMIT_S)[0]):
                raise CommandFailed("ranks live on")
            died |= dict.fromkeys(ready, time.monotonic_ns())
        first = next(at for fd, at in died.items() if fds[fd] == 1)
        for fd in fds:
            os.close(fd)
    finally:
        os.close(write_fd)
        codes = [finish(pid) for pid in pids]
    for command, code in zip(commands, codes, strict=True):
        expect(command, code, 7)
    return max(died.values()) - first


def failure_cases(bed: Bed, folder: Path) -> list[Case]:
    """By ssh, and a manual launch: two launchers of this machine, each a node of four ranks, joined by a token."""
    mark = f"BENCH_MARK={os.getpid()}"
    script = f"export {mark}; if [ $RANK = 1 ]; then exec sh -c 'read x; exit 7'; else exec sleep 1000; fi"
    words = ["--stdin=1", "/bin/sh", "-c", script]
    by_ssh = partial(time_failure, [ours(bed, folder / "ssh_config", *words)], bed.env, mark.encode(), 8)

    def by_hand() -> int:
        shape = ["--nnodes=2", "--nproc_per_node=4", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
        env = {**bed.env, "INFINI_RUN_TOKEN": os.urandom(16).hex()}
        nodes = [[bed.infini_run, *shape, f"--node_rank={node}", *words] for node in range(2)]
        return time_failure(nodes, env, mark.encode(), 8)

    rounds = bed.rounds(FAIL_ROUNDS)
    return [
        Case(name="a rank fails: all dead, ssh", measure=by_ssh, rounds=rounds),
        Case(name="a rank fails: all dead, manual", measure=by_hand, rounds=rounds),
    ]


# ---- many


def head_of(bed: Bed, nodes: int, port: int) -> list[str]:
    shape = [f"--nnodes={nodes}", "--node_rank=0", "--nproc_per_node=1", f"--rdzv_endpoint=127.0.0.1:{port}"]
    return [bed.infini_run, *shape, f"--link_port={port + 1}", "/bin/sleep", "1000"]


def cpu_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def peak_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def measure_scale(bed: Bed, nodes: int) -> dict[str, float]:
    """Of one head with so many agents: until all are told to go, peak memory, CPU at rest, from TERM to its end."""
    port = free_port()
    env = {**bed.env, "INFINI_RUN_TOKEN": os.urandom(16).hex()}
    begin = time.monotonic_ns()
    pid = start(head_of(bed, nodes, port), env)
    agents = None
    try:
        while socket.socket().connect_ex(("127.0.0.1", port + 1)):
            time.sleep(0.005)
        words = [bed.python, str(Path(__file__).parent / "agents.py"), f"127.0.0.1:{port + 1}", "1", str(nodes - 1)]
        agents = subprocess.Popen(words, env=env, stdout=subprocess.PIPE)
        assert agents.stdout is not None
        said = agents.stdout.readline().split()
        if not said:
            raise CommandFailed("the agents have not joined")
        joined = int(said[1])
        time.sleep(1.0)
        before, at = cpu_ns(pid), time.monotonic_ns()
        time.sleep(IDLE_S)
        idle = (cpu_ns(pid) - before) / (time.monotonic_ns() - at)
        peak = peak_kib(pid)
        stop = time.monotonic_ns()
        os.kill(pid, signal.SIGTERM)
        code = finish(pid)
        expect(["head"], code, 143)
        ended = time.monotonic_ns()
    finally:
        if agents is not None:
            agents.kill()
            agents.communicate()
    return {
        "join_ms": (joined - begin) / 1e6,
        "peak_mb": peak * 1024 / 1e6,
        "idle_percent": 100 * idle,
        "stop_ms": (ended - stop) / 1e6,
    }


def scale_rows(samples: list[dict[str, float]]) -> list[Row]:
    def middle(name: str) -> float:
        return sorted(sample[name] for sample in samples)[len(samples) // 2]

    return [
        Row(figure=f"{SIMULATED} agents: all joined", value=middle("join_ms"), unit="ms", bar="joined"),
        Row(figure=f"{SIMULATED} agents: head's peak memory", value=middle("peak_mb"), unit="MB", bar="head"),
        Row(figure=f"{SIMULATED} agents: CPU at rest", value=middle("idle_percent"), unit="%", bar="beats"),
        Row(figure=f"{SIMULATED} agents: TERM to the end", value=middle("stop_ms"), unit="ms"),
    ]


def measure(bed: Bed) -> Figure:
    rows, samples = [], {}
    with scratch() as folder, hosts(folder) as at:
        launches, failures = launch_cases(bed, at), failure_cases(bed, at)
        done = interleave([*launches, *failures])
        for name, bar in (("ssh", "many_ssh"), ("ssh, open", "many_open")):
            ms, hand = (done[f"{who}, {name}"].median / 1e6 for who in ("4 hosts x 2", "manual"))
            rows.append(
                Row(figure=f"4 hosts x 2, {name}", value=ms, unit="ms", ratio=ms / hand, against="manual", bar=bar)
            )
        ms, hand = (done[name].median / 1e6 for name in ("bare, ssh, open", "manual, ssh, open"))
        rows.append(Row(figure="Pythons alone, ssh, open", value=ms, unit="ms", ratio=ms / hand, against="manual"))
        rows += [Row(figure=case.name, value=case.median / 1e6, unit="ms", bar="dead") for case in failures]
        samples |= raw([*launches, *failures])
    scale = [measure_scale(bed, SIMULATED) for _ in range(bed.rounds(SCALE_ROUNDS))]
    samples["scale"] = scale
    return Figure(name="many", rows=rows + scale_rows(scale), samples=samples)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
