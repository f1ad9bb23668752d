"""Epochs that are committed while they are served: taken over under load, or left where they are no good."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import linear, serving, train, wait_until

from torchrelay import open_checkpoint
from torchrelay.errors import NoProvableEpochError, StorageError, TaskFailedError, UsageError
from torchrelay.tools.serving.batching import Meters, Watching
from torchrelay.tools.serving.handlers import ModelSlot, TensorHandler
from torchrelay.tools.serving.program_server import EpochModelSource, PlainModel

BIAS_AT = 4096 + (8 + 8 * 4) * 4
"""Where the last bias lies in a shard: behind the header and the first layer."""


def source(
    where: Path, wish: str = "last", said: list[str] | None = None, blob: str = "model"
) -> EpochModelSource:
    model = PlainModel("a run", linear, blob, TensorHandler, None, None, None)
    return EpochModelSource(str(where), wish, model, (said if said is not None else []).append)


def damage(where: Path, epoch: int) -> None:
    """Another byte of the model in an epoch, where the size of no file tells it."""
    for file in (where / "checkpoints/data").glob(f"e{epoch:08d}-*/*.main.safetensors"):
        data = bytearray(file.read_bytes())
        data[BIAS_AT] ^= 0xFF
        file.chmod(0o644)
        file.write_bytes(data)


def test_flm_6_watch_takes_new_epochs_without_a_failed_request(tmp_path: Path):
    """Clients ask without a pause while a training commits epochs: all are answered, by ever newer epochs."""
    train(tmp_path / "run", 1)
    said: list[str] = []
    epochs = source(tmp_path / "run", said=said)
    wrong, seen, done = list[str](), set[int](), threading.Event()

    def ask(port: int) -> None:
        before = 0
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while not done.is_set():
                answer = client.post("/predict", json={"sample": [0.5] * 4})
                told = answer.json()
                if (
                    answer.status_code != 200
                    or told["result"] != [told["epoch"]] * 3
                    or told["epoch"] < before
                ):
                    wrong.append(f"{answer.status_code} {told} after {before}")
                before = told.get("epoch", before)
                seen.add(before)

    watching = Watching(epochs, said.append, every_secs=0.01)
    with serving(epochs.first(), watching=watching) as here:
        clients = [threading.Thread(target=ask, args=(here.port,), daemon=True) for _ in range(4)]
        for one in clients:
            one.start()
        for last in (2, 3, 4, 5):
            train(tmp_path / "run", last)
            wait_until(lambda last=last: here.running.holder.current.epoch == last)
            wait_until(lambda last=last: last in seen)
        done.set()
        for one in clients:
            one.join(60)
        assert here.metric("torchrelay_swaps_total") == 4 and here.metric("torchrelay_model_epoch") == 5
    assert not wrong, wrong[:3]
    assert seen >= {2, 3, 4, 5}
    assert [text for text in said if "now serving" in text] == [
        f"now serving epoch {number} of a run" for number in (2, 3, 4, 5)
    ]


def test_a_damaged_newest_epoch_leaves_the_old_one_and_says_so(tmp_path: Path):
    """Its damage is named once; the next good one is taken."""
    train(tmp_path / "run", 2)
    said: list[str] = []
    epochs = source(tmp_path / "run", said=said)
    holder, meters = ModelSlot(epochs.first()), Meters()
    watching = Watching(epochs, said.append)
    watching.look(holder, meters)
    train(tmp_path / "run", 3)
    damage(tmp_path / "run", 3)
    for _ in range(3):
        watching.look(holder, meters)
    assert holder.current.epoch == 2
    assert len(said) == 1 and "epoch 3 cannot be served, epoch 2 is still served" in said[0]
    train(tmp_path / "run", 4)
    watching.look(holder, meters)
    assert holder.current.epoch == 4


def test_a_damaged_newest_epoch_at_the_start_gives_way_to_an_older_one(tmp_path: Path):
    """That is said; where none is left nothing is served."""
    train(tmp_path / "run", 2)
    damage(tmp_path / "run", 2)
    said: list[str] = []
    assert source(tmp_path / "run", said=said).first().epoch == 1
    assert len(said) == 1 and "an older one is tried" in said[0]
    damage(tmp_path / "run", 1)
    with pytest.raises(NoProvableEpochError, match="is usable"):
        source(tmp_path / "run").first()


def test_storage_that_fails_for_a_while_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is said once, tried again, and the epoch that is served stays."""
    train(tmp_path / "run", 1)
    said: list[str] = []
    epochs = source(tmp_path / "run", said=said)
    holder, meters = ModelSlot(epochs.first()), Meters()
    train(tmp_path / "run", 2)
    watching = Watching(epochs, said.append)
    with monkeypatch.context() as patch:

        def fail(entry: Any) -> Any:
            raise StorageError("the disk is away")

        patch.setattr(epochs, "_made", fail)
        for _ in range(3):
            watching.look(holder, meters)
    assert holder.current.epoch == 1 and said == ["keeping the current epoch: the disk is away"]
    watching.look(holder, meters)
    assert holder.current.epoch == 2


def test_best_follows_the_metric_and_a_rewind_is_followed(tmp_path: Path):
    """`best` stays where later epochs are no better; `last` goes to another branch."""
    train(tmp_path / "run", 3)
    best, last = source(tmp_path / "run", "best"), source(tmp_path / "run")
    first = best.first()
    assert first.epoch == 2 and first.about["metrics"] == {"val/acc": 0.0}
    served = last.first()
    train(tmp_path / "run", 2, again_from=1)
    newer = last.newer(served)
    assert newer is not None and (newer.epoch, newer.branch) == (2, 1)
    train(tmp_path / "run", 4)
    assert last.newer(newer) is not None
    assert source(tmp_path / "run", "1").newer(served) is None


def test_only_the_blob_of_the_model_is_read(tmp_path: Path):
    """The optimizer's bytes are not; what does not fit is refused, as is what was not trained."""
    train(tmp_path / "run", 1)
    opened = open_checkpoint(tmp_path / "run", 1)
    PlainModel("a", linear, "model", TensorHandler, None, None, None)(opened)
    files = list((tmp_path / "run/checkpoints/data").glob("e00000001-*/*.optim.safetensors"))
    sizes = sum(one.nbytes for one in linear().parameters())
    assert files and opened.bytes_read > sizes
    for file in files:
        file.unlink()
    assert source(tmp_path / "run", "1").first().epoch == 1, "files of other blobs need not be there"
    with pytest.raises(UsageError):
        source(tmp_path / "run", blob="other").first()
    with pytest.raises(TaskFailedError):
        train(tmp_path / "untrained", 1, fails=True)
    with pytest.raises(UsageError, match="no trained epoch yet"):
        source(tmp_path / "untrained").first()
