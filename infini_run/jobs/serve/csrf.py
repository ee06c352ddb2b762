"""The requests that a browser may bring: only those of this service's page, through a tunnel of its user.

The one rule: another site's page must not speak for the user. A tunnel (ssh -L) ends at a port of the user's own
machine, which any page in the user's browser can reach. So Host must be that machine (DNS rebinding), and Origin and
Sec-Fetch-Site must be this service's. A change needs a header that no foreign page can send without a preflight
(fetch.spec.whatwg.org, CORS-preflight), which nobody here answers.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders

from infini_run.errors import printable
from infini_run.jobs.serve.http_errors import problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Infini-Job"
_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_READS = ("GET", "HEAD")
_POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def refusal(method: str, headers: Headers) -> tuple[int, str]:
    """Return the status and why; 0 and "" for a request that may pass. Pure."""
    host = headers.get("host", "")
    if not _HOST.fullmatch(host):
        return 421, f"Host: {printable(host)} is not this service; use http://localhost/"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return 403, f"Origin: {printable(origin)} is another site; use the page of this service"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "another page sent this request; open this page by its own address"
    if method not in _READS and HEADER not in headers:
        return 403, f"a request that changes something needs the header {HEADER}: 1"
    return 0, ""


class SameOrigin:
    """Around the whole service."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_POLICY)
            await send(message)

        status, why = refusal(scope["method"], Headers(scope=scope))
        app = problem(status, why) if status else self._app
        await app(scope, receive, send_with_policy)
