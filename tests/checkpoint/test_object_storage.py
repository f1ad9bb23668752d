"""The storage seam on object stores: the same answers as on a disk, whatever the network does."""

from __future__ import annotations

import errno
import itertools
import random
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from log_helpers import entry, kinds_of, take
from stores import QUICK, Faulty, OverloadedError, Terse, store_of

import torchrelay
from torchrelay.checkpoint.format.position import Retirement
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage import object_store
from torchrelay.checkpoint.storage.base import AT_LEAST, RetryTimeouts, may_pass, persistently
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import joined, storage_of
from torchrelay.errors import StorageError, UsageError

PATHS = ("log/0.json", "log/1.json", "data/e1/trainer:0.safetensors", "HINT", "data/e1", "log")
FILES = PATHS[:4]
CALLS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(FILES), st.binary(max_size=9)),
    st.tuples(st.just("link"), st.sampled_from(FILES), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("replace"), st.sampled_from(FILES), st.binary(max_size=9)),
    st.tuples(st.just("delete"), st.sampled_from(FILES)),
    st.tuples(st.just("read"), st.sampled_from(FILES), st.integers(0, 12), st.integers(0, 12)),
    st.tuples(st.just("stat"), st.sampled_from(PATHS)),
    st.tuples(st.just("list"), st.sampled_from(("data/e1", "log", "data/none"))),
)


def write(storage, path, data):
    handle = storage.open_exclusive(path)
    try:
        half = len(data) // 2
        handle.preallocate(len(data))
        handle.write_at(half, memoryview(data)[half:])  # the header comes last
        handle.write_at(0, memoryview(data)[:half])
        handle.sync_file()
    finally:
        handle.close()


def answer(storage, call):
    """What a call gives, or the kind of its error."""
    name, *args = call
    verbs = {
        "write": lambda *a: write(storage, *a),
        "link": storage.link_exclusive,
        "read": storage.read_range,
    }
    try:
        return verbs.get(name, getattr(storage, name, None))(*args)
    except (FileExistsError, FileNotFoundError, StorageError) as error:
        return type(error)


@settings(max_examples=80, deadline=None)
@given(calls=st.lists(CALLS, max_size=14))
def test_a_store_answers_as_a_disk_does(calls):
    """Any sequence of verbs has the same answers on a local directory and on an object store.

    What is created exclusively is like nothing else, as the nonces of records make it.
    """
    with tempfile.TemporaryDirectory() as directory:
        disk, store = LocalStorage(directory), store_of(Faulty())
        for storage in (disk, store):
            for path in ("log", "data/e1"):
                storage.mkdir(path)
        for index, call in enumerate(calls):
            if call[0] == "link":
                call = (*call[:2], b"%d: %b" % (index, call[2]))
            assert answer(disk, call) == answer(store, call), call


def story(storage):
    """Two writers' lives over a log, one after another; returns what is then true."""
    for first in (0, 5):
        writer = take(storage)
        for epoch in range(first, first + 5):
            write(storage, f"data/e{epoch:08d}-{epoch:06x}/f", b"%d" % epoch)
            writer.commit(entry(epoch, nonce=f"{epoch:06x}"))
            if epoch > 1:
                gone = Retirement(f"e{epoch - 2:08d}-{epoch - 2:06x}")
                writer.retire([gone])
                storage.delete(f"data/{gone.attempt_name}/f")
                writer.forget([gone])
        writer.release()
    view = open_log(storage)
    files = [name for name in storage.list("data") if storage.stat(f"data/{name}/f") is not None]
    return view.epochs(), view.slot, kinds_of(storage, view.slot), files


def test_faults_change_nothing():
    """With 503, resets and lost answers at a third of thousands of calls the log tells the same story."""
    expected, counted = story(store_of(Faulty())), 0
    assert expected[0] == (8, 9)
    for seed in range(20):
        draw = random.Random(seed)
        system = Faulty(iter(lambda draw=draw: draw.choice(("", "", "", "", "503", "reset", "lost")), None))
        assert story(store_of(system)) == expected
        assert min(system.fired.values()) > 10
        counted += sum(system.fired.values())
    assert counted > 2000


def test_every_lost_answer_of_a_commit():
    """Whichever call of a commit loses its answer, there is one record of it and it is acknowledged."""
    for at in itertools.count():
        system = Faulty()
        storage = store_of(system)
        writer = take(storage)
        system.faults = iter(["" for _ in range(at)] + ["lost"])
        writer.commit(entry(0))
        system.faults, fired = iter(()), system.fired["lost"]
        writer.close()
        assert (kinds_of(storage, 1), open_log(storage).slot) == (["takeover", "commit"], 1)
        if not fired:
            assert at > 2
            return


