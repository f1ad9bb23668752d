"""A local directory as whoever only looks at it should see it: a near one shows the far place behind it."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.checkpoint.tier.notes import read_notes
from torchrelay.checkpoint.tier.tier_storage import TierStorage
from torchrelay.errors import UsageError


def opened(directory: Path) -> LocalStorage:
    """The storage of a directory. Epochs of a near one whose files are far only would else look damaged."""
    near = LocalStorage(directory)
    notes = read_notes(near)
    return (
        near
        if notes is None or not notes.far
        else TierStorage(directory, storage_of(notes.far, "the far place"))
    )


def refuse_near(storage: Storage) -> NoReturn:
    """Refuse to write to a near directory as if it were the whole place of checkpoints (UsageError)."""
    notes = read_notes(storage)
    far = notes.far if notes is not None else "the far place"
    raise UsageError(
        f"{storage.url} is the near directory of {far}: give that as the place of the checkpoints, and "
        "tier=Tier(near=...) with this one"
    )
