"""Checkpoints for trainings that Hugging Face's `transformers.Trainer` runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn

from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.errors import NotAllowedNowError, RelayError, UsageError, install_command
from torchrelay.integrations.trainer_state import (
    AnotherPositionError,
    HeldState,
    TrainerStateBlob,
    captured_draws,
    metrics_of,
    restore_draws,
    started_at,
)
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import decide
from torchrelay.runners.own_loop.checkpointer import Checkpointer
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.local import current_or_new_session

try:
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from torchrelay.integrations.accelerate import check_kind
except (ImportError, UsageError) as missing:
    raise UsageError(
        "torchrelay.integrations.transformers needs transformers and accelerate: "
        f"{install_command('transformers')}"
    ) from missing


class RelayCallback(TrainerCallback):  # type: ignore[misc]  # a class of a library without types here
    """Save model, optimizer, scheduler and trainer state of a Trainer, and resume them before it trains.

    A save follows the logging and the evaluation of its step. The Trainer's own checkpoints are not needed:
    pass `TrainingArguments(save_strategy="no")`.

    Args:
        where: Directory or URL of the checkpoints.
        every: Save every so many steps; None saves whole epochs only.
        asynchronous: Write in the background while the training continues.
        options: Options of `Checkpointer`: `keep_last`, `keep_best=("eval_loss", "min")`, ...

    Example:
        relay = RelayCallback("runs/x/checkpoints", every=500, keep_last=3)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[relay])
        relay.train(trainer)
    """

    def __init__(
        self, where: str | Path, *, every: int | None = None, asynchronous: bool = False, **options: Any
    ) -> None:
        self._where, self._every, self._asynchronous, self._options = where, every, asynchronous, options
        self._trainer: Any = None
        self._session: SessionBase | None = None
        self._epoch: int | None = None
        self._ckpt: Checkpointer | None = None
        self._state = TrainerStateBlob()
        self._ranks = HeldState(lambda: self._draws)
        self._draws: dict[str, Any] = {}
        self._order: dict[str, Any] = {}
        self._streams: RandomStreams | None = None
        self._due, self._saved = False, -1
        self._epochs, self._began, self._ended = 0, 0, False

    def train(self, trainer: Trainer, *, epoch: int | None = None, **options: Any) -> Any:
        """Call `trainer.train()` from the newest position that verifies. All ranks call this together.

        Args:
            trainer: A Trainer whose callbacks include this one.
            epoch: Epoch to rewind to; default: the newest position.
            options: Options of `trainer.train`.

        Returns:
            The result of `trainer.train`.

        Raises:
            NotAllowedNowError: The trainer does not have this callback.
            UnknownEpochError: The epoch is not committed.
            SaveFailedError: A save failed on at least one rank.
        """
        if self not in trainer.callback_handler.callbacks:
            raise NotAllowedNowError(
                "the Trainer does not have this callback: make it with Trainer(..., callbacks=[relay])"
            )
        check_kind(trainer.accelerator)
        self._trainer, self._epoch = trainer, epoch
        try:
            with current_or_new_session(None) as self._session:
                start = decide(self._session.peers, "trainer state", self._newest)
                while True:
                    self._state.text = start[0]
                    try:
                        with started_at(trainer, *start) as folder:
                            given = {"resume_from_checkpoint": folder} if folder is not None else {}
                            return trainer.train(**options | given)
                    except AnotherPositionError as found:  # the newest one could not be read
                        start = found.args
        except BaseException as error:
            if self._ckpt is not None:
                self._ckpt.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._ckpt = self._trainer = self._session = None

    def _newest(self) -> tuple[str | None, int, int]:
        """Return the trainer state, epoch and step of the position that a resume will probably choose."""
        try:
            if self._epoch is not None:
                found = open_checkpoint(self._where, self._epoch)
            else:
                place = place_of(self._where)
                view = read_log(place)
                entry = view.newest()
                if entry is None:
                    return None, 0, 0
                found = Checkpoint(place, verify_epoch(place.storage, entry), view)
            return found.value("trainer")["state"], found.position.epoch, found.position.step
        except RelayError:
            return None, 0, 0

    # Events

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        *,
        model: nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        **_: Any,
    ) -> None:
        """Resume if a position was saved."""
        trainer = self._trainer
        if trainer is None:
            raise NotAllowedNowError("trainer.train() was called directly: call relay.train(trainer) instead")
        accelerator = trainer.accelerator
        blobs: dict[str, Any] = {
            "model": accelerator.unwrap_model(model, keep_torch_compile=False),
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": lr_scheduler,
            "trainer": self._state,
        }
        if accelerator.scaler is not None:
            blobs["scaler"] = accelerator.scaler
        self._epochs, self._began, self._ended = 0, 0, False
        began = self._state.text
        self._ckpt = Checkpointer(self._where, blobs, session=self._session, **self._options)
        self._ckpt._job.blobs.add({"ranks": self._ranks}, reshard="by_rank")
        start = self._ckpt.resume(self._epoch)
        if start is None:
            return
        if self._state.text != began:
            self._ckpt.close()
            self._ckpt = None
            raise AnotherPositionError(self._state.text, start.epoch, start.step)
        self._streams = RandomStreams.capture()
        self._saved = state.global_step
        self._epochs, self._began = start.epoch, state.global_step - start.step
        self._state.restore_window(trainer)
        self._restore_callbacks(state)

    def _restore_callbacks(self, state: TrainerState) -> None:
        """Restore callbacks as the Trainer does with restore_callback_states_from_checkpoint."""
        for name, saved in state.stateful_callbacks.items():
            alike = [one for one in self._trainer.callback_handler.callbacks if type(one).__name__ == name]
            for callback, content in zip(alike, saved if isinstance(saved, list) else [saved], strict=False):
                for key, value in content.get("attributes", {}).items():
                    setattr(callback, key, value)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        """Save the previous epoch if it is not saved; after a resume, restore the random states."""
        loader = given["train_dataloader"]
        if self._ended:
            self._epochs, self._began, self._ended = self._epochs + 1, state.global_step, False
        if self._streams is not None:
            self._streams.restore()
            within = self._position(args, state, loader)[1] > 0
            restore_draws("order" if within else "next", self._ranks.loaded, [loader])
            self._streams = self._streams if within else None
        self._save_if_due(args, state, loader)
        self._order = captured_draws("order", [loader])

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        """Save the previous step if due; by now all its values are logged."""
        loader = given["train_dataloader"]
        if self._streams is not None:  # batches were skipped
            self._streams.restore()
            restore_draws("next", self._ranks.loaded, [loader])
            self._streams = None
        self._save_if_due(args, state, loader)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Note that a save is due."""
        if self._every and state.global_step % self._every == 0:
            self._due = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Note that a save is due."""
        self._due = self._ended = True

    def on_log(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        """Save the last epoch before the Trainer may load the best model."""
        if "train_runtime" in (given.get("logs") or {}):
            self._save_if_due(args, state, given["train_dataloader"])

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        """Wait for the save in flight and release the directory."""
        self._save_if_due(args, state, given["train_dataloader"])
        if self._ckpt is not None:
            ckpt, self._ckpt = self._ckpt, None
            ckpt.close()

    def _save_if_due(self, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
        """Save the current position if a save is due."""
        due, self._due = self._due, False
        if not due or self._ckpt is None or self._session is None or state.global_step == self._saved:
            return
        self._trainer.store_flos()
        peers = self._session.peers
        self._state.text = decide(peers, "trainer state", lambda: self._as_text(state))
        self._state.take_window(self._trainer, peers)
        epoch, step = self._position(args, state, loader)
        self._draws = captured_draws("next", [loader]) | (self._order if step else {})
        metrics = metrics_of(json.loads(self._state.text))
        self._ckpt.save(epoch, step, metrics=metrics, asynchronous=self._asynchronous)
        self._saved = state.global_step

    def _position(self, args: TrainingArguments, state: TrainerState, loader: Any) -> tuple[int, int]:
        """Return finished epochs and steps of the next one, counted as the Trainer does."""
        try:
            steps = max(-(-len(loader) // args.gradient_accumulation_steps), 1)
        except TypeError:  # a dataset without a length
            return self._epochs, state.global_step - self._began
        epoch, step = divmod(state.global_step, steps)
        return epoch, step

    def _as_text(self, state: TrainerState) -> str:
        """Return the trainer state as the Trainer writes it to trainer_state.json."""
        handler = self._trainer.callback_handler
        exported: dict[str, list[Any]] = {}
        for one in [*handler.callbacks, self._trainer.control]:
            if isinstance(one, ExportableState):
                exported.setdefault(type(one).__name__, []).append(one.state())
        callbacks = {name: found if len(found) > 1 else found[0] for name, found in exported.items()}
        return json.dumps({**dataclasses.asdict(state), "stateful_callbacks": callbacks})
