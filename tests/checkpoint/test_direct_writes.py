"""Large files go to the device directly, from several threads; what stands in them does not depend on it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from given_entries import ShardEntry, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from torchrelay import Job, JobRunner, max_epochs
from torchrelay.checkpoint.format.dtypes import BLOCK, block_digests
from torchrelay.checkpoint.format.names import Whole
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.format.shard import writer
from torchrelay.checkpoint.format.shard import writer as extents
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.format.shard.reader import read_header
from torchrelay.checkpoint.storage import local, local_io
from torchrelay.checkpoint.storage import work as workers
from torchrelay.checkpoint.storage.local import LocalStorage, LocalWriteHandle
from torchrelay.checkpoint.storage.local_io import ALIGNMENT, open_direct
from torchrelay.checkpoint.storage.work import Clock
from torchrelay.errors import BlobError, StorageError

IDENTITY = ShardIdentity("job", Position(1), "node_0", "main", "try")
_random = random.Random(7)
_CONTENT = _random.randbytes(40 << 20)


def raw(name, content):
    """An entry of plain bytes."""
    return ShardEntry(Whole(name), "uint8", (len(content),), memoryview(content))


def of_sizes(sizes):
    """Entries of these sizes, each with bytes of its own; every third cannot be written to."""
    found = []
    for index, size in enumerate(sizes):
        content = _CONTENT[index * 101 : index * 101 + size]
        found.append(raw(f"t{index:04}", content if index % 3 else bytearray(content)))
    return found


def written(where, entries, **options):
    """The bytes of the one file that is written, and its report."""
    where.mkdir(exist_ok=True)
    (report,) = write_shard(LocalStorage(where), "", IDENTITY, entries, **options)
    content = (where / report.path).read_bytes()
    (where / report.path).unlink()
    return content, report


@pytest.fixture
def any_size_direct(monkeypatch):
    """Files of every size are written directly where that is possible."""
    monkeypatch.setattr(local, "WORTH_IT", 1)


@pytest.fixture
def direct_writes(tmp_path):
    """Skips where the file system of the tests takes no direct writes."""
    path = tmp_path / "probe"
    path.touch()
    descriptor = os.open(path, os.O_WRONLY)
    file = open_direct(str(path), descriptor)
    os.close(descriptor)
    if file is None:
        pytest.skip("no direct writes on this file system")
    file.close()
    path.unlink()


EVERY = -1


class Pwrite:
    """`os.pwrite`, except for direct descriptors: their call number `at` does what `fault` says."""

    def __init__(self, monkeypatch, at, fault):
        self.at, self.fault, self.direct, self.cached, self.fired = at, fault, 0, 0, 0
        self._lock, self._real = threading.Lock(), os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, descriptor, data, offset):
        if not is_direct(descriptor):
            self.cached += 1
            return self._real(descriptor, data, offset)
        with self._lock:
            self.direct += 1
            fires = self.at in (EVERY, self.direct)
            self.fired += fires
        work = self.fault if fires else call
        return work(self._real, descriptor, data, offset)


def is_direct(descriptor):
    """Whether a descriptor goes past the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def call(real, *args):
    """No fault."""
    return real(*args)


