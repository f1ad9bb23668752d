"""What the local storage promises when directories are new, or gone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import StorageError


def test_names_above_a_new_root_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a log has synced every directory that leads to it: a power cut takes none of them."""
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd))[1]
    )
    LogWriter.take(LocalStorage(tmp_path / "runs" / "one" / "checkpoints"), "job").release()
    for directory in (tmp_path, tmp_path / "runs", tmp_path / "runs" / "one"):
        assert str(directory) in synced


def test_a_sync_above_the_root_that_is_refused_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a directory that may not be opened is passed over: one that is not synced is an error."""
    root, real = tmp_path / "root", os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        real(descriptor)

    root.mkdir()
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        LocalStorage(root).sync_dir("")


def test_a_directory_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    """A verb that meets a directory that is gone says so as StorageError, not as an error of presence."""
    storage = LocalStorage(tmp_path / "gone")
    for verb in (
        lambda: storage.open_exclusive("file"),
        lambda: storage.link_exclusive("file", b""),
        lambda: storage.replace("file", b""),
        lambda: storage.sync_dir(""),
    ):
        with pytest.raises(StorageError, match="gone"):
            verb()


def test_a_writer_whose_directory_is_gone_fails_with_a_storage_error(tmp_path: Path) -> None:
    """Releasing a log whose directory was removed raises what callers handle, and closes all the same."""
    writer = LogWriter.take(LocalStorage(tmp_path / "log"), "job")
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(StorageError):
        writer.release()
    assert not writer._beat._thread.is_alive()


def test_a_refused_mode_leaks_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses the file's mode the descriptor is closed again."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "not here")

    storage = LocalStorage(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fchmod", refuse)
    for name in ("a", "b", "c"):
        with pytest.raises(StorageError):
            storage.open_exclusive(name)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_temporary_files_of_a_killed_writer_keep_no_directory(tmp_path: Path) -> None:
    """A try in which a writer was killed while it replaced a file goes whole; one with other files stays."""
    storage = LocalStorage(tmp_path)
    storage.mkdir("data/try")
    (tmp_path / "data/try/.tmp-0123456789abcdef").write_bytes(b"{")
    (tmp_path / "data/try/kept").write_bytes(b"")
    with pytest.raises(StorageError, match="not empty"):
        storage.delete("data/try")
    assert len(list((tmp_path / "data/try").iterdir())) == 2
    storage.delete("data/try/kept")
    assert storage.list("data/try") == []
    storage.delete("data/try")
    assert storage.list("data") == []


def test_a_failed_close_of_a_read_file_is_named_and_closes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close that fails, as on a network file system, is a StorageError; nothing is closed twice."""
    (tmp_path / "file").write_bytes(b"x")
    before = set(os.listdir("/proc/self/fd"))
    handle = LocalStorage(tmp_path).open_read("file")
    real = os.close

    def close(descriptor: int) -> None:
        real(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(StorageError, match=f"cannot close {tmp_path}/file: Input/output error"):
        handle.close()
    monkeypatch.undo()
    handle.close()
    assert set(os.listdir("/proc/self/fd")) <= before
