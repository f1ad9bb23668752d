"""What a log says is true now: live entries, branches, marks, what is being deleted, who holds it.

Pure types; every log record carries all of it, so that the newest valid record tells everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.records import dataclass

Json = Any

HEALTHY = "ok"
DAMAGED = "damaged"
"""Set by `quarantine`; any other health than `HEALTHY` means: not to be resumed from."""


class Key(NamedTuple):
    """What a live entry is known by; sorts by branch, then position."""

    branch: int
    position: Position

    def __str__(self) -> str:
        return f"{self.position},branch={self.branch}"


@dataclass(frozen=True)
class Entry:
    """One committed position: which try holds it and the manifest that proves it.

    `needs` are earlier tries that its manifest refers to; `groups` the file groups that still
    exist; `resumable` is False once a group such as the optimizer's is gone.
    """

    branch: int
    position: Position
    try_name: str
    manifest_bytes: int
    manifest_sha256: str
    needs: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    resumable: bool = True
    health: str = HEALTHY
    extra: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Fields of a newer minor version: not understood, always kept."""

    @property
    def key(self) -> Key:
        """(branch, position)."""
        return Key(self.branch, self.position)

    @property
    def tries(self) -> tuple[str, ...]:
        """All tries whose files this entry needs, its own first."""
        return (self.try_name, *self.needs)

    @property
    def healthy(self) -> bool:
        """Whether nobody has found it damaged."""
        return self.health == HEALTHY


@dataclass(frozen=True)
class Branch:
    """One line of epochs. It shares its parent's entries up to and including `base`.

    `base` None: a fresh start, nothing is shared. `request` is what the user asked for when the
    branch began, e.g. `{"epoch": 2, "process": "..."}`; None for the first branch.
    """

    id: int
    parent: int | None = None
    base: Position | None = None
    request: Mapping[str, Json] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class Mark:
    """A `tag` (a name for an epoch) or a `pin` (a reason to keep it); names are unique per kind."""

    kind: str
    name: str
    target: Key


@dataclass(frozen=True)
class Retirement:
    """A try (`groups` None), or some groups of its files, that may be deleted."""

    try_name: str
    groups: tuple[str, ...] | None = None


@dataclass(frozen=True)
class State:
    """Everything a log record says beside itself. `entries` are sorted by key."""

    entries: tuple[Entry, ...] = ()
    branches: tuple[Branch, ...] = (Branch(0),)
    current: int = 0
    next_branch: int = 1
    marks: tuple[Mark, ...] = ()
    retiring: tuple[Retirement, ...] = ()
    """Retired, deletion not yet known to be complete."""
    holder: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """The identity of the writer of the newest takeover (see `writer.py`)."""
    released: bool = True
    """Whether that writer has said that it is done."""

    @property
    def tries(self) -> frozenset[str]:
        """Every try that some live entry needs."""
        return frozenset(name for entry in self.entries for name in entry.tries)

    @property
    def marked(self) -> frozenset[Key]:
        """Entries that are tagged or pinned."""
        return frozenset(mark.target for mark in self.marks)
