"""The dashboard: which runs a directory or URL has, and their pages over HTTP, kept until files change."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from torchrelay.checkpoint.load.open import best_in
from torchrelay.checkpoint.log.record import has_job
from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.jobs.runtime import Worker
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.remote_runs.local_copies import Wanted, mirror_of
from torchrelay.runners.remote_runs.names import for_a_glance, for_a_look
from torchrelay.tools.report.charts import count, spark
from torchrelay.tools.report.gather import gather, points_of
from torchrelay.tools.report.page import policy, report_page, whole_page
from torchrelay.tools.report.run_data import ReadLimits, RunFacts, Troubles, course_of, moment_of
from torchrelay.tools.serving.serve import tell
from torchrelay.tools.serving.web import HttpServer, access_at, bound_socket, done_by, url_of

MOST_RUNS = 1000
_LOOK_SECS = 10
_FILES = ("run.json", "status.json", "metadata.jsonl", "config/resolved.yaml", "lineage")
_OF_CHECKPOINTS = ("log", "log/HINT", "data")


class RunIndex:
    """Directories of runs below a root, or the root itself if it is a run; links are not followed."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            what = "a file" if root.exists() else "not there"
            raise UsageError(f"{root} is {what}: give the directory in which runs lie")
        self.root = root.absolute()
        self.shown = str(self.root)
        self._single = is_run(self.root)

    def names(self) -> list[str]:
        """The runs that are there now, sorted; at most a thousand."""
        if self._single:
            return [self.root.name]
        try:
            with os.scandir(self.root) as found:
                names = (one.name for one in found if one.is_dir(follow_symlinks=False))
                return sorted(name for name in names if is_run(self.root / name))[:MOST_RUNS]
        except OSError:
            return []  # the directory is away now; the page says that there is no run

    def runs(self) -> list[RunDirectory]:
        """The same, as run directories."""
        return [RunDirectory(self.root if self._single else self.root / name) for name in self.names()]

    def run(self, name: str) -> RunDirectory | None:
        """The run of a name that the listing has; None for any other text."""
        return next((run for run in self.runs() if run.name == name), None)


def is_run(path: Path) -> bool:
    """Whether a directory is one of a run. One whose notes are links is none: they may lead to any file."""
    begun = (path / "run.json").is_file() or has_job(path / "checkpoints")
    return begun and not any(one.is_symlink() for one in _notes(RunDirectory(path)))


