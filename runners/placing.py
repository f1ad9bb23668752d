"""Which rank plays which node: a pure rule that every process computes alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchrelay.errors import UsageError

_TRAINER = re.compile(r"trainer_(0|[1-9][0-9]*)")


def names_by_rank(declared: Sequence[str], world_size: int) -> tuple[str, ...]:
    """Give each of `world_size` ranks the name of the node that it plays.

    A declared `trainer_<n>` gets rank n, other declared names the remaining ranks in first-use
    order, and ranks that no declared node took are called `trainer_<rank>`. Raises UsageError for
    a name declared twice, more nodes than ranks, and a `trainer_<n>` whose rank does not exist.
    """
    _check(declared, world_size)
    numbered = {rank: name for name in declared if (rank := _rank_of(name)) is not None}
    others = iter([name for name in declared if _rank_of(name) is None])
    return tuple(
        numbered[rank] if rank in numbered else next(others, f"trainer_{rank}") for rank in range(world_size)
    )


def numbered_first(names: Sequence[str]) -> tuple[str, ...]:
    """Order the nodes that one process emulates: each `trainer_<n>` at rank n where there is such a rank.

    The others fill the ranks that are left in their own order; nothing is refused, because a process
    may emulate `trainer_3` alone.
    """
    numbered = {rank: name for name in names if (rank := _rank_of(name)) is not None and rank < len(names)}
    others = iter([name for name in names if name not in numbered.values()])
    return tuple(numbered[rank] if rank in numbered else next(others) for rank in range(len(names)))


def _rank_of(name: str) -> int | None:
    found = _TRAINER.fullmatch(name)
    return int(found.group(1)) if found else None


def _check(declared: Sequence[str], world_size: int) -> None:
    twice = sorted({name for name in declared if declared.count(name) > 1})
    if twice:
        raise UsageError(f"node {twice[0]!r} is declared twice: every node needs its own name")
    if len(declared) > world_size:
        raise UsageError(
            f"the job declares {len(declared)} nodes ({', '.join(declared)}) but there are {world_size} "
            f"ranks: start at least {len(declared)} processes, or declare fewer nodes"
        )
    for name in declared:
        rank = _rank_of(name)
        if rank is not None and rank >= world_size:
            raise UsageError(
                f"node {name!r} belongs to rank {rank}, but the ranks are 0 to {world_size - 1}: "
                f"start at least {rank + 1} processes, or rename the node"
            )
