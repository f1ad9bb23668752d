"""Old epochs go only for one that is proved: damage that nobody has met yet takes nothing with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from epochs import Writing, moment, parameter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage import warned

from torchrelay import (
    Context,
    FileMetadataHandler,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    max_epochs,
    open_checkpoint,
)
from torchrelay.checkpoint.coordinator import retention
from torchrelay.checkpoint.coordinator.retention import Retaining
from torchrelay.checkpoint.coordinator.session_log import Ledger
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.local_io import LocalReadHandle
from torchrelay.errors import StorageError
from torchrelay.jobs.session import Solo

EPOCHS = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0 to 5 of two nodes, with optimizers; 3 and 5 refer to the tries before them."""
    root = tmp_path_factory.mktemp("made") / "ckpt"
    leaves = [parameter("w", torch.arange(40.0)), moment("m", torch.arange(3.0))]
    with Writing(root, "lasting") as run:
        for epoch in range(EPOCHS):
            before = run.manifests[run.log.view.line()[-1].position] if epoch in (3, 5) else None
            run.save(epoch, leaves, nodes=2, referenced=None if before is None else (before, ["w"]))
    return root


def flip_header(file: Path) -> None:
    data = bytearray(file.read_bytes() or b"\0")
    data[30 % len(data)] ^= 4
    file.write_bytes(data)


HARMS: list[Callable[[Path], object]] = [flip_header, Path.unlink, lambda file: file.write_bytes(b"")]


def harm(root: Path, epoch: int, how: int, which: int) -> None:
    files = sorted(next(root.glob(f"data/e{epoch:08d}-*")).iterdir())
    HARMS[how % len(HARMS)](files[which % len(files)])


def provable(root: Path) -> list[int]:
    """Whole epochs that a job could resume from."""
    storage = LocalStorage(root)
    candidates = open_log(storage).candidates(boundary=True)
    return [entry.position.epoch for entry in candidates if verify_epoch(storage, entry).verified]


def retain(root: Path, keeping: Keeping) -> list[str]:
    ledger = Ledger(LocalStorage(root), 0.05)
    ledger.writer = LogWriter.take(ledger.storage, "lasting")
    with warned() as said:
        Retaining(ledger, keeping).now(Solo())
        ledger.close()
    return said


HARM = st.tuples(st.integers(0, EPOCHS - 1), st.integers(0, 2), st.integers(0, 5))


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    harms=st.lists(HARM, max_size=5),
    last=st.integers(1, 4),
    optimizers=st.one_of(st.none(), st.integers(1, 2)),
)
def test_the_newest_provable_epoch_stays_whatever_is_damaged(
    made: Path, tmp_path: Path, harms: list[tuple[int, int, int]], last: int, optimizers: int | None
) -> None:
    """Damaged on the disk, healthy in the log: whichever they are, the newest provable one stays."""
    root = tmp_path / "harmed"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(made, root)
    for epoch, how, which in harms:
        files = list(next(root.glob(f"data/e{epoch:08d}-*")).iterdir())
        if files:
            harm(root, epoch, how, which)
    before = provable(root)
    retain(root, Keeping(last=last, optimizer_last=optimizers))
    after = provable(root)
    assert before[:1] == after[:1]
    if not harms:
        assert len(after) < EPOCHS, "something goes"


def test_nothing_goes_while_no_epoch_is_proved(made: Path, tmp_path: Path) -> None:
    """All damaged: everything stays as evidence, and it is said why."""
    root = Path(shutil.copytree(made, tmp_path / "ckpt"))
    for epoch in range(EPOCHS):
        harm(root, epoch, 0, 1)
    (text,) = retain(root, Keeping(last=1))
    assert "old epochs could not be deleted: epoch 5 is damaged (" in text and "older ones stay" in text
    assert len(list(root.glob("data/*"))) == EPOCHS


def test_a_storage_that_does_not_answer_is_asked_for_one_epoch_only(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may keep each question waiting for minutes, and all ranks wait: then nothing goes this time."""
    root = Path(shutil.copytree(made, tmp_path / "ckpt"))
    read, asked = LocalStorage.read_range, list[str]()

    def read_range(self: LocalStorage, path: str, offset: int, length: int) -> bytes:
        if path.endswith("manifest.json"):
            asked.append(path)
            raise StorageError(f"{path}: the store does not answer")
        return read(self, path, offset, length)

    monkeypatch.setattr(LocalStorage, "read_range", read_range)
    (text,) = retain(root, Keeping(last=1))
    monkeypatch.undo()
    assert "epoch 5 is unknown" in text and len(set(asked)) == 1
    assert provable(root) == [5, 4, 3, 2, 1, 0]


def test_many_nodes_are_looked_at_in_turns(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where headers would be too many, a share is read each time, another one the next time."""
    monkeypatch.setattr(retention, "LOOKED_AT", 1)
    read, looked = LocalStorage.open_read, list[str]()

    def open_read(self: LocalStorage, path: str) -> LocalReadHandle:
        looked.append(path)
        return read(self, path)

    monkeypatch.setattr(LocalStorage, "open_read", open_read)
    storage = LocalStorage(made)
    view, looks = open_log(storage), retention.Lasting()
    seen = []
    for _ in range(2):
        looked.clear()
        assert looks.unproved(storage, view) == ()
        seen.append({path for path in looked if path.endswith(".safetensors")})
    assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_a_run_keeps_what_it_can_prove(tmp_path: Path) -> None:
    """An epoch that is damaged as soon as it is acknowledged does not cost the one before."""

    class Spoiling(FileMetadataHandler):
        def write(self, epoch: int) -> None:
            """Behind the training the handler hears of an epoch before older ones go."""
            super().write(epoch)
            if epoch == 3:
                (directory,) = tmp_path.glob("data/e00000003-*")
                for file in directory.glob("*.safetensors"):
                    flip_header(file)

    job = Job("lasting", blobs={"total": torch.zeros(3)})

    @job.epoch
    def add(ctx: Context) -> None:
        ctx["total"] += ctx.epoch

    job.stop_when(max_epochs(3))
    manager = MultiNodeCheckpointManager(tmp_path, Spoiling(tmp_path), keep_last=1, asynchronous=True)
    with warned() as said, LocalSession() as session:
        assert JobRunner(job, manager).train(session) == 3
    assert provable(tmp_path) == [2]
    assert open_checkpoint(tmp_path, epoch=2).load_tensors("total")["total"][0] == 3
    assert [text for text in said if "epoch 3 is damaged" in text and "older ones stay" in text]
