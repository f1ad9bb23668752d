"""The dashboard: pages of a run store over HTTP, kept until their files change."""

from __future__ import annotations

import hashlib
import secrets
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from http import HTTPStatus
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from torchrelay.jobs.runtime import Worker
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.tools.report.gather import gather
from torchrelay.tools.report.page import RunIndex, glance, index_page, policy, report_page, signature
from torchrelay.tools.report.run_data import ReadLimits, RunFacts
from torchrelay.tools.serving.serve import tell
from torchrelay.tools.serving.web import Access, HttpServer, access_at, bound_socket, done_by, url_of

_MOST_PAGES = 64
_PAUSE_SECS = 1.0
_SHARE = 8.0
"""A page is made anew no earlier than after so many times what it took: at most an eighth of a core."""


@dataclass(frozen=True)
class Page:
    """What a client gets: `tag` is another one whenever the content may be."""

    tag: str
    body: bytes


@dataclass
class _Kept:
    state: str
    page: Page
    not_before: float


class Rendered:
    """Pages by key, used by one thread. `render` gets a text to put where the page is to name its own tag."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def page(self, key: str, state: str, render: Callable[[str], str]) -> Page:
        """The page of a key at a state of its files, or a slightly older one where it was made just now."""
        kept = self._kept.get(key)
        began = self._clock()
        if kept is not None and (kept.state == state or began < kept.not_before):
            return kept.page
        page = _tagged(render)
        now = self._clock()
        self._kept[key] = _Kept(state, page, now + max(_PAUSE_SECS, _SHARE * (now - began)))
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_PAGES:
            self._kept.popitem(last=False)
        return page


def _tagged(render: Callable[[str], str]) -> Page:
    """A page that says its own tag, which is of its content: what looks the same has the same tag."""
    here = secrets.token_hex(16)  # nothing in a run can spell it
    text = render(here)
    tag = hashlib.sha256(text.replace(here, "").encode()).hexdigest()[:32]
    return Page(f'"{tag}"', text.replace(here, f"&quot;{tag}&quot;").encode())


class Pages:
    """The pages of a store, made when they are asked for."""

    def __init__(self, store: RunIndex, limits: ReadLimits, rendered: Rendered) -> None:
        self.store = store
        self.limits = limits
        self._rendered = rendered
        self._glances: dict[str, tuple[str, RunFacts]] = {}

    def index(self) -> Page:
        """The list of runs; runs whose files are as they were are not read again."""
        states = [(run, signature(run)) for run in self.store.runs()]
        state = repr([(run.name, seen) for run, seen in states])
        return self._rendered.page("", state, lambda tag: self._list(states, tag))

    def of_run(self, name: str) -> Page | None:
        """The page of a run; None where the listing has none of this name."""
        run = self.store.run(name)
        if run is None:
            return None
        return self._rendered.page(
            f"run {name}",
            signature(run),
            lambda tag: report_page([gather(run, self.limits)], live=tag, back="/"),
        )

    def _list(self, states: Sequence[tuple[RunDirectory, str]], tag: str) -> str:
        known = self._glances
        self._glances = {
            run.name: known[run.name] if known.get(run.name, ("",))[0] == seen else (seen, glance(run))
            for run, seen in states
        }
        return index_page(self.store.shown, [facts for _, facts in self._glances.values()], tag)


COOKIE = "torchrelay"
_HEADERS = {
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",  # pages that ask every few seconds hold no connection meanwhile
}


class Dashboard:
    """The application. Nothing of a request is used but its path, its query's token, and four headers."""

    def __init__(self, pages: Pages, access: Access) -> None:
        self._pages, self._access = pages, access
        self._worker = Worker("torchrelay dashboard")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; what goes wrong on this side is told on stderr."""
        try:
            answer = await self._answer(Request(scope))
        except Exception as error:
            tell("torchrelay dashboard: a request failed", "".join(traceback.format_exception(error)))
            answer = _line(500)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path, asked = request.scope["path"], request.query_params.get("token", "")
        refused = self._access.refusal(request.headers, asked, request.cookies.get(COOKIE, ""))
        if refused is not None:
            return _line(refused[0])
        if request.method not in ("GET", "HEAD"):
            return _line(405)
        if self._access.token is not None and asked:
            return _remembered(path, self._access.token)
        page = await done_by(self._worker, lambda: self._page(path))
        if page is None:
            return _line(404)
        headers = {**_HEADERS, "ETag": page.tag}
        if request.headers.get("if-none-match") == page.tag:
            return Response(None, 304, headers)
        return Response(page.body, headers=headers, media_type="text/html")

    def _page(self, path: str) -> Page | None:
        if path == "/":
            return self._pages.index()
        name = path.removeprefix("/run/")
        return self._pages.of_run(name) if name != path else None


def _line(status: int) -> Response:
    """A line of text: nothing that the client sent comes back in it."""
    headers = {**_HEADERS, "Allow": "GET, HEAD"} if status == 405 else _HEADERS
    return PlainTextResponse(f"{HTTPStatus(status).phrase}\n", status, headers)


def _remembered(path: str, token: str) -> Response:
    """Take the token out of the address and into a cookie, so that it stands in no history."""
    answer = Response(None, 303, {**_HEADERS, "Location": quote(path) if path.startswith("/run/") else "/"})
    answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
    return answer


class DashboardServer(HttpServer):
    """Serves a store at an address. Raises UsageError for an address that cannot be had."""

    def __init__(
        self,
        store: RunIndex,
        host: str,
        port: int,
        token: str | None,
        limits: ReadLimits,
        rendered: Rendered | None = None,
    ) -> None:
        access_at(host, port, token)
        self.socket = bound_socket(host, port)
        self.pages = Pages(store, limits, rendered or Rendered())
        access = access_at(host, self.socket.getsockname()[1], token)
        super().__init__(
            Dashboard(self.pages, access),
            log_level="critical",
            limit_concurrency=256,
            timeout_graceful_shutdown=0,  # whoever still reads a page does not hold the end up
        )

    @property
    def url(self) -> str:
        """Where the list of runs is."""
        return url_of(self.socket)
