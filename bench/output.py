"""(d) Output: 4 ranks write 200 MB each in lines of 100 bytes, through `--console=prefix`, `lines`, and `fold`, and
into `--log_dir`. Once more with 100 connections to the launch's control socket that nobody reads.

Against `cat`: the same four writers into one pipe, cat, and the same reader (or a file). Every timed run
checks that no byte is missing; one more run of each kind checks every line: none lost, mixed, changed or
out of order.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bars import Figure, Row, print_figure
from bed import Bed, bed_from_args, scratch
from launchers import FINDERS, Launcher, find_peers, infini_run
from sample import Case, CommandFailed, expect, finish, interleave, raw, start
from unread import COUNT, connect_unread

RANKS = 4
LINE_BYTES = 100
LINES = 2_000_000
PEER_LINES = 200_000
ROUNDS = 5
LABELS = [f"[rank {rank}] " for rank in range(RANKS)]
PREFIXES = {"prefix": LABELS, "lines": [""] * RANKS, "fold": LABELS}  # no two ranks write the same line


class Output:
    """One size of job, in one directory for its files."""

    def __init__(self, bed: Bed, directory: Path, lines: int) -> None:
        self.bed = bed
        self.directory = directory
        self.lines = lines
        self.payload = RANKS * lines * LINE_BYTES

    def writer(self, *flags: str) -> list[str]:
        return [self.bed.program("lines"), "write", *flags, str(self.lines)]

    def start_reader(self, mode: Sequence[str]) -> tuple[int, int]:
        """Starts `lines MODE` on a new pipe; returns its pid and the pipe's end for writing."""
        reading, writing = os.pipe()
        pid = start([self.bed.program("lines"), *mode], self.bed.env, {0: reading, 1: self.directory / "answer"})
        os.close(reading)
        return pid, writing

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads((self.directory / "answer").read_text())
        return answer

    def through_launcher(self, launcher: Launcher, mode: Sequence[str]) -> int:
        """Launcher | lines MODE; returns ns."""
        argv = launcher.argv(RANKS, self.writer())
        begin = time.monotonic_ns()
        reader, pipe = self.start_reader(mode)
        pid = start(argv, {**self.bed.env, **launcher.env}, {1: pipe})
        os.close(pipe)
        code = finish(pid)
        finish(reader)
        took = time.monotonic_ns() - begin
        expect(argv, code)
        return took

    def through_cat(self, sink: int | Path) -> list[int]:
        """Starts four writers | cat; returns their pids."""
        reading, writing = os.pipe()
        cat = start([shutil.which("cat") or "/bin/cat"], self.bed.env, {0: reading, 1: sink})
        os.close(reading)
        writers = [start(self.writer("-k", str(rank)), self.bed.env, {1: writing}) for rank in range(RANKS)]
        os.close(writing)
        return [*writers, cat]

    def time_watched(self, launcher: Launcher, *, unread: bool) -> int:
        """From the moment at which the ranks may write. unread: by then others have connected, and never read."""
        gate = self.directory / "gate"
        os.mkfifo(gate)
        held = os.open(gate, os.O_RDWR | os.O_CLOEXEC)
        argv = launcher.argv(RANKS, ["sh", "-c", f'read _ < {gate}; exec "$@"', "sh", *self.writer()])
        reader, pipe = self.start_reader(["sink"])
        pid = start(argv, {**self.bed.env, **launcher.env}, {1: pipe})
        os.close(pipe)
        clients = connect_unread(pid, COUNT if unread else 0)
        begin = time.monotonic_ns()
        os.write(held, b"\n" * RANKS)
        code = finish(pid)
        finish(reader)
        took = time.monotonic_ns() - begin
        for client in clients:
            client.close()
        os.close(held)
        gate.unlink()
        expect(argv, code)
        self.expect_bytes(self.payload)
        return took

    def time_lines(self, launcher: Launcher, prefixes: Sequence[str]) -> int:
        took = self.through_launcher(launcher, ["sink"])
        self.expect_bytes(self.payload + self.lines * sum(map(len, prefixes)))
        return took

    def time_cat(self) -> int:
        begin = time.monotonic_ns()
        reader, pipe = self.start_reader(["sink"])
        pids = self.through_cat(pipe)
        os.close(pipe)
        for pid in [*pids, reader]:
            expect(["cat"], finish(pid))
        took = time.monotonic_ns() - begin
        self.expect_bytes(self.payload)
        return took

    def time_cat_file(self) -> int:
        path = self.directory / "cat.out"
        begin = time.monotonic_ns()
        for pid in self.through_cat(path):
            expect(["cat"], finish(pid))
        took = time.monotonic_ns() - begin
        path.unlink()
        return took

    def time_log_dir(self) -> int:
        logs = self.directory / "logs"
        argv = self.log_argv(logs)
        begin = time.monotonic_ns()
        code = finish(start(argv, self.bed.env))
        took = time.monotonic_ns() - begin
        expect(argv, code)
        sizes = [path.stat().st_size for path in self.log_paths(logs)]
        shutil.rmtree(logs)
        if sizes != [self.lines * LINE_BYTES] * RANKS:
            raise CommandFailed(f"infini-run --log_dir: the files have {sizes} bytes")
        return took

    def log_argv(self, logs: Path) -> list[str]:
        launcher = infini_run(self.bed, "--console=none", f"--log_dir={logs}")
        return launcher.argv(RANKS, self.writer())

    def log_paths(self, logs: Path) -> list[Path]:
        return [logs / f"rank_{rank}.log" for rank in range(RANKS)]

    def expect_bytes(self, wanted: int) -> None:
        got = self.answer()["bytes"]
        if got != wanted:
            raise CommandFailed(f"{got} bytes came out, not {wanted}")

    def check_lines(self, launcher: Launcher) -> tuple[int, dict[str, Any]]:
        """How long, and what was wrong with the lines."""
        took = self.through_launcher(launcher, ["check", str(RANKS), str(self.lines)])
        return took, self.answer()

    def check_log_dir(self) -> int:
        """How many lines in the log files are wrong."""
        logs = self.directory / "logs"
        argv = self.log_argv(logs)
        expect(argv, finish(start(argv, self.bed.env)))
        wrong = 0
        for rank, path in enumerate(self.log_paths(logs)):
            wrong += self.check_file(path, rank)
        shutil.rmtree(logs)
        return wrong

    def check_file(self, path: Path, rank: int) -> int:
        """A log holds one rank; lines of all lower ranks count as lost, so they are taken off."""
        checker = [self.bed.program("lines"), "check", str(rank + 1), str(self.lines)]
        with path.open("rb") as log:
            finish(start(checker, self.bed.env, {0: log.fileno(), 1: self.directory / "answer"}))
        return wrong_lines(self.answer()) - rank * self.lines


