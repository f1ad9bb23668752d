"""Files made to harm: each ends in a typed error, quickly and in bounded memory; nothing is executed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle  # noqa: TID251 - only to show that nobody reads it
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Trial, newest_try, noted, records, shard
from torchrun import clean_environment

from torchrelay import open_checkpoint
from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.names import pack_numbers
from torchrelay.errors import DamagedError, NoProvableEpochError, RelayError, StorageError
from torchrelay.metadata.run_directory import RunDirectory

MEMORY_BYTES = 128 << 20
"""A few copies of the largest file that is read whole before it is proved (16 MiB)."""
SECS = 1.0


def hurt(work: Callable[[], Any], *kinds: type[RelayError]) -> str:
    """Check that `work` raises one of our errors, quickly and without taking memory."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(kinds or (RelayError,)) as caught:
            work()
        secs, memory = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert secs < 5 * SECS, f"{secs:.1f} s with every allocation traced"
    assert memory < MEMORY_BYTES, f"{memory} bytes"
    return str(caught.value)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("original") / "run"
    Trial({"w": torch.arange(3.0), "v": torch.ones(2)}).train(run)
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A run of two epochs, to be spoilt."""
    subprocess.run(["cp", "-a", str(original), str(tmp_path / "run")], check=True)
    return tmp_path / "run"


def load(run: Path) -> dict[str, torch.Tensor]:
    return open_checkpoint(run, epoch=2).load_tensors("*")


def forge_manifest(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest of epoch 2, and let the log's newest record state its new size and digest."""
    path = newest_try(run, 2) / "manifest.json"
    raw = json.loads(path.read_bytes())
    made = change(raw)
    data = made if isinstance(made, bytes) else json.dumps(raw).encode()
    path.write_bytes(data)
    forge_record(run, lambda record: _point_to(record, data))


def _point_to(record: dict[str, Any], data: bytes) -> None:
    (entry,) = [one for one in record["live"] if one["epoch"] == 2]
    entry["manifest_bytes"], entry["manifest_sha256"] = len(data), hashlib.sha256(data).hexdigest()


