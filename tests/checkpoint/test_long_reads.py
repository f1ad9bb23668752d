"""Whichever way bytes come, cold or cached, they are the same, and damage is found."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import MemoryStorage, Saved, local_part, target
from page_cache import drop_from_cache, pages_in_cache, until_cold

from torchrelay import load_blobs, load_into, save_blobs
from torchrelay.checkpoint.format.dtypes import BLOCK, memory_of
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Sharded
from torchrelay.checkpoint.format.shard.reader import read_header
from torchrelay.checkpoint.format.shard.reads import ReadOptions, ReadRequest
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead
from torchrelay.checkpoint.state.leaf import blob_of
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import DamagedError, PartiallyLoadedError, StorageError, UsageError

ALIGN = 4096
EDGES = [0, 1, 511, 512, 513, ALIGN - 1, ALIGN, ALIGN + 1, BLOCK - 1, BLOCK, BLOCK + 1]
SIZE = 5 * BLOCK + 777


@pytest.fixture(scope="module")
def content():
    return os.urandom(SIZE)


@pytest.fixture(scope="module")
def storage(tmp_path_factory, content):
    found = LocalStorage(tmp_path_factory.mktemp("long"))
    (found.root / "file").write_bytes(content)
    return found


def share_in_cache(path):
    """The part of a file that the page cache holds."""
    pages = pages_in_cache(path)
    return sum(pages) / len(pages)


near = st.sampled_from(EDGES) | st.integers(0, 3 * ALIGN)


@settings(max_examples=150, deadline=None)
@given(start=near, less=near, shift=st.integers(0, ALIGN), cold=st.booleans(), once=st.booleans())
def test_any_range_comes_as_it_is_and_nothing_beside_it_is_touched(
    storage, content, start, less, shift, cold, once
):
    """Every offset, length and place in memory gives the file's bytes, on each way."""
    if cold:
        drop_from_cache(storage.root / "file")
    stop = max(start, SIZE - less)
    around = bytearray(b"\xa5") * (shift + stop - start + ALIGN)
    handle = storage.open_read("file")
    try:
        got = handle.read_into(start, memoryview(around)[shift : shift + stop - start], once=once)
    finally:
        handle.close()
    assert got == stop - start
    assert around[shift : shift + got] == content[start:stop]
    assert set(around[:shift]) <= {0xA5} and set(around[shift + got :]) == {0xA5}


@pytest.mark.parametrize("beyond", [1, 600, 2 * BLOCK])
@pytest.mark.parametrize("cold", [True, False])
def test_the_end_of_a_file_shortens_a_read(storage, content, beyond, cold):
    """A read across the end gives what there is, and says how much."""
    if cold:
        drop_from_cache(storage.root / "file")
    room = bytearray(2 * BLOCK + beyond)
    handle = storage.open_read("file")
    try:
        assert handle.read_into(SIZE - 2 * BLOCK, memoryview(room), once=True) == 2 * BLOCK
    finally:
        handle.close()
    assert room[: 2 * BLOCK] == content[-2 * BLOCK :]


def test_what_is_read_once_does_not_stay_in_a_cache_that_lacked_it(storage):
    """Of a cold file nothing stays that was read once; what was there before stays, as do other reads."""
    path, room = storage.root / "file", memoryview(bytearray(SIZE))

    def leaves_nothing():
        handle = storage.open_read("file")
        handle.read_into(0, room, once=True)
        handle.close()
        return share_in_cache(path) < 0.5

    if not until_cold(path, leaves_nothing):
        pytest.skip("this file system keeps what it has read")
    handle = storage.open_read("file")
    drop_from_cache(path)
    handle.read_into(0, room)
    assert share_in_cache(path) == 1.0
    handle.close()
    handle = storage.open_read("file")
    handle.read_into(0, room, once=True)
    assert share_in_cache(path) == 1.0
    handle.close()


