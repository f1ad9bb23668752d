"""One `/predict`: read, understand, queue, wait, answer. Whatever ends it, nothing of it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio

from torchrelay.runners.programs.serve_options import Budget, Limits
from torchrelay.runners.serving.batching import Asked, Queue
from torchrelay.runners.serving.computing import refusal_of
from torchrelay.runners.serving.desk import SMALL_BYTES, SMALL_ELEMENTS, Desk, settle
from torchrelay.runners.serving.questions import JSON, Form, Question, form_of, read_question, write_answer
from torchrelay.runners.serving.reading import Body, GoneError, Receive
from torchrelay.runners.serving.refusal import busy, unavailable
from torchrelay.runners.serving.served import Holder, Served
from torchrelay.runners.serving.tensor_bodies import MEDIA_TYPE
from torchrelay.runners.serving.trees import elements

JSON_WEIGHT = 4
"""`1,` becomes eight bytes of an int64 tensor."""
Answer = tuple[bytes, str, Served]


class Predicting:
    """Answers questions by a queue that one thread empties; used in one event loop."""

    def __init__(self, holder: Holder, queue: Queue, limits: Limits) -> None:
        self._holder, self._queue, self._limits = holder, queue, limits
        self._budget = Budget(limits.held_bytes)
        self._desk = Desk()

    @property
    def waiting(self) -> int:
        """Samples that wait for a batch."""
        return len(self._queue)

    async def answer(self, headers: Mapping[str, str], receive: Receive) -> Answer:
        """The body of the answer and its type. Raises RefusedError, GoneError, FaultyAnswerError."""
        form = form_of(headers)
        body = Body(self._budget, 1 if form.binary else JSON_WEIGHT)
        try:
            with anyio.move_on_after(self._limits.secs) as scope:
                await body.read(receive, headers, form.limit(self._limits))
                return await self._answered(body, form, receive)
        finally:
            body.release()
        if scope.cancelled_caught:
            raise unavailable(f"there was no answer within {self._limits.secs:g} s")
        raise GoneError

    async def _answered(self, body: Body, form: Form, receive: Receive) -> Answer:
        served = self._holder.current
        large = len(body.data) > SMALL_BYTES
        question, samples = await self._off(large, lambda: _understood(body.data, form, served, self._limits))
        asked = await self._computed(served, samples, receive)
        about = {"epoch": served.epoch}
        many = elements(asked.results) > SMALL_ELEMENTS
        text = await self._off(many, lambda: write_answer(asked.results, question, form, about))
        return text, MEDIA_TYPE if form.binary_answer else JSON, served

    async def _off(self, large: bool, work: Callable[[], Any]) -> Any:
        """Do it here where it is small, else at the desk."""
        return await self._desk.do(work) if large else work()

    async def _computed(self, served: Served, samples: list[Any], receive: Receive) -> Asked:
        """Have it computed, while looking whether the client is still there."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def finish(asked: Asked) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, future, None, asked.error)

        asked = Asked(served, samples, finish)
        if not self._queue.put(asked):
            raise unavailable("the server is leaving") if self._holder.draining else busy("too much is asked")
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((future, gone), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise GoneError
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


def _understood(data: bytearray, form: Form, served: Served, limits: Limits) -> tuple[Question, list[Any]]:
    """The question, and its samples as the handler wants them; raises RefusedError."""
    question = read_question(data, form, limits)
    try:
        return question, [served.handler.decode(one) for one in question.samples]
    except Exception as error:  # whatever the program's code says of what a client sent
        raise refusal_of(error, "the sample cannot be decoded") from None
