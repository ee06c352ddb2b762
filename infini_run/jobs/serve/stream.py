"""Answers that go on: a job's lines as they are written, the list of jobs as it changes.

The one rule: who goes away, or a service that ends, ends the thread that waits for lines at once: it waits on a
descriptor of ours as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import anyio
from starlette.responses import StreamingResponse

from infini_run.errors import InfiniRunError, printable
from infini_run.jobs.logs import blocks
from infini_run.jobs.serve.http_errors import Busy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterator
    from typing import Any, TypeVar

    from starlette.types import Receive, Scope, Send

    from infini_run.jobs.job_dir import JobDir
    from infini_run.jobs.schedulers.scheduler import Scheduler
    from infini_run.jobs.serve.job_cache import JobCache
    from infini_run.jobs.status import Status

    T = TypeVar("T")

_CALLS = 8  # threads for what answers by itself
_FOLLOWERS = 32  # threads for who waits for lines, one each


class Threads:
    """What may block runs here, never in the loop."""

    def __init__(self) -> None:
        self._calls = ThreadPoolExecutor(_CALLS, "call")
        self._followers = ThreadPoolExecutor(_FOLLOWERS, "follow")
        self._stops: set[int] = set()
        self._is_over = False

    async def do(self, call: Callable[[], T]) -> T:
        """Its result. Once begun it goes on, whatever becomes of who asked: a job is submitted, or not."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, call)

    def stop(self) -> int:
        """A descriptor for one more follower, readable when it is to stop. Raises Busy."""
        if len(self._stops) >= _FOLLOWERS:
            raise Busy(f"{_FOLLOWERS} follow logs already; close one of them")
        fd = os.eventfd(1 if self._is_over else 0, os.EFD_CLOEXEC)
        self._stops.add(fd)
        return fd

    def release(self, fd: int) -> None:
        self._stops.discard(fd)
        os.close(fd)

    async def next_block(self, found: Iterator[bytes], stop: int) -> bytes | None:
        """None: that was all. Cancelled, it waits until the thread has stopped."""
        future = asyncio.get_running_loop().run_in_executor(self._followers, next, found, None)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            os.eventfd_write(stop, 1)
            with anyio.CancelScope(shield=True):
                await asyncio.wait([future])
            raise

    def end(self) -> None:
        """Nobody waits for lines any more."""
        self._is_over = True
        for fd in self._stops:
            os.eventfd_write(fd, 1)

    def close(self) -> None:
        """Waits for calls that have begun."""
        self._calls.shutdown()
        self._followers.shutdown()


class Stream(StreamingResponse):
    """It closes what it reads from on every path, at once. release: is called then."""

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
    """stop: of `threads`. What turns out wrong on the way is a last line of ours."""
    found = cast("Generator[bytes, None, None]", blocks(folder, scheduler, stop=stop, **chosen))
    try:
        while (block := await threads.next_block(found, stop)) is not None:
            yield block
    except InfiniRunError as error:
        yield f"infini-job: {printable(str(error))}\n".encode("utf-8", "surrogateescape")
    finally:
        await threads.do(found.close)


async def events(cache: JobCache) -> AsyncGenerator[bytes, None]:
    """Server-sent events `jobs`: those that have changed, by name; first, all of them."""
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
