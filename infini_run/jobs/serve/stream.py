"""Answers without a known end: a job's lines as they appear, the list of jobs as it changes.

The one rule: a client that leaves, or a service that ends, ends the thread that waits for lines at once. The thread
also waits on a descriptor of the service. A thread that the kernel holds (a file server that is gone) stays behind.
It is a daemon, which no interpreter waits for at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from typing import cast

import anyio
from starlette.responses import StreamingResponse

from infini_run.crews.capture import capture_exception
from infini_run.errors import InfiniRunError, printable
from infini_run.jobs.serve.http_errors import Busy
from infini_run.jobs.status.logs import blocks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterator
    from typing import Any, TypeVar

    from starlette.types import Receive, Scope, Send

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.scheduler import Scheduler
    from infini_run.jobs.serve.job_cache import JobCache
    from infini_run.jobs.status.job_status import Status

    T = TypeVar("T")

_CALLS = 8  # threads for quick answers
_FOLLOWERS = 32  # threads for who waits for lines, one each
_LOOK_S = 5.0  # for threads that look, when the service ends
_CHANGE_S = 600.0  # those that submit, cancel, or forget: a scheduler's commands have their own limits
_SILENCE_S = 1.0  # before the stream names what it waits for


class Threads:
    """What may block runs here, never in the loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_CALLS)
        self._looking: set[threading.Thread] = set()
        self._changing: set[threading.Thread] = set()
        self._stops: set[int] = set()
        self._held: set[int] = set()  # of threads that were left behind
        self._is_over = False

    async def do(self, call: Callable[[], T], *, changes: bool = False) -> T:
        """Return its result. Once begun it continues, whatever becomes of the client: a job is submitted, or not.

        changes: it changes jobs, so the service waits for it at its end."""
        await self._free.acquire()
        future = self._run(call, self._changing if changes else self._looking)
        future.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(future)

    def _run(self, call: Callable[[], T], among: set[threading.Thread]) -> asyncio.Future[T]:
        """Run it in a separate thread. Nobody may cancel the future."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            answer, error = capture_exception(call)
            with contextlib.suppress(RuntimeError):  # the loop ended first
                loop.call_soon_threadsafe(_resolve, future, answer, error)
            among.discard(threading.current_thread())

        thread = threading.Thread(target=work, daemon=True)
        among.add(thread)
        try:
            thread.start()
        except RuntimeError:  # ulimit -u
            among.discard(thread)
            future.set_exception(Busy("cannot start a thread for this request; retry later"))
        return future

    def stop(self) -> int:
        """Return a descriptor for one more follower, readable when it has to stop. Raises Busy."""
        if len(self._stops) >= _FOLLOWERS:
            raise Busy(f"{_FOLLOWERS} requests already follow logs; close one of them")
        fd = os.eventfd(1 if self._is_over else 0, os.EFD_CLOEXEC)
        self._stops.add(fd)
        return fd

    def release(self, fd: int) -> None:
        self._stops.discard(fd)
        if fd not in self._held:  # else a thread may still look at it
            os.close(fd)

    def is_held(self, stop: int) -> bool:
        """Return whether the thread that waits for lines there stayed behind."""
        return stop in self._held

    async def next_block(self, found: Iterator[bytes], stop: int) -> bytes | None:
        """Return the next lines, or None after the last. After a cancellation, it waits until the thread has stopped,
        for `_LOOK_S` at most."""
        future = self._run(lambda: next(found, None), self._looking)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            os.eventfd_write(stop, 1)
            with anyio.CancelScope(shield=True):
                _, held = await asyncio.wait([future], timeout=_LOOK_S)
            if held:
                self._held.add(stop)
            raise

    def end(self) -> None:
        """Let nobody wait for lines any more."""
        self._is_over = True
        for fd in self._stops:
            os.eventfd_write(fd, 1)

    def close(self, print_line: Callable[[str], None]) -> None:
        """Wait for calls that have begun: those that look for `_LOOK_S`, those that change jobs for `_CHANGE_S`."""
        _join(self._looking, _LOOK_S)
        _join(self._changing, _SILENCE_S)
        if left := len(self._changing):
            what = "1 request that changes jobs" if left == 1 else f"{left} requests that change jobs"
            print_line(f"waiting up to {_CHANGE_S:.0f} s for {what}; SIGTERM again stops now")
            _join(self._changing, _CHANGE_S)


def _resolve(future: asyncio.Future[Any], answer: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


def _join(threads: set[threading.Thread], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    for thread in tuple(threads):
        thread.join(max(0.0, end_s - time.monotonic()))


class Stream(StreamingResponse):
    """A response that closes its source on every path, at once, and then calls `release`."""

    def __init__(
        self, content: AsyncGenerator[bytes, None], media_type: str, release: Callable[[], None] | None = None
    ) -> None:
        super().__init__(content, media_type=media_type)
        self._content = content
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # from 2.4 on the framework would notice who is gone only by the next line
        scope = {**scope, "asgi": {**scope["asgi"], "spec_version": "2.3"}}
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._content.aclose()
            if self._release is not None:
                self._release()


async def lines(
    threads: Threads, folder: JobDir, scheduler: Scheduler | None, stop: int, **chosen: Any
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a job. stop: of `threads`. An error on the way is a last line."""
    found = cast("Generator[bytes, None, None]", blocks(folder, scheduler, stop=stop, **chosen))
    try:
        while (block := await threads.next_block(found, stop)) is not None:
            yield block
    except InfiniRunError as error:
        yield f"infini-job: {printable(str(error))}\n".encode("utf-8", "surrogateescape")
    finally:
        if not threads.is_held(stop):
            await threads.do(found.close)


async def events(cache: JobCache) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events `jobs`: those that changed, by name; first, all of them."""
    sent: dict[str, Status] = {}
    sent_problem = ""
    is_first = True
    async with contextlib.aclosing(cache.changes()) as found:  # type: ignore[type-var]
        async for jobs, problem in found:
            changed = [status.to_json() for name, status in jobs.items() if sent.get(name) != status]
            gone = [name for name in sent if name not in jobs]
            if changed or gone or problem != sent_problem or is_first:
                content = json.dumps({"jobs": changed, "gone": gone, "problem": problem})
                yield f"event: jobs\ndata: {content}\n\n".encode("ascii")
            sent, sent_problem, is_first = jobs, problem, False
