"""What the models have found in our own code, each kept as the state in which it showed."""

from __future__ import annotations

from stories import still
from weak_disk import WeakDisk

from torchrelay.checkpoint.format.position import Key, Position
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.writer import LogWriter, append_as_guest, pin_draft, tag_draft, unpin_draft
from torchrelay.checkpoint.storage.local import LocalStorage

from rivals import entry  # isort: skip

FIRST = Key(0, Position(0))


def test_a_temporary_file_that_a_crash_left_in_a_try_stops_no_deletion(tmp_path):
    """Killed while `stats.json` was replaced: its private file is no reason to keep the try's directory."""
    storage = LocalStorage(tmp_path)
    storage.mkdir("data/e00000001-0123456789ab")
    (tmp_path / "data/e00000001-0123456789ab/.tmp-1f").write_bytes(b"{")
    storage.delete("data/e00000001-0123456789ab")
    assert storage.list("data") == []


def test_guests_that_pass_a_multiple_of_256_do_not_fence_the_writer():
    """A reader pins and unpins across slot 256 between two commits; nobody has taken over, so all goes on."""
    disk = WeakDisk()
    with still():
        writer = LogWriter.take(disk, "job", patience_secs=0.0)
        writer.commit(entry(0, 1))
        while writer.view.slot < 253:
            writer.append_draft(tag_draft("best", FIRST if writer.view.slot % 2 else None))
        append_as_guest(disk, pin_draft("reader", FIRST), "job")
        append_as_guest(disk, unpin_draft("reader"), "job")
        append_as_guest(disk, pin_draft("reader", FIRST), "job")
        assert writer.commit(entry(1, 1)).slot == 257
        writer.close()
    assert open_log(disk).notices == ()


def test_a_guest_behind_a_fresh_slot_255_does_not_make_its_writer_take_it_back():
    """Between a creation and its check a guest stands on it with slot 256: then it is part of the log."""
    disk = WeakDisk()
    with still():
        writer = LogWriter.take(disk, "job", patience_secs=0.0)
        writer.commit(entry(0, 1))
        while writer.view.slot < 254:
            writer.append_draft(tag_draft("best", FIRST if writer.view.slot % 2 else None))

        def tag_at_once(verb, path):
            if verb == "link" and path.endswith("0255.json"):
                append_as_guest(disk, tag_draft("last", FIRST), "job")

        disk.observe = tag_at_once
        assert writer.commit(entry(1, 1)).slot == 255
        writer.close()
    assert open_log(disk).slot == 256 and open_log(disk).notices == ()
