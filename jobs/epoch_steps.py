"""How an epoch's samples are cut into steps and shared by the ranks. Pure arithmetic, no data."""

from __future__ import annotations

from collections.abc import Iterator

from torchrelay.records import dataclass


@dataclass(frozen=True)
class Step:
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

    def __getitem__(self, index: int) -> Step:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self.done + index * self.batch_size
        last = index == len(self) - 1
        return Step(start, self.stop if last else start + self.batch_size)

    def __iter__(self) -> Iterator[Step]:
        return (self[index] for index in range(len(self)))
