"""Reads that threads share: how many take part, over several files, and what stays open."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_helpers import MemoryStorage
from page_cache import drop_from_cache, pages_in_cache, until_cold

from torchrelay.checkpoint.format.shard.reads import PLAIN, WAITING, Portion, ReadOptions, once, read_portions
from torchrelay.checkpoint.load.reads.shared_reads import threads_each
from torchrelay.checkpoint.load.verify import seen_twice
from torchrelay.checkpoint.storage.base import ReadHandle, open_for_reading
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.local_io import LocalReadHandle
from torchrelay.errors import DamagedError

PIECE = 3 << 20


class Counted(LocalStorage):
    """Counts how often each file was opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def open_read(self, path: str) -> ReadHandle:
        self.opened.append(path)
        return super().open_read(path)


def open_files(folder: Path) -> list[str]:
    """The files of a folder that this process has open."""
    held = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            held.append(str(link.readlink()))
    return [path for path in held if path.startswith(str(folder))]


@pytest.fixture
def storage(tmp_path: Path) -> Counted:
    """Three files of four pieces, each piece of its own bytes."""
    for number in range(3):
        content = b"".join(bytes([16 * number + piece]) * PIECE for piece in range(4))
        (tmp_path / str(number)).write_bytes(content)
    return Counted(tmp_path)


def portions_of(storage: LocalStorage, found: dict[tuple[str, int], bytes]) -> list[Portion]:
    """All pieces of the three files, noted where they are read."""

    def read(path: str, piece: int, handle: ReadHandle) -> None:
        data = bytearray(PIECE)
        assert handle.read_into(piece * PIECE, memoryview(data)) == PIECE
        found[path, piece] = bytes(data[:1]) + bytes(data[-1:])

    return [
        Portion(storage, str(number), piece * PIECE, PIECE, partial(read, str(number), piece))
        for number in range(3)
        for piece in range(4)
    ]


EXPECTED = {(str(n), piece): bytes([16 * n + piece]) * 2 for n in range(3) for piece in range(4)}


@given(st.integers(1, 300), st.integers(1, 300))
def test_all_processes_together_have_two_threads_for_a_core(processes: int, cores: int) -> None:
    """Never more than two for a core in all, unless that would leave a process without one; at most four."""
    each = threads_each(processes, cores)
    assert 1 <= each <= ReadOptions.threads
    assert each == 1 or each * processes <= 2 * cores
    assert each == ReadOptions.threads or (each + 1) * processes > 2 * cores


def test_what_is_in_memory_is_read_by_fewer_threads(tmp_path: Path) -> None:
    """Bytes in the page cache take the threads there are cores for; the device has two at least."""
    path, options = tmp_path / "a", ReadOptions(of_the_cores=1)
    path.write_bytes(os.urandom(4 << 20))
    with open_for_reading(LocalStorage(tmp_path), "a") as handle:
        assert options.threads_for(handle, 0, 4 << 20) == 1
        assert ReadOptions().threads_for(handle, 0, 4 << 20) == ReadOptions.threads
        assert ReadOptions(threads=1).threads_for(handle, 0, 4 << 20) == 1
        assert ReadOptions(threads=1, of_the_cores=2).threads_for(handle, 0, 4 << 20) == 1
        drop_from_cache(path)
        if any(pages_in_cache(path)):
            pytest.skip("this file system keeps its files in memory")
        assert until_cold(path, lambda: options.threads_for(handle, 0, 4 << 20) == WAITING)
        three = ReadOptions(of_the_cores=3)
        assert until_cold(path, lambda: three.threads_for(handle, 0, 4 << 20) == 3)


def test_requests_to_a_storage_are_not_counted_by_cores() -> None:
    """A handle that cannot say what is in memory is asked by as many threads as ever."""
    with open_for_reading(MemoryStorage(), "0") as handle:
        assert ReadOptions(of_the_cores=1).threads_for(handle, 0, 1) == ReadOptions.threads


@pytest.mark.parametrize("threads", [1, 4])
def test_files_are_read_as_one_list(storage: Counted, threads: int) -> None:
    """Every piece of every file once; a thread opens a file once, and none stays open."""
    found: dict[tuple[str, int], bytes] = {}
    options = replace(PLAIN, threads=threads, of_the_cores=threads)
    read_portions(iter(portions_of(storage, found)), 12 * PIECE, options)
    assert found == EXPECTED
    assert all(1 <= storage.opened.count(str(n)) <= threads for n in range(3))
    assert not open_files(storage.root)


def test_as_many_threads_as_are_asked_for(storage: Counted) -> None:
    """Where there is enough to read so many threads read at the same time: they meet before any goes on."""
    meeting = threading.Barrier(3)

    def read(handle: ReadHandle) -> None:
        meeting.wait(timeout=60)

    some = [Portion(storage, str(n), 0, PIECE, read) for n in range(3)]
    read_portions(some, 100 << 20, replace(PLAIN, threads=3, of_the_cores=3))
    assert not meeting.broken


def test_nothing_to_read_opens_nothing(storage: Counted) -> None:
    """No portions: no file is opened."""
    read_portions([], 0, PLAIN)
    assert storage.opened == []


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_ends_all_and_closes_everything(storage: Counted, threads: int) -> None:
    """What a portion raises is raised, later ones are not begun for long, and no file stays open."""
    found: dict[tuple[str, int], bytes] = {}
    portions = portions_of(storage, found)

    def fail(handle: ReadHandle) -> None:
        raise DamagedError("block 1 of x")

    portions[2] = replace(portions[2], read=fail)
    options = replace(PLAIN, threads=threads, of_the_cores=threads)
    with pytest.raises(DamagedError, match="block 1 of x"):
        read_portions(portions, 12 * PIECE, options, seen_twice)
    assert len(found) < len(EXPECTED) and not open_files(storage.root)


def test_a_second_look_is_at_the_file_of_that_name(storage: Counted, tmp_path: Path) -> None:
    """A portion that failed is read again from a file that is opened anew, as it may have been replaced."""
    looks: list[bytes] = []

    def read(handle: ReadHandle) -> None:
        data = bytearray(1)
        handle.read_into(0, memoryview(data))
        looks.append(bytes(data))
        if len(looks) == 1:
            (tmp_path / "new").write_bytes(b"n")
            (tmp_path / "new").rename(tmp_path / "0")
            raise DamagedError("block 0 of x")

    read_portions([Portion(storage, "0", 0, 1, read)], 1, PLAIN, seen_twice)
    assert looks == [b"\x00", b"n"]
    looks.clear()
    with pytest.raises(DamagedError):
        read_portions([Portion(storage, "0", 0, 1, read)], 1, PLAIN, once)


def test_a_file_that_is_missing_is_damage_where_a_second_look_says_so(storage: Counted) -> None:
    """Also the first of all files, which is opened before anything is read."""
    gone = Portion(storage, "gone", 0, 1, lambda handle: None)
    with pytest.raises(DamagedError, match="gone is missing"):
        read_portions([gone], 1, ReadOptions(of_the_cores=1), seen_twice)


def test_an_error_of_closing_is_none_of_reading(storage: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read and verified stays so where a file does not close well; all are closed."""
    found: dict[tuple[str, int], bytes] = {}
    failed: list[str] = []
    real = LocalReadHandle.close

    def close(self: LocalReadHandle) -> None:
        real(self)
        failed.append(self.path)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LocalReadHandle, "close", close)
    read_portions(portions_of(storage, found), 12 * PIECE, PLAIN, seen_twice)
    assert found == EXPECTED and len(failed) == len(storage.opened) and not open_files(storage.root)
