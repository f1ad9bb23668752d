"""Memory through which spans of an entry pass: the right bytes, whole blocks, each read once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import ATTEMPT_NAME, Saved, load, local_part, target

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded
from torchrelay.checkpoint.format.shard.reads import Passage, Passing, ReadOptions
from torchrelay.checkpoint.load.reads import leaf_reader
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import DamagedError, StorageError

spans = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), max_size=12).map(
    lambda found: sorted((start, min(90, start + length)) for start, length in found)
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(spans, min_size=1, max_size=3), st.integers(1, 20), st.sampled_from([0, 30]), st.integers(0, 20)
)
def test_spans_pass_as_they_are_stored(entries, block, far, gap):
    """Whatever spans of whatever entries pass, one after the other: their bytes, from blocks read once."""
    memory = Passing()
    for number, wanted in enumerate(entries):
        stored, read = bytes((number * 90 + at) % 256 for at in range(90)), Counter()

        def fill(first: int, room: memoryview, stored: bytes = stored, read: Counter = read) -> None:
            assert first % block == 0 and ((first + len(room)) % block == 0 or first + len(room) == 90)
            room[:] = stored[first : first + len(room)]
            read.update(range(first // block, -(-(first + len(room)) // block)))

        passing = memory.over(wanted, Passage(90, block, far, gap), fill)
        for (start, stop), data in zip(wanted, passing, strict=True):
            assert bytes(data) == stored[start:stop]
        assert all(count == 1 for count in read.values())
        needed = {at // block for start, stop in wanted for at in range(start, stop)}
        assert needed <= set(read)
        if not far:  # a span that is empty may bring its block along
            assert set(read) <= needed | {start // block for start, _ in wanted}


def test_no_more_memory_than_a_span_and_its_blocks():
    """A long entry passes through memory of a span and two blocks."""
    memory, block = Passing(), 100
    wanted = [(at, at + 150) for at in range(0, 100_000 - 150, 130)]
    for _ in memory.over(wanted, Passage(100_000, block), lambda first, room: None):
        assert len(memory.room(0).obj) <= 150 + 2 * block


def test_near_spans_of_a_distant_place_come_with_one_request():
    """Where a request costs much, spans with small gaps are asked for together, others are not."""
    asked: list[tuple[int, int]] = []
    wanted = [(0, 10), (15, 20), (30, 40), (200, 210)]
    passage = Passage(1000, 10, at_once=100, gap=12)
    list(Passing().over(wanted, passage, lambda first, room: asked.append((first, first + len(room)))))
    assert asked == [(0, 40), (200, 210)]


WIDE = torch.arange(2100 * 999, dtype=torch.float32).reshape(2100, 999)  # no row begins with a block
COLUMNS = Mesh((0, 1), (2,), (Sharded(1),))


def _saved() -> Saved:
    return Saved({"m": WIDE}, {"m": Mesh((0,), (1,), (Replicated(),))}, 1)


def test_columns_of_rows_that_end_anywhere_are_read_once():
    """Half of each row of a tensor of eight blocks: its bytes, and hardly a block twice."""
    saved = _saved()
    reader = saved.run()
    for node in (0, 1):
        before = saved.storage.bytes_read
        found = load(reader, "m", WIDE, target(COLUMNS, WIDE.shape, node))
        assert torch.equal(found, local_part(WIDE, COLUMNS, node))
        assert saved.storage.bytes_read - before <= WIDE.nbytes + (2 << 20)


def test_one_reader_gives_every_place_its_part():
    """Two places of a mesh, asked of one reader of two files, each get their own part of a leaf."""
    rows = Mesh((0, 1), (2,), (Sharded(0),))
    reader = Saved({"m": WIDE}, {"m": rows}, 2).run()
    for node in (0, 1):
        found = load(reader, "m", WIDE, target(rows, WIDE.shape, node))
        assert torch.equal(found, local_part(WIDE, rows, node))


def test_work_is_what_is_read_not_what_is_wanted(monkeypatch):
    """Narrow columns of rows of a block each: every row counts as a block, so that threads share them."""
    whole = torch.arange(24 << 18, dtype=torch.float32).reshape(24, 1 << 18)
    reader = Saved({"m": whole}, {"m": Mesh((0,), (1,), (Replicated(),))}, 1).run()
    shared: list[tuple[int, int]] = []
    real = leaf_reader.read_portions

    def read_portions(portions, nbytes, *others):
        found = list(portions)
        shared.append((len(found), nbytes))
        real(found, nbytes, *others)

    monkeypatch.setattr(leaf_reader, "read_portions", read_portions)
    mesh = Mesh(tuple(range(64)), (64,), (Sharded(1),))
    assert torch.equal(load(reader, "m", whole, target(mesh, whole.shape, 3)), local_part(whole, mesh, 3))
    [(batches, nbytes)] = shared
    assert batches >= 3
    assert nbytes == whole.nbytes


@pytest.mark.parametrize("at", [1, 1 << 20, (3 << 20) + 17])
def test_damage_is_found_in_what_passes(at):
    """A changed byte of any block fails the load of columns, wanted or not."""
    saved = _saved()
    reader = saved.run()
    path = max(saved.storage.files, key=lambda path: len(saved.storage.files[path]))
    saved.storage.files[path][-at] ^= 1
    with pytest.raises(DamagedError, match="not what was saved"):
        load(reader, "m", WIDE, target(COLUMNS, WIDE.shape, 0))


def _on_disk(folder):
    """Four tensors in rows on two nodes, in files, and a read of the columns of one of two."""
    storage = LocalStorage(folder)
    storage.mkdir(f"data/{ATTEMPT_NAME}")
    wholes = {f"m{number}": torch.rand(64, 4096) for number in range(4)}
    saved = Saved(wholes, {name: Mesh((0, 1), (2,), (Sharded(0),)) for name in wholes}, 2, storage)
    reader = saved.run()
    columns = target(COLUMNS, (64, 4096), 0)
    found = {name: torch.empty(columns.shape) for name in wholes}
    reads = [LeafRead(name, memory_of(found[name]), None, columns) for name in wholes]
    reader.planned(reads)  # the headers are open, as after a proof
    return storage, reader, reads, wholes, found


def test_a_file_that_is_gone_after_the_proof_is_damage(tmp_path):
    """The first file of all slabs is missing: DamagedError, which callers know, and not a bare error."""
    _, reader, reads, _, _ = _on_disk(tmp_path)
    min(tmp_path.rglob("*.safetensors")).unlink()
    for options in (ReadOptions(), ReadOptions(of_the_cores=1)):
        reader.options = options
        with pytest.raises(DamagedError, match="is missing"):
            reader.read_many(reads)


def test_a_file_that_fails_once_is_looked_at_again(tmp_path, monkeypatch):
    """One I/O error where the first file of all slabs is opened: the load goes on."""
    storage, reader, reads, wholes, found = _on_disk(tmp_path)
    real, failed = storage.open_read, []

    def flaky(path):
        if not failed:
            failed.append(path)
            raise StorageError(f"cannot read {path}: Input/output error")
        return real(path)

    monkeypatch.setattr(storage, "open_read", flaky)
    reader.read_many(reads)
    assert failed and all(torch.equal(found[name], wholes[name][:, :2048]) for name in wholes)


class Once(LocalStorage):
    """One read, the `wrong_at`-th from when that is set, gives a wrong byte; `opened`: files since."""

    def __init__(self, root):
        super().__init__(root)
        self.wrong_at, self.opened = 0, []

    def open_read(self, path):
        handle = super().open_read(path)
        real = handle.read_into

        def read_into(offset, destination, *, once=False):
            count = real(offset, destination, once=once)
            self.wrong_at -= 1
            if self.wrong_at == 0:
                destination[count - 1] ^= 1
                self.opened.clear()
            return count

        handle.read_into = read_into
        self.opened.append(path)
        return handle


@pytest.mark.parametrize(("rows", "wrong_at"), [(64, 1), (1024, 3)])
def test_slabs_that_come_wrong_once_are_read_again(tmp_path, rows, wrong_at):
    """A byte of one read is wrong, of small entries or large ones: the file is opened for a second look."""
    wholes = {f"m{number}": torch.rand(rows, 4096) for number in range(4)}
    storage = Once(tmp_path)
    storage.mkdir(f"data/{ATTEMPT_NAME}")
    reader = Saved(wholes, dict.fromkeys(wholes, Mesh((0,), (1,), (Replicated(),))), 1, storage).run()
    columns = target(COLUMNS, (rows, 4096), 0)
    found = {name: torch.empty(columns.shape) for name in wholes}
    reads = [LeafRead(name, memory_of(found[name]), None, columns) for name in wholes]
    reader.planned(reads)  # the headers are open, as after a proof
    reader.options = ReadOptions(threads=1)
    storage.wrong_at = wrong_at
    reader.read_many(reads)
    assert storage.wrong_at < 0, "no read was made wrong"
    assert len(storage.opened) == 1
    assert all(torch.equal(found[name], wholes[name][:, :2048]) for name in wholes)


def test_straight_reads_and_slabs_of_a_file_come_in_its_order(monkeypatch):
    """Rows of one tensor and columns of another, entry by entry: one list, each file from begin to end."""
    wholes = {f"m{number}": torch.rand(512, 2048) for number in range(6)}
    reader = Saved(wholes, dict.fromkeys(wholes, Mesh((0, 1), (2,), (Sharded(0),))), 2).run()
    rows = Mesh((0, 1), (2,), (Sharded(0),))
    wanted = {
        name: target(rows if n % 2 else COLUMNS, (512, 2048), 0) for n, name in enumerate(sorted(wholes))
    }
    found = {name: torch.empty(one.shape) for name, one in wanted.items()}
    seen: list[tuple[str, int]] = []
    real = leaf_reader.read_portions

    def read_portions(portions, *others):
        def noted():
            for one in portions:
                seen.append((one.path, one.begin))
                yield one

        real(noted(), *others)

    monkeypatch.setattr(leaf_reader, "read_portions", read_portions)
    reader.read_many(LeafRead(name, memory_of(found[name]), None, wanted[name]) for name in wholes)
    assert seen == sorted(seen) and len({path for path, _ in seen}) == 2
    assert len(seen) >= 9  # three straight of the first file, three columns of both
    for n, name in enumerate(sorted(wholes)):
        assert torch.equal(found[name], local_part(wholes[name], rows if n % 2 else COLUMNS, 0))
