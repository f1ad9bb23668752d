"""`EpochLoader`: data in an order that is independent of restarts and the number of ranks.

Indices become collated data in this process or in workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.random import check_seed, current_seed, mix, numpy_module, permutation, sample_seed
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
    fields = data if isinstance(data, (tuple, list)) else (data,)
    batch = MappingBatch(data) if isinstance(data, Mapping) else Batch(fields)
    batch.data, batch.weight, batch.indices, batch.count = data, weight, indices, len(indices)
    return batch


SampleError = Callable[[int, Exception], Exception]
"""Returns the error to raise instead of one raised by `dataset[index]`."""

_PYTHON, _NUMPY, _TORCH = 1, 2, 3  # as in jobs/random.py


@dataclass(frozen=True)
class FetchRequest:
    """The samples of one rank in one step, with everything that a stateless worker needs."""

    seed: int
    epoch: int
    indices: tuple[int, ...]


class TensorFetch(Dataset[Any]):
    """Fetch rows of tensors with one indexing operation per batch; uses no randomness."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, bare: bool) -> None:
        self._tensors, self._bare = tuple(tensors), bare
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
        self._dataset, self._collate = dataset, collate or default_collate
        self._seeds, self._sample_error = seeds, sample_error
        self.length = len(dataset)

    def __getitem__(self, request: FetchRequest) -> Any:
        if self._seeds:
            samples = []
            with _streams_kept():
                for index in request.indices:
                    seed = sample_seed(request.seed, request.epoch, index)
                    random.seed(mix(seed, _PYTHON))
                    torch.default_generator.manual_seed(mix(seed, _TORCH))
                    numpy = numpy_module(load=False)
                    if numpy:
                        numpy.random.seed(mix(seed, _NUMPY) % 2**32)
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
            raised = error if self._sample_error is None else self._sample_error(index, error)
            if raised is error:
                raise
            raise raised from error


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
        dataset, sample_error = TensorDataset(*dataset), None  # a tuple of tensors is the fields of a dataset
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"EpochLoader needs a dataset with __getitem__ and __len__ (or tensors), not "
            f"{type(dataset).__name__}; a stream without indices cannot be resumed at a sample"
        )
    return SampleFetch(dataset, collate, seeds=sample_seeds, sample_error=sample_error)


@contextmanager
def _streams_kept() -> Iterator[None]:
    """Restore Python's, numpy's and torch's CPU streams, but not CUDA's."""
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


class _Feed:
    """Sampler of a DataLoader that lasts for many epochs, for persistent workers."""

    requests: Iterable[FetchRequest] = ()

    def __iter__(self) -> Iterator[FetchRequest]:
        return iter(self.requests)


def _as_it_is(data: Any) -> Any:
    return data


@dataclass(frozen=True)
class StepSamples:
    """Samples [start, stop) of the epoch's order: one step over all ranks."""

    start: int
    stop: int

    def share(self, rank: int, world: int) -> tuple[int, int]:
        """Return the contiguous samples [from, to) of one rank; lower ranks take the remainder."""
        size, rest = divmod(self.stop - self.start, world)
        begin = self.start + rank * size + min(rank, rest)
        return begin, begin + size + (rank < rest)

    def weight(self, rank: int, world: int) -> float:
        """Return the factor for a rank's mean loss, and gradient, that makes the mean that over samples."""
        begin, end = self.share(rank, world)
        return (end - begin) * world / (self.stop - self.start)


@dataclass(frozen=True)
class StepPlan:
    """The remaining steps of an epoch of `total` samples after `done` of them.

    Every step has `batch_size` samples over all ranks. A tail of fewer than two samples per rank joins the
    previous step (batch norm needs two), if there is one; `drop_last` omits any tail.
    """

    done: int
    total: int
    batch_size: int
    world: int
    drop_last: bool = False

    @property
    def stop(self) -> int:
        """Number of samples done at the end of the plan."""
        tail = (self.total - self.done) % self.batch_size
        return self.total - tail if self.drop_last else self.total

    def __len__(self) -> int:
        full, tail = divmod(self.stop - self.done, self.batch_size)
        joins = tail == 0 or (full > 0 and tail < 2 * self.world)
        return full if joins else full + 1

    def __getitem__(self, index: int) -> StepSamples:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self.done + index * self.batch_size
        last = index == len(self) - 1
        return StepSamples(start, self.stop if last else start + self.batch_size)

    def __iter__(self) -> Iterator[StepSamples]:
        return (self[index] for index in range(len(self)))


_WORKERS = 0x776F726B657273  # "workers": seeds the workers' own streams


