"""One `/predict`: read within bounds, understood, queued, answered. Whatever ends it, nothing of it stays.

    {"sample": S}          one sample      {"result": R, "epoch": 3}
    {"samples": [S, ...]}  several         {"results": [R, ...], "epoch": 3}
    safetensors            tensors with a row per sample, by name; the answer likewise

S is a number, a list of S, a text, or an object of these by the names of a model's inputs: what becomes of it
is the handler's business.
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
from torchrelay.tools.serving.serve import FaultyAnswerError, RefusedError, busy, unavailable, wrong
from torchrelay.tools.serving.web import done_by, settle

SMALL_BYTES = 16 << 10
"""What is shorter is done at once: handing it over would take longer."""
SMALL_ELEMENTS = 2048


class Body:
    """A body that grows while it is read; `release` gives its bytes back to the budget.

    `weight` is how many bytes of memory a byte of it comes to.
    """

    def __init__(self, budget: Budget, weight: int = 1) -> None:
        self.data = bytearray()
        self._budget, self._weight, self._taken = budget, weight, 0

    async def read(self, request: Request, most: int) -> None:
        """Read it whole. Raises RefusedError 413 where it is too long, 429 where all are; ClientDisconnect.

        What says itself that it is too long is refused before a byte is read.
        """
        said = request.headers.get("content-length", "0")
        if not said.isdecimal() or len(said) > 15 or int(said) > most:
            raise _too_long(most)
        async for chunk in request.stream():
            if len(self.data) + len(chunk) > most:
                raise _too_long(most)
            cost = len(chunk) * self._weight
            if not self._budget.take(cost):
                raise busy("too many large requests at once")
            self._taken += cost
            self.data += chunk

    def release(self) -> None:
        """It is not needed any more."""
        self._budget.give_back(self._taken)
        self._taken = 0


def _too_long(most: int) -> RefusedError:
    return wrong(f"the body is longer than {most} bytes", 413)


JSON = "application/json"
BINARY = (MEDIA_TYPE, "application/octet-stream")


@dataclass(frozen=True)
class PredictRequest:
    """What was asked: samples as they were sent; `single` where they were sent as one."""

    samples: tuple[Any, ...]
    single: bool = False


@dataclass(frozen=True)
class ContentFormat:
    """How a body is to be read, and its answer to be written."""

    binary: bool
    binary_answer: bool

    def limit(self, limits: RequestLimits) -> int:
        """The most bytes that its body may have."""
        return limits.body_bytes if self.binary else limits.json_bytes


def form_of(headers: Mapping[str, str]) -> ContentFormat:
    """By Content-Type and Accept; raises RefusedError 415 or 406 for others than JSON and safetensors."""
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise wrong("bodies are not unpacked here: send it without Content-Encoding", 415)
    kind, _, more = headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != JSON and kind not in BINARY:
        raise wrong(f"Content-Type: send {JSON}, or tensors as {' or '.join(BINARY)}", 415)
    charset = more.strip().lower().removeprefix("charset=").strip('"')
    if kind == JSON and charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise wrong("JSON is read as UTF-8: send no other charset", 415)
    return ContentFormat(kind in BINARY, _wants_binary(headers.get("accept", ""), kind in BINARY))


def _wants_binary(accept: str, binary: bool) -> bool:
    """The form that the client names first of those that there are; without one, that of the request."""
    for text in accept.split(","):
        kind = text.partition(";")[0].strip().lower()
        if kind == JSON or kind in BINARY:
            return kind in BINARY
        if kind in ("*/*", "application/*", ""):
            return binary
    raise wrong(f"Accept: there is {JSON} and {BINARY[0]}", 406)


def read_question(body: bytearray, form: ContentFormat, limits: RequestLimits) -> PredictRequest:
    """Understand a body; raises RefusedError."""
    found = _of_tensors(body, limits) if form.binary else _of_json(body, limits)
    if len(found.samples) > limits.samples:
        raise wrong(f"{len(found.samples)} samples at once: send at most {limits.samples}", 413)
    return found


def _of_tensors(body: bytearray, limits: RequestLimits) -> PredictRequest:
    tensors = tensors_of(body, limits.elements)
    counts = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors.values()}
    if len(counts) != 1 or min(counts) < 1:
        raise wrong("tensors have a row per sample, all of them equally many, at least one")
    count = counts.pop()
    if count > limits.samples:
        raise wrong(f"{count} samples at once: send at most {limits.samples}", 413)
    return PredictRequest(tuple({name: one[at] for name, one in tensors.items()} for at in range(count)))


def _of_json(body: bytearray, limits: RequestLimits) -> PredictRequest:
    if body.count(b",") > limits.elements:  # before anything is made of it: there are at least as many values
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
    """The body of an answer; raises FaultyAnswerError for results that cannot be written in this form."""
    if form.binary_answer:
        metadata = {name: str(value) for name, value in about.items() if value is not None}
        return body_of(_stacked(results), metadata)
    try:
        told = [plain(one) for one in results]
        content = {"result": told[0]} if question.single else {"results": told}
        return json_bytes({**content, **about})
    except TypeError as error:
        raise FaultyAnswerError(f"{error}: write encode() of the handler so that it is") from None


def _stacked(results: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Results as tensors with a row for each, by name; one without a name is `result`."""
    named = [one if isinstance(one, Mapping) else {"result": one} for one in results]
    try:
        return {
            str(name): torch.stack([torch.as_tensor(one[name]).detach().cpu() for one in named])
            for name in named[0]
        }
    except (ValueError, TypeError, RuntimeError, KeyError):
        raise wrong("the results are no tensors of one shape: ask for application/json", 406) from None


