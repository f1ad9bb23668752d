"""Fetch batches: from indices to collated data, in this process or in workers."""

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
    """The collated samples of a rank; unpacks into fields: `for x, y in loader`.

    A rank without samples in a step gets one anyway, because DDP needs a forward and backward pass; then
    `count` is 0, `indices` is empty and `weight` is 0.0. If the samples are not tuples, a batch has one
    field: `for (x,) in loader`.

    Attributes:
        data: The collated object.
        weight: Factor for this rank's mean loss, so that the mean over ranks is the mean over samples.
        indices: Indices of the samples in the dataset, as an int64 tensor.
        count: Number of samples.
    """

    data: Any
    weight: float
    indices: Tensor
    count: int  # type: ignore[assignment]  # of samples; nobody counts equal tensors with tuple.count


class MappingBatch(dict[Any, Any]):
    """A batch of samples that are mappings: `batch["image"]`, with the attributes of `Batch`."""

    data: Any
    weight: float
    indices: Tensor
    count: int


def make_batch(data: Any, *, weight: float, indices: Tensor) -> Batch | MappingBatch:
    """Wrap collated `data` without copying tensors."""
    batch: Batch | MappingBatch
    if isinstance(data, Mapping):
        batch = MappingBatch(data)
    else:
        batch = Batch(data if isinstance(data, (tuple, list)) else (data,))
    batch.data, batch.weight, batch.indices, batch.count = data, weight, indices, len(indices)
    return batch


SampleError = Callable[[int, Exception], Exception]
"""Returns the error to raise instead of one raised by `dataset[index]`."""

_PYTHON, _NUMPY, _TORCH = 1, 2, 3  # as in random_streams


@dataclass(frozen=True)
class FetchRequest:
    """The samples of one rank in one step, with everything that a stateless worker needs."""

    seed: int
    epoch: int
    indices: tuple[int, ...]


class TensorFetch(Dataset[Any]):
    """Fetch rows of tensors with one indexing operation per batch; uses no randomness."""

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
    """Fetch samples one by one from a map-style dataset and collate them; optionally seeds per sample."""

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
    """Choose how to fetch; raises UsageError unless it is a map-style dataset."""
    if collate is None and isinstance(dataset, torch.Tensor) and dataset.dim() > 0:
        return TensorFetch([dataset], bare=True)
    if collate is None and isinstance(dataset, TensorDataset):
        return TensorFetch(dataset.tensors, bare=False)
    if isinstance(dataset, (tuple, list)) and dataset and all(isinstance(x, torch.Tensor) for x in dataset):
        if collate is None:
            return TensorFetch(dataset, bare=False)
        dataset, sample_error = (
            TensorDataset(*dataset),
            None,
        )  # a tuple of tensors are the fields of a dataset
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"EpochLoader needs a dataset with __getitem__ and __len__ (or tensors), not "
            f"{type(dataset).__name__}; a stream without indices cannot be resumed at a sample"
        )
    return SampleFetch(dataset, collate, seeds=sample_seeds, sample_error=sample_error)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Context manager that restores Python's, numpy's and torch's CPU streams, but not CUDA's."""
    numpy = numpy_module(load=True)  # otherwise a dataset that imports numpy gets an unseeded first sample
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
    """Seed the three CPU streams from one 64-bit seed, each differently."""
    random.seed(mix(seed, _PYTHON))
    torch.default_generator.manual_seed(mix(seed, _TORCH))
    numpy = numpy_module(load=False)
    if numpy:
        numpy.random.seed(mix(seed, _NUMPY) % 2**32)


BatchSource = Callable[[Iterable[FetchRequest], int], Iterator[Any]]
"""Answers requests in order; the number seeds the workers' streams."""


class InWorkers:
    """Fetch batches ahead with torch's DataLoader, whose "samples" are whole requests."""

    def __init__(self, fetch: Fetch, num_workers: int, options: Mapping[str, Any]) -> None:
        self._feed = _Feed()
        self._generator = torch.Generator()  # otherwise DataLoader draws from the global stream
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
        """Answer requests in order, as a `BatchSource`."""
        self._feed.requests = requests
        self._generator.manual_seed(worker_seed)
        return iter(self._loader)


class _Feed:
    """Sampler of a DataLoader that lasts for many epochs, for persistent workers."""

    requests: Iterable[FetchRequest] = ()

    def __iter__(self) -> Iterator[FetchRequest]:
        return iter(self.requests)


def batch_source(fetch: Fetch, num_workers: int, options: Mapping[str, Any]) -> BatchSource:
    """Choose a batch source by the options; raises UsageError for options set by EpochLoader itself."""
    reserved = {"batch_sampler", "collate_fn", "generator", "sampler"} & set(options)
    if reserved:
        raise UsageError(
            f"EpochLoader sets {', '.join(sorted(reserved))} itself (use collate= for collating)"
        )
    if whole_number("num_workers", num_workers, least=0) or options:
        return InWorkers(fetch, num_workers, options)
    return partial(_in_process, fetch)


def _in_process(fetch: Fetch, requests: Iterable[FetchRequest], worker_seed: int) -> Iterator[Any]:
    return (fetch[request] for request in requests)  # lazily, one batch at a time


def _as_it_is(data: Any) -> Any:
    return data
