"""What `test_prune` strikes at calls to the file system: fresh processes import it, without torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from torchrelay.checkpoint.coordinator.retention import prune
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Best, Keeping
from torchrelay.checkpoint.storage.local import LocalStorage

KEPT = [2, 3, 5, 6]


def tries(run: Path) -> list[int]:
    """The epochs of which there is anything in the directory."""
    return sorted(int(one.name[1:9]) for one in (run / "checkpoints/data").iterdir())


def whole(run: Path) -> list[int]:
    """The live epochs, all of them proved to the last byte."""
    storage = LocalStorage(run / "checkpoints")
    entries = open_log(storage).entries
    assert all(verify_epoch(storage, one, level="full").verified for one in entries)
    return [one.position.epoch for one in entries]


def copied(root: Path) -> None:
    """The run that is struck, from beside the folders of the trials."""
    shutil.copytree(root.parent.parent / "run", root / "run")


def pruned(root: Path) -> None:
    """Newest, best, pinned ones and what they need are left; only the newest keeps its optimizer."""
    prune(LocalStorage(root / "run/checkpoints"), Keeping(1, None, 1, Best("val/acc", "max")))


def pruned_again(root: Path) -> None:
    """What is live is whole whenever a prune ended, and the next one comes to the same end."""
    storage = LocalStorage(root / "run/checkpoints")
    live = whole(root / "run")
    assert set(KEPT) <= set(live), live
    pruned(root)
    assert tries(root / "run") == whole(root / "run") == KEPT
    assert not list(root.glob("run/checkpoints/data/e00000002-*/*.optim.safetensors"))
    assert not open_log(storage).state.retiring
