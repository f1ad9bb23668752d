"""The Lightning callback `TorchrelayCheckpoint` and plugin `TorchrelayCheckpointIO`.

The callback saves right before the next epoch or step begins, when all work of the previous one is done.
Therefore a resume needs none of Lightning's loop restarts, which repeat or skip hooks.
Batches of an epoch that were already seen are loaded again and dropped, unless the loader has a state.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.blob_files import estimate_bytes, load_blobs, save_blobs
from torchrelay.errors import UsageError, install_command
from torchrelay.integrations.trainer_state import (
    HeldState,
    captured_draws,
    explained,
    fetched,
    numbered,
    prefetches,
    restore_draws,
    stand_in,
)
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
        self._trainer = self._ranks = HeldState()
        self._order, self._before, self._ahead = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        self._gradients, self._groups = list[Any](), list[Any]()
        self._first = stand_in(self, _callbacks.Callback)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let a stand-in at the front run the hooks, so that a save precedes what others do at a start."""
        ours = self, self._first
        trainer.callbacks = [self._first, *(one for one in trainer.callbacks if one not in ours)]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the newest position before the training begins."""
        if trainer.fast_dev_run:
            return
        if trainer.world_size > 1 and "RANK" not in os.environ:
            start = f"start the script with torchrun --nproc-per-node={trainer.world_size}"
            raise UsageError(f"torchrelay does not support the ranks that Lightning started itself: {start}")
        self._saved, self._step, self._seen, self._due, self._groups, self._ahead = -1, 0, 0, False, [], {}
        self._trainer = HeldState(partial(self._state_of_trainer, trainer))
        self._ranks = HeldState(partial(self._state_of_rank, trainer))
        with explained("nothing was trained"):
            estimate_bytes({"trainer": self._trainer, "ranks": self._ranks})
        blobs = {"model": pl_module, "trainer": self._trainer, **numbered("optimizer", trainer.optimizers)}
        blobs |= numbered("scheduler", [one.scheduler for one in trainer.lr_scheduler_configs])
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
        trainer.model.require_forward_param_sync = pl_module.automatic_optimization  # DDP's state
        self._gradients = [(one, one.grad) for one in pl_module.parameters()]  # Lightning clears them
        self._groups = [(one, [{**group} for group in one.param_groups]) for one in trainer.optimizers]

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
        loop, inner = trainer.fit_loop, trainer.fit_loop.epoch_loop
        loop.load_state_dict(loaded["loops"]["fit_loop"])
        for one in (loop, inner, inner.val_loop, inner.automatic_optimization, inner.manual_optimization):
            one._restarting = one._loaded_from_state_dict = one._resuming_from_checkpoint = False
        inner.val_loop._restarting = True  # skips the sanity check
        trainer._logger_connector._callback_metrics.update(self._ranks.loaded.get("metrics", {}))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Move to the batch at which the training was interrupted."""
        loop, inner, ranks = trainer.fit_loop, trainer.fit_loop.epoch_loop, self._ranks.loaded
        loaders, fetcher = loop._combined_loader.flattened, loop._data_fetcher
        inner.val_loop._restarting = False
        for optimizer, groups in self._groups:  # callbacks may have replaced them in on_fit_start
            optimizer.param_groups = groups
        if self._held is None and self.every_n_steps:
            self._order = captured_draws("order", loaders)  # the first order was drawn before this hook
            iter(fetcher)
        if self._held is None or not self._step:
            return
        loop._restart_stage = _loops.RestartStage.RESTARTED_MID_EPOCH
        inner._restarting = True  # keeps the count of batches, and counts one step too many
        inner._batches_that_stepped -= 1
        inner.val_loop.increment_progress_to_evaluation_end = lambda: None  # it is at its end already
        self._order = {name: ranks[name] for name in ranks if name.startswith("order")}
        restore_draws("order", ranks, loaders)
        for loader in loaders:
            _loops._set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        loop._combined_loader._load_state_dicts(ranks["loaders"])
        if ranks["loaders"]:
            restore_draws("prefetch", ranks, loaders)
        iter(fetcher)
        if not ranks["loaders"]:
            for left in reversed(range(self._step)):
                if not left:
                    restore_draws("prefetch", ranks, loaders)
                following = next(fetcher.iterator)
                if prefetches(fetcher):
                    fetcher.batches = [following]
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
        restore_draws("fetch", ranks, loaders)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Save the previous epoch, or restore the random streams after a resume."""
        loop, begun = trainer.fit_loop, trainer.fit_loop.epoch_progress.current.processed
        if self._held is not None:
            loop._combined_loader._load_state_dicts(self._ranks.loaded.get("loaders", []))
            restore_draws("fetch", self._ranks.loaded, loop._combined_loader.flattened)
            self._release_streams()
        elif begun:
            self._save(trainer, 0)
        self._ahead = {}
        if self.every_n_steps and begun:
            self._order = captured_draws("order", loop._combined_loader.flattened)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save if due, or restore the random streams after a resume."""
        loop, done = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if self._held is not None:
            del loop.epoch_loop.val_loop.increment_progress_to_evaluation_end
            trainer.accumulate_grad_batches = self._trainer.loaded["accumulate"]
            self._release_streams()
        elif self._due and done and (self._before or not prefetches(loop._data_fetcher)):
            self._save(trainer, done)
        self._seen, self._due, self._before = trainer.global_step, False, self._ahead

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Record the state that the next batch is loaded with if a save is due."""
        every = self.every_n_steps or sys.maxsize
        self._due = trainer.global_step // every > self._seen // every
        if self._due or (self.every_n_steps and prefetches(trainer.fit_loop._data_fetcher)):
            self._ahead = fetched(trainer.fit_loop._combined_loader)

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
        """Restore the random streams and gradients that were held during a resume."""
        held, self._held = self._held, None
        if held is not None:
            held.restore()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            self._gradients = []

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
        metrics = {"metrics": dict(trainer.callback_metrics)}
        if not self._step:
            return metrics | fetched(trainer.fit_loop._combined_loader)
        if not prefetches(trainer.fit_loop._data_fetcher):
            return metrics | self._order | self._ahead
        before = {name.replace("fetch", "prefetch"): one for name, one in self._before.items()}
        return metrics | self._order | self._ahead | before


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
        with explained(f"{path} was not written"):
            save_blobs(path, dict(checkpoint), overwrite=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        """Read and verify a file of `save_checkpoint`. Raises UsageError for a file of torch.save."""
        if "://" not in str(path) and zipfile.is_zipfile(path):
            raise UsageError(f"{path} was written by torch.save: load it with a Trainer without this plugin")
        return load_blobs(path, device=map_location if isinstance(map_location, str | torch.device) else None)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file if it exists."""
        _io.TorchCheckpointIO().remove_checkpoint(path)