JSON_WEIGHT = 4
"""`1,` becomes eight bytes of an int64 tensor."""
Answer = tuple[bytes, str, Served]


class Predicting:
    """Answers questions by a queue that one thread empties; used in one event loop."""

    def __init__(self, holder: ModelSlot, queue: Queue, limits: RequestLimits) -> None:
        self._holder, self._queue, self._limits = holder, queue, limits
        self._budget = Budget(limits.held_bytes)
        self._worker = Worker("torchrelay serve bodies")

    @property
    def waiting(self) -> int:
        """Samples that wait for a batch."""
        return len(self._queue)

    async def answer(self, request: Request) -> Answer:
        """The body of the answer and its type. Raises RefusedError, ClientDisconnect, FaultyAnswerError."""
        form = form_of(request.headers)
        body = Body(self._budget, 1 if form.binary else JSON_WEIGHT)
        try:
            with anyio.move_on_after(self._limits.secs) as scope:
                await body.read(request, form.limit(self._limits))
                return await self._answered(body, form, request.receive)
        finally:
            body.release()
        if scope.cancelled_caught:
            raise unavailable(f"there was no answer within {self._limits.secs:g} s")
        raise ClientDisconnect

    async def _answered(self, body: Body, form: ContentFormat, receive: Receive) -> Answer:
        served = self._holder.current
        large = len(body.data) > SMALL_BYTES
        question, samples = await self._off(large, lambda: _understood(body.data, form, served, self._limits))
        asked = await self._computed(served, samples, receive)
        about = {"epoch": served.epoch}
        many = elements(asked.results) > SMALL_ELEMENTS
        text = await self._off(many, lambda: write_answer(asked.results, question, form, about))
        return text, MEDIA_TYPE if form.binary_answer else JSON, served

    async def _off(self, large: bool, work: Callable[[], Any]) -> Any:
        """Do it here where it is small, else in the thread for that."""
        return await done_by(self._worker, work) if large else work()

    async def _computed(self, served: Served, samples: list[Any], receive: Receive) -> PendingRequest:
        """Have it computed, while looking whether the client is still there."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def finish(asked: PendingRequest) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, future, None, asked.error)

        asked = PendingRequest(served, samples, finish)
        if not self._queue.put(asked):
            raise unavailable("the server is leaving") if self._holder.draining else busy("too much is asked")
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
                future.exception()  # looked at, also where the client is gone
        return asked


async def _gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _understood(
    data: bytearray, form: ContentFormat, served: Served, limits: RequestLimits
) -> tuple[PredictRequest, list[Any]]:
    """The question, and its samples as the handler wants them; raises RefusedError."""
    question = read_question(data, form, limits)
    try:
        return question, [served.handler.decode(one) for one in question.samples]
    except Exception as error:  # whatever the program's code says of what a client sent
        raise refusal_of(error, "the sample cannot be decoded") from None
