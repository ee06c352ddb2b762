"""What goes down to the C core and what comes up, as its structs have it (csrc/include/irun.h): `SpawnSpec` and a
group's configuration; `Event`.

The one rule: Python keeps every byte string that goes down until the call returns, in `kept`; the core copies what it
keeps.
"""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run._irun import ffi, lib
from infini_run.record import made, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

    FoldLabel: TypeAlias = tuple[tuple[bytes, bytes], tuple[bytes, bytes]]

INHERIT = int(lib.IR_FD_INHERIT)
PIPE = int(lib.IR_FD_PIPE)
TO_CONSOLE = int(lib.IR_TO_CONSOLE)
TO_LOG = int(lib.IR_TO_LOG)
UNLABELLED = int(lib.IR_UNLABELLED)

KINDS = {
    lib.IR_STARTED: "started",
    lib.IR_EXITED: "exited",
    lib.IR_START_FAILED: "start_failed",
    lib.IR_SIGNALLED: "signalled",
    lib.IR_FORWARDED: "forwarded",
    lib.IR_LEFTOVER: "leftover",
    lib.IR_STUCK: "stuck",
    lib.IR_OUTPUT_LOST: "output_lost",
    lib.IR_OUTPUT_HELD: "output_held",
    lib.IR_CONSOLE_STUCK: "console_stuck",
    lib.IR_UNGUARDED: "unguarded",
    lib.IR_UNSEEN: "unseen",
    lib.IR_READY: "ready",
    lib.IR_TRIGGERED: "triggered",
    lib.IR_UNPLACED: "unplaced",
    lib.IR_SUSPEND: "suspend",
    lib.IR_LEASE_ENDED: "lease_ended",
    lib.IR_ASKS_TERMINAL: "asks_terminal",
    lib.IR_PROGRESS: "progress",
    lib.IR_CLIENT: "client",
    lib.IR_ENDED: "ended",
}

STEPS = {
    lib.IR_STEP_MEMORY: "allocating memory",
    lib.IR_STEP_DESCRIPTORS: "opening pipes",
    lib.IR_STEP_CLONE: "creating the process",
    lib.IR_STEP_GROUP: "making its process group",
    lib.IR_STEP_PARENT: "tying it to the launcher",
    lib.IR_STEP_USER_NAMESPACE: "making a user namespace",
    lib.IR_STEP_PROC: "mounting /proc in its PID namespace",
    lib.IR_STEP_CWD: "entering its working directory",
    lib.IR_STEP_STDIO: "connecting its stdio",
    lib.IR_STEP_TERMINAL: "giving it the terminal",
    lib.IR_STEP_LIMIT: "restoring its descriptor limit",
    lib.IR_STEP_SIGNALS: "restoring its signals",
    lib.IR_STEP_EXEC: "executing the program",
    lib.IR_STEP_NOTIFY: "making its notify socket",
    lib.IR_STEP_AFFINITY: "binding it to its CPUs",
    lib.IR_STEP_LEASE: "starting the guard that holds its lease",
}

LAUNCHERS_OWN = frozenset(("suspend", "client"))  # events about the launcher: no news of a rank


@record
class ProcessState:
    """The state of the process at its start.

    Attributes:
        blocked: The signals blocked at entry, as a mask: bit n-1 is signal n.
        ignored: The signals ignored at entry, as a mask.
        nofile_soft: The soft limit on open descriptors.
        nofile_hard: The hard limit.
        suspend_write_fd: Where process 1 of a PID namespace asks for a suspension from outside. -1: nowhere.
        inherited_end: Descriptors above 2 that others left open are below this one. 0: unknown.
    """

    blocked: int
    ignored: int
    nofile_soft: int
    nofile_hard: int
    suspend_write_fd: int = -1
    inherited_end: int = 0


