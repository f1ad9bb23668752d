"""What is counted, in the form of Prometheus; a registry of its own per server."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

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
