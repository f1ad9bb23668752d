"""`torchrelay verify RUN --replay`: whether what a run has archived is enough for the same bits.

Rebuild each recorded module from the archived source and configuration, load the epoch, play the recorded
call, compare. What of then could not be had again is named, whether it mattered or not.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.files.blob_files import load_blobs
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.errors import DamagedError, RelayError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.artifacts.rebuild import Archives, archives_of
from torchrelay.runners.training.extras.replay import (
    FACTS,
    FOLDER,
    as_it_was,
    device_of,
    files_of,
    play,
    same_bits,
    settings_now,
)
from torchrelay.runners.training.plan import Recipe

NOT_SAME = 1


@dataclass(frozen=True)
class Replayed:
    """What came of one module: `same` bits or not, why not, and which settings were not reproduced."""

    epoch: int
    blob: str
    same: bool
    why: str = ""
    not_reproduced: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """As an object of `verify --replay --json`."""
        return {**asdict(self), "not_reproduced": list(self.not_reproduced)}

    def lines(self) -> Iterator[str]:
        """For people."""
        outcome = "same bits" if self.same else f"NOT the same: {self.why}"
        yield f"epoch {self.epoch}  {self.blob}  {outcome}"
        for text in self.not_reproduced:
            yield f"  not reproduced: {text}"


def replay(run: Path, wish: int | None = None) -> list[Replayed]:
    """Play what is recorded of an epoch (the newest saved one if None) again.

    Runs the archived code. Raises UsageError where nothing is recorded, DamagedError for a file that was
    changed, StorageError.
    """
    epoch, path = _chosen(run, wish)
    recorded = load_blobs(path)
    about = recorded.get(FACTS)
    try:
        calls, attempt = about["calls"], about["attempt"]  # type: ignore[index]
        with archives_of(run, attempt) as archives:
            return [_replayed(run, epoch, name, call, recorded, archives) for name, call in calls.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} says nothing that can be played again: {error}") from error


def _chosen(run: Path, wish: int | None) -> tuple[int, Path]:
    files = files_of(run)
    if not files:
        raise UsageError(
            f"{run} has no recorded call ({FOLDER}/): train with JobRunner(replay=...), `replay: true` of a "
            "runner, or replay = True of a Program"
        )
    there = {one.position.epoch for one in read_log(place_of(run)).line() if one.position.boundary}
    usable = [one for one in files if one[0] in there and wish in (None, one[0])]
    if not usable:
        names = ", ".join(str(number) for number, _ in files)
        raise UsageError(f"{run}: calls are recorded of epoch {names}; none of these is saved and meant")
    return usable[-1]


def _replayed(
    run: Path, epoch: int, name: str, call: Mapping[str, Any], recorded: Mapping[str, Any], archives: Archives
) -> Replayed:
    settings = call["settings"]
    if not isinstance(settings, dict):
        raise TypeError("its settings are no table")
    inputs = [recorded[f"takes.{name}.{number}"] for number in range(call["inputs"])]
    outputs = [recorded[f"gives.{name}.{number}"] for number in range(call["outputs"])]
    recipe = Recipe.from_json(call["recipe"])
    with as_it_was(settings):
        try:
            module = archives.module(recipe)
            open_checkpoint(run, epoch).load({name: module})
            module = _placed(module, settings)
            form, found = play(module, call["takes"], inputs)
        except RelayError as error:
            return Replayed(epoch, name, same=False, why=str(error), not_reproduced=_told(archives, {}))
        except Exception as error:  # archived code raises anything
            last = "".join(traceback.format_exception_only(error)).strip()
            return Replayed(epoch, name, same=False, why=last, not_reproduced=_told(archives, {}))
        now = settings_now(device_of(module))
    differs = {
        f"{what} was {settings.get(what)}": one for what, one in now.items() if settings.get(what) != one
    }
    why = _difference(call["gives"], form, outputs, found)
    return Replayed(epoch, name, same=not why, why=why, not_reproduced=_told(archives, differs))


def _placed(module: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """On a GPU where it was on one and there is one."""
    on_gpu = settings.get("device") != "cpu" and torch.cuda.is_available()
    return module.to("cuda") if on_gpu else module


def _told(archives: Archives, differs: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(f"{then}, is {now} here" for then, now in differs.items()), *archives.changed())


def _difference(then: Any, now: Any, outputs: list[torch.Tensor], found: list[torch.Tensor]) -> str:
    """What differs between the outputs, in words; empty where nothing does."""
    if then != now or len(outputs) != len(found):
        return "the outputs have another form"
    texts = []
    for number, (old, new) in enumerate(zip(outputs, found, strict=True)):
        if same_bits(old, new):
            continue
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            texts.append(f"output {number} was {_kind(old)}, is {_kind(new)}")
            continue
        apart = (old.double() - new.double()).abs()
        texts.append(
            f"output {number}: {int((old != new).sum())} of {old.numel()} numbers, the greatest difference "
            f"is {float(apart.max()):.3g}"
        )
    return "; ".join(texts)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
