"""What a save acknowledges no limit of a reader refuses: limits lowered for both sides, and one full size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Trial
from log_helpers import entry, run_of, take

from torchrelay import open_checkpoint
from torchrelay.checkpoint.format import canonical_json, names
from torchrelay.checkpoint.format.position import Key, Position
from torchrelay.checkpoint.format.shard.header import ShardLimits
from torchrelay.checkpoint.format.shard.writer import write_shard
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.writer import append_as_guest, pin_draft
from torchrelay.errors import BlobError, UsageError
from torchrelay.tools.cli.main import main

STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "many tensors": lambda: {"t": {f"k{7919 * i % 400}": torch.full((2,), float(i)) for i in range(400)}},
    "many small values": lambda: {f"v{i}": ["x" * 500, i] for i in range(200)},
    "large values": lambda: {f"v{i}": ["x" * 70_000, i] for i in range(4)},
    "one large value": lambda: {"v": {"a": "é" * 400_000}},
    "values beside tensors": lambda: {
        "v": {"a": "x" * 200_000},
        **{f"t{i}": torch.full((2,), float(i)) for i in range(40)},
    },
}


def read_by_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb that reads an epoch does."""
    for verb in ("ls", "verify", "show"):
        assert main(["ckpt", verb, str(run)]) == 0, capsys.readouterr().err
    assert main(["ckpt", "diff", f"{run}@0", f"{run}@1"]) == 0, capsys.readouterr().err
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("header", [2_000, 50_000_000])
def test_what_is_saved_is_resumed_and_read(
    tmp_path: Path,
    state: str,
    header: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Many leaves and large values are saved, resumed, listed, proved, opened, with headers of any size."""
    monkeypatch.setitem(write_shard.__kwdefaults__ or {}, "limits", ShardLimits(1 << 20, header))
    run, made = tmp_path / "run", STATES[state]()
    assert Trial(made, epochs=1).train(run).committed == 1
    blobs = STATES[state]()
    for tensor in (one for one in blobs.values() if isinstance(one, torch.Tensor)):
        tensor.zero_()
    again = Trial(blobs, epochs=2)
    assert again.train(run).committed == 2 and again.ran == ["setup", "epoch 2"]
    read_by_everything(run, capsys)
    opened = open_checkpoint(run)
    found = opened.load_values("v*") if "v" in state else {}
    tensors = opened.load_tensors("t*") if "tensors" in state else {}
    for name, blob in made.items():
        if isinstance(blob, torch.Tensor):
            assert torch.equal(tensors[name], blob) and torch.equal(blobs[name], blob)
        elif name != "t":
            assert found[name] == blob
    for name in tensors if state == "many tensors" else ():
        assert torch.equal(tensors[name], made["t"][name.removeprefix("t.")])


def test_a_column_that_no_reader_unpacks_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More leaves than a column may list fail the save by a remedy; what was committed before stays."""
    run = tmp_path / "run"
    assert Trial({"t": {f"k{i}": torch.zeros(1) for i in range(300)}}, epochs=1).train(run).committed == 1
    monkeypatch.setattr(names, "LIMIT", 310)
    assert open_checkpoint(run).epoch == 1
    with pytest.raises(BlobError, match=r"more than the 310.*stack small tensors"):
        Trial({"t": {f"k{i}": torch.zeros(1) for i in range(320)}}).train(tmp_path / "other")
    assert not list((tmp_path / "other").glob("checkpoints/data/*/manifest.json"))


def test_a_record_that_no_reader_takes_is_not_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record above the limit of its readers is refused before its slot is filled; the log stays."""
    storage = run_of(range(3))
    writer = take(storage)
    monkeypatch.setattr(canonical_json, "LIMIT_BYTES", 1 + max(map(len, storage.files.values())))
    before = {path: data for path, data in storage.files.items() if path.startswith("log/0")}
    with pytest.raises(UsageError, match="more than"):
        writer.commit(entry(3))
    assert {path: data for path, data in storage.files.items() if path.startswith("log/0")} == before
    assert open_log(storage).epochs() == (0, 1, 2)


def test_guests_leave_the_writer_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guests fill at most half a record, so that marks never keep a writer from committing."""
    storage = run_of(range(3))
    monkeypatch.setattr(canonical_json, "LIMIT_BYTES", 16_000)
    with pytest.raises(UsageError, match="pin --delete"):
        for number in range(200):
            append_as_guest(storage, pin_draft(f"{number}{'p' * 50}", Key(0, Position(1))))
    writer = take(storage)
    writer.commit(entry(3))
    writer.release()
    assert open_log(storage).epochs() == (0, 1, 2, 3)


def test_a_note_that_no_reader_takes_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file of a run above what is read is refused by its writer, and the old one stays."""
    from torchrelay.metadata import fs

    path = tmp_path / "run.json"
    fs.write_json(path, {"a": 1})
    monkeypatch.setattr(fs, "MAX_JSON_BYTES", 100)
    with pytest.raises(UsageError, match="more than the limit of 100"):
        fs.write_json(path, {"a": "x" * 100})
    assert fs.read_json(path) == {"a": 1}
    lines = tmp_path / "metrics.1.jsonl"
    for number in range(3):
        fs.append_lines(lines, {"n": number, "x": "x" * 200})
    assert [line["n"] for line in fs.read_lines(lines)] == [0, 1, 2], "lines have no limit"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_seventy_megabytes_of_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1,150 values of 60 kB, for which manifests were too small, are saved, resumed, listed and opened."""
    blobs = {"weights": torch.zeros(4), **{f"table_{i}": ["x" * 60_000] for i in range(1150)}}
    assert Trial(blobs, epochs=1).train(tmp_path / "run").committed == 1
    assert Trial(blobs, epochs=2).train(tmp_path / "run").committed == 2
    manifests = list(tmp_path.glob("run/checkpoints/data/*/manifest.json"))
    assert min(path.stat().st_size for path in manifests) > 64 << 20
    read_by_everything(tmp_path / "run", capsys)
