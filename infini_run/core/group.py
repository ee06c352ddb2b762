"""The live workers of one node: the calls to the C core (csrc/include/irun.h says what they do).

Rules: Python keeps every byte string that goes down until the call returns, and the core copies what it keeps. One
lock serializes calls, except the one that blocks, which touches a descriptor only. Nothing outside core/ calls the C
core.
"""

from __future__ import annotations

from _thread import RLock, get_ident

import infini_run.lean_os as os
from infini_run._irun import ffi, lib
from infini_run.core.c_structs import (
    STEPS,
    ProcessState,
    pack_control,
    pack_entry,
    pack_guard,
    pack_lease,
    pack_output,
    pack_string,
    pack_workers,
    read_event,
)
from infini_run.errors import InfiniRunError, StartError, counted
from infini_run.lean_os import EAGAIN, EMFILE, ENOMEM, EPERM, ESRCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.core.c_structs import Event, FoldLabel, SpawnSpec

_TAIL = 16384  # TAIL_BUFFER of csrc/io/io.h

NO_CGROUP = int(lib.IR_NO_CGROUP)
GUARD = os.fsencode(os.dirname(os.dirname(__file__)) + "/irun-guard")

SCOPES = {"group": lib.IR_SCOPE_GROUP, "leader": lib.IR_SCOPE_LEADER, "mixed": lib.IR_SCOPE_MIXED}


def debug_flags(environ: Mapping[str, str]) -> int:
    """Return the flags of INFINI_RUN_DEBUG=fork,nopidfd,oldpidfd,nocgroup,nochildren: what the core would do on an
    older kernel."""
    asked = environ.get("INFINI_RUN_DEBUG", "")
    if not asked:
        return 0
    flags = {
        "fork": lib.IR_USE_FORK,
        "nopidfd": lib.IR_NO_PIDFD,
        "oldpidfd": lib.IR_OLD_PIDFD,
        "nocgroup": NO_CGROUP,
        "nochildren": lib.IR_NO_CHILDREN,
    }
    return sum(flag for name, flag in flags.items() if name in asked.split(","))


def take_over_process(blocked: int) -> ProcessState:
    """Take the whole process over (ir_entry_take_over); the caller has blocked all signals, `blocked` were before."""
    entry = ffi.new("struct ir_entry *")
    error = lib.ir_entry_take_over(entry)
    if error < 0:
        raise StartError(f"/dev/null cannot be opened: {os.strerror(-error)}", "opening /dev/null", -error)
    return ProcessState(
        blocked=blocked,
        ignored=entry.ignored,
        nofile_soft=entry.nofile_soft,
        nofile_hard=entry.nofile_hard,
        inherited_end=entry.inherited_end,
    )


def release_caller_descriptors(inherited_end: int = 0) -> None:
    """Sit in / and close the user's descriptors, once the workers have theirs (ir_entry_release_descriptors).

    Args:
        inherited_end: That of the ProcessState.
    """
    lib.ir_entry_release_descriptors(inherited_end)


def is_main_thread() -> bool:
    """Return whether this is the main thread. The parent-death signal is the spawning thread's (prctl(2)): only the
    main one lives as long as the process."""
    from _thread import get_native_id

    return get_native_id() == os.getpid()


# Held while the core makes pipes. A child that another thread forks just then (os.fork, multiprocessing) would have
# unknown copies of their ends, and hold them open. Nothing that could wait for a fork runs meanwhile.
forking = RLock()
# Threads that fork, and hold the lock or wait for it; one that forks in a signal's handler, while it forks, is there
# twice. A fork that had begun before this module was there does not hold it; only while ranks are started the core
# makes it wait (csrc/sys/fd.c).
_forkers: list[int] = []


def _begin_fork() -> None:
    _forkers.append(get_ident())
    forking.acquire()


