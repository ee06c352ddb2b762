"""A worker: what runs in its process, from the first message to the last.

It starts with its channel as descriptor 0 (`main`), or as a fork of somebody who has it (`serve`). The user's code
runs in the main thread, one task after the other; nothing else runs. The worker reports and survives whatever a task
raises; SystemExit and a signal end it, as they end any program. The channel's end says how it went: with an END it
was in order, without one it died.
"""

from __future__ import annotations

import atexit
import io
import os
import sys

from infini_run.channel import connect
from infini_run.channel.errors import ChannelBroken
from infini_run.crews.capture import capture_exception, capture_foreign
from infini_run.crews.protocol import NO_TASK, TaskCancelled, TaskDone, TaskStarted, WorkerSetup, decode, dump, encode
from infini_run.crews.remote_exception import add_notes, from_exception
from infini_run.crews.worker import fault_stack
from infini_run.crews.worker.borrowed_multiprocessing import borrow_from_caller
from infini_run.crews.worker.context import Cancelled, Context, TaskInbox, set_current
from infini_run.crews.worker.crew_target import (
    Chunk,
    MethodCall,
    TaskHandler,
    _UnreadableCall,
    make_handler,
    nothing,
)
from infini_run.crews.worker.import_guard import load_task
from infini_run.system.process_title import set_title

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from infini_run.channel import Receiver, Sender
    from infini_run.crews.protocol import Body, Message, RunTask

_kept: list[Receiver] = []  # without END the channel ends when the process does, and not while it still unwinds
_HELD = 4096  # bytes of a result that may wait for the next task
_BAD = 1  # exit code of a worker that could not start or stop; it has said why


def main() -> None:
    """Run as the process of an ExecSpawner."""
    fd = os.dup(0)  # above 2: the core connects all three; dup(2) of Python's is not inherited
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    leave(serve(fd))


def leave(code: int) -> NoReturn:
    """End as a program ends (threads, atexit, unwritten output), but without taking every module apart. That takes
    longer with torch than most functions."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (AttributeError, ValueError):  # it is None, was deleted or closed: as multiprocessing does
            continue
    fault_stack.remove()
    os._exit(code)


def serve(fd: int, path_after: Callable[[Sequence[str]], list[str]] = list) -> int:
    """Serve as a worker over this socket. Return the exit code. path_after: makes sys.path of the caller's. Raises
    KeyboardInterrupt as the user's code does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an import may have put something else there
            stream.reconfigure(line_buffering=True)  # so that a crash takes no line with it
    borrow_from_caller(fd)
    sender, receiver = connect(fd)
    _kept.append(receiver)
    try:
        return WorkerLife(sender, receiver, path_after).run()
    except ChannelBroken:
        return _BAD  # the supervisor is gone, and nobody can receive a report
    except SystemExit as leaving:
        return _code_of(leaving)


