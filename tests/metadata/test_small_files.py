"""Small files of a run are written whole, or the writer says so: never half, never for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrelay.errors import StorageError
from torchrelay.metadata.fs import append_lines, read_json, read_lines, write_json


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes a byte at a time gets every line and every file whole."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:1]))
    append_lines(tmp_path / "lines", {"a": 1})
    write_json(tmp_path / "file", {"b": [2, 3]})
    assert list(read_lines(tmp_path / "lines")) == [{"a": 1}]
    assert read_json(tmp_path / "file") == {"b": [2, 3]}


@pytest.mark.parametrize("durable", [True, False])
def test_content_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """A power cut leaves the old file or the new one: on xfs a rename does not wait for content."""
    synced: list[Path] = []
    real, path = os.fsync, tmp_path / "file"

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        assert path.exists() == (synced[-1] == tmp_path), "the directory is synced behind the rename, alone"
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_json(path, {"b": 1}, durable=durable)
    assert [one.parent for one in synced] == [tmp_path, *([tmp_path.parent] if durable else [])]


def test_writes_of_nothing_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes nothing, again and again, names the file in an error; no other file is left."""
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    with pytest.raises(
        StorageError, match=f"cannot write {tmp_path}/file: the system wrote nothing twice in a row"
    ):
        write_json(tmp_path / "file", {})
    with pytest.raises(StorageError, match=f"cannot append to {tmp_path}/lines"):
        append_lines(tmp_path / "lines", {})
    assert os.listdir(tmp_path) == ["lines"]
