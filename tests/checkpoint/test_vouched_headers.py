"""Headers that another process of the same proof has checked: the same entries, and never other bytes."""

from __future__ import annotations

import gc
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from epochs import Writing, parameter
from meshes import Saved, random_mesh, random_shape
from paired_sessions import Meeting, PairedPeers
from ranks import on_ranks

from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Sharded
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header
from torchrelay.checkpoint.load.verify import (
    Holder,
    JointResult,
    ShardSet,
    VerificationStatus,
    holders_of,
    verify_epoch,
    verify_together,
)
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import DamagedError


def expectation(shards: ShardSet, holder: Holder) -> ShardExpectation:
    """What the manifest says of a holder's only file."""
    (row,) = shards.manifest.files[holder]
    return ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)


@pytest.fixture
def committed(tmp_path: Path) -> tuple[Path, Any]:
    """An epoch of four nodes that hold ranges of elements, with names that need escapes beside plain ones."""
    leaves = [parameter(name, torch.rand(4, 600_000)) for name in ("model.weight", "model.öl@[0:1]%")]
    leaves += [parameter(f"model.small{number}", torch.rand(3, number)) for number in range(1, 9)]
    with Writing(tmp_path) as run:
        return tmp_path, run.save(1, leaves, nodes=4)


def joint(epoch: tuple[Path, Any], ranks: int) -> list[JointResult]:
    """What so many ranks prove together."""
    meeting = Meeting(ranks)

    def work(rank: int) -> Any:
        return verify_together(
            PairedPeers(rank, ranks, meeting), LocalStorage(epoch[0]), epoch[1], host="one"
        )

    return on_ranks(ranks, work)


def compared(storage: Any, shards: ShardSet) -> tuple[int, int]:
    """How many keys of all files, and how many odd ones, say the same vouched for and looked at whole."""
    count = odd = 0
    for holder in holders_of(shards.manifest, range(len(shards.manifest.leaves))):
        (known,) = shards.open(holder).headers
        for seed in range(4):
            found = read_header(storage, known.path, expectation(shards, holder), vouched=True)
            keys = random.Random(seed).sample(list(known.entries), len(known.entries))
            if seed % 2:
                assert list(found.entries.forms(keys)) == list(known.entries.forms(keys))
            assert [found.entries.form(key) for key in keys] == [known.entries.form(key) for key in keys]
            assert [found.entries[key] for key in keys] == [known.entries[key] for key in keys]
            assert list(found.entries) == list(known.entries) and found.aliases == known.aliases
            count, odd = count + len(keys), odd + sum("@" in key or "%" in key for key in keys)
    return count, odd


def test_entries_are_the_same_in_whatever_order_they_are_asked_for(committed: tuple[Path, Any]) -> None:
    """A header that is vouched for says of every key what one says that was looked at whole."""
    storage = LocalStorage(committed[0])
    count, odd = compared(storage, verify_epoch(storage, committed[1]).check()[1])
    assert count > odd > 0


@pytest.mark.parametrize("seed", range(30))
def test_boxes_are_the_same(seed: int) -> None:
    """The same of leaves that lie in boxes, on meshes of all kinds."""
    rng = random.Random(seed)
    shapes = [random_shape(rng) for _ in range(6)]
    wholes = {f"m{number}": torch.rand(shape) for number, shape in enumerate(shapes)}
    meshes = {name: random_mesh(rng, whole.shape) for name, whole in wholes.items()}
    saved = Saved(wholes, meshes, 1 + max(node for mesh in meshes.values() for node in mesh.nodes))
    reader = saved.run()
    count, _ = compared(saved.storage, reader.shards)
    assert count > 0


def test_ranks_check_each_file_once(committed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks prove four files and then open all of them: each file's content is checked by one rank."""
    checked: list[Holder] = []
    real = ShardSet._check_content

    def noted(self: ShardSet, holder: Holder, found: Any) -> None:
        checked.append(holder)
        real(self, holder, found)

    monkeypatch.setattr(ShardSet, "_check_content", noted)
    for proof in joint(committed, 4):
        assert proof.outcome is VerificationStatus.VERIFIED and proof.manifest and proof.shards
        for holder in holders_of(proof.manifest, range(len(proof.manifest.leaves))):
            proof.shards.open(holder)
    assert len(checked) == len(set(checked)) == 4


def test_a_changed_header_is_found_all_the_same(committed: tuple[Path, Any]) -> None:
    """After the proof a bit of a header flips: whoever opens the file then says so, vouched for or not."""
    proofs = joint(committed, 4)
    path = sorted(committed[0].rglob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    content[content.index(b"F32")] ^= 1
    path.write_bytes(content)
    holder = next(
        one
        for one in holders_of(proofs[0].manifest, range(len(proofs[0].manifest.leaves)))
        if proofs[0].manifest.world.names[one[1]] in path.name
    )
    refused = 0
    for proof in proofs:
        try:
            proof.shards.open(holder)
        except DamagedError as error:
            refused += "not the one that was committed" in str(error)
    assert refused == 3  # the fourth had opened it for the proof


def test_what_no_share_holds_is_checked(committed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody vouches for files outside of the proof."""
    checked: list[Holder] = []
    proof = joint(committed, 2)[0]
    proof.shards.vouch(frozenset())
    proof.shards.forget()
    monkeypatch.setattr(ShardSet, "_check_content", lambda self, holder, found: checked.append(holder))
    for holder in holders_of(proof.manifest, range(len(proof.manifest.leaves))):
        proof.shards.open(holder)
    assert len(checked) == 4


def test_sizes_alone_vouch_for_nothing(committed: tuple[Path, Any]) -> None:
    """A proof that looked at sizes alone names nobody whose header was opened."""
    assert verify_epoch(LocalStorage(committed[0]), committed[1], level="sizes").holders == frozenset()
    assert len(verify_epoch(LocalStorage(committed[0]), committed[1]).holders) == 4


def test_a_vouched_header_takes_no_more_memory(tmp_path: Path) -> None:
    """Thousands of boxes: what is kept to look at them later is about what they are once looked at."""
    wholes = {f"m{number:04}": torch.rand(2, 2) for number in range(3000)}
    meshes = {name: Mesh((0, 1), (2,), (Sharded(0),)) for name in wholes}
    saved = Saved(wholes, meshes, 2)
    shards = saved.run().shards
    holder = next(holders_of(shards.manifest, range(len(shards.manifest.leaves))))
    expected = expectation(shards, holder)
    (known,) = shards.open(holder).headers
    held = []
    for vouched in (False, True):
        tracemalloc.start()
        try:
            header = read_header(saved.storage, known.path, expected, vouched=vouched)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert len(header.entries) == 3000
    assert held[1] <= 1.25 * held[0]