def forge_record(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the newest record and seal it again, as somebody who knows the format would."""
    path = records(run)[-1]
    record = canonical_json.unseal("record", path.read_bytes(), "record")
    change(record)
    path.write_bytes(canonical_json.seal("record", record))


def forge_header(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the shard of epoch 2, and every digest above it."""
    path = shard(run, 2)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    whole = len(text).to_bytes(8, "little") + text
    path.write_bytes(whole + data[8 + length :])

    def state(raw: dict[str, Any]) -> None:
        raw["shards"]["header_sha256"] = base64.b64encode(hashlib.sha256(whole).digest()).decode()
        raw["shards"]["bytes"] = pack_numbers([path.stat().st_size])
        raw["shards"]["header_bytes"] = pack_numbers([len(whole)])

    forge_manifest(run, state)


def test_the_forger_is_good_enough(run: Path) -> None:
    """Files that are forged without harm are read: so what is refused below is refused for its content."""
    forge_header(run, lambda header: None)
    assert torch.equal(load(run)["w"], torch.arange(3.0))


# Manifests


def column(table: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw[table][key] = value

    return change


def each_shape(shape: list[int]) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["leaves"]["shape"] = [shape for _ in raw["leaves"]["shape"]]

    return change


def tries(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["tries"] = [*raw["tries"], *names]

    return change


def node_called(name: str) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["world"]["nodes"] = [name]

    return change


def twice(key: str) -> Callable[[dict[str, Any]], bytes]:
    def change(raw: dict[str, Any]) -> bytes:
        text = json.dumps(raw)
        return text.replace(f'"{key}":', f'"{key}": 0, "{key}":', 1).encode()

    return change


def instead(text: str) -> Callable[[dict[str, Any]], bytes]:
    return lambda raw: json.dumps(raw).replace('"branch": 0', f'"branch": {text}', 1).encode()


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "10^15 bytes": column("shards", "bytes", [10**15]),
    "a header of 10^15 bytes": column("shards", "header_bytes", [10**15]),
    "leaves of 10^15 bytes": column("leaves", "bytes", [[10**15, 0, 10**7]]),
    "a shape that overflows": each_shape([2**40, 2**40]),
    "a shape of nothing and everything": each_shape([0, 2**52, 2**52]),
    "a negative extent": each_shape([-3]),
    "a run of 10^15 numbers": column("leaves", "layout", [[0, 0, 10**15]]),
    "a path with ..": tries("../../../etc"),
    "an absolute path": tries("/etc/passwd"),
    "a try with a slash": tries("e00000001-abcdefabcdef/../x"),
    "a node with ..": node_called("../trainer_0"),
    "a group with a slash": lambda raw: raw["words"].__setitem__(slice(None), ["../x" for _ in raw["words"]]),
    "a key twice": twice("branch"),
    "NaN": instead("NaN"),
    "Infinity": instead("Infinity"),
    "1e999": instead("1e999"),
    "a number of 5000 digits": instead("9" * 5000),
    "2^53 + 1": instead(str(2**53 + 1)),
    "depth": lambda raw: b"[" * 100_000 + b"]" * 100_000,
    "no object": lambda raw: b"[]",
    "no JSON": lambda raw: b"\xff\xfe\x00",
    "nothing": lambda raw: b"",
    "a newer version": lambda raw: raw.__setitem__("format", {"major": 99, "minor": 0, "features": []}),
    "an unknown feature": lambda raw: raw["format"].__setitem__("features", ["telepathy"]),
    "no shards": lambda raw: raw.__setitem__("shards", {}),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest(run: Path, name: str) -> None:
    """Sizes, shapes, paths and JSON that no writer makes are refused before anything is allocated."""
    forge_manifest(run, MANIFESTS[name])
    text = hurt(lambda: load(run), StorageError)
    assert "manifest.json" in text or "safetensors" in text or "epoch 2" in text


# Shards


def offsets(first: int, last: int) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["w"].__setitem__("data_offsets", [first, last])


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an overlap": lambda header: header["w"].__setitem__("data_offsets", header["v"]["data_offsets"]),
    "a hole": offsets(4096, 4108),
    "a negative offset": offsets(-12, 0),
    "beyond the file": offsets(0, 10**15),
    "a float offset": lambda header: header["w"].__setitem__("data_offsets", [0.0, 12.0]),
    "a shape of nothing and everything": lambda header: header["w"].__setitem__("shape", [0, 2**62]),
    "another type": lambda header: header["w"].__setitem__("dtype", "F64"),
    "an unknown type": lambda header: header["w"].__setitem__("dtype", "PICKLE"),
    "a name with ..": lambda header: header.__setitem__("../../x", header.pop("w")),
    "a missing name": lambda header: header.pop("w"),
    "no metadata of ours": lambda header: header.__setitem__("__metadata__", {"format": "pt"}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header(run: Path, name: str) -> None:
    """Ranges, shapes and names that do not fit the file or the manifest are refused."""
    forge_header(run, HEADERS[name])
    text = hurt(lambda: load(run), StorageError)
    assert "safetensors" in text


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001])
def test_a_header_length_that_cannot_be(run: Path, length: int) -> None:
    """The first eight bytes are never believed."""
    data = shard(run, 2).read_bytes()
    shard(run, 2).write_bytes(length.to_bytes(8, "little") + data[8:])
    hurt(lambda: load(run), DamagedError)


def test_a_giant_sparse_file(run: Path) -> None:
    """A file that claims a terabyte is refused by its size alone."""
    with shard(run, 2).open("r+b") as file:
        file.truncate(1 << 40)
    assert "bytes instead of" in hurt(lambda: load(run), DamagedError)
    with (newest_try(run, 2) / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    hurt(lambda: load(run), DamagedError)
    with records(run)[-1].open("r+b") as file:
        file.truncate(1 << 40)
    hurt(lambda: Trial(epochs=3).train(run, epoch=9))
    with (run / "run.json").open("r+b") as file:
        file.truncate(1 << 40)
    hurt(lambda: RunDirectory(run).identity(), DamagedError)  # which the next start writes again


@pytest.mark.parametrize("name", ["shard", "manifest"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link"])
def test_something_that_is_no_file(run: Path, name: str, kind: str) -> None:
    """Pipes are not waited for, devices and links not read."""
    path = shard(run, 2) if name == "shard" else newest_try(run, 2) / "manifest.json"
    moved = path.rename(run / "moved")
    make = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
        "link": lambda: path.symlink_to(moved),
    }
    make[kind]()
    assert path.name in hurt(lambda: load(run), DamagedError)


def test_the_shard_of_another_epoch(run: Path) -> None:
    """A whole and valid file in the place of another of the same size is noticed."""
    shard(run, 2).write_bytes(shard(run, 1).read_bytes())
    hurt(lambda: load(run), DamagedError)


# Records


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a try with ..": lambda record: record["live"][-1].__setitem__("try", "../../etc"),
    "a base file with ..": lambda record: record.__setitem__(
        "base", {"name": "../../run.json", "bytes": 10, "sha256": "0" * 64, "gone": []}
    ),
    "a base file of 10^15 bytes": lambda record: record.__setitem__(
        "base", {"name": f"base-{'a' * 16}.json", "bytes": 10**15, "sha256": "0" * 64, "gone": []}
    ),
    "an entry twice": lambda record: record["live"].append(record["live"][-1]),
    "a negative size": lambda record: record["live"][-1].__setitem__("manifest_bytes", -1),
    "another job": lambda record: record.__setitem__("job", "00000000-0000-0000-0000-000000000000"),
    "another slot": lambda record: record.__setitem__("slot", 77),
    "a generation from the future": lambda record: record.__setitem__("generation", 10**6),
    "text for a number": lambda record: record["live"][-1].__setitem__("epoch", "2"),
    "a branch that is not there": lambda record: record.__setitem__("branch", 9),
    "no live entries": lambda record: record.pop("live"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_hostile_record(run: Path, name: str) -> None:
    """A record that no writer of this log made is not believed; the one before it tells what there is."""
    forge_record(run, RECORDS[name])
    began = time.monotonic()
    try:
        found = open_checkpoint(run, epoch=2).load_tensors("w")
        assert torch.equal(found["w"], torch.arange(3.0))
    except DamagedError as error:
        assert "log" in str(error)
    assert time.monotonic() - began < SECS


@pytest.mark.parametrize(
    "hint", [b"", b"garbage", b"99999999999999999999\n", b"-1\n", b"3\n" * 10_000, b"\0" * 4096]
)
def test_a_hostile_hint(run: Path, hint: bytes) -> None:
    """HINT is only where to look first: whatever it says, the same end of the log is found."""
    (run / "checkpoints" / "log" / "HINT").write_bytes(hint)
    assert torch.equal(load(run)["w"], torch.arange(3.0))


def test_a_hint_of_a_terabyte(run: Path) -> None:
    """At most a few kilobytes of it are read."""
    with (run / "checkpoints" / "log" / "HINT").open("wb") as file:
        file.truncate(1 << 40)
    assert torch.equal(load(run)["w"], torch.arange(3.0))


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":2}', b"[NaN]", b"[1e999]", b"[" * 10**5, b"9" * 5000, b'"\xff"']
)
def test_json_that_two_readers_read_differently(text: bytes) -> None:
    """Canonical JSON refuses it, whoever asks."""
    hurt(lambda: canonical_json.loads(text, what="it"), DamagedError)


# Execution


class Bomb:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("name", ["shard", "manifest", "record", "job.json", "run.json", "status.json"])
def test_a_pickle_in_the_place_of_a_file(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle anywhere is bytes that are not ours; it is never run."""
    monkeypatch.chdir(run)
    paths = {
        "shard": shard(run, 2),
        "manifest": newest_try(run, 2) / "manifest.json",
        "record": records(run)[-1],
        "job.json": run / "checkpoints" / "job.json",
    }
    paths.get(name, run / name).write_bytes(pickle.dumps(Bomb()))
    trial = Trial({"w": torch.zeros(3), "v": torch.zeros(2)}, epochs=3)
    with noted() as said, suppress(StorageError):
        trial.train(run, takeover_secs=0.2)
    assert said or not trial.ran, "it was refused, or replaced and said"
    assert not (run / "exploded").exists()


AUDITED = """
import sys
import torch
from torchrelay import Job, JobRunner, LocalSession, max_epochs, open_checkpoint
from torchrelay.records import make_initializers

run = sys.argv[1]
seen, armed = [], True
FORBIDDEN = (
    "pickle.", "os.exec", "os.system", "os.fork", "os.posix_spawn", "subprocess.", "socket.", "ctypes.dlopen",
    "exec", "compile",
)
def audit(event, arguments):
    if not armed:
        return
    if event == "open" and isinstance(arguments[0], str):
        seen.append(("open", arguments[0]))
    elif event.startswith(FORBIDDEN) or (event == "import" and "pickle" in arguments[0]):
        seen.append((event, repr(arguments)[:200]))
target = torch.zeros(3)
warm = open_checkpoint(run, epoch=1)
warm.load({"w": target})
warm.load_tensors("*")
make_initializers()  # of our own classes, compiled when some objects have been made
armed = True
seen.clear()
sys.addaudithook(audit)
checkpoint = open_checkpoint(run, epoch=2)
checkpoint.load({"w": target})
checkpoint.load_tensors("*")
armed = False
outside = [one for one in seen if one[0] != "open" or not one[1].startswith(run)]
print(len(seen), outside)
"""


def test_a_load_runs_nothing_and_opens_nothing_else(run: Path) -> None:
    """By Python's audit events: no pickle, code, process or socket, and no file outside of the directory."""
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, str(run)],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    count, _, outside = done.stdout.strip().partition(" ")
    assert int(count) > 0, "the hook saw the files"
    assert outside == "[]"


def test_no_epoch_left_by_an_attacker(run: Path) -> None:
    """If all manifests are forged no epoch is chosen, and the run does not start afresh."""
    for epoch in range(3):
        (newest_try(run, epoch) / "manifest.json").write_bytes(pickle.dumps(Bomb()))
    trial = Trial({"w": torch.zeros(3), "v": torch.zeros(2)}, epochs=3)
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(NoProvableEpochError):
        trial.train(run)
    assert trial.ran == []
