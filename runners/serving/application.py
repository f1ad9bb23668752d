"""The application: paths, who may ask them, and errors in the words of HTTP."""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchrelay.runners.programs.serve_options import Limits
from torchrelay.runners.serving.access import Doorkeeper
from torchrelay.runners.serving.computing import Computing
from torchrelay.runners.serving.meters import CONTENT_TYPE, Meters
from torchrelay.runners.serving.openapi import description
from torchrelay.runners.serving.page import HEADERS, page
from torchrelay.runners.serving.predicting import Predicting
from torchrelay.runners.serving.reading import GoneError
from torchrelay.runners.serving.refusal import FaultyAnswerError, RefusedError, unavailable
from torchrelay.runners.serving.served import Holder
from torchrelay.runners.serving.telling import tell

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Endpoint = Callable[[Request], Awaitable[Response]]
_UNREAD = (401, 404, 405, 406, 413, 415, 421, 429, 503)
"""Statuses before which the body may not have been read: what follows would be taken for it."""
_SAFE = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


class Application:
    """What uvicorn calls for each request. All state is that of its parts."""

    def __init__(
        self,
        holder: Holder,
        predicting: Predicting,
        computing: Computing,
        meters: Meters,
        door: Doorkeeper,
        limits: Limits,
    ) -> None:
        self._holder, self._predicting, self._computing = holder, predicting, computing
        self._meters, self._door, self._limits = meters, door, limits
        self._running = 0
        self._endpoints: dict[str, Endpoint] = {
            "/predict": self._predict,
            "/health": self._health,
            "/ready": self._ready,
            "/metadata": self._metadata,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/": self._page,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; every way out of it is an answer, but where the client is gone."""
        if scope["type"] != "http":
            return
        began, codes = time.perf_counter(), [0]
        path = scope["path"] if scope["path"] in self._endpoints else "other"

        request = Request(scope, receive)

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                codes.append(message["status"])
                if _leaves_bytes(request):
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        self._running += 1
        self._meters.running.set(self._running)
        try:
            response = await self._response(request)
            if response is not None:
                await response(scope, receive, counted)
        finally:
            self._running -= 1
            self._meters.running.set(self._running)
            self._meters.answered(path, codes[-1], time.perf_counter() - began)

    async def _response(self, request: Request) -> Response | None:
        """The answer or the refusal; None where the client is gone."""
        try:
            return await self._endpoint(request)(request)
        except GoneError:
            return None
        except RefusedError as error:
            return _refusal(error)
        except Exception as error:
            self._meters.faults.inc()
            self._say_fault(error)
            text = str(error)[:300] if isinstance(error, FaultyAnswerError) else "the server failed"
            return _refusal(RefusedError(500, text))

    def _endpoint(self, request: Request) -> Endpoint:
        """Who answers; raises RefusedError for who is not let in, and for what there is not."""
        refused = self._door.refusal(request.scope["path"], request.headers)
        if refused is not None:
            raise refused
        if self._running > self._limits.requests:
            raise unavailable("too many requests at once")
        endpoint = self._endpoints.get(request.scope["path"])
        if endpoint is None:
            raise RefusedError(404, "there is no such path: GET / tells what there is")
        if request.method not in _methods(request.scope["path"]):
            raise RefusedError(405, f"ask by {_methods(request.scope['path'])[0]}")
        return endpoint

    def _say_fault(self, error: Exception) -> None:
        tell("torchrelay serve: a request failed on this side", "".join(traceback.format_exception(error)))

    async def _predict(self, request: Request) -> Response:
        body, kind, served = await self._predicting.answer(request.headers, request.receive)
        epoch = {} if served.epoch is None else {"X-Torchrelay-Epoch": str(served.epoch)}
        return Response(body, media_type=kind, headers={**_SAFE, **epoch})

    async def _health(self, request: Request) -> Response:
        """Whether this process had better be started again."""
        stuck = self._computing.stuck_secs()
        if stuck > max(2 * self._limits.secs, 60.0):
            return _told({"status": "stuck", "batch_secs": None if stuck == float("inf") else stuck}, 503)
        return _told({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Whether requests had better come here."""
        if self._holder.draining:
            return _told({"status": "leaving"}, 503)
        if self._computing.stuck_secs() > self._limits.secs:
            return _told({"status": "stuck"}, 503)
        return _told({"status": "ready", "epoch": self._holder.current.epoch})

    async def _metadata(self, request: Request) -> Response:
        return _told(self._holder.current.to_json())

    async def _metrics(self, request: Request) -> Response:
        self._meters.epoch.set(self._holder.current.epoch or 0)
        self._meters.waiting.set(self._predicting.waiting)
        return Response(self._meters.text(), headers={**_SAFE, "Content-Type": CONTENT_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return _told(self._described())

    async def _page(self, request: Request) -> Response:
        return Response(page(self._described()), headers=HEADERS)

    def _described(self) -> dict[str, Any]:
        return description(self._holder.current, self._limits, token=self._door.token is not None)


def _leaves_bytes(request: Request) -> bool:
    """Whether a body comes that nobody reads, which may never end, or one whose length is said twice."""
    pieces, length = "transfer-encoding" in request.headers, request.headers.get("content-length", "0")
    if request.method == "POST":
        return pieces and "content-length" in request.headers
    return pieces or length != "0"


def _told(content: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status, headers=_SAFE)


def _refusal(error: RefusedError) -> Response:
    """An answer that says why there is none; the connection ends where the body was not read."""
    headers = dict(_SAFE)
    if error.retry_secs is not None:
        headers["Retry-After"] = str(error.retry_secs)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 405:
        headers["Allow"] = "POST" if "POST" in error.text else "GET, HEAD"
    if error.status in _UNREAD:
        headers["Connection"] = "close"
    return JSONResponse({"error": error.text}, error.status, headers=headers)


def _methods(path: str) -> tuple[str, ...]:
    return ("POST",) if path == "/predict" else ("GET", "HEAD")
