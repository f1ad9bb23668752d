"""Damaged logs: what is used instead, what is refused, and that it is said."""

from __future__ import annotations

import pytest
from log_helpers import MemoryStorage, entry, run_of, sweep, take

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.position import Key, Position
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import decode, encode, slot_path
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.writer import append_as_guest, tag_draft
from torchrelay.errors import DamagedError, FormatError, StorageError


def held(epochs=3):
    storage = MemoryStorage()
    writer = take(storage)
    for epoch in range(epochs):
        writer.commit(entry(epoch))
    writer.close()
    return storage


def damaged(storage, slot):
    data = bytearray(storage.files[slot_path(slot)])
    data[len(data) // 2] ^= 1
    storage.files[slot_path(slot)] = bytes(data)
    return storage


def test_every_bit_flip_of_the_newest_record_steps_back_and_says_so():
    """Whatever bit of the newest record flips, the record before it is used, with a notice."""
    storage = held(2)
    data = storage.files[slot_path(2)]
    for index in range(len(data)):
        broken = bytearray(data)
        broken[index] ^= 1 << (index % 8)
        storage.files[slot_path(2)] = bytes(broken)
        view = open_log(storage)
        assert view.newest() == entry(0)
        assert slot_path(2) in view.notices[0]
        assert slot_path(1) in view.notices[0]


def test_every_truncation_of_the_newest_record_steps_back_and_says_so():
    """Cut at any length, the newest record is not believed and the one before it is used."""
    storage = held(2)
    data = storage.files[slot_path(2)]
    for length in range(len(data)):
        storage.files[slot_path(2)] = data[:length]
        view = open_log(storage)
        assert view.newest() == entry(0)
        assert len(view.notices) == 1


def test_several_damaged_records_are_stepped_over():
    """Not one but as many records as needed are stepped back, each is named."""
    view = open_log(damaged(damaged(held(4), 4), 3))
    assert view.newest() == entry(1)
    assert len(view.notices) == 2


def test_a_log_without_a_valid_record_is_an_error():
    """When no record can be trusted nothing is guessed."""
    storage = damaged(held(0), 0)
    with pytest.raises(DamagedError, match="no record that can be trusted"):
        open_log(storage)
    with pytest.raises(DamagedError):
        take(storage)


def test_a_writer_goes_on_behind_a_damaged_record():
    """The damaged slot stays as it is; the next record carries the hash of its bytes, the chain holds."""
    storage = damaged(held(3), 3)
    bytes_as_they_are = storage.files[slot_path(3)]
    writer = take(storage)
    assert writer.generation == 4
    writer.commit(entry(2, nonce="abcdef"))
    record = decode(storage.files[slot_path(4)], slot=4, job=writer.view.job_uuid)
    assert record.previous_sha256 == sha256(bytes_as_they_are)
    assert storage.files[slot_path(3)] == bytes_as_they_are
    view = open_log(storage)
    assert view.newest().attempt_name.endswith("abcdef")
    assert any(slot_path(3) in notice for notice in view.notices)


def test_no_orphan_is_deleted_while_damage_hides_commits():
    """A try whose commit record is damaged looks like an orphan and is kept."""
    storage = held(3)
    for epoch in range(3):
        storage.files[f"data/{entry(epoch).attempt_name}/manifest.json"] = b"{}"
    writer = take(damaged(storage, 3))
    assert sweep(writer, Keeping(5))[2] == ()
    assert f"data/{entry(2).attempt_name}/manifest.json" in storage.files


def test_a_record_damaged_later_is_noticed_below_the_tail():
    """An older record that was damaged after its successor was written is reported; the tail serves."""
    view = open_log(damaged(held(4), 2))
    assert view.epochs() == (0, 1, 2, 3)
    assert any(slot_path(2) in notice for notice in view.notices)


def test_a_broken_chain_of_intact_records_is_an_error():
    """Intact records that do not follow each other are a mixture of two histories: refused by both sides."""
    storage = held(4)
    uuid = open_log(storage).job_uuid
    record = decode(storage.files[slot_path(2)], slot=2, job=uuid)
    storage.files[slot_path(2)] = encode(type(record)(**{**vars(record), "nonce": "0000000000000000"}))
    for use in (open_log, take):
        with pytest.raises(DamagedError, match="two histories"):
            use(storage)


def test_a_missing_record_is_noticed():
    """A record that is gone below the tail is reported, wherever the hint leads, and hinders no writer."""
    storage = held(6)
    del storage.files[slot_path(2)]
    view = open_log(storage)
    assert view.epochs() == (0, 1, 2, 3, 4, 5)
    assert any("missing" in notice for notice in view.notices)
    for hint in (None, b"1\n"):
        storage.files.pop("log/HINT", None)
        storage.files |= {} if hint is None else {"log/HINT": hint}
        assert open_log(storage) == view
    writer = take(storage)
    writer.commit(entry(6))
    assert not writer.view.certain and open_log(storage).epochs() == (0, 1, 2, 3, 4, 5, 6)


def test_a_record_of_another_directory_is_not_believed():
    """A record copied from another job's log is damage, whatever it says."""
    storage, other = held(2), held(2)
    storage.files[slot_path(2)] = other.files[slot_path(2)]
    view = open_log(storage)
    assert view.newest() == entry(0)
    assert "another job" in view.notices[0]


def test_a_record_of_a_newer_version_is_not_stepped_over():
    """What a newer version wrote is an error that says so: stepping back would undo it."""
    storage = held(2)
    uuid = open_log(storage).job_uuid
    record = decode(storage.files[slot_path(2)], slot=2, job=uuid)
    storage.files[slot_path(2)] = encode(type(record)(**{**vars(record), "kind": "merge"}))
    for use in (open_log, take):
        with pytest.raises(FormatError, match="merge"):
            use(storage)


@pytest.mark.parametrize("harm", [lambda data: data[:-1], lambda data: data.replace(b"e0", b"e1", 1), None])
@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_base_file_is_made_again_or_an_error(harm, known):
    """Base files are proved by size and SHA-256: made again where records tell, else refused."""
    storage = held(0)
    writer = take(storage)
    for epoch in range(80):
        writer.commit(entry(epoch))
    writer.close()
    (base,) = [name for name in storage.files if "base-" in name]
    whole = storage.files[base]
    if harm is None:
        del storage.files[base]
    else:
        storage.files[base] = harm(whole)
    if not known:  # and no manifest either
        for slot in range(80):
            damaged(storage, slot)
        with pytest.raises(DamagedError, match="base-"):
            open_log(storage)
        return
    view = open_log(storage)
    assert view.epochs() == tuple(range(80)) and base in view.notices[0] and storage.files.get(base) != whole
    take(storage).close()
    assert storage.files[base] == whole and not open_log(storage).notices


def test_a_guest_does_not_write_behind_damage():
    """Guests leave a damaged log to its writer."""
    with pytest.raises(DamagedError, match="start the job"):
        append_as_guest(damaged(run_of(range(3)), 4), tag_draft("x", Key(0, Position(0))))


class OneBadRead(MemoryStorage):
    """From `bad` nothing is read, as long as it is set."""

    bad = ""

    def read_range(self, path, offset, length):
        if path == self.bad:
            raise StorageError(f"{path}: input/output error")
        return super().read_range(path, offset, length)


@pytest.mark.parametrize("how", ["an error", "damage"])
def test_thinning_keeps_a_base_file_beside_a_record_that_cannot_be_read(how):
    """Whether that record refers to the base file is not known then, and newer ones may, too."""
    storage = OneBadRead()
    writer = take(storage)
    for epoch in range(70):
        writer.commit(entry(epoch))
    while writer.view.slot < 71 + 256:  # other jobs look at an epoch, say: the base file stays what it is
        writer.append_draft(tag_draft("seen", Key(0, Position(writer.view.slot % 2))))
    (base,) = [name for name in storage.files if "/base-" in name]
    thinned_next = writer.view.slot + 1 - 256
    assert base.encode().rpartition(b"/")[2] in storage.files[slot_path(thinned_next)]
    if how == "an error":
        storage.bad = slot_path(thinned_next + 1)
    else:
        storage.files[slot_path(thinned_next + 1)] = b"{}"
    writer.append_draft(tag_draft("seen", Key(0, Position(5))))
    storage.bad = ""
    assert slot_path(thinned_next) not in storage.files, "it was thinned"
    assert base in storage.files
    assert len(open_log(storage, "job").entries) == 70


def test_half_an_answer_is_no_damage():
    """A record of which a store gave half once is read again: what comes next stands on all of it."""
    storage = held()
    whole, halved = storage.read_range, set()

    def half_once(path, offset, length):
        data = whole(path, offset, length)
        if not path.endswith(".json") or path in halved:
            return data
        halved.add(path)
        return data[: len(data) // 2]

    storage.read_range = half_once
    take(storage).close()
    assert slot_path(3) in halved
    storage.read_range = whole
    assert open_log(storage).notices == ()