@record
class Event:
    """A fact about a launch. Unused fields are 0; `worker` and `rank` are -1.

    Attributes:
        kind: one of these words.

            - started, ready, exited, ended
            - start_failed: code is the step, signal the errno
            - signalled: a signal from outside stops the launch; code is 1 if a key of the terminal sent it
            - forwarded: the core passed a signal on to ranks
            - leftover: a process outlived the ranks, and is stopped
            - stuck: SIGKILL did not end it
            - output_lost: code is the stream, signal the errno
            - output_held: a process that infini-run may not end keeps the rank's stdout (code 0) or stderr (1) open;
              it is not read any more
            - console_stuck: all ranks exited, and the last output waits for its reader
            - unguarded: no guard; code is the step that failed, signal the errno; code 0: the guard was killed
            - unseen: /proc does not show leftover processes; signal is the errno, code is 0 if only the guard needs
              /proc, 1 if the launcher does
            - triggered: the rank sent WATCHDOG=trigger
            - late: not ready in time
            - hung: no output and no CPU time for hang_timeout
            - unplaced: ranks are bound to CPUs, but not to memory; signal is the errno
            - restarting: in place of ended if another attempt follows; code is the number of restarts. A program that
              restarts alone is `name`
            - suspend: Ctrl-Z suspends the launch
            - client: a connection to the control socket asks something
            - lease_ended: the ranks were killed; code is 0 without a renewal in time, 1 after a SIGKILL of its guard
            - asks_terminal: the rank reads the terminal; code is 0 if it gets it, 1 if it stays stopped
            - progress: PROGRESS=value, higher than ever; the highest of several between two looks, with its time
        worker: Its index among the ranks that started together with it on this host.
        rank: Its global rank.
        pid: Its process.
        code: The exit code.
        signal: The signal that ended it, or that came.
        dumped_core: It left a core dump.
        after_stop: It ended after the stop signal.
        had_terminal: It had the foreground of the terminal, so a key reached it alone.
        status_lost: Another part of the host program reaped it: code and signal are unknown.
        time_ns: When it happened, by CLOCK_MONOTONIC.
        user_us: The CPU time that it used, in microseconds.
        system_us: The CPU time of the kernel for it, in microseconds.
        max_rss_kib: The most memory that it had resident, in KiB.
        name: The program name of a leftover or stuck process, "?": unknown; or the program that restarts alone.
        value: The progress of a rank, by its own report: a number from 0 to 2**63 - 1. Of one that exited: the grace
            in milliseconds after which it was killed; 0: it was not.
    """

    kind: str
    worker: int = -1
    rank: int = -1
    pid: int = 0
    code: int = 0
    signal: int = 0
    dumped_core: bool = False
    after_stop: bool = False
    had_terminal: bool = False
    status_lost: bool = False
    time_ns: int = 0
    user_us: int = 0
    system_us: int = 0
    max_rss_kib: int = 0
    name: str = ""
    value: int = 0

    @property
    def is_failure(self) -> bool:
        """Whether a worker ended badly, and not because the launcher stopped it."""
        is_end = self.kind == "exited" and not self.after_stop
        return is_end and (self.code != 0 or self.signal != 0 or self.status_lost)

    def asks_again(self, again_code: int) -> bool:
        """Return whether a worker asked for another run of the job.

        Args:
            again_code: the exit code that asks for it; 0: none does.
        """
        return 0 < again_code == self.code and self.is_failure

    @property
    def is_routine(self) -> bool:
        """Part of every launch that goes well."""
        return self.kind in ("started", "ready", "ended") or (
            self.kind == "exited" and self.code == self.signal == 0 and not self.status_lost and not self.after_stop
        )


