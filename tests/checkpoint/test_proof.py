"""Proof of epochs: what counts as proved, damaged, unknown."""

from __future__ import annotations

import pytest
import torch
from epochs import Writing, buffer, moment, parameter, value

from torchrelay.checkpoint.load.verify import ShardSet, Share, VerificationStatus, verify_epoch
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import StorageError

LEAVES = [
    parameter("model.weight", torch.arange(600_000.0)),
    parameter("model.bias", torch.ones(7)),
    buffer("model.count", torch.tensor(3)),
    moment("optim.moment", torch.full((600_000,), 2.0)),
    value("total", 100),
    value("mine", "own"),
    value("text", "x" * 70_000),
]
SCOPES = {"mine": "rank"}


@pytest.fixture
def epoch(tmp_path):
    with Writing(tmp_path) as run:
        entry = run.save(1, LEAVES, 2, scopes=SCOPES)
    return LocalStorage(tmp_path), entry, tmp_path / "data" / entry.attempt_name


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("level", ["sizes", "headers", "full"])
def test_a_whole_epoch_is_proved_at_every_level(epoch, level):
    """What was committed and not touched since is proved."""
    storage, entry, _ = epoch
    proof = verify_epoch(storage, entry, level=level)
    assert (proof.outcome, proof.reason) == (VerificationStatus.VERIFIED, "")
    assert proof.manifest.position == entry.position


def test_a_flipped_bit_is_found_in_manifest_header_and_block(epoch):
    """Every kind of file is covered: any changed byte is damage at the level that reads it."""
    storage, entry, directory = epoch
    for name, offset, level in [
        ("manifest.json", 50, "headers"),
        ("trainer_1.1.main.safetensors", 20, "headers"),
        ("trainer_1.1.main.safetensors", 5000, "full"),
        ("trainer_0.1.optim.safetensors", -1, "full"),
    ]:
        flip(directory / name, offset)
        proof = verify_epoch(storage, entry, level=level)
        assert proof.outcome is VerificationStatus.DAMAGED
        assert name in proof.reason
        flip(directory / name, offset)
    assert verify_epoch(storage, entry, level="full").verified


@pytest.mark.parametrize(
    "name", ["manifest.json", "trainer_0.1.main.safetensors", "trainer_1.1.optim.safetensors"]
)
@pytest.mark.parametrize("level", ["sizes", "full"])
def test_a_missing_or_shortened_file_is_damage(epoch, name, level):
    """Presence and size are looked at at every level; the reason names the file."""
    storage, entry, directory = epoch
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[:-1])
    assert verify_epoch(storage, entry, level=level).outcome is VerificationStatus.DAMAGED
    (directory / name).unlink()
    proof = verify_epoch(storage, entry, level=level)
    assert proof.outcome is VerificationStatus.DAMAGED
    assert name in proof.reason
    assert "missing" in proof.reason


def test_shards_that_are_swapped_are_damage(epoch):
    """A shard of the right form in the wrong place is told by its header's digest."""
    storage, entry, directory = epoch
    one, other = directory / "trainer_0.1.optim.safetensors", directory / "trainer_1.1.optim.safetensors"
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    assert verify_epoch(storage, entry).outcome is VerificationStatus.DAMAGED


def test_only_what_is_wanted_is_proved(epoch):
    """A damaged optimizer does not keep an evaluation from the model."""
    storage, entry, directory = epoch
    (directory / "trainer_0.1.optim.safetensors").unlink()
    assert verify_epoch(storage, entry, want=["model.weight", "total", "nothing"]).verified
    assert verify_epoch(storage, entry).outcome is VerificationStatus.DAMAGED


def test_the_work_is_shared_without_a_gap(epoch):
    """Shares together look at every shard: damage in any file is seen by exactly one of them."""
    storage, entry, directory = epoch
    for path in directory.glob("*.safetensors"):
        flip(path, 30)
        outcomes = [verify_epoch(storage, entry, share=Share(rank, 3)).outcome for rank in range(3)]
        assert sorted(o.value for o in outcomes) == ["damaged", "proved", "proved"]
        flip(path, 30)


