"""A model with the states that an epoch of a run has, and what is known of both."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from torch import nn

from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import UsageError
from torchrelay.metadata.code.capture import captures, code_id_of


def of_epoch(
    model: nn.Module, run: str | os.PathLike[str], epoch: int | str, blob: str
) -> tuple[nn.Module, dict[str, Any]]:
    """A loaded copy of the model, and `run`, `epoch` and `code_id` as far as known.

    Raises what `open_checkpoint` and its `load` raise.
    """
    opened = open_checkpoint(run, epoch)
    if blob not in opened.blobs:
        raise UsageError(f"{run} has no blob {blob!r}, it has {', '.join(opened.blobs)}: give blob=")
    loaded = copy.deepcopy(model)
    opened.load({blob: loaded})
    found = {"run": os.fspath(run), "epoch": opened.epoch, "code_id": code_id_of_run(run)}
    return loaded, {key: value for key, value in found.items() if value is not None}


def code_id_of_run(run: str | os.PathLike[str]) -> str | None:
    """The code of all starts; None where they had several, since the epoch is of one of them."""
    path = Path(run)
    ids = {code_id_of(one) for one in captures(path)} if path.is_dir() else set()
    return ids.pop() if len(ids) == 1 else None
