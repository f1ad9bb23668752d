"""Sharded epochs, damaged in all the ways of disks: a proof finds it, and nothing wrong is ever read."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from meshes import ATTEMPT_NAME, MemoryStorage, Saved, load, local_part, target

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded
from torchrelay.checkpoint.format.names import manifest_path
from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.load.verify import VerificationStatus, verify_epoch
from torchrelay.errors import RelayError

NODES = (0, 1, 2, 3)
GRID = Mesh(NODES, (2, 2), (Replicated(), Sharded(0)))
MESHES: dict[str, Mesh | None] = {
    "m.rows": Mesh(NODES, (4,), (Sharded(0),)),
    "m.strided": Mesh(NODES, (2, 2), (Sharded(0, 2), Sharded(0))),
    "m.replicas": GRID,
    "m.plain": None,
}
OTHER = Mesh((2, 0, 1), (3,), (Sharded(1),))


class Epoch:
    """A sharded epoch in memory, and the log's entry for it."""

    def __init__(self, fill: float) -> None:
        self.wholes = {name: torch.arange(63.0).reshape(9, 7) + fill + n for n, name in enumerate(MESHES)}
        saved = Saved(self.wholes, MESHES, len(NODES))
        data = codec.encode(saved.run().manifest)
        self.manifest = manifest_path(ATTEMPT_NAME)
        self.files = {**saved.storage.files, self.manifest: bytearray(data)}
        self.entry = CommittedPosition(
            0,
            Position(1),
            ATTEMPT_NAME,
            len(data),
            sha256(data),
            (),
            codec.decode(data).groups,
            resumable=True,
        )

    @property
    def shards(self) -> list[str]:
        return sorted(path for path in self.files if path != self.manifest)

    def outcome(self, files: dict[str, bytearray]) -> VerificationStatus:
        return verify_epoch(storage_of(files), self.entry, level="full").outcome

    def check_reads(self, files: dict[str, bytearray]) -> int:
        """Whatever can be read is what was saved, whole and for every node; returns how many reads failed."""
        failed = 0
        for name, whole in self.wholes.items():
            for node in (None, *OTHER.nodes):
                wanted = None if node is None else target(OTHER, whole.shape, node)
                expected = whole if node is None else local_part(whole, OTHER, node)
                try:
                    manifest = codec.decode(bytes(files[self.manifest]))
                    found = load(LeafReader(storage_of(files), manifest), name, whole, wanted)
                except (RelayError, KeyError):
                    failed += 1
                else:
                    assert torch.equal(found, expected), (name, node)
        return failed


def storage_of(files: dict[str, bytearray]) -> MemoryStorage:
    storage = MemoryStorage()
    storage.files = dict(files)
    return storage


@pytest.fixture(scope="module")
def epoch() -> Epoch:
    return Epoch(0.0)


def with_file(epoch: Epoch, path: str, data: bytearray) -> dict[str, bytearray]:
    return {**epoch.files, path: data}


def test_an_undamaged_epoch_is_proved_and_read(epoch):
    """All four nodes wrote a file; without damage nothing fails."""
    assert len(epoch.shards) == 4
    assert epoch.outcome(epoch.files) is VerificationStatus.VERIFIED
    assert epoch.check_reads(epoch.files) == 0


def flipped(epoch: Epoch, path: str) -> Iterator[int]:
    """Places in all regions: length, header (densely), padding, data (every byte)."""
    data = epoch.files[path]
    if path == epoch.manifest:
        yield from range(0, len(data), 5)
        return
    start = 8 + int.from_bytes(data[:8], "little")
    yield from range(10)
    yield from range(10, start, 29)
    yield from (start - 1, *range(start, len(data)))


def test_a_changed_bit_of_any_file_is_damage(epoch):
    """In the manifest, in every shard's length, header, padding and data; `unknown` counts as not used."""
    rng = random.Random(0)
    for path in epoch.files:
        for offset in flipped(epoch, path):
            data = bytearray(epoch.files[path])
            data[offset] ^= 1 << rng.randrange(8)
            files = with_file(epoch, path, data)
            assert epoch.outcome(files) is not VerificationStatus.VERIFIED, (path, offset)
            if offset % 97 == 0 and path != epoch.manifest:  # the log's entry guards the manifest
                assert epoch.check_reads(files) > 0


LENGTHS: dict[str, Callable[[bytearray], bytearray]] = {
    "a byte less": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "half": lambda data: data[: len(data) // 2],
    "header alone": lambda data: data[: 8 + int.from_bytes(data[:8], "little")],
    "nothing": lambda data: bytearray(),
    "zeros": lambda data: bytearray(len(data)),
}


@pytest.mark.parametrize("change", LENGTHS)
def test_a_file_of_another_length_is_damage(epoch, change):
    """Also one that lost its content and kept its length, as after a power cut."""
    for path in epoch.files:
        if path == epoch.manifest and change == "header alone":
            continue
        files = with_file(epoch, path, LENGTHS[change](epoch.files[path]))
        assert epoch.outcome(files) is VerificationStatus.DAMAGED, path
        if path != epoch.manifest:
            assert epoch.check_reads(files) > 0


def test_a_missing_file_is_damage(epoch):
    """No file is missed in silence: what it held cannot be read, and the rest is right."""
    for path in epoch.files:
        files = {name: data for name, data in epoch.files.items() if name != path}
        assert epoch.outcome(files) is VerificationStatus.DAMAGED, path
        assert epoch.check_reads(files) > 0


def test_shards_in_each_others_place_are_damage(epoch):
    """Every pair of shards, exchanged or one put over the other."""
    for one, other in itertools.permutations(epoch.shards, 2):
        swapped = {**epoch.files, one: epoch.files[other], other: epoch.files[one]}
        for files in (swapped, with_file(epoch, one, epoch.files[other])):
            assert epoch.outcome(files) is VerificationStatus.DAMAGED, (one, other)
            assert epoch.check_reads(files) > 0


def test_a_shard_of_another_epoch_is_damage(epoch):
    """The same name, layout, position and length with other content, valid in itself, is not this epoch's."""
    other = Epoch(1000.0)
    assert other.outcome(other.files) is VerificationStatus.VERIFIED
    for path in epoch.files:
        files = with_file(epoch, path, other.files[path])
        assert epoch.outcome(files) is VerificationStatus.DAMAGED, path
        if path != epoch.manifest:
            assert epoch.check_reads(files) > 0