def test_a_refusal_in_other_words_is_a_name_that_is_taken():
    """EINVAL for a condition that does not hold means FileExistsError, by what lies there."""
    storage = store_of(Terse())
    storage.link_exclusive("x", b"first")
    with pytest.raises(FileExistsError):
        storage.link_exclusive("x", b"second")
    assert storage.read_range("x", 0, 9) == b"first"


def test_other_clients_are_seen_at_once():
    """What another process wrote or removed is seen by the next question: nothing is remembered."""
    system = Faulty()
    mine, other = (ObjectStorage(system, "/b/job", "memory://b/job") for _ in range(2))
    assert (mine.list("log"), mine.stat("log/0")) == ([], None)
    other.link_exclusive("log/0", b"x")
    assert (mine.list("log"), mine.stat("log/0")) == (["0"], 1)
    other.delete("log/0")
    assert (mine.list("log"), mine.stat("log/0")) == ([], None)


def test_an_outage_ends_at_the_deadline():
    """A store that stays away is an error of ours that names place and remedy, after the deadline."""
    storage = store_of(Faulty(itertools.repeat("503")), patience=RetryTimeouts(0.2, 0.01, 0.05))
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot read memory:.*log/0: 503 Slow Down; try again when"):
        storage.read_range("log/0", 0, 1)
    assert time.monotonic() - begun < 10
    assert storage.system.calls >= 3


def test_a_call_within_a_call_is_not_repeated_again():
    """The look at what lies there, repeated to the end by itself, ends the creation that needed it."""
    storage = store_of(Faulty(itertools.repeat("503")), patience=RetryTimeouts(0.0, 0.0, 0.0))
    with pytest.raises(StorageError, match="cannot read"):
        storage.link_exclusive("log/0", b"x")
    assert storage.system.calls == 1 + AT_LEAST


@pytest.mark.parametrize("error", [PermissionError("403"), OSError(errno.ENOSYS, "no"), ValueError("bad")])
def test_what_does_not_pass_is_not_repeated(error):
    """A refusal for good is raised at the first attempt."""
    attempts = []

    def work():
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        persistently(work, QUICK)
    assert len(attempts) == 1


def test_errors_below_fsspec_may_pass():
    """Overload is known by its status, and by the causes of an error; an unknown error does not pass."""
    wrapped = OSError("upload failed")
    wrapped.__cause__ = OverloadedError()
    assert may_pass(wrapped)
    assert may_pass(TimeoutError())
    assert not may_pass(OSError("upload failed"))


def test_repeating_leaves_the_users_random_numbers_alone():
    """Pauses between attempts draw nothing from Python's global stream: resumed runs would differ."""
    random.seed(3)
    before = random.getstate()
    storage = store_of(Faulty(iter(["503"] * 5)), patience=RetryTimeouts(30.0, 0.001, 0.002))
    assert storage.stat("x") is None
    assert storage.system.fired["503"] == 5
    assert random.getstate() == before


def test_nothing_is_visible_before_it_is_whole():
    """A shard appears when it is synced, whole; closed before that it never was."""
    storage = store_of(Faulty())
    handle = storage.open_exclusive("data/x")
    handle.write_at(2, memoryview(b"data"))
    handle.write_at(0, memoryview(b"he"))
    assert storage.list("data") == []
    handle.sync_file()
    assert storage.read_range("data/x", 0, 9) == b"hedata"
    handle.close()
    with pytest.raises(FileExistsError):
        storage.open_exclusive("data/x")
    storage.open_exclusive("data/y").close()
    assert storage.list("data") == ["x"]


def test_large_files_are_put_from_the_staged_file(monkeypatch):
    """Beyond one PUT fsspec reads the staged file itself; a lost answer repeats it."""
    monkeypatch.setattr(object_store, "PUT_IN_ONE_BYTES", 100)
    system = Faulty(iter(["", "lost"]))
    storage = store_of(system)
    write(storage, "data/x", bytes(range(256)))
    assert system.fired["lost"] == 1
    assert storage.read_range("data/x", 0, 999) == bytes(range(256))


def test_what_arrived_short_is_not_written():
    """The size that the store tells afterwards has to be that of what was sent."""

    class Truncating(Faulty):
        def pipe_file(self, path, value, mode="overwrite", **kwargs):
            return super().pipe_file(path, value[:-1], mode=mode, **kwargs)

    with pytest.raises(StorageError, match="has 3 bytes after 4 were sent"):
        write(store_of(Truncating()), "data/x", b"abcd")


