"""Saves that find no room, and directories that vanish: real small file systems, real processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Trial, noted, small_disk
from in_flight import nothing_in_flight
from torchrun import REPOSITORY, torchrun

from torchrelay import open_checkpoint
from torchrelay.checkpoint.save import commit
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import LostDirectoryError

PROGRAM = Path(__file__).resolve().parent.parent / "programs/full_disk.py"


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))


def filling(disk: Path, full: range) -> Callable[[Any], None]:
    """An epoch task that fills the disk at the first epoch of `full` and frees it after the last."""

    def epoch(ctx: Any) -> None:
        ctx["w"].add_(1)
        nothing_in_flight()
        if ctx.epoch == full.start:
            fill(disk)
        if ctx.epoch == full.stop:
            (disk / "filler").unlink()

    return epoch


def tries(run: Path) -> set[str]:
    return {path.name[:9] for path in (run / "checkpoints/data").iterdir()}


def rests(run: Path) -> list[str]:
    """Names of writes that were cut off."""
    return [str(path) for path in run.rglob(".tmp-*")]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("looks", [True, False], ids=["preflight", "write"])
def test_a_disk_fills_and_empties_and_saving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, looks: bool
) -> None:
    """What does not fit warns with needed and free bytes and leaves nothing; later epochs are saved."""
    if not looks:  # others may take the room after the look: then the write itself finds out
        monkeypatch.setattr(LocalStorage, "room", lambda self: None)
    with small_disk(tmp_path / "disk", "size=3m") as disk:
        run = disk / "run"
        trial = Trial({"w": torch.zeros(50_000)}, epochs=5, epoch=filling(disk, range(2, 4)))
        with noted() as said:
            result = trial.train(run, asynchronous=asynchronous)
        assert (result, result.committed) == (5, 5)
        unsaved = [text for text in said if "NOT saved" in text]
        assert [text.split(" was")[0] for text in unsaved] == ["epoch 2", "epoch 3"]
        assert all("No space left" in text and "free some space" in text for text in unsaved)
        assert not looks or all("it needs 2" in text and "are free" in text for text in unsaved)
        assert tries(run) == {"e00000000", "e00000001", "e00000004", "e00000005"} and rests(run) == []
        for epoch in (1, 4, 5):
            assert open_checkpoint(run, epoch=epoch).load_tensors("w")["w"][0] == epoch


def test_a_disk_that_is_full_when_the_record_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that fitted but for its record gives its space back too, so that the next one fits again."""
    with small_disk(tmp_path / "disk", "size=3m") as disk:
        run, write, filled = disk / "run", commit._write_manifest, []

        def write_then_fill(job: Any, *rest: Any) -> Any:
            entry = write(job, *rest)
            if job.position.epoch == 2:
                fill(disk)
                filled.append(entry.attempt_name)
            return entry

        monkeypatch.setattr(commit, "_write_manifest", write_then_fill)

        def epoch(ctx: Any) -> None:
            if ctx.epoch == 3:
                (disk / "filler").unlink()

        with noted() as said:
            assert Trial({"w": torch.zeros(50_000)}, epochs=3, epoch=epoch).train(run) == 3
        assert len([text for text in said if "epoch 2 was NOT saved" in text]) == 1
        assert filled and not (run / "checkpoints/data" / filled[0]).exists()
        assert tries(run) == {"e00000000", "e00000001", "e00000003"} and rests(run) == []


def test_a_disk_without_room_for_files(tmp_path: Path) -> None:
    """Inodes can be used up while bytes are free: the warning says which of them is missing."""
    with small_disk(tmp_path / "disk", "size=8m,nr_inodes=64") as disk:
        many = disk / "many"

        def epoch(ctx: Any) -> None:
            if ctx.epoch == 2:
                many.mkdir()
                with suppress(OSError):
                    for number in range(100):
                        (many / str(number)).touch()
            if ctx.epoch == 3:
                for path in many.iterdir():
                    path.unlink()

        with noted() as said:
            assert Trial(epochs=3, epoch=epoch).train(disk / "run").committed == 3
        (unsaved,) = [text for text in said if "NOT saved" in text]
        assert "files, 0 can be made (inodes)" in unsaved
        assert tries(disk / "run") == {"e00000000", "e00000001", "e00000003"}


