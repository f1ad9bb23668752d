"""Which ranks share a host, so that one of them can speak for the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeVar

from torchrelay.records import dataclass

T = TypeVar("T")


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host in rank order; hosts in the order of their lowest ranks, so rank 0's first.

    Every rank of the job is in exactly one host. Ranks of a host need not be next to each other.
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, groups: Iterable[Iterable[int]]) -> Hosts:
        """Put groups of ranks in order."""
        return cls(tuple(sorted(tuple(sorted(group)) for group in groups)))

    @classmethod
    def one(cls, size: int) -> Hosts:
        """All ranks on one host."""
        return cls((tuple(range(size)),))

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each host."""
        return tuple(host[0] for host in self.members)

    def around(self, leader: int) -> tuple[int, ...]:
        """The ranks of the host that `leader` leads, itself included."""
        return self.members[self.leaders.index(leader)]

    def in_rank_order(self, values: Sequence[T]) -> list[T]:
        """Put values that are in the hosts' order in rank order."""
        return [values[at] for at in self._places] if self._places else list(values)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Where each rank is in the hosts' order; nothing where that is the rank order."""
        order = [rank for host in self.members for rank in host]
        return () if order == sorted(order) else tuple(sorted(range(len(order)), key=order.__getitem__))