def failing(number):
    """A write that fails with an errno."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


EDGES = [0, 1, 511, 512, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1]
LARGE = [
    writer.BOUNCE_SIZE - 1,
    writer.BOUNCE_SIZE,
    writer.BOUNCE_SIZE + 1,
    2 * writer.BOUNCE_SIZE + BLOCK + 64,
]


@pytest.mark.parametrize("size", EDGES + LARGE)
@pytest.mark.parametrize("place", ["here", "memory"])
def test_a_file_of_any_size_is_what_a_plain_writer_makes(tmp_path, any_size_direct, monkeypatch, size, place):
    """Around every border of sectors, pages, blocks and buffers the two paths give the same file."""
    where = tmp_path if place == "here" else Path("/dev/shm") / f"torchrelay-{os.getpid()}"
    try:
        quick, quick_report = written(where, of_sizes([size]), writers=3)
        monkeypatch.setattr(local, "WORTH_IT", 1 << 60)
        plain, plain_report = written(where, of_sizes([size]))
    finally:
        if place == "memory":
            where.rmdir()
    assert quick == plain
    assert quick_report.digests == plain_report.digests == (block_digests(memoryview(_CONTENT[:size])),)


sizes = st.one_of(st.sampled_from(EDGES), st.sampled_from(LARGE), st.integers(0, 3 * BLOCK))


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(sizes, max_size=9), writers=st.integers(1, 4))
def test_all_paths_make_identical_files(tmp_path_factory, sizes, writers):
    """Direct, through the page cache, and by `write_at` alone: the same bytes, header, digests."""
    where = tmp_path_factory.mktemp("paths")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for worth in (1, 1 << 60):
            patch.setattr(local, "WORTH_IT", worth)
            found.append(written(where, of_sizes(sizes), writers=writers))
        patch.setattr(local, "WORTH_IT", 1)
        Pwrite(patch, 1, failing(errno.EINVAL))
        found.append(written(where, of_sizes(sizes), writers=writers))
    (content, report), *others = found
    assert all(one == content and said == report and said.digests == report.digests for one, said in others)
    where.rmdir()


def test_large_files_are_written_directly_by_several_threads(tmp_path, direct_writes, monkeypatch):
    """Only the header and the end that fills no page go through the page cache."""
    everybody, seen = threading.Barrier(3), set()

    def meet(real, *args):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            everybody.wait(60)
        return real(*args)

    calls = Pwrite(monkeypatch, EVERY, meet)
    _, report = written(tmp_path, of_sizes([9 * BLOCK, 9 * BLOCK, 9 * BLOCK + 1]), writers=3)
    assert report.bytes % ALIGNMENT
    assert calls.direct == -(-(27 * BLOCK) // writer.BOUNCE_SIZE)
    assert calls.cached == 2
    assert len(seen) == 3


def test_small_files_take_the_page_cache(tmp_path, monkeypatch):
    """A file below the threshold is not opened twice."""
    calls = Pwrite(monkeypatch, 0, call)
    written(tmp_path, of_sizes([local_io.WORTH_IT // 2]))
    assert calls.direct == 0 and calls.cached > 0


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_changes_its_mind_is_written_through_the_cache(
    tmp_path, direct_writes, monkeypatch, at, number
):
    """A refusal in the middle costs speed and nothing else; it is not asked again."""
    entries = of_sizes([20 * BLOCK + 77, 3])
    expected, _ = written(tmp_path, entries)
    calls = Pwrite(monkeypatch, at, failing(number))
    content, _ = written(tmp_path, entries, writers=3)
    assert content == expected
    assert calls.fired == 1 and calls.direct <= at + 2


@pytest.mark.parametrize("taken", [0, 1, 512, 4096, BLOCK + 512, writer.BOUNCE_SIZE - 1])
def test_a_short_direct_write_is_continued(tmp_path, direct_writes, monkeypatch, taken):
    """Whatever part of a write was taken, the rest follows, by the cache where it is not aligned."""
    entries = of_sizes([20 * BLOCK + 77])
    expected, _ = written(tmp_path, entries)

    def short(real, descriptor, data, offset):
        if taken % 512 == 0:
            return real(descriptor, data[:taken], offset)
        other = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)  # a part of a sector, as if it could be
        try:
            return real(other, data[:taken], offset)
        finally:
            os.close(other)

    calls = Pwrite(monkeypatch, 2, short)
    content, _ = written(tmp_path, entries, writers=2)
    assert content == expected and calls.fired == 1


def test_short_cached_writes_are_continued(tmp_path, monkeypatch):
    """The same where all bytes go through the cache, and the system takes few of them at a time."""
    entries = of_sizes([3000])
    expected, _ = written(tmp_path, entries)
    real, short = os.pwrite, []

    def write_part(descriptor, data, offset):
        short.append(len(data) > 77)
        return real(descriptor, data[:77], offset)

    monkeypatch.setattr(os, "pwrite", write_part)
    content, _ = written(tmp_path, entries)
    assert content == expected and any(short)


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_in_any_thread_fails_all(tmp_path, direct_writes, monkeypatch, at, number):
    """The error names the file, the file is gone, no thread is left, and the next try succeeds."""
    before = threading.active_count()
    calls = Pwrite(monkeypatch, at, failing(number))
    with pytest.raises(StorageError, match=f"cannot write {tmp_path}.*{os.strerror(number)}") as caught:
        write_shard(LocalStorage(tmp_path), "", IDENTITY, of_sizes([24 * BLOCK + 1]), writers=3)
    assert caught.value.errno == number and calls.fired == 1
    assert list(tmp_path.iterdir()) == [] and threading.active_count() <= before
    assert written(tmp_path, of_sizes([24 * BLOCK + 1]), writers=3)


def test_a_full_disk_shows_before_anything_is_written(tmp_path, direct_writes, monkeypatch):
    """What cannot be reserved is not begun."""
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    calls = Pwrite(monkeypatch, 0, call)
    with pytest.raises(StorageError, match="free some space"):
        write_shard(LocalStorage(tmp_path), "", IDENTITY, of_sizes([24 * BLOCK]))
    assert calls.direct == calls.cached == 0 and list(tmp_path.iterdir()) == []


def test_a_file_system_without_reservation_gets_files_of_the_right_length(tmp_path, monkeypatch):
    """Direct writes make the file longer, and its end is exact."""
    entries = of_sizes([20 * BLOCK + 77])
    expected, _ = written(tmp_path, entries)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    assert written(tmp_path, entries, writers=3)[0] == expected


def test_saves_in_several_threads_do_not_share_buffers(tmp_path, monkeypatch):
    """Six saves at once with buffers for two writers: each waits for its turn and writes its own bytes."""
    small = writer.Pool(limit=2)
    monkeypatch.setattr(writer, "pool", lambda: small)
    entries = [of_sizes([17 * BLOCK + 13 * index]) for index in range(6)]
    results = [None] * 6

    def save(index):
        results[index] = written(tmp_path / str(index), entries[index], writers=3)

    threads = [threading.Thread(target=save, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for (content, report), (entry,) in zip(results, entries, strict=True):
        assert content[report.header_bytes :] == bytes(entry.data)


@pytest.mark.parametrize(
    "held", [lambda tensor: tensor, lambda tensor: {"deep": [tensor]}], ids=["tensor", "container"]
)
def test_buffers_that_setup_has_touched_are_not_made_again(tmp_path, monkeypatch, held):
    """A job of large tensors has its buffers before its first save; one of small tensors takes no memory."""
    made = []
    new = writer.Pool._new
    monkeypatch.setattr(writer.Pool, "_new", lambda self: made.append(self) or new(self))
    for nbytes, expected in ((BLOCK, 0), (17 * BLOCK, workers.WRITERS)):
        fresh = writer.Pool()
        monkeypatch.setattr(writer, "pool", lambda fresh=fresh: fresh)
        job = Job("large", blobs={"w": held(torch.zeros(nbytes, dtype=torch.uint8))})

        @job.epoch
        def work(ctx, expected=expected):
            assert len(made) == expected

        job.stop_when(max_epochs(1))
        JobRunner(job, tmp_path / str(nbytes), save_initial=False).train()
        assert len(made) == max(1, expected)  # the small one has made a buffer in its save
        made.clear()


@pytest.mark.parametrize("inside", [True, False])
def test_a_run_with_what_cannot_be_stored_is_refused_by_name(tmp_path, inside):
    """Setup looks at the sizes of what will be saved; a sparse tensor has none, and is refused as ever."""
    sparse = torch.eye(2).to_sparse()
    module = torch.nn.Module()
    module.mask = torch.nn.Parameter(sparse, requires_grad=False)
    job = Job("sparse", blobs={"m": module if inside else sparse})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    with pytest.raises(BlobError, match=r"m(\.mask)? has layout torch\.sparse_coo"):
        JobRunner(job, tmp_path / "run").train()


def test_a_child_process_begins_with_buffers_of_its_own():
    """What a forked process writes into its buffers does not reach those of its parent."""
    with writer.pool().buffer() as room:
        room[:4] = b"mine"
    child = os.fork()
    if child == 0:
        with writer.pool().buffer() as room:
            room[:4] = b"thei"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with writer.pool().buffer() as room:
        assert bytes(room[:4]) == b"mine"


def test_a_file_that_was_exchanged_is_not_written_directly(tmp_path):
    """The second descriptor must be of the very file that was created."""
    handle = LocalStorage(tmp_path).open_exclusive("file")
    (tmp_path / "file").rename(tmp_path / "moved")
    (tmp_path / "file").touch()
    handle.preallocate(local_io.WORTH_IT)
    handle.close()
    assert handle.alignment == 0 and (tmp_path / "file").stat().st_size == 0


def test_the_seconds_of_many_threads_are_no_more_than_passed(tmp_path, monkeypatch):
    """Phases are averaged over the writers."""
    begin = time.monotonic()
    _, report = written(tmp_path, of_sizes([39 * BLOCK]), writers=4)
    passed = time.monotonic() - begin
    seconds = report.seconds
    assert 0 < sum(seconds.secs.values()) <= passed


def test_phases_are_averaged_over_threads():
    """What two of two threads did at the same time counts once."""
    seconds = Clock({"hash": 1.0, "write": 1.0, "fsync": 1.0})
    seconds.add_mean([Clock({"hash": 2.0, "write": 4.0}), Clock({"hash": 4.0})], 2)
    assert seconds.secs == {"hash": 4.0, "write": 3.0, "fsync": 1.0}


def test_each_byte_is_hashed_once(tmp_path, any_size_direct, monkeypatch):
    """Blocks that lie in two segments are hashed part by part, in the copies that are written."""
    hashed, lock, hashing = [], threading.Lock(), extents.Digests.hash

    def counting(self, piece, copied):
        with lock:
            hashed.append(len(copied))
        hashing(self, piece, copied)

    monkeypatch.setattr(extents.Digests, "hash", counting)
    written(tmp_path, of_sizes([5 * BLOCK + 64, 9 * BLOCK + 1, 7 * BLOCK]), writers=3)
    assert sum(hashed) == 21 * BLOCK + 65


@pytest.mark.parametrize("limit", [1, 1 << 40])
def test_what_is_written_to_meanwhile_is_proved_all_the_same(tmp_path, monkeypatch, limit):
    """A thread of the program that writes to tensors during a save never makes blocks that do not verify."""
    monkeypatch.setattr(local, "WORTH_IT", limit)
    sources = [bytearray(_CONTENT[:size]) for size in (5 * BLOCK + 64, 9 * BLOCK + 1, 100, 7 * BLOCK)]
    write_at, writes, lock = LocalWriteHandle.write_at, [], threading.Lock()

    def disturbing(self, offset, data):
        with lock:
            writes.append(offset)
            for source in sources:
                source[:] = bytes([len(writes)]) * len(source)
        write_at(self, offset, data)

    copy = writer.copy

    def copied(room, at, data):
        """The moment between copying and hashing: the copy must be what counts."""
        count = copy(room, at, data)
        with lock:
            for source in sources:
                source[0] = source[0] ^ 1
                source[-1] = source[-1] ^ 1
        return count

    monkeypatch.setattr(writer, "copy", copied)
    monkeypatch.setattr(LocalWriteHandle, "write_at", disturbing)
    entries = [raw(f"t{index}", source) for index, source in enumerate(sources)]
    (report,) = write_shard(LocalStorage(tmp_path), "", IDENTITY, entries, writers=3)
    assert len(writes) > 5
    content = (tmp_path / report.path).read_bytes()
    assert len({content[at] for at in range(len(content) - 7 * BLOCK, len(content), BLOCK)}) > 1  # it fired
    assert read_header(LocalStorage(tmp_path), report.path).verify() == sum(map(len, sources))


def test_an_error_ends_the_work_of_all():
    """After a failure nobody begins another item."""
    begun = []

    def work(items):
        for item in items:
            begun.append(item)
            if item == 3:
                raise StorageError("third")

    with pytest.raises(StorageError, match="third"):
        workers.share(work, range(10**6), 1)
    assert begun == [0, 1, 2, 3]
    failed, waiting = threading.Event(), threading.Barrier(2)

    def half(items):
        first = next(items)
        waiting.wait(60)
        if first == 0:
            failed.set()
            raise StorageError("first")
        failed.wait(60)
        while next(items, None) is not None and len(begun) < 10**5:
            begun.append(0)

    with pytest.raises(StorageError, match="first"):
        workers.share(half, itertools.count(), 2)
    assert len(begun) < 10**5


def test_an_interrupt_ends_all_threads():
    """Ctrl-C in the thread that waits stops the others after their item, and is what is raised."""
    met, go = threading.Barrier(2), threading.Event()
    done = []

    def work(items):
        main = threading.current_thread() is threading.main_thread()
        for item in items:
            if item < 2:
                met.wait(60)
            if main:
                go.set()
                raise KeyboardInterrupt
            go.wait(60)
            done.append(item)
            raise StorageError("too")

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        workers.share(work, range(1000), 2)
    assert len(done) == 1 and threading.active_count() <= before


def test_without_more_threads_the_work_is_done_by_one(monkeypatch):
    """A process that may have no more threads still saves."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    workers.share(lambda items: done.extend(items), range(5), 3)
    assert done == [0, 1, 2, 3, 4]