def _end_fork() -> None:
    if get_ident() in _forkers:
        if forking._is_owned():  # type: ignore[attr-defined]  # else a handler has raised while it was waited for
            forking.release()
        _forkers.remove(get_ident())


def _end_fork_in_child() -> None:
    _end_fork()
    own = get_ident()
    _forkers[:] = [thread for thread in _forkers if thread == own]  # the others are threads of the parent
    _release_in_child()


def _release_in_child() -> None:
    """Renew the lock in the child of a fork that did not hold it: the thread that may have had it does not exist
    there."""
    if not forking._is_owned():  # type: ignore[attr-defined]
        forking._at_fork_reinit()  # type: ignore[attr-defined]


# A signal that came during the fork is handled as the first hook in Python begins. What its handler raises ends that
# hook alone, so the first one does nothing.
os.register_at_fork(after_in_parent=lambda: None, after_in_child=lambda: None)
os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork_in_child)


class Group:
    """Live workers of one node. Spawn once, then run_once and wait until an `ended` event, then close.

    Usable from several threads.

    Args:
        size: How many workers there will be.
        mark: `NAME=value` in every worker's environment, which finds leftover processes. Empty: do not look for what
            leaves a worker's process group.
        grace_s: Seconds from the stop signal to SIGKILL.
        signal_grace_s: The same for a stop that a signal from outside began. None: grace_s.
        stop_signal: The number of the signal that asks workers to end.
        stop_scope: Which processes of a rank get it: group, leader or mixed.
        console: Descriptors of the labeled stdout and stderr. -1: nowhere.
        message_fd: Where `print_line` writes if there is no labeled stderr. -1: nowhere.
        stdin_fd: The descriptor whose bytes every worker with a pipe as stdin gets. -1: none.
        suspend_read_fd: Where a command inside a PID namespace asks for a suspension from outside. -1: nowhere.
        entry: Given if the process is the launcher's own: then the core takes its signals and reaps orphans.
        guard: The path of irun-guard, which ends what is left after a SIGKILL of this process. None: no guard.
        guard_wait_s: The guard waits this many seconds for each worker's end, then kills it and nothing else. 0: it
            ends all that is left, at once.
        folder: The directory that the guard then removes.
        control: The path of the control socket, where other processes find the launch. None: there is none.
        control_fd: A socket that listens there already, and stays the caller's. -1: the core makes it.
        about: What whoever connects there is sent first.
        lease_s: The guard kills the workers and all that they have started after this many seconds without
            `renew_lease`. 0: there is no lease.
        lease_since_s: When the first lease began, by CLOCK_BOOTTIME. 0: with the spawn.
        last_word: With a lease: what the guard sends to the peer of `link_fd` after the death of this process and of
            all that it started; at most 64 bytes. b"": nothing.
        link_fd: A connected TCP socket. -1: there is none.
        stays: It does not end without `stop`: its workers may restart.
        beside: Another group of this process has it: of the entry, the workers get only the signal mask.
        is_last: The process ends with this group, so as process 1 it may end whatever else there is.
        suspend_as_event: Ctrl-Z is the event `suspend`, and the caller calls `suspend`.
        shares_terminal: A worker that reads the terminal of this process, or changes its modes, gets it for that.
        timestamps: Labeled lines begin with the time (UTC).
        fold_label: Lines that several workers write alike are shown once, with their numbers between these two, for
            stdout and for stderr. None: they are not.
        first_rank: The rank of the first worker, in those numbers.
        debug: Flags of ir_config, as `debug_flags` returns them.
    """

    def __init__(
        self,
        size: int,
        *,
        mark: bytes,
        grace_s: float,
        signal_grace_s: float | None = None,
        stop_signal: int,
        stop_scope: str,
        console: tuple[int, int] = (-1, -1),
        message_fd: int = -1,
        stdin_fd: int = -1,
        suspend_read_fd: int = -1,
        entry: ProcessState | None = None,
        guard: bytes | None = None,
        guard_wait_s: float = 0.0,
        folder: bytes | None = None,
        control: bytes | None = None,
        control_fd: int = -1,
        about: bytes = b"",
        lease_s: float = 0.0,
        lease_since_s: float = 0.0,
        last_word: bytes = b"",
        link_fd: int = -1,
        stays: bool = False,
        beside: bool = False,
        is_last: bool = False,
        suspend_as_event: bool = False,
        shares_terminal: bool = False,
        timestamps: bool = False,
        fold_label: FoldLabel | None = None,
        first_rank: int = 0,
        debug: int = 0,
    ) -> None:
        self._lock = RLock()
        self._waiting = 0
        self._closed = False
        self._ranks: list[int] = []
        self.ended = False
        self.dropped_lines = 0
        self._events = ffi.new("struct ir_event[64]")
        kept: list[Any] = []
        config = ffi.new("struct ir_config *")
        config.mark = pack_string(mark, kept)
        config.grace_ms = max(0, round(grace_s * 1000))
        config.signal_grace_ms = max(0, round((grace_s if signal_grace_s is None else signal_grace_s) * 1000))
        config.stop_signal = stop_signal
        config.stop_scope = SCOPES[stop_scope]
        config.stdin_fd = stdin_fd
        config.flags = debug | (lib.IR_STAYS if stays else 0)
        pack_guard(config, kept, guard, guard_wait_s, folder)
        pack_lease(config, kept, lease_s, lease_since_s, last_word, link_fd)
        pack_control(config, kept, control, control_fd, about)
        pack_output(config, kept, console, message_fd, timestamps, fold_label, first_rank)
        config.suspend_read_fd = suspend_read_fd
        config.suspend_write_fd = -1 if entry is None else entry.suspend_write_fd
        if entry is not None:
            pack_entry(config, entry)
            config.flags |= lib.IR_GIVEN_MASK if beside else lib.IR_OWN_PROCESS
            config.flags |= lib.IR_LAST if is_last else 0
            config.flags |= lib.IR_REPORT_TSTP if suspend_as_event else 0
            config.flags |= lib.IR_SHARES_TERMINAL if shares_terminal else 0
        self._handle_place = ffi.new("struct ir_group **")
        try:
            error = lib.ir_group_new(config, size, self._handle_place)
            if error < 0:
                raise StartError(f"a launch cannot be set up: {os.strerror(-error)}", "setting up", -error)
        except BaseException:  # also an interrupt that came within the call
            lib.ir_group_free(self._handle_place)
            raise

    @property
    def _handle(self) -> Any:
        return self._handle_place[0]

    def spawn(self, specs: Sequence[SpawnSpec], base_env: Sequence[bytes]) -> int:
        """Start all, in order; return how many were (fewer: a signal that ends the job came meanwhile).

        Raises StartError where the core could not create one; those before it run.
        """
        kept: list[Any] = []
        workers = pack_workers(specs, base_env, kept)
        failure = ffi.new("struct ir_failure *")
        self._ranks = [spec.rank for spec in specs]
        with self._lock, forking:
            started = lib.ir_group_spawn(self._handle, workers, len(specs), failure)
        return self._checked(started, failure)

    def start_held(self, workers: Sequence[int]) -> int:
        """Start workers whose spec is held, by their indexes; return how many were (none: the group stops or is
        closed). Raises as `spawn`."""
        failure = ffi.new("struct ir_failure *")
        with self._lock, forking:
            if self._closed or self.ended:
                return 0
            started = lib.ir_group_start_held(self._handle, ffi.new("uint32_t[]", workers), len(workers), failure)
        return self._checked(started, failure)

    def part_signal(self, workers: Sequence[int], number: int, *, leaders: bool) -> int:
        """Send a signal to some workers, which are to restart (ir_group_part_signal).

        Args:
            workers: Their indexes.
            number: The signal.
            leaders: It goes to them alone, and not to their process groups.

        Returns:
            How many have not ended. 0: none, or the group stops.
        """
        with self._lock:
            if self._closed:
                return 0
            indexes = ffi.new("uint32_t[]", workers)
            return int(lib.ir_group_part_signal(self._handle, indexes, len(workers), number, leaders))

    def part_leftovers(self, workers: Sequence[int], mark: bytes, number: int) -> int:
        """Return how many processes some workers have left, after the end of all of them (ir_group_part_leftovers).

        Args:
            workers: Their indexes.
            mark: `NAME=value` in the environment of each of them, and of no other.
            number: The signal to send them. 0: none.
        """
        kept: list[Any] = []
        with self._lock:
            if self._closed:
                return 0
            indexes = ffi.new("uint32_t[]", workers)
            marked = pack_string(mark, kept)
            return int(lib.ir_group_part_leftovers(self._handle, indexes, len(workers), marked, number))

    def part_start(self, specs: Sequence[SpawnSpec], base_env: Sequence[bytes], workers: Sequence[int]) -> int | None:
        """Restart some workers that exited (ir_group_part_start).

        Args:
            specs: Those of all workers, as for `spawn`. The log of each one that starts gets its heading.
            base_env: As for `spawn`.
            workers: The indexes of those that start, in that order.

        Returns:
            How many did; fewer: the group stops. None: not yet, as the console has not taken their last output.

        Raises:
            StartError: The core could not create one; those before it run.
        """
        kept: list[Any] = []
        failure = ffi.new("struct ir_failure *")
        described = pack_workers(specs, base_env, kept)
        with self._lock, forking:
            if self._closed or self.ended:
                return 0
            indexes = ffi.new("uint32_t[]", workers)
            count = len(workers)
            started = lib.ir_group_part_start(self._handle, described, len(specs), indexes, count, failure)
        if started == -EAGAIN and failure.step == lib.IR_STEP_STDIO:
            return None
        return self._checked(started, failure)

    def _checked(self, started: int, failure: Any) -> int:
        """Raises StartError: the number is an error."""
        if started < 0:
            step = STEPS.get(failure.step, "starting")
            rank = self._ranks[failure.worker] if failure.worker < len(self._ranks) else None
            raise StartError(os.strerror(-started), step, -started, rank)
        return int(started)

    def wait(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> bool:
        """Block until `run_once` has something to do, or a descriptor of `also` is readable. Return False when the
        time is up. May return early."""
        with self._lock:
            if self._closed or self.ended:
                return True
            self._waiting += 1
        try:
            timeout_ms = -1 if timeout_s is None else min(max(0, -int(-timeout_s * 1000 // 1)), 2**31 - 1)
            ready = _poll(self.fileno(), also, timeout_ms) if also else lib.ir_group_wait(self._handle, timeout_ms)
        finally:
            with self._lock:
                self._waiting -= 1
                self._free_if_last()
        return bool(ready != 0)

    def fileno(self) -> int:
        """Return the descriptor that `wait` waits for. Valid until `close`."""
        assert not self._closed or self._waiting
        return int(lib.ir_group_fd(self._handle))

    def run_once(self) -> list[Event]:
        """Do what is due; never block. The events come once, in order."""
        with self._lock:
            events = self._pop_events()
            while not self._closed:
                count = lib.ir_group_run_once(self._handle, self._events, 64)
                events += self._pop_events()
                if count < 64:
                    break
        return events

    def _pop_events(self) -> list[Event]:
        """Take the events in the buffer, also those that an interrupt (Ctrl-C in a host) has left there, which may
        come at any line. Without that, the loss of an end would leave its waiter waiting for ever."""
        slots = []
        for slot in self._events:
            if not slot.kind:
                break
            slots.append(slot)
        events = [read_event(slot, self._ranks) for slot in slots]
        self.ended = self.ended or (len(events) > 0 and events[-1].kind == "ended")
        for slot in reversed(slots):  # from the last one on: what is left is whole, and is taken next time
            slot.kind = 0
        return events

    def signal(self, worker: int, number: int) -> int:
        """Send a signal to one worker, or to all (-1). Return how many it reached (0: it is gone). Raises
        InfiniRunError without the permission."""
        with self._lock:
            reached = -ESRCH if self._closed else int(lib.ir_group_signal(self._handle, worker, number))
        if reached == -ESRCH:
            return 0
        if reached == -EPERM:  # it has become another user's process
            raise InfiniRunError(f"the signal cannot be sent: {os.strerror(EPERM)}")
        if reached < 0:
            raise OSError(-reached, os.strerror(-reached))
        return reached

    def signal_groups(self, number: int) -> None:
        """Send a signal to every worker's process group."""
        with self._lock:
            if not self._closed:
                lib.ir_group_signal_groups(self._handle, number)

    def suspend(self) -> None:
        """Stop the workers and this process, as Ctrl-Z does, until SIGCONT."""
        with self._lock:
            if not self._closed:
                lib.ir_group_suspend(self._handle)

    def stop(self, number: int = 0, *, by_signal: bool = False) -> None:
        """Begin to stop the workers. Does nothing the second time.

        Args:
            number: The signal to send. 0: the stop signal.
            by_signal: A signal from outside asked for it, so the grace is signal_grace_s.
        """
        with self._lock:
            if not self._closed:
                lib.ir_group_stop(self._handle, number, by_signal)

    def kill(self) -> None:
        """Send SIGKILL to everything that is left."""
        with self._lock:
            if not self._closed:
                lib.ir_group_kill(self._handle)

    def hand_clients(self, take: Callable[[int], None]) -> None:
        """Pass on each connection to the control socket that has asked something: its descriptor is the callee's from
        now on.

        Forks of other threads wait meanwhile: a child would keep a connection, for whose end its client waits. The
        locks are taken in the order of `spawn`.
        """
        with self._lock, forking:
            while not self._closed and (fd := lib.ir_group_next_client(self._handle)) >= 0:
                take(int(fd))

    def add_follower(self, fd: int, wanted: Sequence[bool], first: bytes) -> None:
        """Send what workers write to a connection, too, until it or the launch ends (ir_group_add_follower).

        Args:
            fd: A socket that does not block. It becomes the core's.
            wanted: Whether each worker is wanted.
            first: What is sent before.

        Raises:
            InfiniRunError: Nothing of it happened.
        """
        with self._lock:
            chosen = bytes(wanted)
            error = -ESRCH if self._closed else lib.ir_group_add_follower(self._handle, fd, chosen, first, len(first))
        if error == -EMFILE:
            raise InfiniRunError("too many processes follow this launch; end one of them")
        if error < 0:
            raise InfiniRunError(f"this launch cannot be followed: {os.strerror(-error)}")

    def renew_lease(self, since_s: float = 0.0) -> bool:
        """Let the workers live for another lease. Costs no system call.

        Args:
            since_s: When the new lease begins, by CLOCK_BOOTTIME: the time at which the answered message was sent. 0:
                now. A lease never gets shorter.

        Returns:
            False after its end: the workers are dead. A renewal that comes too late revives nothing.
        """
        with self._lock:
            return not self._closed and lib.ir_group_renew_lease(self._handle, int(since_s * 1e9)) == 0

    def tail(self, worker: int) -> bytes:
        """Return the last bytes that a piped worker wrote to stderr."""
        buffer = ffi.new("char[]", _TAIL)
        with self._lock:
            size = 0 if self._closed else lib.ir_group_tail(self._handle, worker, buffer, _TAIL)
        return bytes(ffi.buffer(buffer, max(0, size)))

    def status(self, worker: int) -> bytes:
        """Return the last STATUS= that a worker sent to its NOTIFY_SOCKET, unchanged."""
        buffer = ffi.new("char[512]")
        with self._lock:
            size = 0 if self._closed else lib.ir_group_status(self._handle, worker, buffer, 512)
        return bytes(ffi.buffer(buffer, max(0, size)))

    def activity(self, worker: int) -> tuple[int, int]:
        """Return the time of a worker's last sign (output through the launcher, a message), and of its last
        WATCHDOG=1; 0: never."""
        activity = ffi.new("struct ir_activity *")
        with self._lock:
            if not self._closed:
                lib.ir_group_activity(self._handle, worker, activity)
        return activity.active_ns, activity.ping_ns

    def volume(self, worker: int) -> tuple[int, int]:
        """Return how many bytes a worker wrote to stdout and to stderr, as far as they go through the launcher."""
        activity = ffi.new("struct ir_activity *")
        with self._lock:
            if not self._closed:
                lib.ir_group_activity(self._handle, worker, activity)
        return int(activity.bytes[0]), int(activity.bytes[1])

    def line(self, worker: int) -> bytes:
        """Return the last line of a worker's output through the launcher; of a long one the end."""
        buffer = ffi.new("char[512]")
        with self._lock:
            size = 0 if self._closed else lib.ir_group_line(self._handle, worker, buffer, 512)
        return bytes(ffi.buffer(buffer, max(0, size)))

    def spare(self, pid: int, spared: bool = True) -> None:
        """Spare a child that the caller started and ends itself: it is no leftover process."""
        with self._lock:
            if not self._closed and lib.ir_group_spare(self._handle, pid, spared) < 0:
                raise StartError("no memory is left", "sparing a helper", ENOMEM)

    def print_line(self, text: str) -> None:
        """Write a line of the launcher's own between the lines of the workers.

        It goes to the labeled stderr, or to message_fd. If nobody reads there, the core drops the line and counts it
        in `dropped_lines`; the next line that finds room says how many it dropped.
        """
        with self._lock:
            if self._closed:
                return
            before, lost = "", self.dropped_lines
            if lost:
                verb = "was" if lost == 1 else "were"
                before = f"... {counted(lost, 'line')} {verb} dropped here: the console was not read\n"
            line = os.encode_text(f"{before}{text}\n")
            self.dropped_lines = (
                0 if lib.ir_group_print(self._handle, 1, line, len(line)) == 0 else self.dropped_lines + 1
            )

    def close(self) -> None:
        """Kill and reap what is left, and free everything. Safe twice."""
        with self._lock:
            if self._closed:
                return
            if self._waiting:
                lib.ir_group_end(self._handle)
            self._closed = True
            self._free_if_last()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child: the workers are the parent's, and get no signal."""
        _release_in_child()  # the hook that does so may come after this one
        self._lock, self._waiting, self._closed, self.ended = RLock(), 0, True, True
        self._free_if_last()

    def _free_if_last(self) -> None:
        if self._closed and self._waiting == 0 and self._handle:
            lib.ir_group_end(self._handle)
            if not any(thread != get_ident() for thread in _forkers) or not self._free_later():
                self._free()

    def _free(self) -> None:
        with forking:  # a child must find all of it, or nothing; so must one of a signal's handler after the call
            lib.ir_group_free(self._handle_place)

    def _free_later(self) -> bool:
        """Have another thread wait for a fork: this one may have a lock that the fork takes, if a signal's handler
        closes (logging's, the import lock). Return False if there can be no thread."""
        from _thread import start_new_thread

        from infini_run.system.fork_hooks import call_in_forked_children

        call_in_forked_children(self)
        try:
            start_new_thread(self._free, ())
        except RuntimeError:
            return False
        return True


def _poll(own: int, also: Sequence[int], timeout_ms: int) -> int:
    import select

    poll = select.poll()
    for fd in (own, *also):
        poll.register(fd, select.POLLIN)
    return len(poll.poll(timeout_ms))
