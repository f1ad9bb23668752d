"""Very many small tensors are fetched while they are looked at: a hint that changes no byte and no error."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from torchrelay import load_into, save_blobs
from torchrelay.checkpoint.files.blob_reader import open_blob_file
from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.shard import batched_reads
from torchrelay.checkpoint.format.shard.batched_reads import fetched_ahead, worth_fetching
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.local_io import LocalReadHandle

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no hints")
COUNT, WAIT_SECS = 40, 60
SIZES = [(number * 7919) % 50_000 + 1 for number in range(COUNT)]


@pytest.fixture
def file(tmp_path):
    """A blob file of 40 tensors, and what to load them into."""
    blobs = {f"t{number}": torch.full((size,), float(number)) for number, size in enumerate(SIZES)}
    save_blobs(tmp_path / "file", blobs)
    return tmp_path / "file", {name: torch.zeros(size) for name, size in zip(blobs, SIZES, strict=True)}


@pytest.fixture
def asked(monkeypatch):
    """The ranges that the kernel is asked to fetch, of a file that it has not at hand."""
    found = []
    advise = os.posix_fadvise

    def note(descriptor, offset, nbytes, advice):
        if advice == os.POSIX_FADV_WILLNEED:
            found.append(range(offset, offset + nbytes))
        return advise(descriptor, offset, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    monkeypatch.setattr(batched_reads, "WORTH_IT", COUNT)
    monkeypatch.setattr(LocalReadHandle, "_is_cached", lambda *args: False)
    return found


def is_right(into):
    return all(bool((tensor == float(number)).all()) for number, tensor in enumerate(into.values()))


def fetching():
    return [one for one in threading.enumerate() if one.name == "torchrelay-fetch"]


def test_what_will_be_read_is_asked_for_once_and_in_order(file, asked):
    """All data from the first entry to the last, a MiB at a time; nobody asks any more afterwards."""
    path, _ = file
    header = open_blob_file(path).header
    with header.expecting(list(header.entries)):
        for thread in fetching():
            thread.join(WAIT_SECS)
    start, stop = header.content.data_start, header.content.file_bytes
    assert asked == [
        range(at, min(at + batched_reads.STEP, stop)) for at in range(start, stop, batched_reads.STEP)
    ]
    assert len(asked) > 1
    assert not fetching()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_load_is_right_with_the_hint(file, asked, atomic):
    """The same bytes, verified, while the kernel is asked for them; no thread is left."""
    path, into = file
    load_into(path, into, atomic=atomic)
    assert is_right(into)
    assert not fetching()


def test_few_entries_and_far_ones_are_not_fetched(file, monkeypatch):
    """Neither is worth it: little to look at, or more between the wanted ones than is wanted."""
    monkeypatch.setattr(batched_reads, "WORTH_IT", 4)
    entries = open_blob_file(file[0]).header.entries
    stored, starts, stops = entries.stored, entries.stored.columns.starts, entries.stored.columns.stops
    assert worth_fetching(stored, [3, 1, 2]) == range(0)
    assert worth_fetching(stored, [0, 1, 2, COUNT - 1]) == range(0)
    at = stored.data_start
    assert worth_fetching(stored, [5, 2, 4, 3]) == range(at + starts[2], at + stops[5])
    monkeypatch.setattr(batched_reads, "AT_MOST", 1000)
    assert worth_fetching(stored, range(COUNT)) == range(at, at + 1000)


def test_what_is_at_hand_is_not_asked_for(file, asked, monkeypatch):
    """A file in the page cache is read as ever."""
    monkeypatch.setattr(LocalReadHandle, "_is_cached", lambda *args: True)
    load_into(file[0], file[1])
    assert asked == []
    assert is_right(file[1])


def test_it_ends_with_the_block(tmp_path, asked, monkeypatch):
    """Whoever has looked at all reads himself: what was not asked for by then is not asked for any more."""
    (tmp_path / "file").write_bytes(bytes(8 * BLOCK))
    first, go_on = threading.Event(), threading.Event()
    fetch = LocalReadHandle.fetch

    def slow(self, offset, nbytes):
        first.set()
        assert go_on.wait(WAIT_SECS)
        return fetch(self, offset, nbytes)

    def joined(thread, timeout=None):
        if thread.name == "torchrelay-fetch":
            go_on.set()
        join(thread, timeout)

    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", joined)
    monkeypatch.setattr(LocalReadHandle, "fetch", slow)
    with fetched_ahead(LocalStorage(tmp_path), "file", range(8 * BLOCK)):
        assert first.wait(WAIT_SECS)
    assert len(asked) == 1
    assert not fetching()


def _no_hints(monkeypatch):
    def refuse(descriptor, offset, nbytes, advice):
        if advice == os.POSIX_FADV_WILLNEED:
            raise OSError(22, "no hints here")

    monkeypatch.setattr(os, "posix_fadvise", refuse)


def _no_threads(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "torchrelay-fetch":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def _no_call(monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")


@pytest.mark.parametrize("trouble", [_no_hints, _no_threads, _no_call])
def test_a_load_needs_no_hint(file, asked, monkeypatch, trouble):
    """A file system that refuses, no thread to be had, a system without the call: the load is as ever."""
    trouble(monkeypatch)
    load_into(file[0], file[1])
    assert is_right(file[1])
    assert asked == []


def test_a_file_that_is_gone_is_told_by_who_reads_it(tmp_path, asked):
    """The hint says nothing of what it does not find."""
    with fetched_ahead(LocalStorage(tmp_path), "absent", range(BLOCK)):
        pass
    assert asked == []


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
