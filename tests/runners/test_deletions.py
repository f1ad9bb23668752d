"""What retention gives up is deleted behind the training: after its record, before anything ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, UploadTaskGroupBuilder, max_epochs
from torchrelay.checkpoint.coordinator.session_log import Deletions
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import StorageError
from torchrelay.jobs.job import TaskGroup

both = pytest.mark.parametrize("asynchronous", [False, True])


def job(epochs: int, note: Callable[[int], None] = lambda epoch: None) -> Job:
    made = Job("small", blobs={"weights": torch.zeros(4)})

    @made.epoch
    def work(ctx: Any) -> None:
        note(ctx.epoch)

    made.stop_when(max_epochs(epochs))
    return made


def tries(run: Path) -> list[str]:
    """The epochs of which there is anything in the directory."""
    return sorted(one.name.split("-")[0] for one in next(run.glob("**/data")).iterdir())


def intercept(monkeypatch: pytest.MonkeyPatch, look: Callable[[LocalStorage, str], None]) -> None:
    """Call `look` before each deletion below data/."""
    delete = LocalStorage.delete

    def looking(self: LocalStorage, path: str) -> None:
        if path.startswith("data/"):
            look(self, path)
        delete(self, path)

    monkeypatch.setattr(LocalStorage, "delete", looking)


@both
def test_the_record_comes_first_and_the_training_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """A deletion that hangs through an epoch holds nobody up; the log has let go of what it deletes."""
    reached, go_on = threading.Event(), threading.Event()
    threads: set[threading.Thread] = set()
    known: list[bool] = []

    def look(storage: LocalStorage, path: str) -> None:
        threads.add(threading.current_thread())
        known.append(path.split("/")[1] in open_log(storage, "small").state.tries)
        reached.set()
        assert go_on.wait(60)

    def note(epoch: int) -> None:
        if epoch == (4 if asynchronous else 3):  # epoch 0 was given up at the boundary before
            assert reached.wait(60)
            go_on.set()

    intercept(monkeypatch, look)
    JobRunner(job(4, note), tmp_path / "run", asynchronous=asynchronous, keep_last=2).train()
    assert known and not any(known)
    assert threading.main_thread() not in threads
    assert len(tries(tmp_path / "run")) == 2


@both
def test_nothing_is_left_to_delete_at_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Upload, download and exit find the directory as retention leaves it, though deletions are slow."""
    slow = threading.Event()
    fired: list[str] = []
    found: list[int] = []

    class Upload(UploadTaskGroupBuilder):
        def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
            found.append(len(tries(tmp_path / "run")))
            return TaskGroup()

    intercept(monkeypatch, lambda _, path: (fired.append(path), slow.wait(0.05))[0])
    run = JobRunner(job(2), tmp_path / "run", None, Upload(), asynchronous=asynchronous, keep_last=1)
    run.train()
    assert fired
    assert found == [1]


@both
def test_a_deletion_that_fails_warns_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """One failure costs a warning; at the end nothing is left of what should have gone."""
    failed: list[str] = []

    def look(_: LocalStorage, path: str) -> None:
        if not failed:
            failed.append(path)
            raise StorageError("the disk is gone for a moment")

    intercept(monkeypatch, look)
    with pytest.warns(UserWarning, match="old epochs could not be deleted: the disk is gone"):
        JobRunner(job(4), tmp_path / "run", asynchronous=asynchronous, keep_last=1).train()
    assert failed
    assert len(tries(tmp_path / "run")) == 1


KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_deletions import LocalStorage, JobRunner, job
delete, seen = LocalStorage.delete, []
def dying(self, path):
    if path.startswith("data/"):
        seen.append(path)
        if len(seen) == 2:
            os._exit(9)
    delete(self, path)
