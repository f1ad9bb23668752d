"""The five methods by which an outside store follows a job (Caffe2's metadata handler).

A handler remembers epochs and durations wherever it likes and may override the resume decision.
It is called on rank 0's main thread only. An exception in `write` or `report` degrades the run
to a warning; one in `set_params` or `last_epoch` ends it, because the decision would be a guess.

Two more things a handler may have, and need not:

    decides            whether its `last_epoch` decides where a run starts. Without it a manager's handler
                       does, as in Caffe2, and one that was given beside a run directory does not
    opened(holder)     hears, before `write` and `report`, as whom the job holds its checkpoint log
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torchrelay.records import dataclass


@dataclass(frozen=True)
class Holder:
    """Who holds a checkpoint log: job `uuid` (of this directory, for ever) called `name`, for a while.

    `generation` counts the starts; `branch` is what it writes, begun by a rewind to epoch `base` (None: begun
    from scratch).
    """

    uuid: str
    name: str
    generation: int
    branch: int = 0
    base: int | None = None


@runtime_checkable
class MetadataHandler(Protocol):
    """What a job tells, and asks, a store of the user's choice."""

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Where this job keeps its checkpoints; called before anything else, once per train."""

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The epoch to resume from, given the user's wish; None starts from scratch."""

    def write(self, epoch: int) -> None:
        """`epoch` is acknowledged on all nodes. May be called again for the same epoch."""

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Seconds by logical path for `checkpoint_save`, `checkpoint_load` or `checkpoint_partial_load`.

        torchrelay passes a `metadata.stats.NodeStats`, which also has phases, bytes and the slowest node.
        """

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether a save may be tried now; False skips this one with a warning."""
