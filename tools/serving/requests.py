"""Handling of `/predict` requests: limited reading, parsing, queueing and answering.

    {"sample": S}          one sample      {"result": R, "epoch": 3}
    {"samples": [S, ...]}  several         {"results": [R, ...], "epoch": 3}
    safetensors            tensors with a row per sample, by name; the answer likewise

S is a number, a list of S, a text, or an object of these by names of inputs; the handler converts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
import torch
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from torchrelay.checkpoint.format import canonical_json
from torchrelay.errors import DamagedError
from torchrelay.jobs.runtime import Worker
from torchrelay.records import dataclass
from torchrelay.runners.programs.request import Budget, RequestLimits
from torchrelay.tools.serving.batching import PendingRequest, Queue, refusal_of
from torchrelay.tools.serving.handlers import (
    MEDIA_TYPE,
    ModelSlot,
    Served,
    body_of,
    elements,
    json_bytes,
    plain,
    tensors_of,
)
from torchrelay.tools.serving.serve import FaultyAnswerError, busy, unavailable, wrong
from torchrelay.tools.serving.web import done_by, settle

SMALL_BYTES = 16 << 10
"""Smaller bodies are parsed directly instead of in another thread."""
SMALL_ELEMENTS = 2048


class Body:
    """A request body, with the memory per byte as `weight`; `release` returns its bytes to the budget."""

    def __init__(self, budget: Budget, weight: int = 1) -> None:
        self.data = bytearray()
        self._budget, self._weight, self._taken = budget, weight, 0

    async def read(self, request: Request, most: int) -> None:
        """Read the body; raises RefusedError 413 if it is too long, 429 if all are; ClientDisconnect.

        A declared length beyond the limit is refused before reading.
        """
        too_long = wrong(f"the body is longer than {most} bytes", 413)
        said = request.headers.get("content-length", "0")
        if not said.isdecimal() or len(said) > 15 or int(said) > most:
            raise too_long
        async for chunk in request.stream():
            if len(self.data) + len(chunk) > most:
                raise too_long
            cost = len(chunk) * self._weight
            if not self._budget.take(cost):
                raise busy("too many large requests at once")
            self._taken += cost
            self.data += chunk

    def release(self) -> None:
        """Release the memory."""
        self._budget.give_back(self._taken)
        self._taken = 0


JSON = "application/json"
BINARY = (MEDIA_TYPE, "application/octet-stream")


@dataclass(frozen=True)
class PredictRequest:
    """The samples of a request; `single` for `{"sample": ...}`."""

    samples: tuple[Any, ...]
    single: bool = False


@dataclass(frozen=True)
class ContentFormat:
    """Formats of the request body and the answer."""

    binary: bool
    binary_answer: bool

    def limit(self, limits: RequestLimits) -> int:
        """Limit on the size of the body in bytes."""
        return limits.body_bytes if self.binary else limits.json_bytes


def form_of(headers: Mapping[str, str]) -> ContentFormat:
    """Choose formats by Content-Type and Accept; raises RefusedError 415 or 406 for unsupported ones."""
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise wrong("compressed bodies are not supported: send it without Content-Encoding", 415)
    kind, _, more = headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != JSON and kind not in BINARY:
        raise wrong(f"Content-Type: send {JSON}, or tensors as {' or '.join(BINARY)}", 415)
    charset = more.strip().lower().removeprefix("charset=").strip('"')
    if kind == JSON and charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise wrong("JSON must be UTF-8", 415)
    for text in headers.get("accept", "").split(","):  # the first supported one, else that of the request
        wanted = text.partition(";")[0].strip().lower()
        if wanted == JSON or wanted in BINARY:
            return ContentFormat(kind in BINARY, wanted in BINARY)
        if wanted in ("*/*", "application/*", ""):
            return ContentFormat(kind in BINARY, kind in BINARY)
    raise wrong(f"Accept: supported are {JSON} and {BINARY[0]}", 406)


def read_question(body: bytearray, form: ContentFormat, limits: RequestLimits) -> PredictRequest:
    """Parse a body; raises RefusedError."""
    found = _of_tensors(body, limits) if form.binary else _of_json(body, limits)
    if len(found.samples) > limits.samples:
        raise wrong(f"{len(found.samples)} samples at once: send at most {limits.samples}", 413)
    return found


def _of_tensors(body: bytearray, limits: RequestLimits) -> PredictRequest:
    tensors = tensors_of(body, limits.elements)
    counts = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors.values()}
    if len(counts) != 1 or min(counts) < 1:
        raise wrong("expected tensors with a row per sample, all with the same number of rows, at least one")
    count = counts.pop()
    if count > limits.samples:
        raise wrong(f"{count} samples at once: send at most {limits.samples}", 413)
    return PredictRequest(tuple({name: one[at] for name, one in tensors.items()} for at in range(count)))


def _of_json(body: bytearray, limits: RequestLimits) -> PredictRequest:
    if body.count(b",") > limits.elements:  # before parsing: there are at least as many values
        raise wrong(f"the body has more than {limits.elements} elements", 413)
    try:
        value = canonical_json.loads(
            bytes(body), what="the body", limit_bytes=limits.json_bytes, depth=limits.depth
        )
    except DamagedError as error:
        raise wrong(f"{str(error)[:300]}") from None
    match value:
        case {"sample": sample} if len(value) == 1:
            return PredictRequest((sample,), single=True)
        case {"samples": [*samples]} if len(value) == 1 and samples:
            return PredictRequest(tuple(samples))
    raise wrong('the body is neither {"sample": ...} nor {"samples": [..., ...]}')


def write_answer(
    results: Sequence[Any], question: PredictRequest, form: ContentFormat, about: Mapping[str, Any]
) -> bytes:
    """Encode an answer; raises FaultyAnswerError for results that do not fit the format."""
    if form.binary_answer:
        metadata = {name: str(value) for name, value in about.items() if value is not None}
        return body_of(_stacked(results), metadata)
    try:
        values = [plain(one) for one in results]
        content = {"result": values[0]} if question.single else {"results": values}
        return json_bytes({**content, **about})
    except TypeError as error:
        raise FaultyAnswerError(f"{error}: fix encode() of the handler") from None


def _stacked(results: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Stack results to tensors by name, with a row each; a result without a name is `result`."""
    named = [one if isinstance(one, Mapping) else {"result": one} for one in results]
    try:
        return {
            str(name): torch.stack([torch.as_tensor(one[name]).detach().cpu() for one in named])
            for name in named[0]
        }
    except (ValueError, TypeError, RuntimeError, KeyError):
        raise wrong("the results are not tensors of equal shape: request application/json", 406) from None


