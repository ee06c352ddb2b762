"""The service's life: the socket, the framework's server, its end by TERM or INT. Jobs do not notice.

The one rule: it leaves nothing behind. It finishes calls that have begun, ends streams, and removes the socket. It
does not wait for what a dead file server holds (decision 61).
"""

from __future__ import annotations

import asyncio
import os
import signal

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from infini_run.errors import UsageError
from infini_run.jobs.lines import print_answer, print_line
from infini_run.jobs.serve.api import make_app
from infini_run.jobs.serve.csrf import SameOrigin
from infini_run.jobs.serve.job_cache import JobCache
from infini_run.jobs.serve.stream import Threads
from infini_run.jobs.serve.unix_listener import UnixListener, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

_GRACE_S = 5  # for clients that do not read what was sent to them
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Guarded(H11Protocol):
    """HTTP for this user only: nothing reads from another user's connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        why = refusal(transport.get_extra_info("socket"))
        if why:
            print_line(why)
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)


class Server(uvicorn.Server):
    """A server that sleeps until a request to end, where the framework's looks ten times a second."""

    def __init__(self, config: uvicorn.Config, threads: Threads, cache: JobCache, mask: Iterable[int]) -> None:
        super().__init__(config)
        self._mask = mask
        self._threads = threads
        self._cache = cache
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)  # the framework's handlers are there
        await self.on_tick(0)
        self._loop = asyncio.get_running_loop()
        if not self.should_exit:
            print_answer(f"infini-job: serving at {self.config.uds}")
            await self._stop.wait()
        self._threads.end()
        self._cache.end()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def shutdown(self, sockets: object = None) -> None:
        await super().shutdown(None)
        await self._cache.close()


def serve(path: str, above: str, environ: Mapping[str, str]) -> int:
    """Serve the jobs in `above` at the socket `path` until TERM or INT. Return the exit code. Raises UsageError."""
    try:
        os.makedirs(above, mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--dir={above}: {error.strerror}; use a directory that you can write") from None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)  # until it can end well: the socket would stay
    try:
        listener = UnixListener(path)
        threads = Threads()
        try:
            asyncio.run(_serve(listener, threads, above, environ, before))
        finally:
            listener.close()
            threads.close(print_line)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


async def _serve(
    listener: UnixListener, threads: Threads, above: str, environ: Mapping[str, str], mask: Iterable[int]
) -> None:
    cache = JobCache(above, environ, threads.do)
    app = SameOrigin(make_app(above, environ, threads, cache))
    config = uvicorn.Config(
        app, uds=listener.path, http=Guarded, loop="asyncio", ws="none", lifespan="off", log_config=None,
        access_log=False, date_header=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
    )  # fmt: skip
    await Server(config, threads, cache, mask).serve([listener.socket])
