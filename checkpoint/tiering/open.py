"""Open the storage and the log of a manager's `db_prefix` and `tier`."""

from __future__ import annotations

from pathlib import Path

from torchrelay.checkpoint.coordinator.session_log import Ledger
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.storage.base import SingleWriter, Storage
from torchrelay.checkpoint.storage.open import Tier, check_tier, storage_of


def placed(
    prefix: str | Path, single_writer: SingleWriter, tier: Tier | None, keeping: Keeping, takeover_secs: float
) -> tuple[Storage, Ledger]:
    """The storage to write and its log; with a tier both are local ones, followed by the remote ones.

    Accesses nothing. Raises UsageError for an invalid prefix or tier.
    """
    place = storage_of(prefix, "the checkpoint prefix", single_writer)
    if check_tier(tier) is None or tier is None:
        return place, Ledger(place, takeover_secs)
    from torchrelay.checkpoint.log.tiered_storage import TierStorage
    from torchrelay.checkpoint.tiering.multi_host import HostsLedger

    storage = TierStorage(tier.directory, place)
    return storage, HostsLedger(storage, tier, keeping, takeover_secs)
