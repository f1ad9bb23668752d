"""Retention and damage, seen from a run: what is kept, what it falls back to, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stage import warned

from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, max_epochs, open_checkpoint
from torchrelay.errors import (
    DamagedError,
    NoProvableEpochError,
    SaveFailedError,
    UnknownEpochError,
    UsageError,
)
from torchrelay.metadata.run_directory import RunDirectory

Damage = Callable[[Path], None]


def start(run: Path, epochs: int, resume_from_epoch: int | None = None, **options: object):
    """Train the job that adds its epoch to `total`; returns result, session and the epochs that ran."""
    ran: list[int] = []
    job = Job("damage", blobs={"total": torch.zeros(300)})

    @job.epoch
    def add(ctx) -> None:
        ran.append(ctx.epoch)
        ctx["total"] += ctx.epoch

    job.stop_when(max_epochs(epochs))
    session = LocalSession()
    result = JobRunner(job, run, **options).train(session, resume_from_epoch=resume_from_epoch)
    return result, session, ran


def shard(run: Path, epoch: int) -> Path:
    (file,) = MultiNodeCheckpointManager(run / "checkpoints").files("trainer_0", epoch)
    return Path(file)


def flip_header(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)


def flip_data(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def remove(file: Path) -> None:
    file.unlink()


def spoil_manifest(file: Path) -> None:
    manifest = file.parent / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"total", b"tutal", 1))


DAMAGES = [flip_header, flip_data, cut_short, remove, spoil_manifest]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_epoch_is_replaced_by_an_older_one(
    tmp_path: Path, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning says which and why, the epoch is quarantined, and training ends in the same total."""
    run = tmp_path / "run"
    start(run, 3)
    damage(shard(run, 3))
    with warned() as texts:
        result, session, ran = start(run, 5)
    told = [text for text in texts if "epoch 3 is damaged" in text]
    assert len(told) == 1 and "an older one is used" in told[0]
    assert "resuming from epoch 2 instead" in capsys.readouterr().err
    assert (result, ran) == (5, [3, 4, 5])
    assert session.blob("total")[0] == 15
    with warned() as texts:
        assert start(run, 5)[0] == 5
    assert texts == [], "the replacement is in order"
    for epoch in range(6):
        ckpt = open_checkpoint(run, epoch=epoch)
        assert ckpt.load_tensors("total")["total"][0] == sum(range(epoch + 1))


def test_several_damaged_epochs_are_passed_over(tmp_path: Path) -> None:
    """The fallback goes as far as it must; the same is told again for each."""
    run = tmp_path / "run"
    start(run, 4)
    for epoch in (4, 3, 2):
        flip_header(shard(run, epoch))
    with warned() as texts:
        result, session, ran = start(run, 5)
    assert len([text for text in texts if "is damaged" in text]) == 3
    assert (result, ran, session.blob("total")[0]) == (5, [2, 3, 4, 5], 15)


def test_no_epoch_left_is_never_a_silent_fresh_start(tmp_path: Path) -> None:
    """All epochs damaged: exit code 3 and a status that says so; only resume="never" begins anew."""
    run = tmp_path / "run"
    start(run, 2)
    for epoch in range(3):
        remove(shard(run, epoch))
    for _ in range(2):
        with warned(), pytest.raises(NoProvableEpochError) as caught:
            start(run, 4)
        assert caught.value.exit_code == 3
    status = RunDirectory(run).status()
    assert (status["state"], status["exit_code"]) == ("FAILED", 3)
    with warned():
        assert start(run, 2, resume="never")[2] == [1, 2]
    assert start(run, 3)[2] == [3]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_an_explicit_damaged_epoch_is_refused(tmp_path: Path, damage: Damage) -> None:
    """An epoch that was asked for is never replaced by another, and nothing is abandoned by trying."""
    run = tmp_path / "run"
    start(run, 3)
    damage(shard(run, 2))
    with pytest.raises(DamagedError) as caught:
        start(run, 3, resume_from_epoch=2)
    assert caught.value.exit_code == 5
    result, _, ran = start(run, 4)
    assert (result, ran) == (4, [4]), "epochs 3 and 4 follow as if nothing was asked"


def test_keep_last_keeps_so_many(tmp_path: Path) -> None:
    """keep_last=2: the newest two epochs are loadable, older ones are gone from the log and the disk."""
    run = tmp_path / "run"
    start(run, 5, keep_last=2)
    tries = [path.name for path in (run / "checkpoints" / "data").iterdir()]
    assert sorted(name[:9] for name in tries) == ["e00000004", "e00000005"]
    assert open_checkpoint(run).load_tensors("total")["total"][0] == 15
    with pytest.raises(UnknownEpochError, match="there are: 4, 5"):
        start(run, 5, resume_from_epoch=1)
    result, session, ran = start(run, 7, keep_last=2)
    assert (result, ran, session.blob("total")[0]) == (7, [6, 7], 28)
    assert len(list((run / "checkpoints" / "data").iterdir())) == 2


def test_keep_last_over_a_rewind(tmp_path: Path) -> None:
    """Epochs that a rewind abandoned go once the new branch has passed them; the newest stays provable."""
    run = tmp_path / "run"
    start(run, 4, keep_last=3)
    result, session, ran = start(run, 6, resume_from_epoch=2, keep_last=3)
    assert (result, ran, session.blob("total")[0]) == (6, [3, 4, 5, 6], 21)
    assert len(list((run / "checkpoints" / "data").iterdir())) == 3
    with pytest.raises(UsageError, match="keep_last"):
        start(tmp_path / "other", 1, keep_last=0)


def test_a_full_disk_is_a_warning_until_it_is_too_many(tmp_path: Path, monkeypatch) -> None:
    """A failed save warns and is never found; so many in a row end the run, a good one starts anew."""
    from torchrelay.checkpoint.storage import local

    run = tmp_path / "run"
    good, failed = local.LocalWriteHandle.sync_file, []
    broken: set[str] = set()

    def sync(handle) -> None:
        if any(mark in handle.path for mark in broken):
            failed.append(handle.path)
            raise local.StorageError(f"cannot sync {handle.path}: No space left on device")
        good(handle)

    monkeypatch.setattr(local.LocalWriteHandle, "sync_file", sync)
    broken |= {"e00000002-", "e00000004-"}
    with warned() as texts:
        assert start(run, 5, max_failed_saves=2)[0] == 5
    assert len([text for text in texts if "NOT saved" in text]) == 2 and len(failed) >= 2
    assert open_checkpoint(run).position.epoch == 5
    with pytest.raises(UnknownEpochError, match="0 to 1, 3, 5"):
        open_checkpoint(run, epoch=2)
    broken |= {"e00000006-", "e00000007-"}
    with warned(), pytest.raises(SaveFailedError, match="2 saves failed in a row"):
        start(run, 9, max_failed_saves=2)
    broken.clear()
    assert start(run, 7)[2] == [6, 7]


def test_checkpoints_that_are_away_are_missed(tmp_path: Path) -> None:
    """A run that tells of saved epochs and finds no checkpoints does not begin anew unless it is told to."""
    run = tmp_path / "run"
    start(run, 2)
    (run / "checkpoints").rename(tmp_path / "away")
    with pytest.raises(NoProvableEpochError, match=r"records epoch 2 as saved.*--resume never"):
        start(run, 2)
    assert start(run, 2, resume="never")[2] == [1, 2]
    assert start(run, 3)[2] == [3]