def signature(run: RunDirectory) -> str:
    """Another text when a file that a page is made of was changed; the same costs some calls of stat."""
    seen = hashlib.sha256()
    with suppress(RelayError, OSError):
        if run.status().get("state") == "RUNNING":  # its process may be gone, and no file would say so
            seen.update(str(time.time() // _LOOK_SECS).encode())
    for path in (*_notes(run), *(run.path / "checkpoints" / name for name in _OF_CHECKPOINTS)):
        try:
            status = path.stat(follow_symlinks=False)
            seen.update(f"{path.name} {status.st_mtime_ns} {status.st_size} {status.st_ino}\n".encode())
        except OSError as error:
            seen.update(f"{path.name} {error.errno}\n".encode(errors="replace"))
    return seen.hexdigest()[:32]


def _notes(run: RunDirectory) -> Iterator[Path]:
    for name in _FILES:
        yield run.path / name
    yield from sorted(run.path.glob("captured.*.json"))
    for kind in ("metrics", "steps", "events"):
        for _, path in run.generations(kind):
            yield path


NOT_OLDER_SECS = 5.0
"""Pages ask again every few seconds, in many browsers; the store is asked once meanwhile."""


class RemoteRuns(RunIndex):
    """What RunIndex is of a directory. A store that does not answer shows what was seen last.

    Raises UsageError for a URL that is none, StorageError for a store that does not answer at the start.
    """

    def __init__(self, url: str) -> None:
        self._mirror = mirror_of(url)
        self.root = self._mirror.root
        self.shown = self._mirror.url
        self._single = self._mirror.is_run()
        self._names: list[str] = []
        self._looked = float("-inf")
        if not self._single and not self.names():
            raise UsageError(f"no run lies at {url}, or below it: give the URL of a run, or of several")

    def names(self) -> list[str]:
        """The runs that are there now, sorted; at most a thousand."""
        if not self._single and time.monotonic() - self._looked > NOT_OLDER_SECS:
            try:
                self._names = self._mirror.names()[:MOST_RUNS]
            except StorageError:
                if not self._names:
                    raise
            self._looked = time.monotonic()
        return [self._mirror.root.name] if self._single else self._names

    def runs(self) -> list[RunDirectory]:
        """The same, with what a list shows of them."""
        if self._single:
            return [self._run("", for_a_look)]
        return [self._run(name, for_a_glance) for name in self.names()]

    def run(self, name: str) -> RunDirectory | None:
        """The run of a name that the listing has, with what its page shows; None for any other text."""
        if name not in self.names():
            return None
        return self._run("" if self._single else name, for_a_look)

    def _run(self, name: str, wanted: Wanted) -> RunDirectory:
        try:
            return self._mirror.run(name, wanted, NOT_OLDER_SECS)
        except StorageError:
            return RunDirectory(Path(self._mirror.root, name), f"{self.shown}/{name}".rstrip("/"))


def glance(run: RunDirectory) -> RunFacts:
    """As much of a run as a line of the list shows: identity, status and metrics, not its checkpoints."""
    troubles = Troubles()
    identity = troubles.tried(run.identity, None) or {}
    status: dict[str, Any] = troubles.tried(run.status, {})
    epoch, state, job = status.get("epoch"), status.get("state"), identity.get("job")
    return RunFacts(
        name=run.name,
        path=str(run.where),
        job=job if isinstance(job, str) else None,
        state=state if isinstance(state, str) else None,
        epoch=epoch if type(epoch) is int else None,
        stands=standing(run.path),
        updated=moment_of({"time": status.get("updated")}),
        best=best_in(identity.get("best")),
        identity=identity,
        course=course_of(points_of(run, troubles), {}),
        trouble=tuple(troubles.said),
    )


def index_page(root: str, runs: Sequence[RunFacts], tag: str) -> str:
    """The list as a page, what wrote last on top."""
    ordered = sorted(runs, key=lambda run: (-(run.updated or 0.0), run.name))
    going = sum(run.stands.word == "running" for run in runs)
    title = f"{count(len(runs), 'run')}, {going} running" if going else count(len(runs), "run")
    rows = []
    for run in ordered:
        # The course of its own metric, without numbers: the cell beside it has the one that counts.
        name = run.best[0] if run.best is not None else ""
        values = [(one.epoch, one.metrics[name]) for one in run.course.points if name in one.metrics]
        finite = [(epoch, value) for epoch, value in values if math.isfinite(value)]
        course = spark(f"{name} over {count(len(finite), 'epoch')}", finite) if len(finite) > 1 else None
        rows.append((run, quote(run.name, safe=""), course, run.job if run.job != run.name else ""))
    return whole_page("runs.html", title, live=tag, root=root, rows=rows)


_MOST_PAGES = 64
_MOST_COMPARED = 8
"""Runs on one page: as many as there are colours."""
_PAUSE_SECS = 1.0
_SHARE = 8.0
"""A page is made again only after so many times the seconds it took: at most an eighth of a core."""


@dataclass(frozen=True)
class Page:
    """What a client gets; equal content has an equal `tag`."""

    tag: str
    body: bytes


class Rendered:
    """Pages by key, used by one thread. `render` gets a text to put where the page is to name its own tag."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[str, Page, float]] = OrderedDict()

    def page(self, key: str, state: str, render: Callable[[str], str]) -> Page:
        """The page of a key at a state of its files, or a slightly older one where it was made just now."""
        began = self._clock()
        if key in self._kept:
            seen, page, not_before = self._kept[key]
            if seen == state or began < not_before:
                return page
        here = secrets.token_hex(16)  # nothing in a run can spell it
        text = render(here)
        tag = hashlib.sha256(text.replace(here, "").encode()).hexdigest()[:32]
        page = Page(f'"{tag}"', text.replace(here, f"&quot;{tag}&quot;").encode())
        now = self._clock()
        self._kept[key] = state, page, now + max(_PAUSE_SECS, _SHARE * (now - began))
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_PAGES:
            self._kept.popitem(last=False)
        return page


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

    def of_runs(self, names: Sequence[str]) -> Page | None:
        """The page of a run, or one that compares several; None where the listing lacks one of them."""
        runs = [run for name in names if (run := self.store.run(name)) is not None]
        if len(runs) != len(names):
            return None
        return self._rendered.page(
            "/".join(names),
            " ".join(map(signature, runs)),
            lambda tag: report_page([gather(run, self.limits) for run in runs], live=tag, back="/"),
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


def _line(status: int) -> Response:
    """A line of text: nothing that the client sent comes back in it."""
    headers = {**_HEADERS, "Allow": "GET, HEAD"} if status == 405 else _HEADERS
    return PlainTextResponse(f"{HTTPStatus(status).phrase}\n", status, headers)


class DashboardServer(HttpServer):
    """Serves a store at an address. Raises UsageError for an address that cannot be had.

    Nothing of a request is used but its path, its query's token, and four headers.
    """

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
        self._access = access_at(host, self.socket.getsockname()[1], token)
        self._worker = Worker("torchrelay dashboard")
        super().__init__(
            self._application,
            log_level="critical",
            limit_concurrency=256,
            timeout_graceful_shutdown=0,  # whoever still reads a page does not hold the end up
        )

    @property
    def url(self) -> str:
        """Where the list of runs is."""
        return url_of(self.socket)

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; errors of the server are printed on stderr."""
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
            # Out of the address and into a cookie, so that it stands in no history.
            where = quote(path) if path.startswith(("/run/", "/compare/")) else "/"
            answer = Response(None, 303, {**_HEADERS, "Location": where})
            answer.set_cookie(COOKIE, self._access.token, httponly=True, samesite="strict")
            return answer
        page = await done_by(self._worker, lambda: self._page(path))
        if page is None:
            return _line(404)
        headers = {**_HEADERS, "ETag": page.tag}
        if request.headers.get("if-none-match") == page.tag:
            return Response(None, 304, headers)
        return Response(page.body, headers=headers, media_type="text/html")

    def _page(self, path: str) -> Page | None:
        if path == "/":
            return self.pages.index()
        kind, *names = path.removeprefix("/").split("/")
        if kind == "compare":
            names = list(dict.fromkeys(names))
            return self.pages.of_runs(names) if 2 <= len(names) <= _MOST_COMPARED else None
        return self.pages.of_runs(names) if kind == "run" and len(names) == 1 else None