def test_a_file_in_memory_is_read(content):
    """A memory file system, whose pages are the file, gives the same bytes."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no memory file system")
    name = f"torchrelay-test-{os.getpid()}-{threading.get_ident()}"
    storage, path = LocalStorage("/dev/shm"), Path("/dev/shm") / name
    try:
        path.write_bytes(content)
        room = bytearray(SIZE)
        handle = storage.open_read(name)
        assert handle.read_into(0, memoryview(room), once=True) == SIZE
        handle.close()
        assert room == content
    finally:
        path.unlink(missing_ok=True)


def test_a_missing_file_and_a_link_are_refused(storage):
    """Opening for long reads refuses what a single read refuses."""
    with pytest.raises(FileNotFoundError):
        storage.open_read("nothing")
    (storage.root / "link").symlink_to(storage.root / "file")
    with pytest.raises(StorageError, match="link"):
        storage.open_read("link")


def test_a_proof_of_all_bytes_leaves_the_cache_alone(tmp_path):
    """What is only looked at does not push out what others need."""
    path = tmp_path / "blobs.safetensors"
    save_blobs(path, {"x": torch.zeros(9 * BLOCK, dtype=torch.uint8)})
    header = read_header(LocalStorage(tmp_path), path.name)
    drop_from_cache(path)
    if share_in_cache(path) > 0.5:
        pytest.skip("this file system keeps what it has read")
    assert until_cold(path, lambda: header.verify() == 9 * BLOCK and share_in_cache(path) < 0.5)


# Whole files, every way

WAYS = [
    ReadOptions(),
    ReadOptions(threads=1),
    ReadOptions(of_the_cores=1),
    ReadOptions(verify=False),
    ReadOptions(verify=False, of_the_cores=2),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    extents = [3 * BLOCK, 1, 100, 5 * BLOCK + 4, *[1000] * 20, BLOCK, BLOCK - 4, 0]
    blobs = {
        f"m.{n:02}": torch.randint(0, 256, (extent,)).to(torch.uint8) for n, extent in enumerate(extents)
    }
    path = tmp_path_factory.mktemp("saved") / "blobs.safetensors"
    save_blobs(path, blobs)
    return path, blobs


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("options", WAYS)
def test_every_way_of_reading_gives_the_same_bytes(saved, options, cold):
    """Alone or in turns with others, verified or not, cold or cached."""
    path, blobs = saved
    if cold:
        drop_from_cache(path)
    header = read_header(LocalStorage(path.parent), path.name)
    fresh = {name: torch.full_like(tensor, 7) for name, tensor in blobs.items()}
    header.read_many(
        (ReadRequest(n, 0, one.nbytes, memory_of(one)) for n, one in fresh.items()),
        options,
    )
    assert all(torch.equal(fresh[name], blobs[name]) for name in blobs)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), options=st.sampled_from(WAYS))
def test_parts_of_entries_come_every_way(saved, data, options):
    """Ranges that begin and end anywhere near the borders of blocks."""
    path, blobs = saved
    header = read_header(LocalStorage(path.parent), path.name)
    wanted = []
    for name in data.draw(st.lists(st.sampled_from(sorted(blobs)), unique=True, max_size=6)):
        size = blobs[name].nbytes
        edges = st.integers(0, size) | st.sampled_from([min(size, edge) for edge in EDGES])
        start, stop = sorted((data.draw(edges), data.draw(edges)))
        wanted.append(ReadRequest(name, start, stop, memoryview(bytearray(stop - start))))
    header.read_many(wanted, options)
    for one in wanted:
        assert torch.equal(
            torch.tensor(list(one.destination), dtype=torch.uint8), blobs[one.key][one.start : one.stop]
        )


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("options", [way for way in WAYS if way.verify])
@pytest.mark.parametrize("name", ["m.03", "m.07", "m.25"])
def test_damage_is_found_on_every_way_and_named(saved, tmp_path, options, cold, name):
    """One flipped bit of a large entry, one among small ones, one before the last."""
    path, blobs = saved
    copy = tmp_path / "copy.safetensors"
    header = read_header(LocalStorage(path.parent), path.name)
    damaged = bytearray(path.read_bytes())
    damaged[header.entries[name].stop - 1] ^= 4
    copy.write_bytes(damaged)
    if cold:
        drop_from_cache(copy)
    header = read_header(LocalStorage(tmp_path), copy.name)
    requests = [
        ReadRequest(key, 0, len(one), memoryview(bytearray(one.nbytes))) for key, one in blobs.items()
    ]
    with pytest.raises(DamagedError, match=f"block [0-9]+ of {name}"):
        header.read_many(requests, options)


# Into objects


def test_a_file_fills_objects_in_place(tmp_path):
    """A module keeps its memory and gets the stored numbers, straight or beside first."""
    model = torch.nn.Linear(700, 900)
    save_blobs(tmp_path / "a", {"model": model, "best": 3})
    for atomic in (True, False):
        other = torch.nn.Linear(700, 900)
        memory = other.weight.data_ptr()
        result = load_into(tmp_path / "a", {"model": other}, atomic=atomic)
        assert other.weight.data_ptr() == memory and torch.equal(other.weight, model.weight)
        assert set(result.loaded) == {"model.weight", "model.bias"} and not result.missing


def test_what_does_not_fit_changes_nothing(tmp_path):
    """Strict reports name every difference before an object changes; unknown blobs are refused."""
    save_blobs(tmp_path / "a", {"model": torch.nn.Linear(3, 4)})
    other = torch.nn.Linear(3, 4, bias=False)
    before = other.weight.clone()
    with pytest.raises(Exception, match=r"only in the checkpoint: model\.bias"):
        load_into(tmp_path / "a", {"model": other}, atomic=False)
    assert torch.equal(other.weight, before)
    assert load_into(tmp_path / "a", {"model": other}, strict=False).unexpected == ("model.bias",)
    with pytest.raises(UsageError, match="mdoel"):
        load_into(tmp_path / "a", {"mdoel": other})
    with pytest.raises(UsageError, match="by blob name"):
        load_into(tmp_path / "a", other)


def test_damage_leaves_objects_alone_or_says_that_it_did_not(tmp_path):
    """Atomic loads read first; others say that the objects are not what they were."""
    path = tmp_path / "a"
    save_blobs(path, {"x": torch.zeros(3 * BLOCK, dtype=torch.uint8)})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    live = torch.full((3 * BLOCK,), 9, dtype=torch.uint8)
    with pytest.raises(DamagedError, match="block 2 of x"):
        load_into(path, {"x": live})
    assert live.eq(9).all()
    with pytest.raises(PartiallyLoadedError, match="block 2 of x"):
        load_into(path, {"x": live}, atomic=False)


def test_verification_is_off_only_where_it_is_asked_for(tmp_path):
    """With `headers` a damaged tensor loads as it lies there; a damaged header never does."""
    path = tmp_path / "a"
    save_blobs(path, {"x": torch.zeros(3 * BLOCK, dtype=torch.uint8)})
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"\1")
    with pytest.raises(DamagedError):
        load_blobs(path)
    assert load_blobs(path, verify="headers")["x"][-1] == 1
    live = torch.full((3 * BLOCK,), 9, dtype=torch.uint8)
    load_into(path, {"x": live}, verify="headers")
    assert live[-1] == 1 and not live[:-1].any()
    path.write_bytes(good.replace(b'"uint8"', b'"uint9"').replace(b'"U8"', b'"I8"'))
    with pytest.raises(DamagedError):
        load_blobs(path, verify="headers")
    with pytest.raises(UsageError, match="invalid verify='none'"):
        load_blobs(path, verify="none")


@pytest.mark.parametrize("shapes", [[(4096, 5120)], [(450, 512)] * 100])
def test_memory_beyond_the_destinations_is_bounded(shapes):
    """A large tensor cut the other way, and many small ones: at most 64 MiB whatever is loaded."""
    wholes = {
        f"m.{n:03}": torch.arange(a * b, dtype=torch.float32).reshape(a, b) for n, (a, b) in enumerate(shapes)
    }
    rows = Mesh((0, 1, 2, 3), (4,), (Sharded(0),))
    columns = Mesh((0, 1, 2, 3), (4,), (Sharded(1),))
    reader = Saved(wholes, dict.fromkeys(wholes, rows), 4).run()
    wanted = {name: target(columns, whole.shape, 2) for name, whole in wholes.items()}
    out = {name: torch.zeros(one.shape) for name, one in wanted.items()}
    tracemalloc.start()
    try:
        reader.read_many(LeafRead(name, memory_of(out[name]), None, wanted[name]) for name in wholes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert all(torch.equal(out[name], local_part(whole, columns, 2)) for name, whole in wholes.items())


class Far(MemoryStorage):
    """A storage whose requests cost much, and whose answers are held in memory while they are copied."""

    request_bytes = 1 << 20

    def read_into(self, path, start, target):
        answer = bytes(self.files[path][start : start + len(target)])
        target[: len(answer)] = answer
        return len(answer)


def test_memory_is_bounded_where_requests_cost_much():
    """Large tensors in columns and small ones in rows, in turns, from far away: at most 64 MiB as well."""
    wholes = {f"m.{n:03}": torch.rand(*((4096, 1536) if n % 8 == 0 else (450, 512))) for n in range(64)}
    stored = Mesh((0, 1), (2,), (Sharded(0),))
    columns, rows = Mesh((0, 1), (2,), (Sharded(1),)), Mesh((0, 1, 2), (3,), (Sharded(0),))
    reader = Saved(wholes, dict.fromkeys(wholes, stored), 2, Far()).run()
    meshes = {name: columns if len(whole) == 4096 else rows for name, whole in wholes.items()}
    wanted = {name: target(meshes[name], whole.shape, 1) for name, whole in wholes.items()}
    out = {name: torch.zeros(one.shape) for name, one in wanted.items()}
    tracemalloc.start()
    try:
        reader.read_many(LeafRead(name, memory_of(out[name]), None, wanted[name]) for name in wholes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 8 << 20 < peak < 48 << 20  # four threads never hold the most at the same moment here
    assert all(torch.equal(out[name], local_part(whole, meshes[name], 1)) for name, whole in wholes.items())


def test_a_leaf_finds_its_object_without_looking_at_all_of_them():
    """Among 50,000 objects a leaf's is found by its name alone; a search of all would take minutes."""

    class Unsearchable(dict):
        def __iter__(self):
            raise AssertionError("all objects were looked at")

    objects = Unsearchable({"a.b": 1, "c": 2})
    assert blob_of("a.b", objects) == blob_of("a.b.weight.0", objects) == "a.b"
    assert blob_of("c.x", objects) == "c"
    assert blob_of("a", objects) is None and blob_of("a.bb", objects) is None
