"""Checkpoints for trainings that Hugging Face's `transformers.Trainer` runs."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.errors import NotAllowedNowError, RelayError, UsageError, install_command
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import Peers, decide
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

_STATE_FILE = "trainer_state.json"
_NO_METRICS = ("step", "epoch", "total_flos", "train_loss")
_SPEEDS = ("_runtime", "_per_second", "_preparation_time")


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
        self._state = _StateBlob()
        self._streams: RandomStreams | None = None
        self._due, self._saved = False, -1

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
                self._state.text = decide(self._session.peers, "trainer state", self._newest)
                while True:
                    try:
                        with _started_at(trainer, self._state.text) as folder:
                            return trainer.train(resume_from_checkpoint=folder, **options)
                    except _AnotherPositionError:  # the newest one could not be read: use the one before
                        continue
        except BaseException as error:
            if self._ckpt is not None:
                self._ckpt.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._ckpt = self._trainer = self._session = None

    def _newest(self) -> str | None:
        """Return the trainer state of the position that a resume will probably choose."""
        try:
            if self._epoch is not None:
                return str(open_checkpoint(self._where, self._epoch).value("trainer.state"))
            place = place_of(self._where)
            view = read_log(place)
            entry = view.newest()
            if entry is None:
                return None
            return str(Checkpoint(place, verify_epoch(place.storage, entry), view).value("trainer.state"))
        except RelayError:
            return None

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
        began = self._state.text
        self._ckpt = Checkpointer(self._where, blobs, session=self._session, **self._options)
        start = self._ckpt.resume(self._epoch)
        if start is None:
            return
        if self._state.text != began:
            self._ckpt.close()
            self._ckpt = None
            raise _AnotherPositionError
        self._streams = RandomStreams.capture()
        self._saved = state.global_step
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
        if self._streams is not None:
            self._streams.restore()
            if _position(args, state, given["train_dataloader"])[1] == 0:
                self._streams = None
        self._save_if_due(args, state, given["train_dataloader"])

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        """Save the previous step if due; by now all its values are logged."""
        if self._streams is not None:  # batches were skipped
            self._streams.restore()
            self._streams = None
        self._save_if_due(args, state, given["train_dataloader"])

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Note that a save is due."""
        if self._every and state.global_step % self._every == 0:
            self._due = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Note that a save is due."""
        self._due = True

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
        epoch, step = _position(args, state, loader)
        metrics = _metrics(json.loads(self._state.text))
        self._ckpt.save(epoch, step, metrics=metrics, asynchronous=self._asynchronous)
        self._saved = state.global_step

    def _as_text(self, state: TrainerState) -> str:
        """Return the trainer state as the Trainer writes it to trainer_state.json."""
        handler = self._trainer.callback_handler
        exported: dict[str, list[Any]] = {}
        for one in [*handler.callbacks, self._trainer.control]:
            if isinstance(one, ExportableState):
                exported.setdefault(type(one).__name__, []).append(one.state())
        callbacks = {name: found if len(found) > 1 else found[0] for name, found in exported.items()}
        return json.dumps({**dataclasses.asdict(state), "stateful_callbacks": callbacks})


class _StateBlob:
    """Trainer state of rank 0 as JSON, and the losses of all ranks since the last log."""

    same_on_all_ranks = True

    def __init__(self) -> None:
        self.text: str | None = None
        self.losses: list[float] = []
        self.logged = 0

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.text, "losses": self.losses, "logged": self.logged}

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        self.text, self.losses, self.logged = content["state"], content["losses"], content["logged"]

    def take_window(self, trainer: Any, peers: Peers) -> None:
        """Record the sum of the losses since the last log; all ranks together."""
        self.losses = peers.exchange("losses", float(trainer._tr_loss))
        self.logged = trainer._globalstep_last_logged

    def restore_window(self, trainer: Any) -> None:
        """Restore the losses since the last log; another number of ranks shares the mean."""
        rank, same = trainer.args.process_index, trainer.args.world_size == len(self.losses)
        trainer._tr_loss.fill_(self.losses[rank] if same else sum(self.losses) / len(self.losses))
        trainer._globalstep_last_logged = self.logged


class _AnotherPositionError(Exception):
    """The Trainer was started at a position other than the loaded one."""


@contextmanager
def _started_at(trainer: Trainer, text: str | None) -> Iterator[str | None]:
    """Create a folder that gives the Trainer its state; the callback loads all else."""
    if text is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _STATE_FILE).write_text(text)
        vars(trainer)["_load_from_checkpoint"] = lambda *_, **__: None  # it holds no weights
        try:
            yield folder
        finally:
            del vars(trainer)["_load_from_checkpoint"]


def _metrics(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the values logged at this step, except those that measure speed."""
    logs = [one for one in state["log_history"] if one.get("step") == state["global_step"]]
    return {
        name: value
        for one in logs
        for name, value in one.items()
        if isinstance(value, (int, float)) and name not in _NO_METRICS and not name.endswith(_SPEEDS)
    }


def _position(args: TrainingArguments, state: TrainerState, loader: Any) -> tuple[int, int]:
    """Return finished epochs and steps of the next one, counted as the Trainer does."""
    try:
        steps = max(-(-len(loader) // args.gradient_accumulation_steps), 1)
    except TypeError:  # a dataset without a length is one epoch
        steps = state.max_steps
    epoch, step = divmod(state.global_step, steps)
    return epoch, step
