"""What the processes of a session know of a log: what a look found, what was proved, who holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest.position import Facts, Position
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.reading.shard_set import ShardSet
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Look:
    """What a log says before a run starts.

    `epoch`, `step` and `facts` are of the newest entry of the current branch, not proved yet, `whole` is its
    newest whole epoch; `request` is what that branch was begun by. `rest`: some of it is still to be sent to
    another place. `notices` are for people.
    """

    commits: bool = False
    branch: int = 0
    request: Mapping[str, Any] | None = None
    epoch: int | None = None
    step: int = 0
    whole: int | None = None
    facts: Facts | None = None
    rest: bool = False
    notices: tuple[str, ...] = ()

    @property
    def rewound(self) -> bool:
        """Whether the newest entry is where its user began the current branch, to train on from there."""
        asked = self.request or {}
        return bool(asked.get("by") == "user" and asked.get("epoch") == self.epoch and self.step == 0)

    @property
    def position(self) -> Position | None:
        """That of the newest entry."""
        return None if self.epoch is None else Position(self.epoch, self.step)


@dataclass(frozen=True)
class Target:
    """A proved position, ready to be loaded; until then `shards` has the files open that were proved here."""

    entry: Entry
    manifest: Manifest
    shards: ShardSet | None = field(default=None, compare=False, repr=False)

    @property
    def position(self) -> Position:
        """Where in the run it was taken."""
        return self.entry.position

    @property
    def lost_blobs(self) -> frozenset[str]:
        """The blobs of which retention has removed files."""
        if self.entry.resumable:
            return frozenset()
        left = self.entry.groups
        return frozenset(leaf.blob for leaf in self.manifest.leaves if leaf.group not in left)

    @property
    def facts(self) -> Facts:
        """What the manifest remembers of the run."""
        return self.manifest.facts


@dataclass(frozen=True)
class Holding:
    """What every process knows of the log that rank 0 holds."""

    job: str
    uuid: str
    branch: int
    generation: int
