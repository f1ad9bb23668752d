"""What makes saves and loads quick changes neither bytes nor errors."""

from __future__ import annotations

import gc
import os
import threading

import pytest
from given_entries import ShardEntry, entries_of

from torchrelay import Job, JobRunner, max_epochs
from torchrelay.checkpoint.format.canonical_json import dumps
from torchrelay.checkpoint.format.names import Flat, Whole, encode_name, format_key, parse_key
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity, ShardPart, cost_limit, entry_cost
from torchrelay.checkpoint.format.shard.reads import EACH, each
from torchrelay.checkpoint.storage import local_io
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.local_io import STRIDE, Pacer
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.runtime import undisturbed


@pytest.fixture
def started(monkeypatch):
    """The ranges that the device was told to write, instead of telling it."""
    found = []
    monkeypatch.setattr(local_io, "_sync_file_range", lambda fd, start, n, flags: found.append((start, n)))
    return found


def test_the_device_is_told_of_every_full_stride_once(started):
    """Bytes in order are started when a stride is full; the short rest is left to the sync."""
    pacer = Pacer(0)
    for piece in range(5):
        pacer.wrote(4096 + piece * STRIDE // 2, STRIDE // 2)
    assert started == [(4096, STRIDE), (4096 + STRIDE, STRIDE)]


def test_a_jump_back_to_the_header_starts_nothing_twice(started):
    """The header, written last at offset 0, is not taken for a continuation of the data."""
    pacer = Pacer(0)
    pacer.wrote(4096, STRIDE + 1)
    pacer.wrote(0, 4096)
    assert started == [(4096, STRIDE + 1)]


def test_a_system_without_the_hint_writes_the_same(tmp_path, monkeypatch):
    """Where the call does not exist, files are whole all the same."""
    monkeypatch.setattr(local_io, "_sync_file_range", None)
    content = os.urandom(2 * STRIDE + 3)
    handle = LocalStorage(tmp_path).open_exclusive("file")
    handle.write_at(0, memoryview(content))
    handle.sync_file()
    handle.close()
    assert (tmp_path / "file").read_bytes() == content


class _Noting:
    """An object that notes whether cycles are collected while it is loaded."""

    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        self.seen.append(gc.isenabled())


def test_a_resume_sets_off_no_collections(tmp_path):
    """The objects that a load makes stay in use: nobody looks through them for cycles meanwhile."""
    for epochs in (1, 2):
        noting = _Noting()
        job = Job("job", blobs={"noting": noting})
        job.epoch(lambda ctx: None)
        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run").train()
    assert noting.seen == [False]
    assert gc.isenabled()


def test_collections_are_off_inside_and_as_before_afterwards():
    """Nested and failing uses restore what was; who had switched collections off finds them off."""
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), undisturbed(), undisturbed():
        assert not gc.isenabled()
        raise ValueError("x")
    assert gc.isenabled()
    gc.disable()
    try:
        with undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_inside_sets_off_no_full_collection():
    """Only the objects made meanwhile are looked through; what the program owes comes when it would."""
    seen: list[int] = []
    kept: list[list[int]] = []

    def note(phase, info):
        seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        with undisturbed():
            kept += [[] for _ in range(2 * gc.get_threshold()[0])]
            assert not seen
        assert gc.get_count()[0] < gc.get_threshold()[0]
    finally:
        gc.callbacks.remove(note)
    assert set(seen) == {0}


@pytest.mark.parametrize("nbytes", [0, 2 * EACH])
def test_every_item_is_worked_on_once(nbytes):
    """With one thread or two, nothing is left out and nothing done twice."""
    done, lock = [], threading.Lock()

    def work(item):
        with lock:
            done.append(item)

    each(work, range(100), nbytes, 2)
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("nbytes", [0, 2 * EACH])
def test_an_error_of_either_thread_arrives(nbytes):
    """The first failure is raised in the caller, and the rest is not begun for ever."""

    def work(item):
        if item == 3:
            raise StorageError("item 3")

    with pytest.raises(StorageError, match="item 3"):
        each(work, range(1000), nbytes, 2)


@pytest.mark.parametrize(
    "name", ["model.0.weight", "a b~!", 'q"uote\\', "__metadata__", "50%", "x@y", "é", "\x7f"]
)
def test_keys_of_plain_and_other_names_come_back(name):
    """The short way for plain names and the long way for others write keys that read back."""
    assert parse_key(format_key(Whole(name))) == Whole(name)
    assert (encode_name(name) == name) == (name in ("model.0.weight", "a b~!", 'q"uote\\', "é"))


@pytest.mark.parametrize("name", ["w", '"\\' * 50, "\u00e9" * 80, "\U0001f600" * 30, "%@\x01" * 20])
@pytest.mark.parametrize("shape", [(), (1,), (7, 2**40, 0), (1,) * 30])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("key", [Whole, lambda name: Flat(name, 0, 0)])
def test_the_quick_bound_of_a_header_entry_holds(name, shape, dtype, key):
    """Files are never left uncut on the strength of a bound that an entry exceeds."""
    entries = entries_of([ShardEntry(key(name), dtype, shape, memoryview(b""))])
    (text,), (form,) = entries.keys, entries.forms
    assert entry_cost(text, form, entries.pieces.get(text, {})) <= cost_limit(entries)


def test_a_header_frame_has_the_length_it_announces():
    """Whatever text values and job names hold, digests land in their own field."""
    from torchrelay.checkpoint.format.shard.header import HeaderFrame, parse

    identity = ShardIdentity('"digests":"', Position(1), "n", "main", "t")
    entry = ShardEntry(Whole("w"), "uint8", (5,), memoryview(b"12345"))
    part = ShardPart(identity, 1, entries_of([entry]), {}, {'a"digests":"': '\\"digests\\":\\"'})
    frame = HeaderFrame(part)
    header = frame.filled(bytes(range(16)))
    assert len(header) == frame.nbytes and frame.digest_bytes == 16
    content = parse(header, len(header) + 5, what="x")
    assert content.entries["w"].digests == bytes(range(16)) and content.identity == identity


def test_shared_containers_and_cycles_are_checked_in_bounded_time():
    """A value that contains itself twice is refused at once, not after 2**128 looks."""
    cycle: list = []
    cycle += [cycle, cycle]
    with pytest.raises(UsageError, match="deeper"):
        dumps(cycle)