class Flaky(LocalStorage):
    """Fails the first `faults` reads whose path contains `part`, in a way."""

    def __init__(self, root, part, faults, kind):
        super().__init__(root)
        self.part, self.faults, self.kind, self.fired = part, faults, kind, 0

    def read_range(self, path, offset, length):
        data = super().read_range(path, offset, length)
        if self.part in path and self.fired < self.faults:
            self.fired += 1
            if self.kind == "io":
                raise StorageError(f"cannot read {path}: Input/output error")
            return bytes([data[0] ^ 1]) + data[1:]
        return data


@pytest.mark.parametrize("part", ["manifest.json", "trainer_1.1.main"])
@pytest.mark.parametrize("kind", ["io", "flip"])
def test_a_fault_that_is_gone_at_the_second_look_is_no_damage(epoch, part, kind):
    """A mismatch or an I/O error must be seen twice; then it is damage, or unknown."""
    storage, entry, _ = epoch
    once = Flaky(storage.root, part, 1, kind)
    assert verify_epoch(once, entry).verified
    assert once.fired == 1
    twice = Flaky(storage.root, part, 2, kind)
    assert verify_epoch(twice, entry).outcome is (
        VerificationStatus.UNKNOWN if kind == "io" else VerificationStatus.DAMAGED
    )
    assert twice.fired == 2


def test_a_format_of_a_later_version_is_unknown_and_not_damage(tmp_path, monkeypatch):
    """What this version cannot read says nothing about the epoch."""
    from torchrelay.checkpoint.format import canonical_json

    with Writing(tmp_path) as run:
        monkeypatch.setattr(canonical_json, "MAJOR", 2)
        stamped = canonical_json.stamp()
        monkeypatch.setattr(canonical_json, "MAJOR", 1)
        monkeypatch.setattr(canonical_json, "stamp", lambda *features: stamped)
        entry = run.save(1, LEAVES[:2])
        monkeypatch.undo()
        proof = verify_epoch(run.storage, entry)
    assert proof.outcome is VerificationStatus.UNKNOWN
    assert "version" in proof.reason


def test_a_header_must_hold_exactly_what_the_manifest_puts_there(tmp_path):
    """A shard with a leaf too few, too many, or of another form is no shard of this manifest."""
    with Writing(tmp_path) as run:
        run.save(1, [parameter("model.a", torch.ones(3)), parameter("model.b", torch.ones(4))])
        for epoch, leaves in enumerate(
            (
                [parameter("model.a", torch.ones(3))],
                [parameter("model.a", torch.ones(3)), parameter("model.b", torch.ones(2, 2))],
                [parameter("model.a", torch.ones(3)), parameter("model.b", torch.ones(4).int())],
                [*(parameter(f"model.{n}", torch.ones(4 if n == "b" else 3)) for n in "abc")],
            ),
            2,
        ):
            run.save(epoch, leaves)
        good, *others = run.manifests.values()
        import dataclasses

        for other in others:
            mixed = dataclasses.replace(other, leaves=good.leaves, layouts=good.layouts, values=good.values)
            with pytest.raises(StorageError, match=r"model\.[abc]"):
                ShardSet(run.storage, mixed).open((0, 0, "main"))


def test_references_to_earlier_tries_are_written_and_proved(tmp_path):
    """An epoch may keep leaves in earlier tries; it is proved only while these are whole."""
    with Writing(tmp_path) as run:
        first = run.save(1, LEAVES, 2, scopes=SCOPES)
        kept = ["model.weight", "mine", "text"]
        second = run.save(
            2, [leaf for leaf in LEAVES if leaf.name not in kept], 3, scopes=SCOPES,
            referenced=(run.manifests[first.position], kept),
        )  # fmt: skip
        third = run.save(
            3,
            [LEAVES[1]],
            1,
            referenced=(run.manifests[second.position], ["model.weight", "model.count", "mine"]),
        )
    assert second.needs == (first.attempt_name,)
    assert set(third.needs) == {first.attempt_name, second.attempt_name}
    for entry in (second, third):
        assert verify_epoch(run.storage, entry, level="full").verified
    next((tmp_path / "data" / first.attempt_name).glob("trainer_1*main*")).unlink()
    assert verify_epoch(run.storage, third).outcome is VerificationStatus.DAMAGED
    assert verify_epoch(run.storage, third, want=["model.bias"]).verified
