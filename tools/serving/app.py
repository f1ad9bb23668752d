"""ASGI application of the model server: routes, access, HTTP errors, OpenAPI document, and shutdown.

On SIGTERM and SIGINT new connections are refused and `/ready` returns 503. Open requests have `drain_secs`,
the remaining ones get 503, and the process exits with code 0. A second signal ends it immediately.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from jinja2 import Environment
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

import torchrelay
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.runners.programs.request import RequestLimits
from torchrelay.tools.serving.batching import CONTENT_TYPE, Computing, Meters, Queue, Watching
from torchrelay.tools.serving.handlers import MEDIA_TYPE, ModelSlot, Served
from torchrelay.tools.serving.requests import Predicting
from torchrelay.tools.serving.serve import FaultyAnswerError, RefusedError, tell, unavailable
from torchrelay.tools.serving.web import Access, HttpServer

OPEN = ("/health", "/ready")
"""Paths without the token, for process supervisors; they reveal nothing."""


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}code,pre{font:13px/1.5 ui-monospace,monospace}"
    "pre{overflow:auto;padding:.8rem}td{padding:.2rem .8rem .2rem 0;vertical-align:top}"
)
_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ info.title }}</title>
<style>{{ style | safe }}</style></head><body><h1>{{ info.title }}</h1><p>{{ info.description }}</p>
<p>Machine-readable: <a href="/openapi.json">/openapi.json</a></p>
{% for path, methods in paths.items() %}{% for method, one in methods.items() %}
<h2><code>{{ method | upper }} {{ path }}</code></h2><p>{{ one.summary }}</p>
{% if one.requestBody %}
<h3>Body</h3><pre>{{ json(one.requestBody.content["application/json"].schema, indent=1) }}</pre>
<h3>Answers</h3><table>
{% for code, answer in one.responses.items() %}
<tr><td><code>{{ code }}</code></td><td>{{ answer.description }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% endfor %}{% endfor %}
</body></html>
""")
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page(document: dict[str, Any]) -> str:
    """Render the OpenAPI document as a page."""
    return _PAGE.render(**document, style=_STYLE, json=json.dumps)


Json = dict[str, Any]
_TEXT: Json = {"type": "string"}
_ANY: Json = {"description": "a number, a text, a list, or an object by names of inputs"}
_BINARY: Json = {"type": "string", "format": "binary", "description": "a safetensors file, a row per sample"}
_EPOCH: Json = {"type": ["integer", "null"]}
_GETS = {
    "/health": ("503 if the process should be restarted", "application/json"),
    "/ready": ("503 while the server shuts down or is stuck", "application/json"),
    "/metadata": ("Run, epoch, branch, code id and signature of the served model", "application/json"),
    "/metrics": ("For Prometheus", "text/plain"),
}
_REFUSALS = {
    "400": "invalid body",
    "413": "body or number of samples too large",
    "415": "body is neither JSON nor safetensors",
    "422": "sample does not fit the model",
    "429": "too many requests: see Retry-After",
    "503": "timeout or shutdown: see Retry-After",
}


def description(served: Served, limits: RequestLimits, *, token: bool) -> Json:
    """Return the OpenAPI document; `token` is whether requests need one."""
    text = (
        f"At most {limits.samples} samples in a request; JSON up to {limits.json_bytes} bytes and "
        f"{limits.depth} levels, tensors up to {limits.body_bytes} bytes and {limits.elements} elements. "
        f"Requests time out after {limits.secs:g} s. Up to {limits.max_batch} samples are computed at "
        f"once, for which one may wait {limits.max_delay_secs * 1000:g} ms."
    )
    title = f"{served.name}, served by torchrelay"
    paths: Json = {"/predict": {"post": _predict(served.signature)}}
    for path, (summary, kind) in _GETS.items():
        schema = {"type": "object" if kind == "application/json" else "string"}
        answer = {"description": "as it is now", "content": {kind: {"schema": schema}}}
        paths[path] = {"get": {"summary": summary, "responses": {"200": answer}}}
    content: Json = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": torchrelay.__version__, "description": text},
        "paths": paths,
    }
    if token:
        scheme = {"type": "http", "scheme": "bearer"}
        content |= {"components": {"securitySchemes": {"token": scheme}}, "security": [{"token": []}]}
    return content


