"""What a fault left, as a fresh process finds it; and what a reader makes of damaged files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import torchrelay
from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.checkpoint.load.open import place_of
from torchrelay.checkpoint.load.verify import prove
from torchrelay.checkpoint.log.job_file import has_job, holds_job
from torchrelay.checkpoint.log.reader import open_log
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import RelayError
from torchrelay.runners.chaos.contents import SMALL, Lost, Mixed, compare
from torchrelay.runners.chaos.target import acknowledged, train


def check(
    run: str, oracle: str, large: int = 0, options: Mapping[str, Any] | None = None, further: bool = True
) -> dict[str, Any]:
    """Prove what lies in the run directory, and that the run goes on from there.

    Raises Lost where an acknowledged epoch is gone, a committed one is not whole or nothing goes on, and
    Mixed where something else was loaded than saved. Otherwise says what was found. With `further` the next
    epoch is trained, too.
    """
    known = acknowledged(Path(oracle))
    newest = _check_log(run, known)
    if further:
        _go_on(run, oracle, newest, large, options)
    return {"newest": newest, "acknowledged": known}


def _check_log(run: str, known: int) -> int:
    """All live epochs are proved and hold what they must; returns the newest, -1 for none."""
    if not _begun(run):
        if known >= 0:
            raise Lost(f"epoch {known} was acknowledged, and there is no job.json")
        return -1
    place = place_of(_where(run))
    view = open_log(place.storage)
    if view.notices:
        raise Lost(f"the log is damaged: {view.notices}")
    newest = -1
    for entry in view.entries:
        proof = prove(place.storage, entry, level="full")
        if not proof.proved or not entry.healthy:
            raise Lost(f"epoch {entry.position} is committed and {proof.outcome.value}: {proof.reason}")
        epoch = entry.position.epoch
        newest = max(newest, epoch)
        compare(_tensors(run, entry), epoch)
    if newest < known:
        raise Lost(f"epoch {known} was acknowledged, the newest in the log is {newest}")
    if view.current.id != 0:
        raise Lost(f"the run is on branch {view.current.id}: a committed epoch was given up")
    return newest


@cache
def _where(run: str) -> str | Storage:
    """What `place_of` and `open_checkpoint` take; a store is opened once: its client takes a second."""
    return storage_of(run, "the run") if is_url(run) else run


def _begun(run: str) -> bool:
    where = _where(run)
    if isinstance(where, str):
        return has_job(Path(run) / "checkpoints")
    return holds_job(where)


def _tensors(run: str, entry: Entry) -> dict[str, torch.Tensor]:
    return tensors_of(
        torchrelay.open_checkpoint(_where(run), f"{entry.position.epoch},branch={entry.branch}"),
        entry.resumable,
    )


def tensors_of(checkpoint: Checkpoint, whole: bool = True) -> dict[str, torch.Tensor]:
    """What a reader loads of an epoch of the built-in run, verified; not `whole` is without the optimizer."""
    names = ["model", *SMALL, *(["optimizer.state.*"] if whole else [])]
    return checkpoint.load_tensors(names)


def _go_on(run: str, oracle: str, newest: int, large: int, options: Mapping[str, Any] | None) -> None:
    until = max(newest, 0) + 1
    said = train(run, oracle, until, large, options)
    if said["error"] or said.get("epoch") != until:
        raise Lost(f"the run does not go on after epoch {newest}: {said['kind']}: {said['error']}")
    if said["warnings"]:
        raise Lost(f"the next start warns: {said['warnings']}")
    if said["open"]:
        raise Lost(f"files are left open: {said['open']}")
    if acknowledged(Path(oracle)) != until:
        raise Lost(f"epoch {until} was not acknowledged")
    checkpoint = torchrelay.open_checkpoint(_where(run), "last")
    if checkpoint.epoch != until:
        raise Lost(f"the newest epoch is {checkpoint.epoch} instead of {until}")
    compare(tensors_of(checkpoint), until)


def look(run: str, oracle: str) -> str:
    """Load what a fresh process would, and every committed epoch; says what came of it.

    Raises Mixed where something else was loaded than saved, or an older epoch without a word, and whatever
    is no error of ours.
    """
    newest = acknowledged(Path(oracle))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpoint = torchrelay.open_checkpoint(_where(run), "last")
            compare(tensors_of(checkpoint), checkpoint.epoch)
        except RelayError:
            return "refused"
    if checkpoint.epoch < newest:
        if not caught:
            raise Mixed(f"epoch {checkpoint.epoch} was loaded instead of {newest}, and nothing was said")
        return "an older epoch is used"
    return _look_at_older(run, checkpoint.epoch)


def _look_at_older(run: str, newest: int) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entries = open_log(place_of(_where(run)).storage).entries
            for entry in entries:
                epoch = entry.position.epoch
                if epoch != newest:
                    compare(_tensors(run, entry), epoch)
        except RelayError:
            return "an older epoch is refused"
    return "harmless"
