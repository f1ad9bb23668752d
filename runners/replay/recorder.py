"""Records a call of each module that is to be played again: the first of a start, anew for every epoch.

    replay/epoch_<k>.safetensors     a file of `save_blobs`: arguments, what they give with the weights of
                                     that epoch in `eval` mode, and the settings that bits hang on

Written before the epoch is saved, so that no saved epoch lacks it; older ones go afterwards. Only rank 0 does
so, and alone: a module whose tensors are sharded cannot be called by one rank, which is said, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrelay.checkpoint.files.blobs.api import save_blobs
from torchrelay.errors import UsageError
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.rebuilding.recipe import Recipe
from torchrelay.runners.replay.playing import device_of, play, settings_now
from torchrelay.runners.replay.trees import Json, taken_apart

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from torchrelay.runners.journal import Journal

FOLDER, FACTS = "replay", "replay"
MOST_BYTES = 256 << 20
"""Arguments longer than this are not recorded."""
KEPT = 2
"""Files that stay: the newest one's epoch may turn out not to be saved."""


class Recorder:
    """Mutable; one per run. Without recipes, without a run directory and on other ranks it does nothing."""

    def __init__(self, recipes: Mapping[str, Recipe], run: RunDirectory | None, journal: Journal) -> None:
        self._recipes = dict(recipes)
        self._folder = None if run is None else run.path / FOLDER
        self._journal = journal
        self._modules: dict[str, nn.Module] = {}
        self._calls: dict[str, tuple[Json, list[torch.Tensor]]] = {}
        self._hooks: dict[str, RemovableHandle] = {}

    def watch(self, workspace: Workspace, rank: int) -> None:
        """Wait for the first call of each module; raises UsageError for a name that is no module."""
        for name in self._recipes:
            module = workspace.get(name)
            if not isinstance(module, nn.Module):
                raise UsageError(f"replay names {name!r}, which is no registered module")
            if rank == 0 and self._folder is not None:
                self._modules[name] = module
                self._hooks[name] = module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def record(self, epoch: int) -> None:
        """Play the recorded calls with the weights as they are now, and write what came of them."""
        if self._folder is None or not self._calls:
            return
        blobs: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        for name in list(self._calls):
            try:
                facts[name] = self._played(name, blobs)
            except Exception as error:  # the user's forward may raise anything in `eval`
                self._give_up(name, f"{type(error).__name__}: {error}")
        if facts:
            about = {"epoch": epoch, "attempt": self._journal.attempt, "calls": facts}
            self._write(self._folder, epoch, {**blobs, FACTS: about})

    def close(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _hook(self, name: str) -> Any:
        def first(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._hooks.pop(name).remove()
            try:
                self._take(name, module, args, kwargs)
            except Exception as error:
                self._give_up(name, str(error))

        return first

    def _take(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if any(hasattr(one, "placements") for one in module.parameters()):
            raise UsageError("its parameters are sharded, and rank 0 cannot call it alone")
        tensors: list[torch.Tensor] = []
        form = taken_apart((tuple(args), dict(kwargs)), tensors)
        if (size := sum(one.nbytes for one in tensors)) > MOST_BYTES:
            raise UsageError(f"its arguments have {size} bytes, more than {MOST_BYTES}")
        self._calls[name] = form, tensors

    def _played(self, name: str, blobs: dict[str, Any]) -> dict[str, Any]:
        module, (form, inputs) = self._modules[name], self._calls[name]
        gives, outputs = play(module, form, inputs)
        for what, tensors in (("takes", inputs), ("gives", outputs)):
            for number, tensor in enumerate(tensors):
                blobs[f"{what}.{name}.{number}"] = tensor
        return {
            "recipe": self._recipes[name].to_json(),
            "takes": form,
            "gives": gives,
            "inputs": len(inputs),
            "outputs": len(outputs),
            "settings": settings_now(device_of(module)),
        }

    def _write(self, folder: Path, epoch: int, blobs: Mapping[str, Any]) -> None:
        try:
            save_blobs(folder / f"epoch_{epoch}.safetensors", blobs, overwrite=True)
            for old in files_of(folder.parent)[:-KEPT]:
                with suppress(OSError):
                    old[1].unlink()
        except Exception as error:  # what is recorded beside an epoch ends no run
            self._journal.warn(f"the call of epoch {epoch} is not recorded: {error}")

    def _give_up(self, name: str, why: str) -> None:
        self._calls.pop(name, None)
        self._journal.warn(f"no call of {name} is recorded for `verify --replay`: {why}")


def files_of(run: Path) -> list[tuple[int, Path]]:
    """The recorded calls of a run by epoch, ascending."""
    found = []
    for path in (run / FOLDER).glob("epoch_*.safetensors"):
        number = path.stem.removeprefix("epoch_")
        if number.isascii() and number.isdigit():
            found.append((int(number), path))
    return sorted(found)