def _predict(signature: Signature | None) -> Json:
    sample = _sample(signature)
    question = (
        _object({"sample": sample}),
        _object({"samples": {"type": "array", "items": sample, "minItems": 1}}),
    )
    answer = (
        _object({"result": _ANY, "epoch": _EPOCH}),
        _object({"results": {"type": "array", "items": _ANY}, "epoch": _EPOCH}),
    )
    error = {"application/json": {"schema": _object({"error": _TEXT})}}
    return {
        "summary": "Results for samples",
        "requestBody": {"required": True, "content": _bodies(*question)},
        "responses": {
            "200": {"description": "one result per sample", "content": _bodies(*answer)},
            **{code: {"description": text, "content": error} for code, text in _REFUSALS.items()},
        },
    }


def _sample(signature: Signature | None) -> Json:
    if signature is None:
        return _ANY
    if len(signature.inputs) == 1:
        return {"description": _spec_json(signature.inputs[0])}
    return _object({spec.name: {"description": _spec_json(spec)} for spec in signature.inputs})


def _spec_json(spec: TensorSpec) -> str:
    return f"{spec.name}: {spec.dtype} of shape ({', '.join(map(str, spec.shape[1:]))}), as nested lists"


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _bodies(*either: Json) -> Json:
    return {"application/json": {"schema": {"oneOf": list(either)}}, MEDIA_TYPE: {"schema": _BINARY}}


Endpoint = Callable[[Request], Awaitable[Response]]
_UNREAD = (401, 404, 405, 406, 413, 415, 421, 429, 503)
"""Statuses for which the body may be unread, so that the connection must be closed."""
_SAFE = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def _leaves_bytes(request: Request) -> bool:
    """Return True if the request has an unread body, or contradicting lengths."""
    pieces, length = "transfer-encoding" in request.headers, request.headers.get("content-length", "0")
    if request.method == "POST":
        return pieces and "content-length" in request.headers
    return pieces or length != "0"


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status, headers=_SAFE)


def _refusal(error: RefusedError) -> Response:
    """Return the error response; closes the connection if the body was not read."""
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


_LAST_SECS = 2.0
"""Additional time after `drain_secs` to write the last refusals."""