def _code_of(leaving: SystemExit) -> int:
    """Return the exit code of a SystemExit as Python understands it."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    try:
        print(leaving.code, file=sys.stderr)
    except (AttributeError, ValueError):  # it was deleted or closed
        return 1
    return 1


class WorkerLife:
    """One life of a worker."""

    def __init__(
        self, sender: Sender, receiver: Receiver, path_after: Callable[[Sequence[str]], list[str]] = list
    ) -> None:
        self._sender = sender
        self._held: tuple[int, Body] | None = None  # a task with its result, which go with the start of the next one
        self._inbox = TaskInbox(receiver)
        setup = decode(receiver.recv_bytes())
        assert isinstance(setup, WorkerSetup)
        sys.path[:] = path_after(setup.path) if setup.path else sys.path
        sys.argv[:] = setup.argv or sys.argv
        set_title(f"infini-run worker: rank {setup.rank} of {setup.world_size}, {os.path.basename(sys.argv[0])}")
        if setup.watchdog_s:  # sd_watchdog_enabled(3); no WATCHDOG_PID: any process of the worker may say it
            os.environ["WATCHDOG_USEC"] = str(max(1, round(setup.watchdog_s * 1e6)))
        fault_stack.enable(setup.stack_signal)
        self._setup = setup
        self.context = Context(setup, self._inbox, sender)
        set_current(self.context)

    def run(self) -> int:
        """Start, do what comes, stop."""
        if self._setup.log_level >= 0:
            from infini_run.crews.worker.log_records import send_records

            send_records(self._sender, self._setup.log_level)
        part, error = capture_exception(_start, self._setup, self.context)
        if part is None:
            return self._give_up(error)
        self.context.ready()
        self._work(part)
        _, error = capture_exception(part.stop, self.context)
        if error is not None:
            return self._give_up(error)
        self._sender.close()
        return 0

    def _give_up(self, error: BaseException | None) -> int:
        assert error is not None
        self._send(from_exception(error, NO_TASK))
        return _BAD

    def _work(self, part: TaskHandler) -> None:
        while (task := self._inbox.next_task()) is not None:
            self._do(part, task)
            del task  # its bytes are not kept until the next one comes
            self._inbox.finish_task()
            if not self._setup.target:  # a function: that was the only one, and no end need be reported first
                return

    def _do(self, part: TaskHandler, task: RunTask) -> None:
        """Do one task, from TaskStarted to its end."""
        if task.task in self._inbox.cancelled:
            self._send(TaskCancelled(task=task.task))
        else:
            self._begin(task.task)
            capture = capture_foreign if part.is_executor else capture_exception
            body, error = capture(self._result, part, task)
            if body is not None:
                if self._inbox.has_tasks and len(body.parts) == 1 and memoryview(body.parts[0]).nbytes < _HELD:
                    self._held = task.task, body
                else:
                    self._send(TaskDone(task=task.task, body=body))
            elif isinstance(error, Cancelled) and not part.is_executor:  # there it answers a call, as any exception
                self._send(TaskCancelled(task=task.task))
            else:
                assert error is not None
                self._send(from_exception(error, task.task))

    def _result(self, part: TaskHandler, task: RunTask) -> Body:
        work = self._load(part, task)
        done: Any
        if isinstance(work, MethodCall):
            done = getattr(part.part, work.method)(*work.args, **work.kwargs)
        elif isinstance(work, Chunk):
            done = [part.task(self.context, item) for item in work.items]
        else:
            done = part.task(self.context, work)
        return dump(done, "result", f" of rank {self.context.rank}", by_reference=True)

    def _load(self, part: TaskHandler, task: RunTask) -> object:
        """Return the work of a task. A note separates an error of that from one of the user's function."""
        work, error = capture_exception(load_task, task.body)
        if error is not None and part.is_executor:
            text = f"a call cannot be unpickled on rank {self.context.rank}: {type(error).__name__}: {error}"
            raise _UnreadableCall(text) from error
        if error is not None:
            what = "the task" if self._setup.target else "the function and its arguments"
            capture_exception(add_notes, error, [f"{what} could not be unpickled on rank {self.context.rank}"])
            try:
                raise error
            finally:
                del error, task  # its traceback has this frame: a cycle, with the bytes of the task
        return work

    def _begin(self, task: int) -> None:
        """Report that this task begins, together with the end of the one before if that is held."""
        held, self._held = self._held, None
        if held is None:
            self._sender.send_bytes(encode(TaskStarted(task=task)))
        else:
            self._sender.send_bytes(encode(TaskDone(task=held[0], body=held[1], then=task)))

    def _send(self, message: Message) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._sender.send_bytes(encode(TaskDone(task=held[0], body=held[1])))
        self._sender.send_bytes(encode(message))


def _start(setup: WorkerSetup, context: Context) -> TaskHandler:
    part = _part(setup)
    part.start(context)
    return part


def _part(setup: WorkerSetup) -> TaskHandler:
    if not setup.target:
        return TaskHandler(_call, nothing, nothing)
    return make_handler(load_task(setup.target))


def _call(context: Context, call: Any) -> object:
    function, args, kwargs = call
    return function(*args, **kwargs)
