"""What the models have found in our own code, each kept as the state in which it showed."""

from __future__ import annotations

from torchrelay.checkpoint.local_storage import LocalStorage


def test_a_temporary_file_that_a_crash_left_in_a_try_stops_no_deletion(tmp_path):
    """Killed while `stats.json` was replaced: its private file is no reason to keep the try's directory."""
    storage = LocalStorage(tmp_path)
    storage.mkdir("data/e00000001-0123456789ab")
    (tmp_path / "data/e00000001-0123456789ab/.tmp-1f").write_bytes(b"{")
    storage.delete("data/e00000001-0123456789ab")
    assert storage.list("data") == []
