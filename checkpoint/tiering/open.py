"""From what managers are given, a place and perhaps a tier, to a storage and its log."""

from __future__ import annotations

from pathlib import Path

from torchrelay.checkpoint.coordinator.session_log import Ledger
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.storage.base import SingleWriter, Storage
from torchrelay.checkpoint.storage.open import Tier, check_tier, storage_of


def placed(
    prefix: str | Path, single_writer: SingleWriter, tier: Tier | None, keeping: Keeping, takeover_secs: float
) -> tuple[Storage, Ledger]:
    """The storage that is written and its log; with a tier both are the near ones, and the far ones follow.

    Touches nothing. Raises UsageError for a prefix or a tier that cannot be.
    """
    place = storage_of(prefix, "the checkpoint prefix", single_writer)
    if check_tier(tier) is None or tier is None:
        return place, Ledger(place, takeover_secs)
    from torchrelay.checkpoint.log.tiered_storage import TierStorage
    from torchrelay.checkpoint.tiering.multi_host import HostsLedger

    storage = TierStorage(tier.directory, place)
    return storage, HostsLedger(storage, tier, keeping, takeover_secs)
