"""What users say of a near place."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import local_directory

NOTES = "tier.json"
"""The file of a near directory that says what it is near to."""


@dataclass(frozen=True)
class Tier:
    """A quick local directory before the place of the checkpoints (docs/tier.md).

    Saves are written to `near`, and acknowledged as `local`: they survive the death of the processes, not
    the loss of that disk. Behind the training they are sent to the place of the checkpoints, oldest first,
    and are `replicated` once its log has them. Hosts share the `near` directory, or have one each on disks of
    their own: then what is `local` needs all of these disks.

    `lag`: how many saved positions may be `local` only. A save beyond that waits at its boundary until one is
    replicated, and fails after `patience_secs` without; a save before a run leaves early does not wait.
    `drain_secs`: how long the end of a run waits until all is replicated; what is not goes up at the next
    start. `uploads`: files that are sent at once.

    Raises UsageError for anything but a path, whole numbers from 1, and seconds from 0.
    """

    near: str | os.PathLike[str]
    lag: int = 2
    patience_secs: float = 600.0
    drain_secs: float = 600.0
    uploads: int = 4
    directory: Path = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("lag", "uploads"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise UsageError(f"Tier({name}={count!r:.80}): it is a whole number from 1")
        for name in ("patience_secs", "drain_secs"):
            secs = getattr(self, name)
            if isinstance(secs, bool) or not isinstance(secs, (int, float)) or not 0 <= secs < float("inf"):
                raise UsageError(f"Tier({name}={secs!r:.80}): it is a number of seconds from 0")
        object.__setattr__(self, "directory", Path(local_directory(self.near, "Tier(near=...)")))


def check_tier(given: object) -> Tier | None:
    """The option as users give it; UsageError for what it cannot be."""
    if given is None or isinstance(given, Tier):
        return given
    raise UsageError(f"tier is {given!r:.80}; give torchrelay.Tier(near='/local/directory')")