def wrong_lines(answer: dict[str, Any]) -> int:
    return int(answer["lost"] + answer["disordered"] + answer["broken"])


def wrong_prefixes(answer: dict[str, Any], prefixes: Sequence[str]) -> int:
    return sum(got != wanted for got, wanted in zip(answer["prefixes"], prefixes, strict=True))


def rate(job: Output, took_ns: float) -> float:
    """MB/s of what the ranks wrote; prefixes do not count."""
    return job.payload / 1e6 / (took_ns / 1e9)


def measure_own(bed: Bed, directory: Path) -> tuple[list[Row], dict[str, Any]]:
    job = Output(bed, directory, LINES // 10 if bed.quick else LINES)
    consoles = {name: infini_run(bed, f"--console={name}") for name in PREFIXES}
    measures: dict[str, Callable[[], int]] = {
        **{name: partial(job.time_lines, launcher, PREFIXES[name]) for name, launcher in consoles.items()},
        "unread": partial(job.time_watched, consoles["lines"], unread=True),
        "unwatched": partial(job.time_watched, consoles["lines"], unread=False),
        "cat": job.time_cat,
        "log_dir": job.time_log_dir,
        "cat > file": job.time_cat_file,
    }
    cases = [Case(name=name, measure=run, rounds=bed.rounds(ROUNDS)) for name, run in measures.items()]
    done = interleave(cases)
    rates = {name: rate(job, case.median) for name, case in done.items()}
    rows = []
    for name, launcher in consoles.items():
        ratio = rates[name] / rates["cat"]
        figure = f"output --console={name}"
        bar = None if name == "fold" else "output"
        rows.append(Row(figure=figure, value=rates[name], unit="MB/s", ratio=ratio, against="cat", bar=bar))
        _, answer = job.check_lines(launcher)
        rows.append(wrong_row(name, wrong_lines(answer) + wrong_prefixes(answer, PREFIXES[name])))
    rows += [
        Row(
            figure=f"- lines, and {COUNT} clients never read",
            value=rates["unread"],
            unit="MB/s",
            ratio=rates["unread"] / rates["unwatched"],
            against="without them",
            bar="unread",
        ),
        Row(
            figure="output --log_dir",
            value=rates["log_dir"],
            unit="MB/s",
            ratio=rates["log_dir"] / rates["cat > file"],
            against="cat > file",
        ),
        wrong_row("log_dir", job.check_log_dir()),
        Row(figure="- cat", value=rates["cat"], unit="MB/s"),
        Row(figure="- cat > file", value=rates["cat > file"], unit="MB/s"),
    ]
    return rows, raw(cases)


def wrong_row(where: str, wrong: int) -> Row:
    figure = f"lines lost, mixed, changed: {where}"
    return Row(figure=figure, value=wrong, unit="lines", bar="whole")


def measure_peer(bed: Bed, peer: Launcher, directory: Path) -> tuple[list[Row], dict[str, Any]]:
    job = Output(bed, directory, PEER_LINES)
    launcher = FINDERS[peer.name](bed, *(peer.prefix_flags or ()))
    assert launcher is not None
    runs = [job.check_lines(launcher) for _ in range(bed.rounds(3))]
    speed = rate(job, median(took for took, _ in runs))
    wrong = max(wrong_lines(answer) for _, answer in runs)
    flags = " ".join(peer.prefix_flags or ())
    rows = [
        Row(figure=f"- {peer.name} {flags}", value=speed, unit="MB/s"),
        Row(figure=f"- lines lost, mixed, changed: {peer.name} (worst run)", value=wrong, unit="lines"),
    ]
    return rows, {peer.name: runs}


def measure(bed: Bed) -> Figure:
    rows: list[Row] = []
    samples: dict[str, Any] = {}
    remarks: list[str] = []
    with scratch(RANKS * LINES * LINE_BYTES) as directory:
        rows, samples = measure_own(bed, directory)
        for peer in find_peers(bed)[0]:
            if peer.prefix_flags is None:
                continue
            try:
                more, raw_runs = measure_peer(bed, peer, directory)
            except CommandFailed as error:
                remarks.append(f"{peer.name}: {error}")
                continue
            rows += more
            samples.update(raw_runs)
    return Figure(name="output", rows=rows, samples=samples, remarks=remarks)


if __name__ == "__main__":
    print_figure(measure(bed_from_args(__doc__)))
