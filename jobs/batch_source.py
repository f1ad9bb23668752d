"""Where batches are fetched: in this process, or ahead of time in the workers of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchrelay.errors import UsageError
from torchrelay.jobs.sample_fetch import Fetch, Request


class InProcess:
    """Batches fetched when they are asked for."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def fetch(self, requests: Iterable[Request], worker_seed: int) -> Iterator[Any]:
        """Answer `requests` in order, none of them before it is asked for."""
        return (self._fetch[request] for request in requests)


class InWorkers:
    """Batches fetched ahead by torch's DataLoader; its "samples" are whole requests, answered in order."""

    def __init__(self, fetch: Fetch, num_workers: int, options: Mapping[str, Any]) -> None:
        self._feed = _Feed()
        self._generator = torch.Generator()  # or DataLoader would draw from the global stream
        self._loader: DataLoader[Any] = DataLoader(
            fetch,
            batch_size=None,
            sampler=self._feed,
            collate_fn=_as_it_is,
            generator=self._generator,
            num_workers=num_workers,
            **options,
        )

    def fetch(self, requests: Iterable[Request], worker_seed: int) -> Iterator[Any]:
        """Answer `requests` in order; the workers' own streams start from `worker_seed`."""
        self._feed.requests = requests
        self._generator.manual_seed(worker_seed)
        return iter(self._loader)


class _Feed:
    """The sampler of a DataLoader that lives for many epochs, so that workers can be persistent."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def batch_source(fetch: Fetch, num_workers: int, options: Mapping[str, Any]) -> InProcess | InWorkers:
    """Choose by what was given; raises UsageError for options that EpochLoader decides itself."""
    reserved = {"batch_sampler", "collate_fn", "generator", "sampler"} & set(options)
    if reserved:
        raise UsageError(
            f"EpochLoader decides {', '.join(sorted(reserved))} itself (collate= is for collating)"
        )
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise UsageError(f"num_workers is an integer from 0, not {num_workers!r}")
    if num_workers or options:
        return InWorkers(fetch, num_workers, options)
    return InProcess(fetch)


def _as_it_is(data: Any) -> Any:
    return data
