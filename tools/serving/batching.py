"""Batching queue, compute thread, Prometheus metrics, and the `--watch` thread.

Samples with the same handler and equal `alike` share a batch, oldest first, at most `max_batch`. An
incomplete batch waits until its oldest sample has waited `max_delay_secs`.

The watch thread switches to newer epochs; requests accepted before are answered by the earlier epoch. An
unusable epoch is reported once, and the current one remains.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import field
from typing import Any

import prometheus_client
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from torchrelay.errors import RelayError
from torchrelay.records import dataclass
from torchrelay.runners.programs.request import RequestLimits
from torchrelay.tools.serving.handlers import ModelSlot, ModelSource, Say, Served, ServingHandler
from torchrelay.tools.serving.serve import FaultyAnswerError, RefusedError, unavailable

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Meters:
    """Prometheus metrics of a server; only known paths are labels, to limit their number."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "torchrelay_requests", "Answers, by path and status", ["path", "code"], registry=registry
        )
        self._secs = Histogram(
            "torchrelay_request_seconds", "Duration from request headers to response", ["path"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._batch = Histogram(
            "torchrelay_batch_samples", "Samples per batch", buckets=_SIZES, registry=registry
        )
        self._computing = Histogram(
            "torchrelay_inference_seconds", "Duration of a batch", buckets=_SECONDS, registry=registry
        )
        self.running = Gauge("torchrelay_requests_in_progress", "Requests in flight", registry=registry)
        self.waiting = Gauge("torchrelay_waiting_samples", "Samples waiting for a batch", registry=registry)
        self.epoch = Gauge("torchrelay_model_epoch", "Served epoch", registry=registry)
        self.swaps = Counter("torchrelay_swaps", "Switches to newer epochs", registry=registry)
        self.swap_failures = Counter(
            "torchrelay_swap_failures", "Failures to switch to a newer epoch", registry=registry
        )
        self.refused = Counter(
            "torchrelay_refused_samples", "Samples for which the model raised an error", registry=registry
        )
        self.faults = Counter("torchrelay_faults", "Internal errors, answered with 500", registry=registry)

    def answered(self, path: str, code: int, secs: float) -> None:
        """Count an answer."""
        self._requests.labels(path, str(code)).inc()
        self._secs.labels(path).observe(secs)

    def computed(self, samples: int, secs: float) -> None:
        """Count a batch."""
        self._batch.observe(samples)
        self._computing.observe(secs)

    def text(self) -> bytes:
        """Return the metrics in Prometheus format."""
        return prometheus_client.generate_latest(self.registry)


EVERY_SECS = 1.0


class Watching:
    """Polls a source for newer epochs."""

    def __init__(self, source: ModelSource, say: Say, every_secs: float = EVERY_SECS) -> None:
        self._source, self._say, self._every_secs = source, say, every_secs
        self._ended = threading.Event()
        self._said = ""
        self._thread: threading.Thread | None = None

    def start(self, holder: ModelSlot, meters: Meters) -> None:
        """Start the daemon thread."""
        self._thread = threading.Thread(
            target=self._run, args=(holder, meters), name="torchrelay serve watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, without waiting for a load in progress."""
        self._ended.set()

    def ended(self, secs: float) -> bool:
        """Return True if no load is in progress after `stop`; waits up to the given time."""
        if self._thread is None:
            return True
        self._thread.join(secs)
        return not self._thread.is_alive()

    def look(self, holder: ModelSlot, meters: Meters) -> None:
        """Poll once and switch to a newer epoch."""
        try:
            found = self._source.newer(holder.current)
        except (RelayError, OSError) as error:
            self._failed(meters, f"{error}")
        except Exception as error:  # from the user's code that builds the model
            self._failed(meters, f"{type(error).__name__}: {error}")
        else:
            self._said = ""
            if found is not None and not self._ended.is_set():
                holder.current = found
                meters.swaps.inc()
                self._say(f"now serving epoch {found.epoch} of {found.name}")

    def _run(self, holder: ModelSlot, meters: Meters) -> None:
        while not self._ended.wait(self._every_secs):
            self.look(holder, meters)

    def _failed(self, meters: Meters, text: str) -> None:
        if text != self._said:
            meters.swap_failures.inc()
            self._say(f"keeping the current epoch: {text}")
            self._said = text


Clock = Callable[[], float]
Key = tuple[int, Hashable]
"""Key of a group: the model, and `alike` of its samples."""


@dataclass(eq=False)
class PendingRequest:
    """One request; `finish` is called once, by any thread; `given_up` is set when the client is gone."""

    served: Served
    samples: Sequence[Any]
    finish: Callable[[PendingRequest], None]
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    given_up: bool = False
    left: int = 0

    def __post_init__(self) -> None:
        self.left = len(self.samples)
        self.results = [None] * self.left


@dataclass(frozen=True, eq=False)
class RequestSample:
    """One sample of a request."""

    asked: PendingRequest
    index: int
    since: float

    @property
    def sample(self) -> Any:
        """The sample to predict."""
        return self.asked.samples[self.index]


class Queue:
    """Ordered groups of equal samples; several threads may put, one takes."""

    def __init__(self, limits: RequestLimits, clock: Clock = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._groups: OrderedDict[Key, deque[RequestSample]] = OrderedDict()
        self._full: dict[Key, None] = {}
        """Groups with a complete batch, in order of completion."""
        self._changed = threading.Condition()
        self._count = 0
        self._closed = False

    def __len__(self) -> int:
        return self._count

    def put(self, asked: PendingRequest) -> bool:
        """Add all samples of a request; returns False if there are too many, or the queue is closed."""
        now = self._clock()
        keys = [(id(asked.served), asked.served.handler.alike(sample)) for sample in asked.samples]
        with self._changed:
            if self._closed or self._count + len(keys) > self._limits.queue:
                return False
            for index, key in enumerate(keys):
                group = self._groups.setdefault(key, deque())
                group.append(RequestSample(asked, index, now))
                if len(group) >= self._limits.max_batch:
                    self._full[key] = None
            self._count += len(keys)
            self._changed.notify()
        return True

    def take(self) -> list[RequestSample]:
        """Wait for the next batch and return it; empty if the queue is closed."""
        with self._changed:
            while not self._closed:
                if not self._groups:
                    self._changed.wait()
                    continue
                key, group, wait = self._due()
                if wait <= 0:
                    if batch := self._cut(key, group):
                        return batch
                else:
                    self._changed.wait(wait)
            return []

    def give_up(self, asked: PendingRequest) -> None:
        """Remove the waiting samples of a request whose client no longer waits."""
        with self._changed:
            asked.given_up = True
            for key in [key for key in self._groups if key[0] == id(asked.served)]:
                group = self._groups[key]
                kept = deque(item for item in group if item.asked is not asked)
                self._count -= len(group) - len(kept)
                if len(kept) < self._limits.max_batch:
                    self._full.pop(key, None)
                if kept:
                    self._groups[key] = kept
                else:
                    del self._groups[key]

    def close(self) -> list[PendingRequest]:
        """Close the queue, wake the taker, and return the unanswered requests."""
        with self._changed:
            self._closed = True
            left = list(dict.fromkeys(item.asked for group in self._groups.values() for item in group))
            self._groups.clear()
            self._full.clear()
            self._count = 0
            self._changed.notify_all()
        return left

    def _due(self) -> tuple[Key, deque[RequestSample], float]:
        """Return the next group and its remaining wait: a complete one, else the oldest."""
        now, delay = self._clock(), self._limits.max_delay_secs
        key = next(iter(self._full or self._groups))
        group = self._groups[key]
        if self._full or group[0].since + delay <= now:
            return key, group, 0.0
        key, group = min(self._groups.items(), key=lambda item: item[1][0].since)
        return key, group, group[0].since + delay - now

    def _cut(self, key: Key, group: deque[RequestSample]) -> list[RequestSample]:
        """Take a batch from a group; its remaining samples go after the other groups."""
        batch: list[RequestSample] = []
        while group and len(batch) < self._limits.max_batch:
            item = group.popleft()
            self._count -= 1
            if not item.asked.given_up:
                batch.append(item)
        if len(group) < self._limits.max_batch:
            self._full.pop(key, None)
        if group:
            self._groups.move_to_end(key)
        else:
            del self._groups[key]
        return batch


_OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError)
_LONGEST = 200


class Computing:
    """Computes the batches of a queue in a daemon thread."""

    def __init__(self, queue: Queue, meters: Meters) -> None:
        self._queue, self._meters = queue, meters
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="torchrelay serve", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stuck_secs(self) -> float:
        """Return the running time of the current batch; 0 between batches, infinite after the end."""
        if not self._thread.is_alive():
            return float("inf")
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Refuse waiting samples, without waiting for the current batch."""
        for asked in self._queue.close():
            asked.error = unavailable("the server is shutting down")
            asked.finish(asked)

    def ended(self, secs: float) -> bool:
        """Return True if the thread has ended after `close`; waits up to the given time."""
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
            del batch  # release its tensors and model before waiting for the next one

    def _answer(self, batch: Sequence[RequestSample]) -> None:
        began = time.perf_counter()
        outcomes = _predicted(batch[0].asked.served.handler, batch)
        self._meters.computed(len(batch), time.perf_counter() - began)
        done: dict[PendingRequest, None] = {}
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


def _predicted(handler: ServingHandler, batch: Sequence[RequestSample]) -> list[Any]:
    """Return a result or error per sample; if a batch fails, its samples are retried one by one."""
    try:
        with nullcontext() if getattr(handler, "own_mode", False) else torch.inference_mode():
            found = list(handler.predict([item.sample for item in batch]))
            if len(found) != len(batch):
                raise FaultyAnswerError(f"predict gave {len(found)} results for {len(batch)} samples")
            return [handler.encode(one) for one in found]
    except BaseException as error:
        if len(batch) > 1 and not isinstance(error, FaultyAnswerError):
            return [one for item in batch for one in _predicted(handler, [item])]
        return [refusal_of(error)] * len(batch)


def refusal_of(error: BaseException, what: str = "the model rejected this sample") -> BaseException:
    """Convert an error of the handler to a response: a client error if the sample may be the cause.

    Any exception may be caused by the sample: torch raises RuntimeError for shapes, a model AttributeError
    for a dict instead of a tensor. These errors are counted, so that a model that rejects all samples is
    noticed.
    """
    if isinstance(error, (RefusedError, FaultyAnswerError)):
        return error
    if isinstance(error, (MemoryError, *_OF_THE_MACHINE)):
        return unavailable("out of memory", 5)
    if isinstance(error, Exception):
        return RefusedError(422, f"{what}: {_line(error)}")
    return FaultyAnswerError(f"the model failed: {_line(error)}")


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:_LONGEST]}"
