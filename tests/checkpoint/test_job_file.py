"""`job.json` is no single point of failure: the log repeats it, and its next owner writes it again."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from log_helpers import MemoryStorage, entry, run_of, take

from torchrelay.checkpoint.format.canonical_json import seal, sha256, unseal
from torchrelay.checkpoint.format.position import Key, Position
from torchrelay.checkpoint.log import record as job_file
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import JobFile, decode, encode, open_job, read_job, slot_path
from torchrelay.checkpoint.log.writer import LogWriter, append_as_guest, tag_draft
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.errors import DamagedError, DirectoryInUseError, FormatError, UsageError

GOLDEN = Path(__file__).parent.parent / "golden"


def harmed(data: bytes):
    """Every bit flipped, every length it may be cut to; then zeros, no JSON, another seal, nothing."""
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    yield from (data[:length] for length in range(len(data)))
    yield from (bytes(len(data)), b"no JSON\n", seal("record", {}), seal("job", {}), None)


def put(storage: MemoryStorage, data: bytes | None) -> None:
    storage.files.pop("job.json", None)
    if data is not None:
        storage.files["job.json"] = data


def test_whatever_happens_to_the_file_the_log_tells_the_same():
    """Each bit flipped, each truncation, empty, gone: readers tell the same epochs and name the file once."""
    storage = run_of(range(2))
    whole, before = storage.files["job.json"], read_job(storage)
    for data in harmed(whole):
        put(storage, data)
        view = open_log(storage, "job")
        assert view.epochs() == (0, 1) and view.job_uuid == before.uuid
        assert len(view.notices) == 1 and "job.json" in view.notices[0] and view.certain
        assert read_job(storage) == before, "the name, the uuid, when it was begun, whether it was named"
        assert storage.files.get("job.json") == data, "who only reads writes nothing"


def test_the_next_start_writes_it_again():
    """60 kinds of damage: the next owner of the log puts back the very bytes; a third start finds nothing."""
    harms = list(harmed(run_of(range(2)).files["job.json"]))
    for data in [*harms[:: len(harms) // 55], *harms[-5:]]:
        storage = run_of(range(2))
        whole = storage.files["job.json"]
        put(storage, data if data is None or len(data) != len(whole) else harms[0])
        writer = take(storage)
        assert storage.files["job.json"] == whole
        assert not writer.notices and writer.view.certain
        writer.commit(entry(2))
        writer.release()
        assert open_log(storage).epochs() == (0, 1, 2) and not open_log(storage).notices


def test_a_guest_works_by_the_log_and_leaves_the_file():
    """Who does not hold the log marks an epoch without job.json, and does not write that."""
    storage = run_of(range(2))
    put(storage, None)
    assert append_as_guest(storage, tag_draft("x", Key(0, Position(1))), "job").tagged("x") == entry(1)
    assert "job.json" not in storage.files


def test_a_damaged_file_before_the_first_record_is_begun_anew():
    """Where nothing was ever written a file that tells nothing hinders nobody."""
    storage = MemoryStorage()
    put(storage, b"{}")
    assert open_log(storage).empty
    take(storage).close()
    assert open_log(storage).job_name == "job" and unseal("job", storage.files["job.json"], "it")


def test_no_record_and_no_file_is_refused():
    """Where nothing tells whose the directory is it is neither read nor written; the remedy is named."""
    for data in (None, b""):
        storage = run_of(range(2))
        put(storage, data)
        for path in [path for path in storage.files if path.startswith("log/0")]:
            storage.files[path] = b"{}"
        for use in (open_log, take):
            with pytest.raises(DamagedError, match=r"job\.json.*restore"):
                use(storage)


def test_a_file_of_another_version_is_not_written_over():
    """What a newer version wrote is refused, not taken for damage."""
    storage = run_of(range(2))
    job = unseal("job", storage.files["job.json"], "it")
    put(storage, seal("job", {**job, "format": {"major": 2, "minor": 0, "features": []}}))
    before = dict(storage.files)
    for use in (open_log, take):
        with pytest.raises(FormatError):
            use(storage)
    assert storage.files == before


def committed(storage: MemoryStorage) -> MemoryStorage:
    """A log of one epoch whose manifest is there."""
    manifest = b"{}"
    one = entry(0)
    writer = take(storage)
    storage.files[f"data/{one.attempt_name}/manifest.json"] = manifest
    writer.commit(type(one)(**{**vars(one), "manifest_bytes": 2, "manifest_sha256": sha256(manifest)}))
    writer.release()
    return storage


@pytest.mark.parametrize("forged", [{"uuid": "0" * 8}, {"name": "other"}, {"uuid": "1", "name": "other"}])
def test_a_forged_file_leads_nowhere(forged: dict[str, str]):
    """A file with a right seal and another uuid or name is outvoted by log and epochs, and written again."""
    storage = committed(MemoryStorage())
    whole = storage.files["job.json"]
    put(storage, seal("job", {**unseal("job", whole, "it"), **forged}))
    view = open_log(storage, "job")
    assert view.epochs() == (0,) and "job.json" in view.notices[0]
    with pytest.raises(UsageError, match="belongs to job 'job'"):
        LogWriter.take(storage, "other")
    take(storage).close()
    assert storage.files["job.json"] == whole


def test_a_log_that_was_copied_here_is_not_believed():
    """A log of another directory over our epochs is refused, and the file stays: it may be right."""
    ours, theirs = committed(MemoryStorage()), run_of(range(2))
    for path in [path for path in ours.files if path.startswith("log/")]:
        del ours.files[path]
    ours.files |= {path: data for path, data in theirs.files.items() if path.startswith("log/")}
    before = dict(ours.files)
    for use in (open_log, take):
        with pytest.raises(DamagedError, match="of another job"):
            use(ours)
    assert ours.files == before


def older(storage: MemoryStorage) -> MemoryStorage:
    """The log as an older version wrote it: its holder does not repeat the file."""
    previous = None
    for slot in range(open_log(storage).slot + 1):
        record = decode(storage.files[slot_path(slot)], slot=slot, job=None)
        holder = {key: value for key, value in record.state.holder.items() if key not in ("created", "named")}
        state = type(record.state)(**{**vars(record.state), "holder": holder})
        fields = {**vars(record), "state": state, "previous_sha256": previous}
        storage.files[slot_path(slot)] = encode(type(record)(**fields))
        previous = sha256(storage.files[slot_path(slot)])
    return storage


@pytest.mark.parametrize("name", ["job", None])
def test_a_log_of_an_older_version_tells_name_and_uuid(name: str | None):
    """Its records have both; a job without a name, and one of that name, resume."""
    storage = older(run_of(range(2)))
    uuid = open_log(storage).job_uuid
    put(storage, None)
    LogWriter.take(storage, name).close()
    found = read_job(storage)
    assert (found.name, found.uuid) == ("job", uuid) and not open_log(storage).notices


def test_the_frozen_record_tells_the_job():
    """The frozen record of format 1 whose holder repeats the file tells all of it."""
    storage = MemoryStorage()
    storage.files[slot_path(0)] = (GOLDEN / "log_record_repeating_job.json").read_bytes()
    uuid = "0d4f8f3e-6a55-4f6e-9a43-1f2b8a7c9d10"
    assert read_job(storage) == JobFile("mnist", uuid, "2026-01-02T03:04:05+00:00", named=True)


def test_two_that_mend_at_once_agree(tmp_path: Path):
    """Of two starts that find the file damaged one gets the log; what lies there afterwards is right."""
    for number in range(8):
        storage = LocalStorage(tmp_path / str(number))
        writer = take(storage)
        writer.release()
        whole = (storage.root / "job.json").read_bytes()
        (storage.root / "job.json").write_bytes(whole[: 10 * number])
        ready, held = Barrier(2), []

        def start(storage=storage, ready=ready, held=held) -> None:
            ready.wait(timeout=10)
            try:
                held.append(LogWriter.take(LocalStorage(storage.root), "job", patience_secs=0.05))
            except DirectoryInUseError:
                held.append(None)

        threads = [Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert sum(one is not None for one in held) == 1
        assert (storage.root / "job.json").read_bytes() == whole
        next(one for one in held if one is not None).close()


def test_two_that_begin_over_damage_at_once_are_one_job():
    """Slot 0 decides whose uuid counts where two wrote a file of their own over one that told nothing."""
    storage = committed(MemoryStorage())
    uuid = open_log(storage).job_uuid
    put(
        storage, job_file.encode_job(JobFile("job", "late", "2026-01-01", True))
    )  # the other one's, written later
    assert open_log(storage).job_uuid == uuid
    take(storage).close()
    assert open_job(storage, "job").uuid == uuid and not open_log(storage).notices


@pytest.mark.parametrize("harm", [lambda data: data[:50], lambda data: b"{}", lambda data: None])
def test_an_object_store_is_mended_alike(harm, tmp_path: Path):
    """In a store the log tells the same, readers leave the object as it is, the next start puts it again."""
    storage = ObjectStorage(
        MemoryFileSystem(), f"{tmp_path}", f"memory:/{tmp_path}", single_writer="external"
    )
    run_of(range(2), storage)
    whole = storage.read_range("job.json", 0, 9999)
    storage.delete("job.json")
    if (data := harm(whole)) is not None:
        storage.replace("job.json", data)
    view = open_log(storage, "job")
    assert view.epochs() == (0, 1) and "job.json" in view.notices[0]
    assert storage.stat("job.json") == (None if data is None else len(data))
    take(storage).release()
    assert storage.read_range("job.json", 0, 9999) == whole and not open_log(storage).notices