def read_event(event: Any, ranks: Sequence[int]) -> Event:
    """Return an event of the core. What only few events have is looked at there alone: there are two events for each
    worker.

    Args:
        event: A struct ir_event.
        ranks: The rank of each worker.
    """
    kind, worker = KINDS[event.kind], event.worker
    rank = ranks[worker] if worker >= 0 else -1
    values = {"kind": kind, "worker": worker, "rank": rank, "pid": event.pid, "time_ns": event.time_ns}
    if kind == "started":
        return made(Event, values)
    values["code"], values["signal"], values["value"] = event.code, event.signal, event.value
    flags = event.flags
    if flags:
        values["dumped_core"] = bool(flags & lib.IR_DUMPED_CORE)
        values["after_stop"] = bool(flags & lib.IR_AFTER_STOP)
        values["had_terminal"] = bool(flags & lib.IR_HAD_TERMINAL)
        values["status_lost"] = bool(flags & lib.IR_STATUS_LOST)
    if kind == "exited":
        values["user_us"], values["system_us"] = event.user_us, event.system_us
        values["max_rss_kib"] = event.max_rss_kib
    elif event.name[0] != b"\0":
        values["name"] = os.fsdecode(ffi.string(event.name))
    return made(Event, values)


class SpawnSpec:
    """One process for the core: bytes and descriptors, as the C struct has them. `env` is what it has beyond the
    base: `NAME=value`, with a NUL between two."""

    __slots__ = (
        "argv",
        "cpus",
        "cwd",
        "dies_with_us",
        "env",
        "error_log_fd",
        "foreground",
        "heading",
        "held",
        "isolate",
        "label",
        "log_fd",
        "nodes",
        "notify",
        "output",
        "pid",
        "program",
        "rank",
        "stdio",
    )

    def __init__(self, rank: int, program: bytes, argv: Sequence[bytes], env: bytes = b"") -> None:
        self.rank = rank
        self.program = program
        self.argv = argv
        self.env = env
        self.cwd: bytes | None = None
        self.notify: bytes | None = None
        self.stdio = [INHERIT, INHERIT, INHERIT]
        self.output = [0, 0]
        self.label: FoldLabel | None = None
        self.log_fd = self.error_log_fd = -1
        self.pid = 0  # of one that was forked already, and waits: stdio are its pipes' reading ends
        self.cpus: Sequence[int] = ()  # empty: the same as the launcher's
        self.nodes: Sequence[int] = ()  # of memory, and only with cpus
        self.foreground = self.isolate = self.dies_with_us = False
        self.held = False  # it starts with Group.start_held
        self.heading: bytes | None = None  # of its log, for Group.part_start


def pack_workers(specs: Sequence[SpawnSpec], base_env: Sequence[bytes], kept: list[Any]) -> Any:
    """Return an array of struct ir_worker.

    Args:
        specs: The processes.
        base_env: `NAME=value`, the part of the environment that they have in common.
        kept: Gets what must live as long as the array is used.
    """
    workers = ffi.new("struct ir_worker[]", max(1, len(specs)))
    base = _strings(base_env, kept)
    argv_of: dict[int, Any] = {}
    alike: dict[bytes, Any] = {}
    for worker, spec in zip(workers, specs, strict=False):
        if id(spec.argv) not in argv_of:
            argv_of[id(spec.argv)] = _strings(spec.argv, kept)
        _fill(worker, spec, argv_of[id(spec.argv)], base, kept, alike)
    kept.append(alike)
    return workers


def _fill(worker: Any, spec: SpawnSpec, argv: Any, base: Any, kept: list[Any], alike: dict[bytes, Any]) -> None:
    """Strings that most workers have alike (`alike`) go down once."""
    worker.program = _shared_string(spec.program, alike)
    worker.argv = argv
    worker.base_env = base
    if spec.env:
        worker.env = pack_string(spec.env, kept)
        worker.env_count = spec.env.count(b"\0") + 1
    if spec.cwd is not None:
        worker.cwd = _shared_string(spec.cwd, alike)
    if spec.notify is not None:
        worker.notify = pack_string(spec.notify, kept)
    if spec.heading is not None:
        worker.heading = _shared_string(spec.heading, alike)
    if spec.cpus:
        worker.cpus, worker.cpu_words = _mask(spec.cpus, kept)
        if spec.nodes:
            worker.nodes, worker.node_words = _mask(spec.nodes, kept)
    if spec.label is not None:
        (out, out_more), (err, err_more) = spec.label
        worker.label = _shared_string(out, alike), _shared_string(err, alike)
        worker.label_more = _shared_string(out_more, alike), _shared_string(err_more, alike)
    worker.pid = spec.pid
    worker.stdio = spec.stdio
    worker.output = spec.output
    worker.log_fd = spec.log_fd
    worker.error_log_fd = spec.error_log_fd
    worker.flags = (
        (lib.IR_WORKER_FOREGROUND if spec.foreground else 0)
        | (lib.IR_WORKER_ISOLATE if spec.isolate else 0)
        | (lib.IR_WORKER_DIES_WITH_US if spec.dies_with_us else 0)
        | (lib.IR_WORKER_HELD if spec.held else 0)
    )


