"""`EpochLoader`: data in an order that survives restarts, crashes and another number of ranks."""

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
    """Samples [start, stop) of the epoch's order: one step of all ranks together."""

    start: int
    stop: int

    def share(self, rank: int, world: int) -> tuple[int, int]:
        """Return the samples [from, to) of one rank; contiguous, lower ranks take what is left over."""
        size, rest = divmod(self.stop - self.start, world)
        begin = self.start + rank * size + min(rank, rest)
        return begin, begin + size + (rank < rest)

    def weight(self, rank: int, world: int) -> float:
        """Return what a rank's mean loss is multiplied by, so that the ranks' mean is the step's mean.

        The mean over ranks of (weight x mean over the rank's samples) is then the mean over all samples
        of the step, for the gradient too. 1.0 where all ranks have equally many.
        """
        begin, end = self.share(rank, world)
        return (end - begin) * world / (self.stop - self.start)


@dataclass(frozen=True)
class StepPlan:
    """The steps that are left of an epoch of `total` samples after `done` of them.

    Every step has `batch_size` samples of all ranks together. A tail of fewer than two samples per
    rank joins the step before it (batch norm needs two), unless there is none left to join; `drop_last`
    leaves any tail out.
    """

    done: int
    total: int
    batch_size: int
    world: int
    drop_last: bool = False

    @property
    def stop(self) -> int:
        """Samples of the epoch that are done when the plan is."""
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


_WORKERS = 0x776F726B657273  # "workers": where the workers' own streams start