def test_a_place_to_stage_is_named(tmp_path, monkeypatch):
    """Where nothing can be staged the error names the directory and TMPDIR."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match=r"gone.*TMPDIR"):
        store_of(Faulty()).open_exclusive("data/x")


@pytest.mark.parametrize("path", ["", "../x", "a//b", "/x", "a/./b", "a\0b"])
def test_paths_stay_below_the_root(path):
    """No path leads out of the place."""
    if path:
        with pytest.raises(StorageError, match="not a path below"):
            store_of(Faulty()).replace(path, b"x")
    with pytest.raises(StorageError, match="empty"):
        store_of(Faulty()).link_exclusive("x", b"")


def test_colons_are_encoded_where_nobody_knows_that_they_are_taken(tmp_path):
    """On a file system of unknown rules a colon lies there as %3A and comes back as a colon."""
    from fsspec.implementations.local import LocalFileSystem

    storage = ObjectStorage(LocalFileSystem(), str(tmp_path), f"odd://{tmp_path}", single_writer="external")
    write(storage, "data/e1/trainer:0%3A.safetensors", b"x")
    assert [one.name for one in (tmp_path / "data" / "e1").iterdir()] == ["trainer%3A0%253A.safetensors"]
    assert storage.list("data/e1") == ["trainer:0%3A.safetensors"]
    assert storage.read_range("data/e1/trainer:0%3A.safetensors", 0, 9) == b"x"
    storage.delete("data/e1/trainer:0%3A.safetensors")
    storage.delete("data/e1")
    assert storage.list("data") == []


def test_places(tmp_path, monkeypatch):
    """Paths and file:// are local, other URLs are stores; what cannot be is refused with the remedy."""
    assert isinstance(storage_of(tmp_path, "the prefix"), LocalStorage)
    assert storage_of(f"file://{tmp_path}", "the prefix").url == str(tmp_path)
    assert storage_of("memory://runs/x/", "the prefix").url == "memory://runs/x"
    assert (joined("memory://x/", "y"), joined("runs", "y")) == ("memory://x/y", "runs/y")
    for url, why in [
        ("nosuch://x/y", "not known"), ("memory://", "no place"), ("simplecache::memory://x", "chains"),
        ("memory://x\ny", "control"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=why):
            storage_of(url, "the prefix")
    import fsspec.core

    def missing(url, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UsageError, match=r"pip install 's3fs>="):
        storage_of("s3://bucket/run", "the prefix")


@pytest.mark.parametrize("kind", ["store", "disk"])
def test_races_for_a_name(kind):
    """Of four that create a name at the same moment exactly one does: ten thousand races for links.

    The store in memory looks before it writes, and others run between.
    """

    class Looking(Faulty):
        def exists(self, path, **kwargs):
            there = super().exists(path, **kwargs)
            time.sleep(0.0002)
            return there

    races, wins = (10_000 if kind == "disk" else 400), []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        storage = LocalStorage(directory) if kind == "disk" else store_of(Looking())
        gate = threading.Barrier(4)

        def run(me):
            for race in range(races):
                if race % 50 == 0:
                    gate.wait()
                try:
                    storage.link_exclusive(f"{race}", b"%d of %d" % (me, race))
                except FileExistsError:
                    continue
                wins.append((race, me))

        threads = [threading.Thread(target=run, args=(me,)) for me in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(race for race, _ in wins) == list(range(races))
        assert len({me for _, me in wins}) > 1
        for race, me in wins[:: races // 50]:
            assert storage.read_range(f"{race}", 0, 99) == b"%d of %d" % (me, race)


def test_a_bare_manager_that_must_resume_tells_what_the_store_refuses(tmp_path: Path) -> None:
    """Where the log cannot be taken over, the store's reason is told, and not that the log is not open."""
    url = f"local://{tmp_path}/place"
    tensor = torch.zeros(2)
    job = torchrelay.Job("refused", blobs={"tensor": tensor})
    job.epoch(lambda ctx: tensor.add_(1))
    job.stop_when(torchrelay.max_epochs(1))

    def manager() -> torchrelay.MultiNodeCheckpointManager:
        (tmp_path / "place").mkdir(exist_ok=True)
        return torchrelay.MultiNodeCheckpointManager(url, single_writer="external")

    torchrelay.JobRunner(job, manager()).train(torchrelay.LocalSession())
    job.stop_when(torchrelay.max_epochs(2))
    second = manager()
    storage = second.engine.storage
    refusing = PermissionError(errno.EACCES, "denied")

    def pipe_file(*given: object, **more: object) -> None:
        raise refusing

    storage.system.pipe_file = pipe_file
    with pytest.raises(StorageError, match="denied"):
        torchrelay.JobRunner(job, second, resume="must").train(torchrelay.LocalSession())