def test_tensors_in_any_memory_are_written_as_they_are(tmp_path, any_size_direct):
    """Strided, transposed, conjugated and gathered tensors beside large ones."""
    tensors = {
        "a": torch.arange(3 * BLOCK).reshape(3, BLOCK).t(),
        "b": torch.arange(6 * BLOCK, dtype=torch.int16)[1::2],
        "c": torch.randn(1000, dtype=torch.complex64).conj(),
        **{f"s{i}": torch.full((i,), i) for i in range(300)},
    }
    entries = [
        ShardEntry(Whole(name), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor)
        for name, tensor in tensors.items()
    ]
    content, _ = written(tmp_path, entries, writers=3)
    loaded = load(content)
    assert all(torch.equal(loaded[name], tensor.resolve_conj()) for name, tensor in tensors.items())


def test_a_handle_that_knows_nothing_of_it_gets_every_byte_by_write_at(tmp_path):
    """A storage of another kind sees all writes in order, from one thread."""
    seen = []

    class Handle(LocalWriteHandle):
        def preallocate(self, nbytes):
            seen.append(nbytes)

        def write_at(self, offset, data):
            seen.append((offset, len(data), threading.get_ident()))
            super().write_at(offset, data)

    class Storage(LocalStorage):
        def open_exclusive(self, path):
            handle = super().open_exclusive(path)
            return Handle(handle.path, handle._descriptor)

    (report,) = write_shard(Storage(tmp_path), "", IDENTITY, of_sizes([20 * BLOCK, 5]), writers=3)
    total, *writes = seen
    assert total == report.bytes == sum(length for _, length, _ in writes)
    assert writes[:-1] == sorted(writes[:-1]) and writes[-1][0] == 0
    assert {thread for *_, thread in writes} == {threading.get_ident()}


def test_a_process_without_memory_for_buffers_says_so(tmp_path, direct_writes, monkeypatch):
    """What the system refuses is an error of the save, and no file is left."""
    monkeypatch.setattr(writer.mmap, "mmap", failing(errno.ENOMEM))
    empty = writer.Pool()
    monkeypatch.setattr(writer, "pool", lambda: empty)
    with pytest.raises(StorageError, match="no memory for a buffer"):
        write_shard(LocalStorage(tmp_path), "", IDENTITY, of_sizes([24 * BLOCK]), writers=2)
    assert list(tmp_path.iterdir()) == []
