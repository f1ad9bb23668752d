"""Finding the end of a log without listing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_helpers import MemoryStorage, entry, sweep, take

from torchrelay.checkpoint.log import writer as log_writer
from torchrelay.checkpoint.log.chain import HINT, open_log
from torchrelay.checkpoint.log.lease import WriterIdentity
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.view import chain_end, find_tail
from torchrelay.errors import FencedError


def thinned(newest):
    kept = set(range(max(0, newest - 255), newest + 1)) | set(range(0, newest + 1, 256))
    return kept.__contains__


@settings(deadline=None, max_examples=200)
@given(newest=st.integers(0, 70_000), hint=st.none() | st.integers(0, 70_000))
def test_the_tail_is_found_whatever_the_hint(newest, hint):
    """In a thinned log of any length the newest slot is found, with a right, wrong, old or no hint."""
    assert find_tail(thinned(newest), hint) == newest


def test_few_questions():
    """A million slots take less than 350 questions without a hint, and six with a right one."""
    asked = []

    def exists(slot):
        asked.append(slot)
        return thinned(1_000_000)(slot)

    assert find_tail(exists) == 1_000_000
    assert len(asked) < 350
    asked.clear()
    assert find_tail(exists, 1_000_000) == 1_000_000
    assert len(asked) <= 8


def test_an_empty_log_has_no_tail():
    """No slot, no tail."""
    assert find_tail(lambda slot: False) is None


@pytest.mark.parametrize("missing", [0, 1, 5, 9])
def test_a_hole_is_not_taken_for_the_end(missing):
    """A missing slot below existing ones is a lost record, which newer ones do not need."""
    assert find_tail(lambda slot: slot != missing and slot <= 10) == 10


def test_a_slot_that_is_filled_meanwhile_is_no_hole():
    """A writer who appends two records while we look does not look like damage."""
    slots = {0, 1}

    def exists(slot):
        if slot == 3:
            slots.update({2, 3})
        return slot in slots

    assert find_tail(exists) == 3


@pytest.mark.parametrize(("slot", "end"), [(0, 0), (1, 0), (255, 0), (256, 0), (257, 256), (600, 512)])
def test_the_chain_ends_at_a_kept_slot(slot, end):
    """The chain of predecessors goes down to the last multiple of 256 below the slot."""
    assert chain_end(slot) == end


@pytest.mark.parametrize(
    "hint", [b"", b"x" * 4096, b"9" * 21 + b"\n", b"-3\n", b"7", b"\xff\x00", b"99999\n", b"256\n"]
)
def test_garbage_in_the_hint_is_ignored(hint):
    """The hint proves nothing: whatever it says, the same log is read."""
    storage = MemoryStorage()
    writer = take(storage)
    for epoch in range(5):
        writer.commit(entry(epoch))
    writer.close()
    storage.files[HINT] = hint
    assert open_log(storage).epochs() == (0, 1, 2, 3, 4)


def test_a_log_of_1000_slots_with_base_files_and_thinning_is_found_and_proved():
    """Pinned: 1,000 slots, more than 64 live entries, old slots gone: found, proved, complete."""
    storage = MemoryStorage()
    writer = take(storage)
    policy = Keeping(3, 5)
    epoch = 0
    while writer.view.slot < 999:
        writer.commit(entry(epoch, nonce=f"{epoch:06x}"))
        epoch += 1
        if epoch % 4 == 0:
            sweep(writer, policy)
    expected = writer.view
    writer.close()
    assert len(expected.entries) > 128
    slots = {int(name[:20]) for name in storage.list("log") if name[:20].isdigit()}
    assert slots == set(range(744, 1000)) | {0, 256, 512}
    bases = [name for name in storage.list("log") if name.startswith("base-")]
    assert 1 <= len(bases) <= 256 // 32 + 4
    del storage.files[HINT]
    storage.reads.clear()
    found = open_log(storage, "job")
    assert (found.state, found.slot, found.notices) == (expected.state, 999, ())
    assert {slot_path(slot) for slot in range(768, 1000)} <= set(storage.reads)
    again = take(storage)
    again.commit(entry(epoch, nonce="aaaaaa"))
    assert open_log(storage).newest() == entry(epoch, nonce="aaaaaa")


class Busy(MemoryStorage):
    """Calls `meanwhile` once, just before a certain path is read or created."""

    path, meanwhile = "", None

    def _now(self, path):
        if path == self.path and self.meanwhile is not None:
            work, self.meanwhile = self.meanwhile, None
            work()

    def read_range(self, path, offset, length):
        self._now(path)
        return super().read_range(path, offset, length)

    def link_exclusive(self, path, data):
        self._now(path)
        super().link_exclusive(path, data)


def busy(storage, path, meanwhile):
    other = Busy(storage.url, storage.files, storage.durable)
    other.path, other.meanwhile = path, meanwhile
    return other


def grow(writer, count):
    for _ in range(count):
        epoch = writer.view.newest().position.epoch + 1 if writer.view.newest() else 0
        writer.commit(entry(epoch, nonce=f"{epoch:06x}"))
        sweep(writer, Keeping(2))


def test_a_log_that_is_thinned_while_it_is_read_is_read_again():
    """A reader that finds slots gone because the writer went on looks for the new tail, without a notice."""
    storage = MemoryStorage()
    writer = take(storage)
    grow(writer, 20)
    view = open_log(busy(storage, slot_path(5), lambda: grow(writer, 200)))
    assert view == writer.view
    assert view.notices == ()


def test_a_slot_that_is_thinned_just_before_it_is_created_again_is_given_up():
    """A writer that is overtaken between its look and its creation is fenced and leaves no file behind."""
    storage = MemoryStorage()
    path = slot_path(2)

    def another_job():
        other = replace(WriterIdentity.here("job"), host="gpu09", boot_id="another")
        log_writer._LIVE.pop(old.nonce)
        grow(take(storage, identity=other), 200)
        assert path not in storage.files

    slow = busy(storage, path, another_job)
    old = take(slow)
    grow(old, 1)
    with pytest.raises(FencedError, match="gpu09"):
        old.commit(entry(1))
    assert slow.meanwhile is None
    assert path not in storage.files
    assert open_log(storage).epochs()[-1] == 200