class EpochLoader:
    """Batches of a map-style dataset: step s takes samples [s*B, (s+1)*B) of the epoch's permutation.

    `batch_size` is GLOBAL: the samples of a step on all ranks together, split contiguously over them.
    Each epoch is one permutation of (seed, epoch); a tail of fewer than two samples per rank joins the
    step before it (`drop_last` leaves the tail out). Batches unpack like the dataset's samples and have
    `weight`, `indices` and `count`: `(loss * batch.weight).backward()` makes DDP's mean of uneven steps
    the exact mean over the step's samples.

    `dataset` has `__getitem__` and `__len__`; a tensor, a tuple of tensors and a `TensorDataset` are
    read by fast indexing. `collate` makes a batch of a list of samples (torch's `default_collate`).
    With `sample_seeds` the global Python, numpy and torch CPU streams are started from (seed, epoch,
    index) before every `dataset[index]` and put back afterwards, so that random augmentation depends
    neither on workers nor on world size nor on restarts; turn it off for datasets without randomness
    (then `__getitems__` is used where the dataset has it). Fast indexing seeds nothing.
    Where `dataset[index]` raises, `sample_error(index, error)` makes what is raised instead of it.
    `num_workers` and other options go to torch's DataLoader, which is only used when one is given.
    Iterating never moves the global streams, unless the dataset does so with `sample_seeds=False`.

    Where it stands is `epoch` and `samples_done`; both are state, and `iter` continues from them: after
    a loop that was left early, the next loop takes the rest of the epoch, exactly as a resumed process
    does. An iteration that delivers its last batch advances to the next epoch. Continuing with another
    world size, or batch size, goes on at the same sample.

    Raises UsageError for arguments that cannot be, and when `batch_size` is below the number of ranks.
    """

    same_on_all_ranks = True
    """Its state is the whole job's, so it is saved once; other loaders keep a state per rank."""

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
        """Batches are made of `dataset` from the next iteration on; raises UsageError for an empty one."""
        fetch = make_fetch(
            dataset, self._collate, sample_seeds=self._sample_seeds, sample_error=self._sample_error
        )
        if fetch.length == 0:
            raise UsageError("EpochLoader got an empty dataset: there is nothing to train on")
        self.dataset, self._fetch, self._order = dataset, fetch, None
        self._source = batch_source(fetch, self._num_workers, self._loader_options)

    @property
    def seed(self) -> int:
        """What the order of all epochs derives from."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch (from 0) that the next batch belongs to."""
        return self._epoch

    @property
    def samples_done(self) -> int:
        """Samples of this epoch, of all ranks, that were handed out."""
        return self._samples_done

    def placed(self, rank: int, world: int) -> EpochLoader:
        """Fix this process's share instead of asking torch.distributed; returns the loader itself.

        For emulated nodes, and for meshes in which several ranks read the same data.
        """
        if whole_number("world", world) <= rank or rank < 0:
            raise UsageError(f"rank {rank} is not one of {world} ranks (0 to {world - 1})")
        self._place = (rank, world)
        return self

    @property
    def world(self) -> int:
        """How many ranks share a step: those of the job, or as many as `placed` said."""
        return self._share()[1]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; does nothing when the loader is in it, wherever it stands."""
        if whole_number("an epoch", epoch, least=0) != self._epoch:
            self._go_to(epoch, 0)

    def __len__(self) -> int:
        """Steps of a whole epoch on the present number of ranks."""
        return len(self._plan(0, self._share()[1]))

    @property
    def steps_left(self) -> int:
        """Steps of this epoch that were not handed out yet."""
        return len(self._plan(self._samples_done, self._share()[1]))

    def __iter__(self) -> Iterator[Batch | MappingBatch]:
        """Batches of this rank from where the loader stands to the end of the epoch.

        Only one iteration is alive: a new one, `set_epoch` and `load_state_dict` end it, and to go on
        with it raises NotAllowedNowError.
        """
        rank, world = self._share()
        self._iteration = object()
        return self._batches(self._iteration, self._plan(self._samples_done, world), rank)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: epoch, samples_done, seed, and the length that they refer to."""
        return {
            "epoch": self._epoch,
            "samples_done": self._samples_done,
            "seed": self._seed,
            "length": self._fetch.length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where `state` says. The seed comes along, so that the order of the data goes on.

        Raises UsageError in the middle of an epoch of a dataset of another length: then "each sample
        once" cannot be kept.
        """
        epoch, done, seed = int(state["epoch"]), int(state["samples_done"]), int(state["seed"])
        length = int(state.get("length", self._fetch.length))
        if done and length != self._fetch.length:
            raise UsageError(
                f"the dataset had {length} samples when {done} of epoch {epoch} were done, and has "
                f"{self._fetch.length} now: resume with the same data, or from the start of an epoch"
            )
        if epoch < 0 or not 0 <= done <= self._fetch.length:
            raise UsageError(f"EpochLoader cannot stand at sample {done} of epoch {epoch}")
        self._seed = check_seed(seed)
        self._go_to(epoch, done)

    def _go_to(self, epoch: int, samples_done: int) -> None:
        self._epoch, self._samples_done, self._iteration = epoch, samples_done, None

    def _share(self) -> tuple[int, int]:
        """Return (rank, world) of this process and check that they can share a step."""
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
                # a copy: a view would keep the whole order alive and let the user change it
                indices = order[begin:end].clone()
                yield make_batch(data, weight=step.weight(rank, plan.world), indices=indices)
        finally:
            # also when the loop was left at its last batch, as a limit on steps does
            if self._iteration is iteration and self._samples_done >= plan.stop:
                self._go_to(self._epoch + 1, 0)

    def _request(self, order: torch.Tensor, step: StepSamples, rank: int, world: int) -> FetchRequest:
        begin, end = step.share(rank, world)
        if begin == end:  # no sample is left for this rank: it repeats the step's first, with weight 0
            begin, end = step.start, step.start + 1
        return FetchRequest(self._seed, self._epoch, tuple(order[begin:end].tolist()))

    def _check_alive(self, iteration: object) -> None:
        if self._iteration is not iteration:
            raise NotAllowedNowError(
                "this iteration over an EpochLoader was ended by a newer one, by set_epoch or by a load; "
                "iterate anew, or use one loader for each loop"
            )


def _distributed_place() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