LocalStorage.delete = dying
JobRunner(job(4), Path(sys.argv[1]), asynchronous=True, keep_last=1).train()
"""


def test_what_a_killed_process_left_half_deleted_goes_in_the_next_run(tmp_path: Path) -> None:
    """Killed between the record and the last file, the next run deletes the rest, and resumes."""
    run = tmp_path / "run"
    where = [str(Path(__file__).parent), *sys.path]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run), *where], timeout=100)
    assert killed.returncode == 9
    assert len(tries(run)) > 1
    assert JobRunner(job(5), run, keep_last=1).train() == 5
    assert len(tries(run)) == 1


def test_everything_asked_for_is_done_in_order_by_one_thread() -> None:
    """Waiting ends when the last one has ended; one that raises is told and stops no other."""
    deletions, done = Deletions(), []
    threads = set()

    def work(number: int) -> None:
        threads.add(threading.current_thread())
        done.append(number)
        if number == 3:
            raise StorageError("no")

    for number in range(100):
        deletions.ask(f"number {number}", lambda number=number: work(number))  # type: ignore[misc]
    assert deletions.wait()
    assert done == list(range(100))
    assert len(threads) == 1
    assert deletions.take_failures() == ["number 3: no"]
    assert deletions.take_failures() == []


def test_waiting_is_bounded() -> None:
    """Whoever waits goes on after its patience, and finds the rest done later."""
    go_on = threading.Event()
    deletions = Deletions()
    deletions.ask("hanging", lambda: go_on.wait(60))
    assert not deletions.wait(0.01)
    go_on.set()
    assert deletions.wait(60)


def inside(
    run: Path, epochs: int, saved: Collection[int], dies_at: int = 0, **options: Any
) -> list[list[str]]:
    """Train epochs of ten steps, saving at some of them; the live positions at each step, and at the end."""
    seen: list[list[str]] = []
    loader = EpochLoader(torch.zeros(40, 2), batch_size=4)
    count = torch.zeros((), dtype=torch.int64)
    made = Job("inside", blobs={"w": torch.zeros(1000), "loader": loader, "count": count})

    def look() -> None:
        view = open_log(LocalStorage(run / "checkpoints"))
        seen.append([f"{one.branch}:{one.position}" for one in view.entries if one.position != Position(0)])

    @made.epoch
    def work(ctx: Any) -> None:
        for _ in ctx.steps(loader):
            count.add_(1)
            ctx["w"].add_(1)
            if int(count) in saved:
                signal.raise_signal(signal.SIGUSR2)
            if int(count) == dies_at:
                raise RuntimeError("cut")
            look()

    made.stop_when(max_epochs(epochs))
    torchrelay.seed(0)
    try:
        JobRunner(made, run, code=False, **options).train()
    except RuntimeError:
        look()
    else:
        look()
    return seen


def test_places_of_an_abandoned_branch_go_when_a_later_epoch_is_saved(tmp_path: Path) -> None:
    """A position inside an epoch on which a new branch stands is deleted, and so is the damaged one."""
    assert inside(tmp_path, 4, (13, 16), dies_at=18)[-1] == ["0:1", "0:1+3", "0:1+6"]
    (newest,) = (tmp_path / "checkpoints/data").glob("e00000001s000006-*")
    for file in newest.glob("*.safetensors"):
        os.truncate(file, 100)
    with pytest.warns(UserWarning, match="damaged"):
        assert inside(tmp_path, 4, ())[-1] == ["0:1", "1:2", "1:3", "1:4"]
    assert tries(tmp_path) == [f"e{epoch:08d}" for epoch in range(5)]


def test_places_of_one_epoch_obey_keep_last(tmp_path: Path) -> None:
    """However often a save is asked for inside an epoch, the newest `keep_last` positions stay."""
    seen = inside(tmp_path / "two", 2, range(11, 20), keep_last=2)
    assert max(sum("+" in one for one in at) for at in seen) == 2
    assert seen[-2] == ["0:1", "0:1+8", "0:1+9"] and seen[-1] == ["0:1", "0:2"]
    assert sum("+" in one for one in inside(tmp_path / "all", 2, range(11, 20))[-2]) == 9
    assert tries(tmp_path / "all") == ["e00000000", "e00000001", "e00000002"], "with the last epoch all go"
