"""The Lightning callback `TorchrelayCheckpoint` and plugin `TorchrelayCheckpointIO`.

The callback saves right before the next epoch or step begins, when all work of the previous one is done.
Therefore a resume needs none of Lightning's loop restarts, which repeat or skip hooks.
Batches of an epoch that were already seen are loaded again and dropped, unless the loader has a state.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.blob_files import estimate_bytes, load_blobs, save_blobs
from torchrelay.errors import BlobError, UsageError, install_command
from torchrelay.jobs.random import RandomStreams
from torchrelay.runners.own_loop.checkpointer import Checkpointer

_ALONE = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_PACKAGE = "pytorch_lightning" if _ALONE else "lightning.pytorch"
"""Both packages define these classes, and a trainer accepts only those of its own package."""
try:
    _callbacks: Any = importlib.import_module(f"{_PACKAGE}.callbacks")
    _loops: Any = importlib.import_module(f"{_PACKAGE}.loops.fit_loop")
    _io: Any = importlib.import_module(f"{_PACKAGE}.plugins.io")
except ImportError as missing:
    raise UsageError(
        f"torchrelay.integrations.lightning needs {_PACKAGE}: {install_command('lightning')}"
    ) from missing


class _Part:
    """A blob that holds loaded state until Lightning can take it."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self.state_dict, self.loaded = state, dict[str, Any]()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class TorchrelayCheckpoint(_callbacks.Checkpoint):  # type: ignore[misc]
    """Save a training at the end of each epoch and resume it when the same command runs again.

    The blobs are `model`, `optimizer` and `scheduler` (`optimizer_0`, ... if there are several). `trainer`
    holds the loops, the callbacks, the data module and the entries of `on_save_checkpoint` hooks. `ranks`
    holds state that differs between ranks. Several ranks need torchrun. `ModelCheckpoint` is not needed.

    Args:
        where: Directory or URL of the checkpoints.
        every_n_steps: Also save within epochs, every so many optimizer steps.
        resume_from_epoch: Rewind to exactly this epoch; default: resume from the newest position.
        asynchronous: Write in the background while the training continues.
        options: Options of `torchrelay.Checkpointer`: `keep_last`, `keep_best`, `exclude`, ...

    Raises:
        UsageError: `every_n_steps` is below 1.

    Example:
        trainer = Trainer(max_epochs=10, callbacks=[TorchrelayCheckpoint("runs/x", every_n_steps=500)])
    """

    _checkpointer: Checkpointer | None = None
    _held: RandomStreams | None = None
    _order: Mapping[str, bytes] = {}
    _ahead: Mapping[str, Any] = {}
    _saved, _step, _seen, _due = -1, 0, 0, False

    def __init__(
        self,
        where: str | Path,
        *,
        every_n_steps: int | None = None,
        resume_from_epoch: int | None = None,
        asynchronous: bool = False,
        **options: Any,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UsageError(f"invalid every_n_steps={every_n_steps}: expected a number above 0, or None")
        self.where, self.every_n_steps, self.options = where, every_n_steps, options
        self.resume_from_epoch, self.asynchronous = resume_from_epoch, asynchronous
        self._trainer = self._ranks = _Part(dict)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move to the front of the callbacks, so that a save precedes what others do at a start."""
        trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the newest position before the training begins."""
        if trainer.fast_dev_run:
            return
        if trainer.world_size > 1 and "RANK" not in os.environ:
            start = f"start the script with torchrun --nproc-per-node={trainer.world_size}"
            raise UsageError(f"torchrelay does not support the ranks that Lightning started itself: {start}")
        self._saved, self._step, self._seen, self._due = -1, 0, 0, False
        self._trainer = _Part(partial(self._state_of_trainer, trainer))
        self._ranks = _Part(partial(self._state_of_rank, trainer))
        with _explained("nothing was trained"):
            estimate_bytes({"trainer": self._trainer, "ranks": self._ranks})
        blobs = {"model": pl_module, "trainer": self._trainer, **_numbered("optimizer", trainer.optimizers)}
        blobs |= _numbered("scheduler", [one.scheduler for one in trainer.lr_scheduler_configs])
        self._checkpointer = Checkpointer(self.where, blobs, **self.options)
        self._checkpointer._job.blobs.add({"ranks": self._ranks}, reshard="by_rank")
        position = self._checkpointer.resume(self.resume_from_epoch)
        if position is None:
            return
        if position.step and (before := self._trainer.loaded["world_size"]) != trainer.world_size:
            raise UsageError(
                f"{self.where} was saved by {before} ranks within epoch {position.epoch + 1}, which other "
                f"numbers of ranks cannot continue: set resume_from_epoch={position.epoch}"
            )
        self._held, self._saved, self._step = RandomStreams.capture(), position.epoch, position.step
        self._restore(trainer)

    def _restore(self, trainer: Any) -> None:
        """Distribute the loaded state as Lightning does, but mark no loop as restarting."""
        loaded, connector = self._trainer.loaded, trainer._checkpoint_connector
        connector._loaded_checkpoint = loaded | {
            "state_dict": trainer.lightning_module.state_dict() | loaded["state_dict"],
            "optimizer_states": [one.state_dict() for one in trainer.optimizers],
            "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        }
        for part in ("datamodule", "model", "callbacks", "precision_plugin_state"):
            getattr(connector, f"restore_{part}")()
        connector._loaded_checkpoint = {}  # overrides ckpt_path, too: this directory is newer
        trainer.fit_loop.load_state_dict(loaded["loops"]["fit_loop"])
        for one in _with_inner(trainer.fit_loop):
            one._restarting = one._loaded_from_state_dict = one._resuming_from_checkpoint = False
        trainer.fit_loop.epoch_loop.val_loop._restarting = True  # skips the sanity check
        trainer._logger_connector._callback_metrics.update(self._ranks.loaded.get("metrics", {}))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Move to the batch at which the training was interrupted."""
        loop, inner, ranks = trainer.fit_loop, trainer.fit_loop.epoch_loop, self._ranks.loaded
        inner.val_loop._restarting = False
        if self._held is None and self.every_n_steps:
            self._order = RandomStreams.capture().encode()  # the first order was drawn before this hook
            iter(loop._data_fetcher)
        if self._held is None or not self._step:
            return
        loop._restart_stage = _loops.RestartStage.RESTARTED_MID_EPOCH
        inner._restarting = True  # keeps the count of batches, and counts one step too many
        inner._batches_that_stepped -= 1
        inner.val_loop.increment_progress_to_evaluation_end = lambda: None  # it is at its end already
        self._order = ranks["order"]
        RandomStreams.decode(ranks["order"]).restore()
        for loader in loop._combined_loader.flattened:
            _loops._set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        loop._combined_loader._load_state_dicts(ranks["loaders"])
        iter(loop._data_fetcher)
        if not ranks["loaders"]:
            for _ in range(self._step):
                next(loop._data_fetcher.iterator)
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
        RandomStreams.decode(ranks["fetch"]).restore()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Save the previous epoch, or restore the random streams after a resume."""
        loop, begun = trainer.fit_loop, trainer.fit_loop.epoch_progress.current.processed
        if self._held is not None:
            loop._combined_loader._load_state_dicts(self._ranks.loaded.get("loaders", []))
            self._release_streams()
        elif begun:
            self._save(trainer, 0)
        if self.every_n_steps and begun:
            self._order = RandomStreams.capture().encode()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save if due, or restore the random streams after a resume."""
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if self._held is not None:
            del trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end
            trainer.accumulate_grad_batches = self._trainer.loaded["accumulate"]
            self._release_streams()
        elif self._due and done:
            self._save(trainer, done)
        self._seen, self._due = trainer.global_step, False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Record the state that the next batch is loaded with if a save is due."""
        every = self.every_n_steps or sys.maxsize
        self._due = trainer.global_step // every > self._seen // every
        if self._due:
            loaders = copy.deepcopy(trainer.fit_loop._combined_loader._state_dicts())
            self._ahead = {"fetch": RandomStreams.capture().encode(), "loaders": loaders}

    on_validation_end = on_train_batch_end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last epoch."""
        if trainer.fit_loop.epoch_progress.current.processed > self._saved:
            self._save(trainer, 0)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the last save and release the directory."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._checkpointer = None
        self._release_streams()  # if nothing was left to train

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the directory without waiting for other ranks, which may not arrive."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, exception.__traceback__)
        self._checkpointer = self._held = None

    def _release_streams(self) -> None:
        """Restore the random streams that were held during a resume."""
        held, self._held = self._held, None
        if held is not None:
            held.restore()

    def _save(self, trainer: Any, step: int) -> None:
        """Save `step` steps behind the finished epochs."""
        if self._checkpointer is not None:
            self._saved, self._step = trainer.fit_loop.epoch_progress.current.processed, step
            metrics = {name: float(one) for name, one in trainer.callback_metrics.items() if one.numel() == 1}
            self._checkpointer.save(self._saved, step, metrics=metrics, asynchronous=self.asynchronous)

    def _state_of_trainer(self, trainer: Any) -> dict[str, Any]:
        """Return Lightning's checkpoint without the blobs, as if no next epoch or step began."""
        found: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        own = {name: one.data_ptr() for name, one in trainer.lightning_module.state_dict().items()}
        states = found.pop("state_dict").items()
        changed = {name: one for name, one in states if own.get(name) != one.data_ptr()}  # by a hook
        del found["optimizer_states"], found["lr_schedulers"]
        progress = found["loops"]["fit_loop"]
        progress["state_dict"].pop("combined_loader", None)
        begun = progress["epoch_loop.batch_progress" if self._step else "epoch_progress"]
        for counts in (begun["total"], begun["current"]):
            counts["ready"] = counts["completed"]
        now = {"world_size": trainer.world_size, "accumulate": trainer.accumulate_grad_batches}
        return found | now | {"state_dict": changed}

    def _state_of_rank(self, trainer: Any) -> dict[str, Any]:
        """Return rank-specific state: loaders, metrics, and the random streams that chose the batches."""
        loader, metrics = trainer.fit_loop._combined_loader, dict(trainer.callback_metrics)
        state: dict[str, Any] = {"loaders": loader._state_dicts() if loader else [], "metrics": metrics}
        return state | {"order": self._order, **self._ahead} if self._step else state


def _numbered(name: str, found: list[Any]) -> dict[str, Any]:
    """Name a single object `name`, several ones `name_0`, `name_1`, ..."""
    return {name: found[0]} if len(found) == 1 else {f"{name}_{at}": one for at, one in enumerate(found)}


def _with_inner(loop: Any) -> list[Any]:
    """Return a loop and all loops nested in it."""
    inner = [one for one in vars(loop).values() if isinstance(one, _loops._Loop)]
    return [loop, *(one for other in inner for one in _with_inner(other))]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Add a remedy to a BlobError raised in the block."""
    try:
        yield
    except BlobError as error:
        remedy = "save_hyperparameters(ignore=[...]), or `del checkpoint[...]` in on_save_checkpoint"
        raise BlobError(f"{what}: {error}. Use tensors and plain values, or exclude it: {remedy}") from error


class TorchrelayCheckpointIO(_io.CheckpointIO):  # type: ignore[misc]
    """Let `ModelCheckpoint` and `Trainer.save_checkpoint` write files atomically and without pickle.

    A file has the format of `torchrelay.save_blobs`; the entries of Lightning's checkpoint are its blobs.
    `trainer.fit(ckpt_path=...)` reads it. `load_from_checkpoint` does not, because it uses no plugin.

    Example:
        trainer = Trainer(plugins=[TorchrelayCheckpointIO()], callbacks=[ModelCheckpoint("checkpoints")])
    """

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint. Raises BlobError if an entry cannot be stored."""
        if storage_options is not None:
            raise UsageError(f"{type(self).__name__} does not support storage_options: pass the URL alone")
        if "://" not in str(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with _explained(f"{path} was not written"):
            save_blobs(path, dict(checkpoint), overwrite=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        """Read and verify a file of `save_checkpoint`. Raises UsageError for a file of torch.save."""
        if "://" not in str(path) and zipfile.is_zipfile(path):
            raise UsageError(f"{path} was written by torch.save: load it with a Trainer without this plugin")
        return load_blobs(path, device=map_location if isinstance(map_location, str | torch.device) else None)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file if it exists."""
        _io.TorchCheckpointIO().remove_checkpoint(path)
