"""Writing and reading shard files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from given_entries import ShardEntry, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from torchrelay.checkpoint.format import dtypes
from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.names import Box, Flat, Whole, format_key
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity, ShardLimits
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header
from torchrelay.checkpoint.format.shard.reads import ReadRequest
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import CountingStorage
from torchrelay.errors import BlobError, StorageError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden"
IDENTITY = ShardIdentity("job", Position(3, 1200), "trainer_0", "optim", "e00000003s001200-abcdef")


def whole(name, tensor):
    return ShardEntry(Whole(name), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor)


def raw(name, data, dtype="uint8"):
    return ShardEntry(Whole(name), dtype, (len(data),), memoryview(data))


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def expectation(report):
    return ShardExpectation(report.bytes, report.header_bytes, report.header_sha256)


def test_the_bytes_of_a_shard_are_frozen(tmp_path, monkeypatch):
    """Today's writer makes the committed file, byte for byte."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    import make_shard

    report = make_shard.write(tmp_path)
    assert (tmp_path / report.path).read_bytes() == (GOLDEN / report.path).read_bytes()


def test_the_frozen_shard_is_read(monkeypatch):
    """Today's reader understands the committed file: identity, values, aliases, pieces and bytes."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    import make_shard

    header = read_header(LocalStorage(GOLDEN), "trainer_0.4.main.safetensors")
    assert header.content.identity == make_shard.IDENTITY
    assert header.aliases == {"model.tied": "model.weight"}
    assert header.values["seen"] == {"$": "int", "v": str(2**60)}
    for entry in make_shard.entries():
        stored = header.entries[format_key(entry.key)]
        assert (stored.key, stored.dtype.name, stored.shape) == (entry.key, entry.dtype, entry.shape)
        assert bytes(header.read(format_key(entry.key))) == bytes(entry.data)
    assert header.verify() == 68


def test_safetensors_opens_our_files_bit_for_bit(storage, tmp_path):
    """Any native dtype, NaN payloads included, comes back from the safetensors library with the same bits."""
    entries, tensors = [], {}
    for name in dtypes._NATIVE:
        data = (
            bytearray(os.urandom(dtypes.by_name(name).itemsize * 6))
            if name != "bool"
            else bytearray(b"\0\1" * 3)
        )
        tensors[name] = torch.frombuffer(data, dtype=getattr(torch, name)).reshape(2, 3)
        entries.append(whole(f"leaf.{name}", tensors[name]))
    report = write_shard(storage, "", IDENTITY, entries, values={"lr": 0.1})[0]
    with safe_open(tmp_path / report.path, "pt") as file:
        assert set(file.keys()) == {f"leaf.{name}" for name in tensors}
        for name, tensor in tensors.items():
            found = file.get_tensor(f"leaf.{name}")
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert dtypes.stored_bytes(found, name) == dtypes.stored_bytes(tensor, name)
        assert json.loads(file.metadata()["torchrelay"])["values"] == {"lr": 0.1}


def test_keys_are_ordered_and_data_start_on_a_page(storage):
    """Item size descending, then key; data begin at a multiple of 4096, every item aligned."""
    entries = [
        whole("b", torch.ones(3)),
        whole("a", torch.ones(3, dtype=torch.int8)),
        whole("a2", torch.ones(1)),
    ]
    entries += [
        whole("z", torch.ones(1, dtype=torch.complex128)),
        whole("y", torch.ones(1, dtype=torch.int64)),
    ]
    report = write_shard(storage, "", IDENTITY, entries)[0]
    assert report.keys == ("z", "y", "a2", "b", "a")
    header = read_header(storage, report.path, expectation(report))
    assert report.header_bytes == header.content.data_start == 4096
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in header.entries.values())


def test_a_shard_without_tensors_holds_values(storage, tmp_path):
    """A file of values alone is a whole file for both readers."""
    report = write_shard(storage, "", IDENTITY, [], values={"best": 1})[0]
    assert read_header(storage, report.path, expectation(report)).values == {"best": 1}
    with safe_open(tmp_path / report.path, "pt") as file:
        assert list(file.keys()) == []


class Recording:
    """A storage that remembers the order of the calls on its only file."""

    def __init__(self, storage, fail_at=None):
        self.calls, self._storage, self._fail_at = [], storage, fail_at

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def open_exclusive(self, path):
        recorder, handle = self, self._storage.open_exclusive(path)

        class Handle:
            path = handle.path
            alignment = 0

            def __getattr__(self, name):
                def call(*args):
                    recorder.calls.append(
                        (name, args[0] if args else None, len(args[1]) if len(args) > 1 else 0)
                    )
                    if recorder._fail_at == len(recorder.calls):
                        raise StorageError(f"scheduled failure at {name}")
                    return getattr(handle, name)(*args)

                return call

        return Handle()


def test_the_header_is_written_last_and_then_synced(storage):
    """Space is reserved, the data follow, the header fills its place, the sync closes: in this order."""
    recording = Recording(storage)
    entries = [raw("big", bytes(20 * BLOCK)), *(raw(f"s{i}", bytes(100)) for i in range(50))]
    report = write_shard(recording, "", IDENTITY, entries)[0]
    names = [name for name, *_ in recording.calls]
    assert names == ["preallocate", *["write_at"] * (len(names) - 3), "sync_file", "close"]
    assert recording.calls[0][1] == report.bytes
    offsets = [offset for name, offset, _ in recording.calls if name == "write_at"]
    assert offsets[-1] == 0 and offsets[:-1] == sorted(offsets[:-1]) and offsets[0] == report.header_bytes
    assert len(offsets) == 7, "five pieces of the large one, all small ones together, the header"
    assert max(size for *_, size in recording.calls) <= 8 * BLOCK
    assert all(report.seconds.secs[phase] > 0 for phase in ("hash", "write", "fsync"))


@pytest.mark.parametrize("call", range(1, 6))
def test_a_write_that_fails_leaves_no_file_and_says_so(storage, call):
    """Whichever call fails, the error arrives and the begun file is gone."""
    recording = Recording(storage, fail_at=call)
    with pytest.raises(StorageError, match="scheduled failure"):
        write_shard(recording, "", IDENTITY, [raw("a", b"123")])
    assert recording.calls[call - 1 :] and storage.list("") == []


def test_a_try_is_written_once(storage):
    """A second write of the same file is refused and the first stays."""
    report = write_shard(storage, "", IDENTITY, [raw("a", b"123")])[0]
    with pytest.raises(StorageError, match="exists already"):
        write_shard(storage, "", IDENTITY, [raw("a", b"456")])
    assert read_header(storage, report.path, expectation(report)).read("a") == b"123"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_is_read_and_nothing_beyond_its_blocks(tmp_path_factory, data):
    """The bytes of a range are right, and exactly its blocks were read."""
    storage = LocalStorage(tmp_path_factory.mktemp("shard"))
    size = data.draw(st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5]))
    content = os.urandom(size)
    report = write_shard(storage, "", IDENTITY, [raw("first", b"xy", "uint8"), raw("k", content)])[0]
    edges = st.integers(0, size) | st.sampled_from([0, size, min(size, BLOCK)])
    start, stop = sorted((data.draw(edges), data.draw(edges)))
    counting = CountingStorage(storage)
    header = read_header(counting, report.path, expectation(report))
    before = counting.bytes_read
    found = bytearray(stop - start)
    header.read_into("k", start, stop, memoryview(found))
    assert bytes(found) == content[start:stop]
    blocks = min(-(-stop // BLOCK) * BLOCK, size) - start // BLOCK * BLOCK if stop > start else 0
    assert counting.bytes_read - before == blocks


def test_many_small_reads_become_few(storage):
    """Neighbouring small entries arrive in one read; strangers in between are not read."""
    entries = [raw(f"k{i:03}", os.urandom(50 + i)) for i in range(200)]
    report = write_shard(storage, "", IDENTITY, [*entries, raw("large", os.urandom(2 * BLOCK))])[0]
    counting = CountingStorage(storage)
    header = read_header(counting, report.path, expectation(report))
    wanted = [f"k{i:03}" for i in range(200) if i != 100] + ["large"]
    buffers = {key: bytearray(header.entries[key].nbytes) for key in wanted}
    reads, nbytes = counting.reads, counting.bytes_read
    header.read_many(ReadRequest(key, 0, len(b), memoryview(b)) for key, b in reversed(buffers.items()))
    written = {entry.key.name: entry.data for entry in entries}
    assert all(buffers[key] == written[key] for key in wanted if key != "large")
    assert counting.reads - reads == 4
    assert counting.bytes_read - nbytes == sum(map(len, buffers.values()))


def test_an_entry_that_is_wanted_twice_is_read_twice(storage):
    """Two requests for one small entry both get its bytes."""
    entries = [raw(f"k{i}", os.urandom(50 + i)) for i in range(3)]
    report = write_shard(storage, "", IDENTITY, entries)[0]
    header = read_header(storage, report.path, expectation(report))
    keys = ["k0", "k1", "k1", "k2", "k1"]
    found = [bytearray(header.entries[key].nbytes) for key in keys]
    header.read_many(ReadRequest(key, 0, len(b), memoryview(b)) for key, b in zip(keys, found, strict=True))
    written = {entry.key.name: entry.data for entry in entries}
    assert found == [written[key] for key in keys]


def test_pieces_keep_what_they_are_pieces_of(storage):
    """A box and a flat range know the shape of their leaf, and read back as written."""
    tensor = torch.arange(24).to(torch.complex128).reshape(4, 6)
    box = ShardEntry(Box("w", ((1, 3), (0, 2))), "complex128", (4, 6), tensor[1:3, 0:2])
    flat = ShardEntry(Flat("v", 5, 9), "complex128", (4, 6), tensor.flatten()[5:9])
    report = write_shard(storage, "", IDENTITY, [box, flat])[0]
    header = read_header(storage, report.path, expectation(report))
    found = header.entries["w@[1:3,0:2]"]
    assert (found.dtype.name, found.shape, found.piece_shape) == ("complex128", (4, 6), (2, 2))
    out = torch.empty(2, 2, dtype=torch.complex128)
    header.read_into("w@[1:3,0:2]", 0, 64, dtypes.memory_of(out))
    assert torch.equal(out, tensor[1:3, 0:2])
    assert header.entries["v@flat[5:9]"].piece_shape == (4,)


def test_large_shards_are_cut_into_parts(storage, tmp_path):
    """Parts stay below both limits, values lie in part 1, an alias beside its target, nothing is lost."""
    entries = [raw(f"k{i:02}", os.urandom(1000)) for i in range(20)]
    limits = ShardLimits(data_bytes=6000, header_bytes=100_000)
    aliases = {"tied": Whole("k19")}
    reports = write_shard(storage, "", IDENTITY, entries, values={"a": 1}, aliases=aliases, limits=limits)
    assert [r.path.removeprefix("trainer_0.3+1200.optim") for r in reports] == [
        ".safetensors", ".2.safetensors", ".3.safetensors", ".4.safetensors",
    ]  # fmt: skip
    headers = [read_header(storage, r.path, expectation(r)) for r in reports]
    assert [key for r in reports for key in r.keys] == [f"k{i:02}" for i in range(20)]
    assert all(r.bytes - r.header_bytes < 6000 for r in reports)
    assert [h.content.part for h in headers] == [1, 2, 3, 4]
    assert [bool(h.values) for h in headers] == [True, False, False, False]
    assert [dict(h.aliases) for h in headers] == [{}, {}, {}, {"tied": "k19"}]


def test_headers_stay_below_their_limit(storage):
    """Long names in two scripts and many pieces are cut by what the header really takes."""
    entries = [
        ShardEntry(Flat('"\u00e9\\' * 40 + str(i), i, i + 1), "complex128", (1000,), memoryview(bytes(16)))
        for i in range(300)
    ]
    reports = write_shard(storage, "", IDENTITY, entries, limits=ShardLimits(header_bytes=50_000))
    assert len(reports) > 1
    assert all(report.header_bytes <= 50_000 + 4096 for report in reports)
    assert sum(len(report.keys) for report in reports) == 300
    with pytest.raises(BlobError, match="large ones such as big"):
        write_shard(
            storage, "", IDENTITY, [], values={"big": "x" * 60_000}, limits=ShardLimits(values_bytes=50_000)
        )


def test_values_lengthen_the_first_header_alone(storage):
    """Values above the limit of a header all lie in part 1; the entries are cut as they are without them."""
    entries = [raw(f"n{i:03}", bytes(4)) for i in range(200)]
    cut = ShardLimits(header_bytes=10_000)
    reports = write_shard(storage, "", IDENTITY, entries, values={"big": "x" * 60_000}, limits=cut)
    assert reports[0].header_bytes > 60_000 and len(reports[0].keys) == 1
    assert len(reports) < 10 and max(report.header_bytes for report in reports[1:]) <= 10_000 + 4096


def test_an_entry_above_the_limit_gets_its_own_part(storage):
    """One tensor is never torn by the writer."""
    entries = [raw("a", bytes(10)), raw("b", bytes(9000)), raw("c", bytes(10))]
    reports = write_shard(storage, "", IDENTITY, entries, limits=ShardLimits(data_bytes=4000))
    assert [r.keys for r in reports] == [("a",), ("b",), ("c",)]


def test_wrong_entries_are_refused_by_name(storage):
    """Wrong sizes, keys twice, aliases of nothing and pieces outside of their leaf leave no file."""
    bad = [
        (
            [ShardEntry(Whole("a"), "float32", (3,), memoryview(b"12"))],
            {},
            "a: 2 bytes were given for float32",
        ),
        ([raw("a", b"1"), raw("a", b"2")], {}, "a occurs twice"),
        ([raw("a", b"1")], {"b": Whole("c")}, "b cannot be an alias of c"),
        (
            [ShardEntry(Flat("a", 0, 9), "uint8", (3,), memoryview(bytes(9)))],
            {},
            "ends beyond the 3 elements",
        ),
        (
            [ShardEntry(Box("a", ((0, 9),)), "uint8", (3,), memoryview(bytes(9)))],
            {},
            "is not a box of a leaf",
        ),
    ]
    for entries, aliases, words in bad:
        with pytest.raises(BlobError, match=words):
            write_shard(storage, "", IDENTITY, entries, aliases=aliases)
    assert storage.list("") == []


def test_requests_that_do_not_fit_are_usage_errors(storage):
    """A range beyond the entry or a destination of another size reads nothing."""
    report = write_shard(storage, "", IDENTITY, [raw("a", b"123")])[0]
    header = read_header(storage, report.path)
    for start, stop, room in ((0, 4, 4), (2, 1, 0), (0, 3, 2), (-1, 2, 3)):
        with pytest.raises(UsageError):
            header.read_into("a", start, stop, memoryview(bytearray(room)))