JSON_WEIGHT = 4
"""`1,` becomes eight bytes of an int64 tensor."""
Answer = tuple[bytes, str, Served]


class Predicting:
    """Answers requests with the queue and compute thread; for one event loop."""

    def __init__(self, holder: ModelSlot, queue: Queue, limits: RequestLimits) -> None:
        self._holder, self._queue, self._limits = holder, queue, limits
        self._budget = Budget(limits.held_bytes)
        self._worker = Worker("torchrelay serve bodies")

    @property
    def waiting(self) -> int:
        """Number of samples waiting for a batch."""
        return len(self._queue)

    async def answer(self, request: Request) -> Answer:
        """Return body and type of the answer; raises RefusedError, ClientDisconnect, FaultyAnswerError."""
        form = form_of(request.headers)
        body = Body(self._budget, 1 if form.binary else JSON_WEIGHT)
        try:
            with anyio.move_on_after(self._limits.secs) as scope:
                await body.read(request, form.limit(self._limits))
                return await self._answered(body, form, request.receive)
        finally:
            body.release()
        if scope.cancelled_caught:
            raise unavailable(f"no answer within {self._limits.secs:g} s")
        raise ClientDisconnect

    async def _answered(self, body: Body, form: ContentFormat, receive: Receive) -> Answer:
        served = self._holder.current
        large = len(body.data) > SMALL_BYTES

        def understood() -> tuple[PredictRequest, list[Any]]:
            question = read_question(body.data, form, self._limits)
            try:
                return question, [served.handler.decode(one) for one in question.samples]
            except Exception as error:  # any error of the program's code on a client's value
                raise refusal_of(error, "the sample cannot be decoded") from None

        question, samples = await self._off(large, understood)
        asked = await self._computed(served, samples, receive)
        about = {"epoch": served.epoch}
        many = elements(asked.results) > SMALL_ELEMENTS
        text = await self._off(many, lambda: write_answer(asked.results, question, form, about))
        return text, MEDIA_TYPE if form.binary_answer else JSON, served

    async def _off(self, large: bool, work: Callable[[], Any]) -> Any:
        """Run small work directly, else in a thread."""
        return await done_by(self._worker, work) if large else work()

    async def _computed(self, served: Served, samples: list[Any], receive: Receive) -> PendingRequest:
        """Compute the answer while watching for a disconnect."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def finish(asked: PendingRequest) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, future, None, asked.error)

        asked = PendingRequest(served, samples, finish)
        if not self._queue.put(asked):
            if self._holder.draining:
                raise unavailable("the server is leaving")
            raise busy("too many samples are waiting")
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((future, gone), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise ClientDisconnect
            future.result()
        finally:
            if not future.done():
                self._queue.give_up(asked)
            gone.cancel()
            if future.done() and not future.cancelled():
                future.exception()  # retrieve the exception, even if the client has disconnected
        return asked


async def _gone(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