class EpochLoader:
    """Loader of a map-style dataset whose sample order does not depend on restarts or the number of ranks.

    - Step s takes samples [s*B, (s+1)*B) of the epoch's permutation, which depends on (seed, epoch). A tail
      of fewer than two samples per rank joins the previous step.
    - Batches unpack like the dataset's samples and have `weight`, `indices` and `count`:
      `(loss * batch.weight).backward()` makes DDP's mean of uneven steps the exact mean over the samples.
    - The position, `epoch` and `samples_done`, is state. After a loop that ended early, the next loop takes
      the rest of the epoch, as after a resume. The last batch advances to the next epoch. With another
      world size or batch size it continues at the same sample.
    - Iterating does not move the global random streams, unless the dataset does so without `sample_seeds`.

    Args:
        dataset: Has `__getitem__` and `__len__`; a tensor, a tuple of tensors and a `TensorDataset` are read
            by fast indexing.
        batch_size: Samples of a step over all ranks, split contiguously between them.
        seed: Seed of the order, 0 to 2**64 - 1.
        shuffle: Permute the samples in each epoch.
        drop_last: Omit the tail of an epoch instead of joining it to the previous step.
        collate: Makes a batch of a list of samples (default: torch's `default_collate`).
        sample_seeds: Seed the Python, numpy and torch CPU streams from (seed, epoch, index) for each
            `dataset[index]`, so that augmentation is reproducible. Turn it off for datasets without
            randomness, which also allows `__getitems__`.
        sample_error: `sample_error(index, error)` returns the error to raise if `dataset[index]` raised.
        loader_options: Other options of torch's DataLoader, which is only used if one is given.
        num_workers: Worker processes of torch's DataLoader.

    Raises:
        UsageError: An argument is invalid, or `batch_size` is below the number of ranks.

    Example:
        loader = EpochLoader((images, labels), batch_size=256, seed=1)
        for x, y in loader: ...
    """

    same_on_all_ranks = True
    """The state is global, so it is saved once; other loaders have a state per rank."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        sample_seeds: bool = True,
        num_workers: int = 0,
        sample_error: SampleError | None = None,
        **loader_options: Any,
    ) -> None:
        self.batch_size = whole_number("batch_size", batch_size)
        self.shuffle, self.drop_last = shuffle, drop_last
        self._order: tuple[int, int, torch.Tensor] | None = None
        self._collate, self._sample_seeds, self._sample_error = collate, sample_seeds, sample_error
        self._num_workers, self._loader_options, self._feed = num_workers, loader_options, _Feed()
        self._take(dataset)
        self._seed = check_seed((current_seed() or 0) if seed is None else seed)
        self._epoch = self._samples_done = 0
        self._place: tuple[int, int] | None = None
        self._iteration: object = None

    def _take(self, dataset: Any) -> None:
        """Use `dataset` from the next iteration on; raises UsageError if it is empty."""
        fetch = make_fetch(
            dataset, self._collate, sample_seeds=self._sample_seeds, sample_error=self._sample_error
        )
        if fetch.length == 0:
            raise UsageError("EpochLoader got an empty dataset")
        options = self._loader_options
        if reserved := {"batch_sampler", "collate_fn", "generator", "sampler"} & set(options):
            raise UsageError(
                f"EpochLoader sets {', '.join(sorted(reserved))} itself (use collate= for collating)"
            )
        self.dataset, self._fetch, self._order = dataset, fetch, None
        self._workers: DataLoader[Any] | None = None
        if whole_number("num_workers", self._num_workers, least=0) or options:
            self._workers = DataLoader(
                fetch,
                batch_size=None,
                sampler=self._feed,
                collate_fn=_as_it_is,
                generator=torch.Generator(),  # otherwise DataLoader draws from the global stream
                num_workers=self._num_workers,
                **options,
            )

    @property
    def seed(self) -> int:
        """Seed of the order of all epochs."""
        return self._seed

    @property
    def epoch(self) -> int:
        """Epoch (from 0) of the next batch."""
        return self._epoch

    @property
    def samples_done(self) -> int:
        """Samples of this epoch delivered so far, over all ranks."""
        return self._samples_done

    def placed(self, rank: int, world: int) -> EpochLoader:
        """Set this process's share explicitly instead of by torch.distributed.

        For emulated nodes, and for meshes in which several ranks read the same data.

        Args:
            rank: Index of the share, from 0.
            world: Number of shares.

        Returns:
            The loader itself.

        Example:
            loader.placed(mesh.get_local_rank("dp"), mesh["dp"].size())
        """
        if whole_number("world", world) <= rank or rank < 0:
            raise UsageError(f"invalid rank {rank}: expected 0 to {world - 1}")
        self._place = (rank, world)
        return self

    @property
    def world(self) -> int:
        """Number of ranks that share a step: all ranks of the job, or as set by `placed`."""
        return self._share()[1]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; does nothing if the loader is already within it."""
        if whole_number("an epoch", epoch, least=0) != self._epoch:
            self._go_to(epoch, 0)

    def __len__(self) -> int:
        """Number of steps of a whole epoch with the current number of ranks."""
        return len(self._plan(0, self._share()[1]))

    @property
    def steps_left(self) -> int:
        """Remaining steps of this epoch."""
        return len(self._plan(self._samples_done, self._share()[1]))

    def __iter__(self) -> Iterator[Batch | MappingBatch]:
        """Yield this rank's batches to the end of the epoch; later uses of earlier iterations are errors."""
        rank, world = self._share()
        self._iteration = object()
        return self._batches(self._iteration, self._plan(self._samples_done, world), rank)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, samples_done, seed, and the length of the dataset."""
        place = {"epoch": self._epoch, "samples_done": self._samples_done}
        return {**place, "seed": self._seed, "length": self._fetch.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, including its seed.

        Raises UsageError within an epoch if the dataset has another length, because then not every sample
        would be seen exactly once.
        """
        epoch, done, seed = int(state["epoch"]), int(state["samples_done"]), int(state["seed"])
        length = int(state.get("length", self._fetch.length))
        if done and length != self._fetch.length:
            raise UsageError(
                f"the dataset had {length} samples when {done} of epoch {epoch} were done, and has "
                f"{self._fetch.length} now: resume with the same data, or from the start of an epoch"
            )
        if epoch < 0 or not 0 <= done <= self._fetch.length:
            raise UsageError(f"invalid position of EpochLoader: sample {done} of epoch {epoch}")
        self._seed = check_seed(seed)
        self._go_to(epoch, done)

    def _go_to(self, epoch: int, samples_done: int) -> None:
        self._epoch, self._samples_done, self._iteration = epoch, samples_done, None

    def _share(self) -> tuple[int, int]:
        """Return (rank, world) of this process and check that a step can be split."""
        rank, world = self._place or (0, 1)
        if self._place is None and distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
        if self.batch_size < world:
            raise UsageError(
                f"batch_size {self.batch_size} counts the samples of all ranks together and must be at "
                f"least their number, {world}"
            )
        return rank, world

    def _plan(self, done: int, world: int) -> StepPlan:
        return StepPlan(done, self._fetch.length, self.batch_size, world, self.drop_last)

    def _batches(self, iteration: object, plan: StepPlan, rank: int) -> Iterator[Batch | MappingBatch]:
        self._check_alive(iteration)
        at, length = (self._seed, self._epoch), self._fetch.length
        if self.shuffle and (self._order is None or self._order[:2] != at):
            self._order = (*at, permutation(*at, length))
        order = self._order[2] if self.shuffle and self._order else torch.arange(length)
        requests = (self._request(order, step, rank, plan.world) for step in plan)
        fetched: Iterator[Any] = (self._fetch[request] for request in requests)
        if self._workers is not None:
            self._feed.requests = requests
            self._workers.generator.manual_seed(mix(self._seed, self._epoch, _WORKERS, rank))
            fetched = iter(self._workers)
        try:
            for data, step in zip(fetched, plan, strict=False):
                self._check_alive(iteration)
                self._samples_done = step.stop
                begin, end = step.share(rank, plan.world)
                # a copy: a view would keep the whole order alive and writable
                indices = order[begin:end].clone()
                yield make_batch(data, weight=step.weight(rank, plan.world), indices=indices)
        finally:
            # also if the loop ends at its last batch, as with a limit on steps
            if self._iteration is iteration and self._samples_done >= plan.stop:
                self._go_to(self._epoch + 1, 0)

    def _request(self, order: torch.Tensor, step: StepSamples, rank: int, world: int) -> FetchRequest:
        begin, end = step.share(rank, world)
        if begin == end:  # without samples a rank repeats the step's first one with weight 0
            begin, end = step.start, step.start + 1
        return FetchRequest(self._seed, self._epoch, tuple(order[begin:end].tolist()))

    def _check_alive(self, iteration: object) -> None:
        if self._iteration is not iteration:
            raise NotAllowedNowError(
                "this iteration over an EpochLoader was ended by a newer one, by set_epoch or by a load; "
                "use one loader per loop"
            )
