"""Wrote epochs_gradients/: one node, whose first epoch ends in an open window. They are frozen.

python tests/golden/make_gradients.py tests/golden/epochs_gradients
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, max_epochs


def model() -> nn.ModuleDict:
    """Gradients of every form that one process has: a tensor, zeros, sparse, none."""
    parts: dict[str, nn.Module] = {"linear": nn.Linear(3, 2), "words": nn.Embedding(4, 2, sparse=True)}
    return nn.ModuleDict(parts | {"unused": nn.Linear(1, 1)})


def expected() -> dict[str, torch.Tensor | None]:
    """The gradients of the window that is open when the first epoch ends."""
    rows = torch.sparse_coo_tensor(
        torch.tensor([[3, 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (4, 2), check_invariants=True
    )
    return {
        "linear.weight": torch.arange(6.0).reshape(2, 3) - 2.5,
        "linear.bias": torch.zeros(2),
        "words.weight": rows,
        "unused.weight": None,
        "unused.bias": None,
    }


def job(seen: dict[str, Any], epochs: int) -> Job:
    """Sets the gradients in the first epoch, and looks at them in the second."""
    torch.manual_seed(0)
    trained = model()
    made = Job("window", blobs={"model": trained})

    @made.epoch
    def look(ctx: Any) -> None:
        for name, one in trained.named_parameters():
            seen[name] = one.grad
            one.grad = expected()[name] if ctx.epoch == 1 else one.grad

    made.stop_when(max_epochs(epochs))
    return made


if __name__ == "__main__":
    with LocalSession(["trainer_0"]) as session:
        JobRunner(job({}, 1), MultiNodeCheckpointManager(sys.argv[1])).train(session)
