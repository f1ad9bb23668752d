"""A file that one host misses says nothing yet; what a second host misses too is damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from epochs import Writing, parameter
from paired_sessions import Meeting, PairedPeers
from ranks import on_ranks

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load.verify import JointResult, VerificationStatus, verify_together
from torchrelay.checkpoint.storage.local import LocalStorage

HOSTS = ("gpu00", "gpu00", "gpu01", "gpu01")


class Blind(LocalStorage):
    """A host that does not see some files, or cannot read them."""

    def __init__(self, root: Path, hides: Callable[[str], bool], *, refuses: bool = False) -> None:
        super().__init__(root)
        self.hides, self.refuses = hides, refuses

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        if self.hides(path):
            raise PermissionError(path) if self.refuses else FileNotFoundError(2, "no such file", path)
        return super().read_range(path, offset, length)


@pytest.fixture
def epoch(tmp_path: Path) -> tuple[Path, CommittedPosition]:
    """A committed epoch of four nodes."""
    with Writing(tmp_path) as run:
        return tmp_path, run.save(1, [parameter("model.weight", torch.rand(4, 700_000))], nodes=4)


def proofs(
    epoch: tuple[Path, CommittedPosition],
    storage_of: Callable[[int], LocalStorage],
    hosts: tuple[str, ...] = HOSTS,
) -> list[JointResult]:
    """What four ranks agree on; every one has its own view of the storage."""
    meeting = Meeting(len(hosts))

    def work(rank: int) -> Any:
        peers = PairedPeers(rank, len(hosts), meeting)
        return verify_together(peers, storage_of(rank), epoch[1], host=hosts[rank])

    found = on_ranks(len(hosts), work)
    assert len({(one.outcome, one.reason) for one in found}) == 1
    return found


def test_what_one_host_misses_is_unknown(epoch: tuple[Path, CommittedPosition]) -> None:
    """A shard that only one host misses is unknown, and the reason names both hosts."""
    found = proofs(
        epoch, lambda rank: Blind(epoch[0], lambda path: HOSTS[rank] == "gpu00" and "trainer_1" in path)
    )
    assert found[0].outcome is VerificationStatus.UNKNOWN
    assert "rank 1 on gpu00" in found[0].reason and "rank 2 on gpu01 sees no damage" in found[0].reason


def test_what_two_hosts_miss_is_damaged(epoch: tuple[Path, CommittedPosition]) -> None:
    """A shard that a second host misses too is damage for all."""
    found = proofs(epoch, lambda rank: Blind(epoch[0], lambda path: "trainer_3" in path))
    assert found[0].outcome is VerificationStatus.DAMAGED
    assert "rank 3 on gpu01" in found[0].reason and "rank 0 on gpu00" in found[0].reason


def test_a_manifest_that_all_miss_is_damaged(epoch: tuple[Path, CommittedPosition]) -> None:
    """A manifest that every rank misses is damage, found by one look of each witness."""
    assert (
        proofs(epoch, lambda rank: Blind(epoch[0], lambda path: "manifest" in path))[0].outcome
        is VerificationStatus.DAMAGED
    )


def test_a_witness_that_cannot_look_proves_nothing(epoch: tuple[Path, CommittedPosition]) -> None:
    """Where the second host has an I/O error the epoch is unknown: nothing may be quarantined."""
    found = proofs(
        epoch,
        lambda rank: Blind(epoch[0], lambda path: "trainer_0" in path, refuses=HOSTS[rank] == "gpu01"),
    )
    assert found[0].outcome is VerificationStatus.UNKNOWN
    assert "could not verify it" in found[0].reason


def test_on_one_host_damage_seen_there_counts(epoch: tuple[Path, CommittedPosition]) -> None:
    """A job on a single host has nobody else to ask."""
    found = proofs(epoch, lambda rank: Blind(epoch[0], lambda path: "trainer_1" in path), ("one",) * 4)
    assert found[0].outcome is VerificationStatus.DAMAGED


def test_a_proved_epoch_brings_its_manifest(epoch: tuple[Path, CommittedPosition]) -> None:
    """All ranks get the manifest that they proved, so that none reads it again and fails alone."""
    assert all(one.manifest is not None for one in proofs(epoch, lambda rank: LocalStorage(epoch[0])))
