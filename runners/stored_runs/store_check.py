"""Before a run in a store begins: may it be written, do all hosts see it, are two jobs told apart."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress

from torchrelay.checkpoint.storage.base import check_exclusion
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import Peers, together
from torchrelay.runners.stored_runs.run_files import RunFiles

VISIBLE_WITHIN_SECS = 10.0


def check_store(files: RunFiles, peers: Peers, place: NodePlace) -> None:
    """Raise UsageError or StorageError on all processes; nothing is left behind. One process a host looks."""
    nonce = peers.exchange("store probe", secrets.token_hex(8))[0]
    probe, written = f".probe-{nonce}", False

    def write() -> None:
        nonlocal written
        if peers.rank == 0:
            check_exclusion(files)
            files.replace(probe, b"probe\n")
            written = True

    try:
        together(peers, "write to the store", write)
        looks = place.local_rank == 0
        seen = together(peers, "store seen", lambda: [place.host, not looks or _appears(files, probe)])
    finally:
        if written:
            with suppress(StorageError):
                files.delete(probe)
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        raise UsageError(
            f"the store at {files.url} of {seen[0][0]} is not the one that {', '.join(blind)} sees: give all "
            "hosts the same endpoint and credentials"
        )


def _appears(files: RunFiles, probe: str) -> bool:
    until = time.monotonic() + VISIBLE_WITHIN_SECS
    while True:
        if files.stat(probe) is not None:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
