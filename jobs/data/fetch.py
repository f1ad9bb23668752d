"""How batches are fetched: from indices to collated data, in this process or in workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from torchrelay.errors import UsageError
from torchrelay.jobs.random import mix, numpy_module, sample_seed
from torchrelay.jobs.runtime import whole_number
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torch import Tensor


class Batch(tuple[Any, ...]):
    """The collated fields of a rank's samples: `for x, y in loader` works, `batch.weight` too.

    `data` is the collated object as it came, `weight` what this rank's mean loss is multiplied by (see
    `epoch_steps.Step.weight`), `indices` the dataset's indices as an int64 tensor, and `count` their
    number. A rank that has no sample in a step still gets one to run forward and backward with, as
    DDP needs: `count` is then 0, `indices` empty and `weight` 0.0.
    A dataset whose samples are no tuples gives batches of one field: `for (x,) in loader`.
    """

    data: Any
    weight: float
    indices: Tensor
    count: int  # type: ignore[assignment]  # of samples; nobody counts equal tensors with tuple.count


class MappingBatch(dict[Any, Any]):
    """The same for a dataset whose samples are mappings: `batch["image"]` and `batch.weight`."""

    data: Any
    weight: float
    indices: Tensor
    count: int


def make_batch(data: Any, *, weight: float, indices: Tensor) -> Batch | MappingBatch:
    """Wrap collated `data`; the tensors in it are not copied."""
    batch: Batch | MappingBatch
    if isinstance(data, Mapping):
        batch = MappingBatch(data)
    else:
        batch = Batch(data if isinstance(data, (tuple, list)) else (data,))
    batch.data, batch.weight, batch.indices, batch.count = data, weight, indices, len(indices)
    return batch


SampleError = Callable[[int, Exception], Exception]
"""What to raise instead of an error that the dataset raised for the sample of a number."""

_PYTHON, _NUMPY, _TORCH = 1, 2, 3  # as in random_streams


@dataclass(frozen=True)
class FetchRequest:
    """The samples of one rank in one step. Holds all that a worker needs, so workers keep no state."""

    seed: int
    epoch: int
    indices: tuple[int, ...]


class TensorFetch(Dataset[Any]):
    """Rows of tensors, by one indexing for all samples; nothing random can happen."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, bare: bool) -> None:
        self._tensors = tuple(tensors)
        self._bare = bare
        lengths = {len(tensor) for tensor in self._tensors}
        if len(lengths) != 1:
            raise UsageError(f"the tensors of a dataset have different lengths: {sorted(lengths)}")
        self.length = lengths.pop()

    def __getitem__(self, request: FetchRequest) -> Any:
        rows = torch.tensor(request.indices, dtype=torch.int64)
        fields = tuple(tensor[rows] for tensor in self._tensors)
        return fields[0] if self._bare else fields


class SampleFetch(Dataset[Any]):
    """Samples one by one from a map-style dataset, collated; streams seeded per sample if asked."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        *,
        seeds: bool,
        sample_error: SampleError | None = None,
    ) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        self._seeds, self._sample_error = seeds, sample_error
        self.length = len(dataset)

    def __getitem__(self, request: FetchRequest) -> Any:
        if self._seeds:
            samples = []
            with streams_kept():
                for index in request.indices:
                    seed_cpu_streams(sample_seed(request.seed, request.epoch, index))
                    samples.append(self._sample(index))
        elif hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(list(request.indices))
        else:
            samples = [self._sample(index) for index in request.indices]
        return self._collate(samples)

    def _sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            told = error if self._sample_error is None else self._sample_error(index, error)
            if told is error:
                raise
            raise told from error


Fetch = TensorFetch | SampleFetch


def make_fetch(
    dataset: Any,
    collate: Callable[[list[Any]], Any] | None,
    *,
    sample_seeds: bool,
    sample_error: SampleError | None = None,
) -> Fetch:
    """Choose how to fetch; raises UsageError for what is no map-style dataset."""
    if collate is None and isinstance(dataset, torch.Tensor) and dataset.dim() > 0:
        return TensorFetch([dataset], bare=True)
    if collate is None and isinstance(dataset, TensorDataset):
        return TensorFetch(dataset.tensors, bare=False)
    if isinstance(dataset, (tuple, list)) and dataset and all(isinstance(x, torch.Tensor) for x in dataset):
        if collate is None:
            return TensorFetch(dataset, bare=False)
        dataset, sample_error = TensorDataset(*dataset), None  # a tuple of tensors is the fields of a dataset
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"EpochLoader needs a dataset with __getitem__ and __len__ (or tensors), not "
            f"{type(dataset).__name__}; a stream without indices cannot be resumed at a sample"
        )
    return SampleFetch(dataset, collate, seeds=sample_seeds, sample_error=sample_error)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Put Python's, numpy's and torch's CPU stream back as they were; CUDA's are not touched."""
    numpy = numpy_module(load=True)  # before a dataset does it, or its first sample would be unseeded
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def seed_cpu_streams(seed: int) -> None:
    """Start the three streams of the CPU from one 64-bit seed, each from another word."""
    random.seed(mix(seed, _PYTHON))
    torch.default_generator.manual_seed(mix(seed, _TORCH))
    numpy = numpy_module(load=False)
    if numpy:
        numpy.random.seed(mix(seed, _NUMPY) % 2**32)


BatchSource = Callable[[Iterable[FetchRequest], int], Iterator[Any]]
"""Answers requests in order; the streams of workers start from the number."""


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

    def __call__(self, requests: Iterable[FetchRequest], worker_seed: int) -> Iterator[Any]:
        """See `BatchSource`."""
        self._feed.requests = requests
        self._generator.manual_seed(worker_seed)
        return iter(self._loader)


class _Feed:
    """The sampler of a DataLoader that lives for many epochs, so that workers can be persistent."""

    requests: Iterable[FetchRequest] = ()

    def __iter__(self) -> Iterator[FetchRequest]:
        return iter(self.requests)


def batch_source(fetch: Fetch, num_workers: int, options: Mapping[str, Any]) -> BatchSource:
    """Choose by what was given; raises UsageError for options that EpochLoader decides itself."""
    reserved = {"batch_sampler", "collate_fn", "generator", "sampler"} & set(options)
    if reserved:
        raise UsageError(
            f"EpochLoader decides {', '.join(sorted(reserved))} itself (collate= is for collating)"
        )
    if whole_number("num_workers", num_workers, least=0) or options:
        return InWorkers(fetch, num_workers, options)
    return partial(_in_process, fetch)


def _in_process(fetch: Fetch, requests: Iterable[FetchRequest], worker_seed: int) -> Iterator[Any]:
    return (fetch[request] for request in requests)  # none before it is asked for


def _as_it_is(data: Any) -> Any:
    return data
