"""How many bytes each blob has at sampled epochs, and how many of them the epoch wrote itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torchrelay.checkpoint.format.layouts import PerNode
from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.runners.report.facts import BlobBytes, EpochBytes
from torchrelay.runners.report.limits import Limits, Troubles, spread


def manifests_of(
    storage: Storage, line: Sequence[Entry], limits: Limits, troubles: Troubles
) -> list[Manifest]:
    """Manifests of epochs spread over a line, the newest among them, within the limit of bytes."""
    whole = [entry for entry in line if entry.position.boundary and entry.healthy]
    size = max((entry.manifest_bytes for entry in whole), default=1)
    room = max(1, min(limits.sized_epochs, limits.manifest_bytes // max(1, size)))
    found = (troubles.tried(partial(codec.read, storage, entry), None) for entry in spread(whole, room))
    return [one for one in found if one is not None]


def sizes_of(manifest: Manifest) -> EpochBytes:
    """Bytes by blob, largest first. What each node has for itself counts once per node."""
    written: dict[str, int] = {}
    referenced: dict[str, int] = {}
    for leaf in manifest.leaves:
        if leaf.alias_of is not None:
            continue
        layout = manifest.layouts[leaf.layout]
        nbytes = leaf.nbytes * (len(layout.nodes) if isinstance(layout, PerNode) else 1)
        into = written if leaf.source == 0 else referenced
        into[leaf.blob] = into.get(leaf.blob, 0) + nbytes
    blobs = [
        BlobBytes(name, written.get(name, 0), referenced.get(name, 0)) for name in {**written, **referenced}
    ]
    return EpochBytes(manifest.position.epoch, tuple(sorted(blobs, key=lambda one: (-one.total, one.blob))))