class Running:
    """A running server: model slot, compute thread, listener, and the ASGI application."""

    def __init__(
        self,
        holder: ModelSlot,
        listening: socket.socket,
        limits: RequestLimits,
        access: Access,
        watching: Watching | None = None,
    ) -> None:
        self.holder, self.limits, self.meters = holder, limits, Meters()
        self._socket, self._access, self._watching, self._requests = listening, access, watching, 0
        queue = Queue(limits)
        self._computing = Computing(queue, self.meters)
        self._predicting = Predicting(holder, queue, limits)
        self._server = _DrainingServer(self)
        self._endpoints: dict[str, Endpoint] = {
            "/predict": self._predict,
            "/health": self._health,
            "/ready": self._ready,
            "/metadata": self._metadata,
            "/metrics": self._metrics,
            "/openapi.json": self._described,
            "/": self._described,
        }

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal or `stop`; calls `ready` once connections are accepted."""
        self._computing.start()
        if self._watching is not None:
            self._watching.start(self.holder, self.meters)
        self._server.ready = ready
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._computing.close()
            if self._watching is not None:
                self._watching.stop()

    def ended(self) -> bool:
        """Return True if all threads have ended after `run`; waits a short time."""
        watched = self._watching is None or self._watching.ended(_LAST_SECS / 2)
        return self._computing.ended(_LAST_SECS / 2) and watched

    def stop(self) -> None:
        """Shut down as after SIGTERM; callable from other threads."""
        self._server.should_exit = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; always answers, unless the client has disconnected."""
        if scope["type"] != "http":
            return
        began, codes = time.perf_counter(), [0]
        path = scope["path"] if scope["path"] in self._endpoints else "other"

        request = Request(scope, receive)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                codes.append(message["status"])
                if _leaves_bytes(request):
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        self._requests += 1
        self.meters.running.set(self._requests)
        try:
            response = await self._response(request)
            if response is not None:
                await response(scope, receive, counted)
        finally:
            self._requests -= 1
            self.meters.running.set(self._requests)
            self.meters.answered(path, codes[-1], time.perf_counter() - began)

    async def _response(self, request: Request) -> Response | None:
        """Return the answer or refusal; None if the client has disconnected."""
        path, refused = request.scope["path"], self._access.refusal(request.headers)
        try:
            if refused is not None and not (refused[0] == 401 and path in OPEN):
                raise RefusedError(*refused)
            if self._requests > self.limits.requests:
                raise unavailable("too many concurrent requests")
            endpoint = self._endpoints.get(path)
            if endpoint is None:
                raise RefusedError(404, "unknown path: GET / lists the paths")
            methods = ("POST",) if path == "/predict" else ("GET", "HEAD")
            if request.method not in methods:
                raise RefusedError(405, f"use {methods[0]}")
            return await endpoint(request)
        except ClientDisconnect:
            return None
        except RefusedError as error:
            return _refusal(error)
        except Exception as error:
            self.meters.faults.inc()
            what = "torchrelay serve: internal error"
            tell(what, "".join(traceback.format_exception(error)))
            text = str(error)[:300] if isinstance(error, FaultyAnswerError) else "internal error"
            return _refusal(RefusedError(500, text))

    async def _predict(self, request: Request) -> Response:
        body, kind, served = await self._predicting.answer(request)
        epoch = {} if served.epoch is None else {"X-Torchrelay-Epoch": str(served.epoch)}
        return Response(body, media_type=kind, headers={**_SAFE, **epoch})

    async def _health(self, request: Request) -> Response:
        """Return 503 if the process should be restarted."""
        stuck = self._computing.stuck_secs()
        if stuck > max(2 * self.limits.secs, 60.0):
            return _json({"status": "stuck", "batch_secs": None if stuck == float("inf") else stuck}, 503)
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Return 503 while shutting down or stuck."""
        if self.holder.draining:
            return _json({"status": "leaving"}, 503)
        if self._computing.stuck_secs() > self.limits.secs:
            return _json({"status": "stuck"}, 503)
        return _json({"status": "ready", "epoch": self.holder.current.epoch})

    async def _metadata(self, request: Request) -> Response:
        return _json(self.holder.current.to_json())

    async def _described(self, request: Request) -> Response:
        """Return the OpenAPI document, or the page that shows it."""
        document = description(self.holder.current, self.limits, token=self._access.token is not None)
        return Response(page(document), headers=HEADERS) if request.scope["path"] == "/" else _json(document)

    async def _metrics(self, request: Request) -> Response:
        self.meters.epoch.set(self.holder.current.epoch or 0)
        self.meters.waiting.set(self._predicting.waiting)
        return Response(self.meters.text(), headers={**_SAFE, "Content-Type": CONTENT_TYPE})


class _DrainingServer(HttpServer):
    """HTTP server with the shutdown described above: drains, and closes what is left after `drain_secs`."""

    def __init__(self, running: Running) -> None:
        limits = running.limits
        super().__init__(
            running,
            log_level="error",
            limit_concurrency=limits.connections + 1,  # uvicorn refuses the request that reaches it
            timeout_graceful_shutdown=int(limits.drain_secs + _LAST_SECS),
        )
        self._running = running

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests up to the limit, then refuse the rest."""
        self._running.holder.draining = True
        close = self._running._computing.close
        timer = asyncio.get_running_loop().call_later(self._running.limits.drain_secs, close)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