@pytest.mark.ranks
def test_a_full_disk_on_two_ranks(tmp_path: Path) -> None:
    """Both ranks warn alike and go on, whichever found the disk full, also behind the training."""
    with small_disk(tmp_path / "disk", "size=6m") as disk:
        env = {"PYTHONPATH": str(REPOSITORY / "tests/helpers")}
        done = torchrun(PROGRAM, str(disk), warm=True, ranks=2, cwd=tmp_path, env=env)
        assert done.rc == 0, str(done)
        assert done.out.count("saved 0 1 4 5") == 2, str(done)
        for name in ("sync", "async"):
            assert tries(disk / name) == {"e00000000", "e00000001", "e00000004", "e00000005"}
            assert rests(disk / name) == []


# Directories that vanish


def unmounted(run: Path) -> None:
    subprocess.run(["umount", "-l", str(run)], check=True)


def renamed(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def replaced(run: Path) -> None:
    renamed(run)
    (run / "checkpoints/data").mkdir(parents=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("lose", [unmounted, renamed, replaced], ids=lambda lose: lose.__name__)
def test_a_directory_that_vanishes_ends_the_run(
    tmp_path: Path, lose: Callable[[Path], None], asynchronous: bool
) -> None:
    """The run ends at once and names the path; nothing is written into what lies there instead."""
    run = tmp_path / "run"
    there: list[Path] = []

    def epoch(ctx: Any) -> None:
        if ctx.epoch == 2:
            nothing_under_way()
            lose(run)
            there.extend(run.rglob("*"))

    trial = Trial({"w": torch.zeros(1000)}, epochs=6, epoch=epoch)
    if lose is unmounted:
        with small_disk(run, "size=3m"):
            ends(trial, run, asynchronous)
    else:
        ends(trial, run, asynchronous)
    assert trial.ran[-1] in ("epoch 2", "epoch 3")
    assert sorted(run.rglob("*")) == sorted(there), "not a single file"


def nothing_under_way() -> None:
    """A write that has looked at its directory already may land in another one: none does so now."""
    until = time.monotonic() + 60
    while any(thread.name == "torchrelay save" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a save is still under way"
        time.sleep(0.005)


def ends(trial: Trial, run: Path, asynchronous: bool) -> None:
    with noted(), pytest.raises(LostDirectoryError, match="unmounted, renamed or replaced") as caught:
        trial.train(run, asynchronous=asynchronous)
    assert str(run) in str(caught.value) and caught.value.exit_code == 5


# A device that loses what was written


@pytest.mark.parametrize("what", ["main.safetensors", "manifest.json", "e00000002-", "/log/.tmp-"])
def test_a_failed_sync_is_never_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """After EIO pages may be gone although the next fsync succeeds: the name is given up, the save fails."""
    failed: list[str] = []
    synced: list[str] = []
    sync, due = os.fsync, [False]

    def fsync(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if due[0] and not failed and what in path and (what != "e00000002-" or Path(path).is_dir()):
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        synced.append(path)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    def epoch(ctx: Any) -> None:
        due[0] = ctx.epoch >= 2

    with noted() as said:
        assert Trial(epochs=3, epoch=epoch).train(tmp_path / "run").committed == 3
    assert len(failed) == 1 and failed[0] not in synced
    (unsaved,) = [text for text in said if "NOT saved" in text]
    assert "epoch 2" in unsaved and "Input/output error" in unsaved
    assert (
        tries(tmp_path / "run") >= {"e00000000", "e00000001", "e00000003"} and rests(tmp_path / "run") == []
    )
    code = [sys.executable, "-m", "torchrelay", "ckpt", "verify", str(tmp_path / "run")]
    assert subprocess.run(code, capture_output=True, timeout=100).returncode == 0
