"""What is counted, for Prometheus; and `--watch`, a thread that puts newer epochs in place.

Requests that were accepted before are answered by the epoch that they met. What cannot be used is said once,
and the epoch that is served stays.
"""

from __future__ import annotations

import threading

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from torchrelay.errors import RelayError
from torchrelay.tools.serving.handlers import ModelSlot, ModelSource, Say

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Meters:
    """The counters of one server. Names of paths are those of the server's own, so that they are few."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "torchrelay_requests", "Answers, by path and status", ["path", "code"], registry=registry
        )
        self._secs = Histogram(
            "torchrelay_request_seconds", "From the head of a request to its answer", ["path"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._batch = Histogram(
            "torchrelay_batch_samples", "Samples computed at once", buckets=_SIZES, registry=registry
        )
        self._computing = Histogram(
            "torchrelay_inference_seconds", "Of a batch", buckets=_SECONDS, registry=registry
        )
        self.running = Gauge(
            "torchrelay_requests_in_progress", "Requests that have no answer yet", registry=registry
        )
        self.waiting = Gauge("torchrelay_waiting_samples", "Samples that wait for a batch", registry=registry)
        self.epoch = Gauge("torchrelay_model_epoch", "The epoch that is served", registry=registry)
        self.swaps = Counter("torchrelay_swaps", "Newer epochs put in place", registry=registry)
        self.swap_failures = Counter(
            "torchrelay_swap_failures", "Times that a newer epoch could not be used", registry=registry
        )
        self.refused = Counter(
            "torchrelay_refused_samples", "Samples for which the model raised an error", registry=registry
        )
        self.faults = Counter(
            "torchrelay_faults", "Errors of this side, whose answer was a 500", registry=registry
        )

    def answered(self, path: str, code: int, secs: float) -> None:
        """One answer."""
        self._requests.labels(path, str(code)).inc()
        self._secs.labels(path).observe(secs)

    def computed(self, samples: int, secs: float) -> None:
        """One batch."""
        self._batch.observe(samples)
        self._computing.observe(secs)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return prometheus_client.generate_latest(self.registry)


EVERY_SECS = 1.0


class Watching:
    """Asks a source for what is newer, every so many seconds."""

    def __init__(self, source: ModelSource, say: Say, every_secs: float = EVERY_SECS) -> None:
        self._source, self._say, self._every_secs = source, say, every_secs
        self._ended = threading.Event()
        self._said = ""
        self._thread: threading.Thread | None = None

    def start(self, holder: ModelSlot, meters: Meters) -> None:
        """Begin, in a daemon thread."""
        self._thread = threading.Thread(
            target=self._run, args=(holder, meters), name="torchrelay serve watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a load that goes on is not waited for."""
        self._ended.set()

    def ended(self, secs: float) -> bool:
        """Whether no load goes on, after `stop`; waits for so long at most."""
        if self._thread is None:
            return True
        self._thread.join(secs)
        return not self._thread.is_alive()

    def look(self, holder: ModelSlot, meters: Meters) -> None:
        """Look once, and put in place what is newer."""
        try:
            found = self._source.newer(holder.current)
        except (RelayError, OSError) as error:
            self._failed(meters, f"{error}")
        except Exception as error:  # of the user's code that makes the model
            self._failed(meters, f"{type(error).__name__}: {error}")
        else:
            self._said = ""
            if found is not None and not self._ended.is_set():
                holder.current = found
                meters.swaps.inc()
                self._say(f"epoch {found.epoch} of {found.name} is served now")

    def _run(self, holder: ModelSlot, meters: Meters) -> None:
        while not self._ended.wait(self._every_secs):
            self.look(holder, meters)

    def _failed(self, meters: Meters, text: str) -> None:
        if text != self._said:
            meters.swap_failures.inc()
            self._say(f"the epoch that is served stays: {text}")
            self._said = text
