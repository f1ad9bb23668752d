"""Damage that a start meets: which file, which epoch, what was used instead, never for an explicit one."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bad_input import Trial, flip, newest_try, records, shard, tree

from torchrelay import JobRunner, LocalSession, MultiNodeCheckpointManager
from torchrelay.errors import (
    DamagedError,
    NoProvableEpochError,
    PartiallyLoadedError,
    RelayError,
    StorageError,
)
from torchrelay.metadata.handlers import FileMetadataHandler
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.training.journal import SaveWarning

Damage = Callable[[Path], Path]


def counting(epochs: int) -> Trial:
    """`w` counts the epochs, so its value tells from which epoch a run went on."""
    return Trial({"w": torch.zeros(3)}, epochs=epochs, epoch=lambda ctx: ctx["w"].add_(1))


def value(trial: Trial) -> float:
    return float(trial.job.blobs["w"].source[0])


def manifest_bit(run: Path) -> Path:
    path = newest_try(run, 2) / "manifest.json"
    flip(path, 100)
    return path


def manifest_gone(run: Path) -> Path:
    path = newest_try(run, 2) / "manifest.json"
    path.unlink()
    return path


def header_bit(run: Path) -> Path:
    flip(shard(run, 2), 60)
    return shard(run, 2)


def random_state_bit(run: Path) -> Path:
    flip(shard(run, 2), -1)
    return shard(run, 2)


def shard_cut(run: Path) -> Path:
    path = shard(run, 2)
    path.write_bytes(path.read_bytes()[:-1])
    return path


def shard_gone(run: Path) -> Path:
    path = shard(run, 2)
    path.unlink()
    return path


def shard_is_a_pipe(run: Path) -> Path:
    path = shard(run, 2)
    path.unlink()
    os.mkfifo(path)
    return path


def shard_is_a_link(run: Path) -> Path:
    path = shard(run, 2)
    shutil.move(path, run / "elsewhere")
    path.symlink_to(run / "elsewhere")
    return path


def block_bit(run: Path) -> Path:
    """One bit of the tensor `w` itself, which is read into live memory."""
    path = shard(run, 2)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    flip(path, 8 + length + json.loads(data[8 : 8 + length])["w"]["data_offsets"][0])
    return path


DAMAGES = [
    manifest_bit, manifest_gone, header_bit, random_state_bit, block_bit, shard_cut, shard_gone,
    shard_is_a_pipe, shard_is_a_link,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_automatic_resume_falls_back(tmp_path: Path, damage: Damage) -> None:
    """A damaged newest epoch is named with its file, the epoch before it is loaded, all epochs follow."""
    counting(2).train(tmp_path / "run")
    path = damage(tmp_path / "run")
    trial = counting(3)
    with pytest.warns(SaveWarning, match="epoch 2 is damaged") as said:
        assert trial.train(tmp_path / "run") == 3
    text = str(said[0].message)
    assert path.name in text and path.parent.name in text and "older one is used instead" in text
    assert trial.ran == ["setup", "epoch 2", "epoch 3"]
    assert value(trial) == 3.0


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_an_explicit_epoch_is_never_replaced(tmp_path: Path, damage: Damage) -> None:
    """Asked for, a damaged epoch is an error that names it and its file; no epoch is abandoned by it."""
    counting(3).train(tmp_path / "run")
    path = damage(tmp_path / "run")
    trial = counting(4)
    with pytest.raises((DamagedError, PartiallyLoadedError)) as caught:
        trial.train(tmp_path / "run", epoch=2)
    text = str(caught.value)
    assert "epoch 2" in text and path.name in text and "another" in text
    assert caught.value.exit_code == 5
    assert "epoch 3" not in trial.ran
    after = counting(4)
    assert after.train(tmp_path / "run") == 4
    assert after.ran == ["setup", "epoch 4"], "epoch 3 was not abandoned by the request that failed"


def test_everything_is_damaged(tmp_path: Path) -> None:
    """If no epoch can be proved the run ends with code 3 and all reasons; it never starts afresh."""
    Trial().train(tmp_path / "run")
    for epoch in range(3):
        flip(newest_try(tmp_path / "run", epoch) / "manifest.json", 50)
    for _ in range(2):
        trial = Trial(epochs=3)
        with warnings.catch_warnings(), pytest.raises(NoProvableEpochError) as caught:
            warnings.simplefilter("ignore")
            trial.train(tmp_path / "run")
        assert caught.value.exit_code == 3
        assert "restore the files" in str(caught.value)
        assert trial.ran == []
    fresh = Trial(epochs=1)
    with pytest.warns(SaveWarning, match="from scratch"):
        assert fresh.train(tmp_path / "run", resume="never") == 1


def test_a_damaged_newest_record(tmp_path: Path) -> None:
    """The record is named with the one that is used instead; its writer is watched before it is replaced."""
    manager = MultiNodeCheckpointManager(tmp_path / "run" / "checkpoints", takeover_secs=0.2)
    Trial(name="run").train(manager)
    flip(records(tmp_path / "run")[-1], 100)
    trial = Trial(name="run", epochs=3)
    manager = MultiNodeCheckpointManager(tmp_path / "run" / "checkpoints", takeover_secs=0.2)
    with pytest.warns(SaveWarning, match=r"0004\.json is damaged.*0003\.json is used instead"):
        assert trial.train(manager, epoch=2) == 3
    assert trial.ran == ["setup", "epoch 3"]


def test_all_records_are_damaged(tmp_path: Path) -> None:
    """Without a single record to trust nothing is done, and the remedy is told."""
    Trial().train(tmp_path / "run")
    for path in records(tmp_path / "run"):
        flip(path, 100)
    before = tree(tmp_path)
    trial = Trial(epochs=3)
    with pytest.raises(DamagedError, match=r"no record that can be trusted .*copy"):
        trial.train(tmp_path / "run")
    assert (trial.ran, tree(tmp_path)) == ([], before)


@pytest.mark.parametrize("what", ["directory", "pipe", "link", "dangling link"])
def test_something_odd_in_the_next_slot(tmp_path: Path, what: str) -> None:
    """What is no file cannot be a record: it is named, the log is not written around it."""
    Trial().train(tmp_path / "run")
    path = records(tmp_path / "run")[-1].with_name("00000000000000000005.json")
    make = {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("/etc/passwd"),
        "dangling link": lambda: path.symlink_to("nowhere"),
    }
    make[what]()
    trial = Trial(epochs=3)
    with pytest.raises(StorageError, match=r"0005\.json.*remove it"):
        trial.train(tmp_path / "run")
    assert trial.ran == []


def test_a_record_is_missing(tmp_path: Path) -> None:
    """A gap in the log is an error: the lost record may have been a commit."""
    Trial().train(tmp_path / "run")
    records(tmp_path / "run")[-2].unlink()
    path = records(tmp_path / "run")[-1]
    path.rename(path.with_name("00000000000000000006.json"))
    with pytest.raises(DamagedError, match=r"0005\.json|0003\.json|0006\.json"):
        Trial(epochs=3).train(tmp_path / "run")


def test_foreign_files_disturb_nobody(tmp_path: Path) -> None:
    """Files and directories of others in log/ and data/ are neither read nor deleted."""
    run = tmp_path / "run"
    Trial().train(run)
    for room in ("log", "data"):
        (run / "checkpoints" / room / "README").write_text("mine")
        (run / "checkpoints" / room / "99999999999999999999.json").write_text("{}")
        (run / "checkpoints" / room / "old").mkdir()
        (run / "checkpoints" / room / "e1-backup").mkdir()
    trial = Trial(epochs=3)
    assert trial.train(run, keep_last=1) == 3
    assert trial.ran == ["setup", "epoch 3"]
    for room in ("log", "data"):
        names = {path.name for path in (run / "checkpoints" / room).iterdir()}
        assert {"README", "99999999999999999999.json", "old", "e1-backup"} <= names


def test_links_planted_in_data(tmp_path: Path) -> None:
    """A link in place of a try is not followed: not to read, and not to delete what it points to."""
    run, treasure = tmp_path / "run", tmp_path / "treasure"
    Trial().train(run)
    treasure.mkdir()
    (treasure / "trainer_0.7.main.safetensors").write_text("precious")
    (run / "checkpoints" / "data" / "e00000007-abcdefabcdef").symlink_to(treasure)
    orphan = run / "checkpoints" / "data" / "e00000008-abcdefabcdef"
    orphan.mkdir()
    (orphan / "trainer_0.8.main.safetensors").symlink_to(treasure / "trainer_0.7.main.safetensors")
    with pytest.warns(UserWarning, match="is a link"):
        assert Trial(epochs=3).train(run) == 3
    assert (treasure / "trainer_0.7.main.safetensors").read_text() == "precious"
    assert not orphan.exists()


def test_a_try_that_became_a_link(tmp_path: Path) -> None:
    """An epoch whose directory was replaced by a link is not read through it; the link is named."""
    run = tmp_path / "run"
    Trial().train(run)
    directory = newest_try(run, 2)
    shutil.move(directory, tmp_path / "moved")
    directory.symlink_to(tmp_path / "moved")
    trial = Trial(epochs=3)
    with pytest.raises(StorageError, match=f"{directory.name} is a link.*remove it"):
        trial.train(run)
    assert trial.ran == []


@pytest.mark.parametrize(
    "content",
    ["", "null", "[]", "{}", '{"attempt":"x","tail":3}', '{"attempt":1e400,"tail":{"done":3}}', "[" * 10**5],
    ids=lambda text: text[:20],
)
def test_a_status_that_nobody_wrote(tmp_path: Path, content: str) -> None:
    """Whatever is in status.json, the run goes on from its checkpoints and writes it anew."""
    Trial().train(tmp_path / "run")
    (tmp_path / "run" / "status.json").write_text(content)
    trial = Trial(epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trial.train(tmp_path / "run") == 3
    assert trial.ran == ["setup", "epoch 3"]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "FINISHED"


@pytest.mark.parametrize("name", ["status.json", "checkpoints/writer.json", "checkpoints/log/HINT"])
def test_a_pipe_in_place_of_a_file_that_proves_nothing(tmp_path: Path, name: str) -> None:
    """A pipe is not waited for; the run goes on."""
    Trial().train(tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Trial(epochs=3).train(tmp_path / "run") == 3


@pytest.mark.parametrize("pattern", ["metadata.jsonl", "metrics.*.jsonl", "events.*.jsonl"])
@pytest.mark.parametrize(
    "content", [b"", b"{}\n[]\n", b'{"epoch":"x"}\n', b"\xff\xfe\n", b"[" * 10**5 + b"\n"]
)
def test_notes_that_nobody_wrote(tmp_path: Path, pattern: str, content: bytes) -> None:
    """Garbage in what is noted for people stops no run, and readers of the notes leave it out."""
    run = tmp_path / "run"
    Trial(epochs=1).train(run)
    next(run.glob(pattern)).write_bytes(content)
    assert Trial().train(run) == 2
    assert [line["epoch"] for line in RunDirectory(run).metrics()][-1] == 2
    assert list(RunDirectory(run).events())
    assert FileMetadataHandler(run).epochs()[-1] == 2


def test_a_missing_epoch_loads_nothing_partially(tmp_path: Path) -> None:
    """A partial load from a damaged or unknown epoch says False and changes nothing."""
    Trial().train(tmp_path / "run")
    flip(newest_try(tmp_path / "run", 2) / "manifest.json", 50)
    runner = JobRunner(Trial().job, tmp_path / "run")
    with LocalSession() as session:
        assert runner.load_blobs_from_checkpoints(["w"], 7, session) is False
        with pytest.raises(RelayError, match=r"manifest\.json"):
            runner.load_blobs_from_checkpoints(["w"], 2, session)
        assert session.workspace()["w"].tolist() == [0, 0, 0]
