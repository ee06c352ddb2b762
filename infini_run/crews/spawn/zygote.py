"""A zygote: a process that has imported what workers need, and becomes workers, by fork, on request.

It forks from its main thread, where it is the only one, and where nothing has touched a device. A fork has neither
the other threads nor a device's context. Else it refuses, and gives the reason. It talks with its launcher over
descriptor 0. A launch comes with a separate socket, for its events, whose end means that nobody wants the launch any
more. When the launcher is gone, all of it goes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from errno import EMFILE

from infini_run.crews.spawn.fork_launch import ChildSetup, ForkLaunch, InForkedChild, UnsafeFork
from infini_run.crews.spawn.preloading import FunctionPreload, find_refusal, refuse_threads
from infini_run.crews.spawn.process_watch import ProcessWatch
from infini_run.crews.spawn.spawner import PING_INTERVAL_S
from infini_run.crews.spawn.start_errors import start_error
from infini_run.crews.spawn.zygote_protocol import MessageSocket, receive_link, receive_with_fds, send_with_fds
from infini_run.errors import InfiniRunError
from infini_run.node.last_output import last_output
from infini_run.system.poller import READ, WRITE, Poller
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.core.c_structs import Event
    from infini_run.warm.imports import Preload

_MADV_COLLAPSE, _HUGE = 25, 1 << 21


def main() -> None:
    """Run as the process of a ForkSpawner."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    zygote = Zygote(control)
    try:
        zygote.run()
    except InForkedChild as forked:
        child_setup = forked.child_setup
    else:
        return
    zygote.after_fork_in_child()
    fd = become(child_setup, zygote.mark, zygote.preload)
    from infini_run.crews.worker.worker_main import leave, serve

    leave(serve(fd, zygote.preload.path_after))


_NO_MARK = f"preload: {MARKER_VARIABLE} is missing in a new Python; make the wrapper around it pass on all variables"


class Zygote:
    """The launcher's requests in, workers out. mark: the place in memory of the mark that identifies processes.

    It always has room for one descriptor more, so that it can answer a launch for which there is no room.
    """

    def __init__(self, control: socket.socket) -> None:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        self.mark: int = libc.getenv(MARKER_VARIABLE.encode()) or 0
        self.preload = FunctionPreload(())
        self._control = control
        self._poller = Poller()
        self._runs: list[_Run] = []
        self._has_ended = False
        self._reserve_fd = -1

    def run(self) -> None:
        """Serve until the launcher is gone. Raises InForkedChild in a worker."""
        hello: Any = receive_with_fds(self._control)
        if hello is None:
            return
        (names, variables, path, argv, stays), _ = hello
        import cloudpickle  # noqa: F401  here and below: before sys.path is the user's

        from infini_run.crews.worker import log_records, worker_main  # noqa: F401

        sys.path[:] = path or sys.path
        sys.argv[:] = argv
        self.preload = FunctionPreload(variables)
        problem = self.preload.run(names) if self.mark else _NO_MARK
        _freeze_memory(with_huge_pages=stays)
        send_with_fds(self._control, (problem, self.preload.is_refused or not self.mark))
        self._reserve()
        self._poller.watch(self._control.fileno(), READ, self._on_request)
        while not self._has_ended:
            for run in list(self._runs):
                run.watch()
            dues = [due_s for run in self._runs if (due_s := run.next_deadline_s()) is not None]
            self._poller.poll(max(0.0, min(dues) - time.monotonic()) if dues else None)
            for run in list(self._runs):
                run.check_due()
        for run in list(self._runs):
            run.close()

    def _reserve(self) -> None:
        self._reserve_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _on_request(self) -> None:
        os.close(self._reserve_fd)
        link = receive_link(self._control)
        if link is None:
            self._has_ended = True
            return
        request: Any = receive_with_fds(link)
        if request is None:  # an interrupt ended its launch
            link.close()
            self._reserve()
            return
        (plan, options, environ, cwd), fds = request
        connection = MessageSocket(link)
        try:
            if len(fds) != 2 + len(plan.workers):
                raise OSError(EMFILE, os.strerror(EMFILE))
            self._reserve()
        except OSError as error:
            for fd in fds:
                os.close(fd)
            connection.send(("failed", start_error(error)))
            connection.close()
            self._reserve()
            return
        stdins = {worker.rank: fd for worker, fd in zip(plan.workers, fds[2:], strict=True)}
        fork_run = ForkLaunch(
            plan,
            options,
            environ=environ,
            cwd=cwd,
            stdins=stdins,
            stdout=fds[0],
            stderr=fds[1],
            find_refusal=refuse_threads,
        )
        _Run(self._poller, self._runs, connection, fork_run).start()

    def after_fork_in_child(self) -> None:
        """Forget everything in a worker: none of it is the worker's."""
        os.close(self._reserve_fd)
        for run in list(self._runs):
            run.after_fork_in_child()
        self._poller.close()
        self._control.close()


