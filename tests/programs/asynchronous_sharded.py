"""Run by torchrun: asynchronous saves of sharded tensors, compared with synchronous ones.

asynchronous_sharded.py FOLDER KIND      a kind of sharded.py
"""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from sharded import Net, sharded
from torch import nn

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.checkpoint.save.staging import Copier, StagedCopies
from torchrelay.errors import UnknownEpochError
from torchrelay.runners.training.exit import run_and_leave

EPOCHS = 3
PATIENCE_SECS = 0.1


class WideNet(Net):
    """Parts of its layers are large enough to be copied late, on 4 ranks too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 8192)
        self.down = nn.Linear(8192, 33)


class HeldUp:
    """Late copies that wait until `free` is set, or for some time."""

    def __init__(self, secs: float) -> None:
        self.free = threading.Event()
        self.copies = 0
        self._secs, self._copy = secs, Copier.copy_late

    def __enter__(self) -> HeldUp:
        held, copy = self, self._copy

        def held_up(copier: Copier, target: Any, source: torch.Tensor) -> None:
            held.free.wait(held._secs)
            held.copies += 1
            copy(copier, target, source)

        Copier.copy_late = held_up  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Copier.copy_late = self._copy  # type: ignore[method-assign]


def train(
    session: Any, where: Path, kind: str, *, write: Any = lambda ctx, model: None, **options: Any
) -> None:
    """Train with fused steps; `write` is called before the forward pass of every step."""
    torchrelay.seed(3)
    model = sharded(WideNet(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    job = Job("sharded", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def learn(ctx: Context) -> None:
        for _ in range(2):
            write(ctx, model)
            loss = F.mse_loss(model(torch.randn(4, 13)), torch.ones(4, 33))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    job.stop_when(max_epochs(EPOCHS))
    JobRunner(job, where, **options).train(session)


def different(run: Path, other: Path, epoch: int) -> list[str]:
    """The tensors of an epoch that two runs do not hold alike, bit by bit; random states aside."""
    found, wanted = (open_checkpoint(one, epoch=epoch).load_tensors("*") for one in (run, other))
    names = [name for name in wanted if not name.startswith("rng.")]
    assert names and set(found) == set(wanted)
    return [name for name in names if not torch.equal(found[name], wanted[name])]


def hidden_write(session: Any, run: Path, kind: str) -> str:
    """Rank 1 writes a local part right after boundary 1, behind the gate's back: what this rank is told."""
    steps: list[int] = []
    with HeldUp(30.0) as held, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        held.free.set()

        def write(ctx: Context, model: Any) -> None:
            steps.append(ctx.epoch)
            if steps == [1, 1]:
                held.free.clear()  # the copies of the next boundary come after the write
            if steps == [1, 1, 2]:
                if session.peers.rank == 1:
                    model.down.weight.detach().to_local().add_(1)
                held.free.set()

        train(session, run, kind, write=write, asynchronous=True)
    assert steps == [1, 1, 2, 2, 3, 3]
    return "\n".join(str(one.message) for one in said if "NOT saved" in str(one.message))


def main() -> None:
    """Epochs saved behind the training are those saved at once; without the gate they are not."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    session = torchrelay.init()
    rank = session.peers.rank
    train(session, folder / "sync", kind)
    with HeldUp(PATIENCE_SECS) as held:
        train(session, folder / "async", kind, asynchronous=True, verify_staging="full")
    assert held.copies >= 3 * EPOCHS, held.copies
    for epoch in range(EPOCHS + 1):
        assert different(folder / "async", folder / "sync", epoch) == []
    unguarded = patch.multiple(StagedCopies, pass_gate=lambda self: None, compare=lambda self: None)
    with unguarded, HeldUp(PATIENCE_SECS):
        train(session, folder / "torn", kind, asynchronous=True, reuse=False)
    torn = [name for epoch in (1, 2) for name in different(folder / "torn", folder / "sync", epoch)]
    # Which of them a step reaches before their copy is a matter of speed.
    assert any(name.startswith("model.") for name in torn), torn
    assert any(name.endswith("exp_avg") for name in torn), torn
    told = hidden_write(session, folder / "hidden", kind)
    assert (rank == 0) == ("'model.down.weight' changed" in told), told
    assert [_saved(folder / "hidden", epoch) for epoch in range(EPOCHS + 1)] == [True, False, True, True]
    (folder / f"rank-{rank}").write_text("exact\n")


def _saved(run: Path, epoch: int) -> bool:
    try:
        open_checkpoint(run, epoch=epoch)
    except UnknownEpochError:
        return False
    return True


if __name__ == "__main__":
    run_and_leave(main)
