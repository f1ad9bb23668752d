"""Ranges of local files come whole, however little the system gives at a time."""

from __future__ import annotations

import os

from torchrelay.checkpoint.storage.local import LocalStorage


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """A range comes whole where the system gives a few bytes at a time; fewer only at the end of the file."""
    (tmp_path / "file").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda descriptor, length, offset: pread(descriptor, min(length, 7), offset)
    )
    storage = LocalStorage(tmp_path)
    assert storage.read_range("file", 3, 50) == bytes(range(3, 53))
    assert storage.read_range("file", 90, 50) == bytes(range(90, 100))
    assert storage.read_range("file", 100, 5) == storage.read_range("file", 200, 5) == b""