class _Run:
    """One launch: its workers, and the connection to whoever asked for it. An error of the system, such as EMFILE,
    ends this launch and no other."""

    def __init__(self, poller: Poller, runs: list[_Run], connection: MessageSocket, run: ForkLaunch) -> None:
        self._poller = poller
        self._runs = runs
        self._connection = connection
        self._run = run
        self._watch = ProcessWatch(self, poller)
        self._pings: dict[int, float] = {}  # by rank, the last WATCHDOG=1 that was passed on
        self._snapshots = 0  # this many were passed on

    def start(self) -> None:
        self._runs.append(self)
        self._try(self._start)

    def _start(self) -> None:
        try:
            if refusal := find_refusal():
                raise UnsafeFork(refusal)
            self._run.start()
            self._connection.send(("started", None))
        except UnsafeFork as error:
            self._connection.send(("refused", str(error)))
        if self._run.ended:
            self.close()
            return
        self._poller.watch(self._connection.fileno(), READ, self._read_messages)
        self._poll()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except InfiniRunError as error:
            self._fail(error)
        except OSError as error:
            self._fail(start_error(error))

    def _fail(self, error: InfiniRunError) -> None:
        self._connection.send(("failed", error))
        self.close()

    def poll(self) -> None:
        """Pass on what happened to the workers."""
        self._try(self._poll)

    def _poll(self) -> None:
        events = self._run.poll(0.0)
        self._pass_on_pings()
        if any(event.kind in ("hung", "late") for event in events):
            self._pass_on_snapshots()
        if events:
            self._connection.send(("events", (events, self._words(events))))
        if self._run.ended:
            self.close()
            return
        self._await_room()

    def fds(self) -> list[int]:
        """Return the descriptors: `poll` has something to do when one of them is readable."""
        return self._run.fds()

    def watch(self) -> None:
        """Tell the poller what to wait for."""
        self._try(self._watch.update)

    def next_deadline_s(self) -> float | None:
        """Return when the watchdog has something to do (monotonic); None: never."""
        return self._run.next_deadline_s()

    def check_due(self) -> None:
        """Check the watchdog, if it is due."""
        due_s = self._run.next_deadline_s()
        if due_s is not None and time.monotonic() >= due_s:
            self.poll()

    def _pass_on_pings(self) -> None:
        pings = {worker.rank: self._run.last_watchdog_ping_s(worker.rank) for worker in self._run.plan.workers}
        new = {rank: at for rank, at in pings.items() if at - self._pings.get(rank, 0.0) >= PING_INTERVAL_S}
        if new:
            self._pings |= new
            self._connection.send(("pinged", new))

    def _pass_on_snapshots(self) -> None:
        """Pass on what hung ranks were doing, and those that stop because of a hang."""
        report = self._run.report()
        new, self._snapshots = report.snapshots[self._snapshots :], len(report.snapshots)
        self._connection.send(("snapshots", (new, [e.rank for e in report.exits if e.watchdog_reason])))

    def _words(self, events: Sequence[Event]) -> dict[int, tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Return the last output of those that ended badly."""
        workers, group = self._run.plan.workers, self._run.group
        ended = [e.worker for e in events if e.kind == "exited" and not e.is_routine]
        return {workers[index].rank: last_output(group, index, workers[index]) for index in ended}

    def _read_messages(self) -> None:
        messages: Any = self._connection.receive()
        for kind, value in messages:
            getattr(self._run, kind)(*value)
        self._connection.flush()
        if self._connection.has_ended:
            self.close()
        else:
            self.poll()

    def _await_room(self) -> None:
        self._poller.watch(
            self._connection.fileno(), READ | WRITE if self._connection.is_full else READ, self._read_messages
        )

    def close(self) -> None:
        """Kill what is left; the end of the connection says that nothing is."""
        self._watch.close()
        self._poller.unwatch(self._connection.fileno())
        self._runs.remove(self)
        self._run.close()
        self._connection.close()

    def after_fork_in_child(self) -> None:
        """Close the copies in a worker. It shares what the epoll set watches with the true one, and so only closes
        it."""
        self._run.after_fork_in_child()
        self._watch.after_fork_in_child()
        self._connection.close()


def _freeze_memory(*, with_huge_pages: bool) -> None:
    """Keep pages that nobody writes to in common with the workers."""
    import gc

    gc.collect()
    gc.freeze()
    if with_huge_pages:
        _use_huge_pages()


def _use_huge_pages() -> None:
    """Use huge pages. A fork copies an entry per page, and torch's imports fill 35000 of them: in huge pages it takes
    a tenth of the time. MADV_COLLAPSE (Linux 6.1) makes them of existing pages, in a while that is only worth it for
    many forks. What the kernel refuses stays as it is."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    for addresses, mode, _, _, _, *names in lines:
        if mode == "rw-p" and names in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start = -(-start // _HUGE) * _HUGE
            size = end // _HUGE * _HUGE - start
            if size > 0:
                libc.madvise(start, size, _MADV_COLLAPSE)


def become(child_setup: ChildSetup, mark: int, preload: Preload) -> int:
    """Become a process like one that starts for this, in the child. Return the channel's descriptor."""
    ctypes.memmove(mark, child_setup.mark.encode(), len(child_setup.mark))  # /proc/PID/environ, of later forks, too
    os.dup2(child_setup.stdout, 1)
    os.dup2(child_setup.stderr, 2)
    os.close(child_setup.stdout)
    os.close(child_setup.stderr)
    preload.set_environ(child_setup.env)
    if child_setup.cwd:
        os.chdir(child_setup.cwd)
    preload.make_own()
    go = os.read(child_setup.gate, 1)
    os.close(child_setup.gate)
    if not go:
        os._exit(1)  # the launch was given up
    return child_setup.channel
