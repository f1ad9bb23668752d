"""`EpochLoader`: data in an order that is independent of restarts and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.data.fetch import (
    Batch,
    FetchRequest,
    MappingBatch,
    SampleError,
    batch_source,
    make_batch,
    make_fetch,
)
from torchrelay.jobs.random import check_seed, current_seed, mix, permutation
from torchrelay.jobs.runtime import whole_number
from torchrelay.records import dataclass


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
        """Return the factor for a rank's mean loss that makes the mean over ranks the mean over samples.

        This also holds for the gradient. It is 1.0 if all ranks have equally many samples.
        """
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
        joins = full > 0 and tail < 2 * self.world
        return full if tail == 0 or joins else full + 1

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
        self._num_workers, self._loader_options = num_workers, loader_options
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
        self.dataset, self._fetch, self._order = dataset, fetch, None
        self._source = batch_source(fetch, self._num_workers, self._loader_options)

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
        """Yield this rank's batches from the current position to the end of the epoch.

        A new iteration, `set_epoch` and `load_state_dict` invalidate earlier iterations, which then raise
        NotAllowedNowError.
        """
        rank, world = self._share()
        self._iteration = object()
        return self._batches(self._iteration, self._plan(self._samples_done, world), rank)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, samples_done, seed, and the length of the dataset."""
        return {
            "epoch": self._epoch,
            "samples_done": self._samples_done,
            "seed": self._seed,
            "length": self._fetch.length,
        }

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
        rank, world = self._place or _distributed_place()
        if self.batch_size < world:
            raise UsageError(
                f"batch_size {self.batch_size} counts the samples of all ranks together and must be at "
                f"least their number, {world}"
            )
        return rank, world

    def _plan(self, done: int, world: int) -> StepPlan:
        return StepPlan(done, self._fetch.length, self.batch_size, world, self.drop_last)

    def _permutation(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self._fetch.length)
        if self._order is None or self._order[:2] != (self._seed, self._epoch):
            order = permutation(self._seed, self._epoch, self._fetch.length)
            self._order = (self._seed, self._epoch, order)
        return self._order[2]

    def _batches(self, iteration: object, plan: StepPlan, rank: int) -> Iterator[Batch | MappingBatch]:
        self._check_alive(iteration)
        order = self._permutation()
        requests = (self._request(order, step, rank, plan.world) for step in plan)
        worker_seed = mix(self._seed, self._epoch, _WORKERS, rank)
        try:
            for data, step in zip(self._source(requests, worker_seed), plan, strict=False):
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


def _distributed_place() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
