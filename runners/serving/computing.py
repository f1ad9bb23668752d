"""The one thread that computes: takes batches, predicts, hands results back. Nobody waits for it for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchrelay.runners.serving.batching import Asked, Item, Queue
from torchrelay.runners.serving.meters import Meters
from torchrelay.runners.serving.refusal import FaultyAnswerError, RefusedError, unavailable
from torchrelay.runners.serving.served import ServingHandler

_OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError)
_TOLD = 200


class Computing:
    """Predicts what is in a queue, in a daemon thread of its own."""

    def __init__(self, queue: Queue, meters: Meters) -> None:
        self._queue, self._meters = queue, meters
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="torchrelay serve", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stuck_secs(self) -> float:
        """How long the batch that is computed now has taken; 0 between batches, infinite after its end."""
        if not self._thread.is_alive():
            return float("inf")
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Refuse what waits; the batch that is computed now goes on, and nobody waits for it."""
        for asked in self._queue.close():
            asked.error = unavailable("the server is leaving")
            asked.finish(asked)

    def ended(self, secs: float) -> bool:
        """Whether the thread is at its end, after `close`; waits for so long at most."""
        if self._thread.ident is not None:
            self._thread.join(secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while batch := self._queue.take():
            self._busy_since = time.monotonic()
            try:
                self._answer(batch)
            finally:
                self._busy_since = None
            del batch  # its tensors, and the model that they were for, are not kept until the next one

    def _answer(self, batch: Sequence[Item]) -> None:
        began = time.perf_counter()
        outcomes = _predicted(batch[0].asked.served.handler, batch)
        self._meters.computed(len(batch), time.perf_counter() - began)
        done: dict[Asked, None] = {}
        for item, outcome in zip(batch, outcomes, strict=True):
            asked = item.asked
            if isinstance(outcome, BaseException):
                self._meters.refused.inc()
                asked.error, asked.given_up = asked.error or outcome, True
            else:
                asked.results[item.index] = outcome
            asked.left -= 1
            if not asked.left or asked.error:
                done[asked] = None
        for asked in done:
            asked.finish(asked)


def _predicted(handler: ServingHandler, batch: Sequence[Item]) -> list[Any]:
    """A result or an error for each; where a batch fails its samples are tried one by one."""
    try:
        return _results(handler, [item.sample for item in batch])
    except BaseException as error:
        if len(batch) > 1 and not isinstance(error, FaultyAnswerError):
            return [one for item in batch for one in _predicted(handler, [item])]
        return [refusal_of(error)] * len(batch)


def _results(handler: ServingHandler, samples: Sequence[Any]) -> list[Any]:
    own_mode = getattr(handler, "own_mode", False)
    with nullcontext() if own_mode else torch.inference_mode():
        found = list(handler.predict(samples))
        if len(found) != len(samples):
            raise FaultyAnswerError(f"predict gave {len(found)} results for {len(samples)} samples")
        return [handler.encode(one) for one in found]


def refusal_of(error: BaseException, what: str = "the model refuses this sample") -> BaseException:
    """What a client is told of an error of the handler: its own fault where the sample may be the cause.

    It may be any exception: torch says RuntimeError for shapes and types, a model AttributeError for a
    dict where it wants a tensor. What a model refuses is counted, so that one that refuses all is seen.
    """
    if isinstance(error, (RefusedError, FaultyAnswerError)):
        return error
    if isinstance(error, (MemoryError, *_OF_THE_MACHINE)):
        return unavailable("there is no memory for this now", 5)
    if isinstance(error, Exception):
        return RefusedError(422, f"{what}: {_line(error)}")
    return FaultyAnswerError(f"the model failed: {_line(error)}")


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:_TOLD]}"