def _strings(strings: Sequence[bytes], kept: list[Any]) -> Any:
    pointers = [ffi.from_buffer("char[]", string + b"\0") for string in strings]
    array = ffi.new("char *[]", [*pointers, ffi.NULL])
    kept += (pointers, array)
    return array


def pack_string(string: bytes, kept: list[Any]) -> Any:
    """Return a C string of bytes without a NUL; `kept` keeps it alive."""
    kept.append(ffi.from_buffer("char[]", string + b"\0"))
    return kept[-1]


def _shared_string(string: bytes, alike: dict[bytes, Any]) -> Any:
    found = alike.get(string)
    if found is None:
        found = alike[string] = ffi.from_buffer("char[]", string + b"\0")
    return found


def _mask(numbers: Sequence[int], kept: list[Any]) -> tuple[Any, int]:
    words = [0] * (max(numbers) // 64 + 1)
    for number in numbers:
        words[number // 64] |= 1 << number % 64
    kept.append(ffi.new("uint64_t[]", words))
    return kept[-1], len(words)


# ---- struct ir_config in parts: what Group takes has the same names


def pack_guard(config: Any, kept: list[Any], guard: bytes | None, guard_wait_s: float, folder: bytes | None) -> None:
    """Fill in what ends the launch after a SIGKILL of this process."""
    config.guard = pack_string(guard, kept) if guard else ffi.NULL
    config.guard_wait_ms = int(guard_wait_s * 1000)
    config.folder = pack_string(folder, kept) if folder else ffi.NULL


def pack_lease(
    config: Any, kept: list[Any], lease_s: float, lease_since_s: float, last_word: bytes, link_fd: int
) -> None:
    """Fill in for how long the workers live without `renew_lease`."""
    config.lease_ms = int(lease_s * 1000)
    config.lease_since_ns = int(lease_since_s * 1e9)
    if last_word:
        config.last_word, config.last_word_size = pack_string(last_word, kept), len(last_word)
    config.link_fd = link_fd


def pack_control(config: Any, kept: list[Any], control: bytes | None, control_fd: int, about: bytes) -> None:
    """Fill in where other processes find the launch, and what they get first."""
    config.control_fd = control_fd
    if control:
        config.control = pack_string(control, kept)
        config.about, config.about_size = pack_string(about, kept), len(about)


def pack_output(
    config: Any,
    kept: list[Any],
    console: tuple[int, int],
    message_fd: int,
    timestamps: bool,
    fold_label: FoldLabel | None,
    first_rank: int,
) -> None:
    """Fill in where labeled lines go."""
    config.console_fd = console
    config.message_fd = message_fd
    config.flags |= lib.IR_TIMESTAMPS if timestamps else 0
    config.first_rank = first_rank
    for k, texts in enumerate(fold_label or ()):
        for i, text in enumerate(texts):
            config.fold_label[k][i] = pack_string(text, kept)


def pack_entry(config: Any, entry: ProcessState) -> None:
    """Fill in the state of this process at its start."""
    config.blocked = entry.blocked
    config.entry.ignored = entry.ignored
    config.entry.nofile_soft = entry.nofile_soft
    config.entry.nofile_hard = entry.nofile_hard
