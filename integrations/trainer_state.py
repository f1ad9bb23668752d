"""State of trainers and loaders of other libraries: as blobs, and as these take it back."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.state.restore.container import continue_generator
from torchrelay.errors import BlobError
from torchrelay.jobs.containers import is_generator
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import Peers

_STATE_FILE = "trainer_state.json"
_NO_METRICS = ("step", "epoch", "total_flos", "train_loss")
_SPEEDS = ("_runtime", "_per_second", "_preparation_time")
_PARTS = ("base_dataloader", "sampler", "batch_sampler", "dataset", "collate_fn")


class HeldState:
    """A blob that holds loaded state until a trainer can take it."""

    def __init__(self, state: Callable[[], dict[str, Any]] = dict) -> None:
        self.state_dict, self.loaded = state, dict[str, Any]()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold the state."""
        self.loaded = state


def captured_draws(name: str, loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the random states that the loaders draw from: of this process and of their own generators."""
    return {name: RandomStreams.capture().encode(), f"{name}_generators": copied_generators(loaders)}


def restore_draws(name: str, state: Mapping[str, Any], loaders: Iterable[Any]) -> None:
    """Restore what `captured_draws` found, if the state has it."""
    restore_generators(state.get(f"{name}_generators", {}), loaders)
    if name in state:
        RandomStreams.decode(state[name]).restore()


def copied_generators(loaders: Iterable[Any]) -> dict[str, Any]:
    """Copy the generators of loaders, samplers and datasets, by path."""
    return {path: copy.deepcopy(live) for path, live in _generators(loaders)}


def restore_generators(copied: Mapping[str, Any], loaders: Iterable[Any]) -> None:
    """Continue generators where the copied ones were."""
    for path, live in _generators(loaders):
        if type(copied.get(path)) is type(live):
            continue_generator(live, copied[path])


def _generators(loaders: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each generator once, with its path."""
    pending, seen = [(str(number), loader) for number, loader in enumerate(loaders)], set[int]()
    while pending:
        path, owner = pending.pop(0)
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if id(value) not in seen and (is_generator(value) or name in _PARTS):
                seen.add(id(value))
                if is_generator(value):
                    yield f"{path}.{name}", value
                else:
                    pending.append((f"{path}.{name}", value))


# accelerate


class LoaderGenerators:
    """The generators of a loader on this rank: now, or `within` an epoch as they were when it began."""

    within = False

    def __init__(self, loader: Any) -> None:
        self._loader, self._begun = loader, dict[str, Any]()

    def begin(self) -> None:
        """Note that an epoch begins."""
        self._begun = copied_generators([self._loader])

    def state_dict(self) -> dict[str, Any]:
        """Return copies."""
        return self._begun if self.within else copied_generators([self._loader])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the generators."""
        self._begun = state
        restore_generators(state, [self._loader])


# Lightning


def stand_in(checkpoint: Any, kind: Any) -> Any:
    """Return a plain callback that runs the hooks of a `Checkpoint`.

    `trainer.checkpoint_callback` is the first `Checkpoint` among the callbacks, which should be the user's.
    """
    found, hooks = kind(), (name for name in dir(kind) if not name.startswith("_") and name != "state_key")
    vars(found).update({name: getattr(checkpoint, name) for name in hooks})
    return found


def fetched(loader: Any) -> dict[str, Any]:
    """Return the state that the next batch of a combined loader is loaded with."""
    if loader is None:
        return {}
    return {"loaders": copy.deepcopy(loader._state_dicts()), **captured_draws("fetch", loader.flattened)}


def prefetches(fetcher: Any) -> bool:
    """Whether the next batch is loaded before a step, as loaders without a length need."""
    return getattr(fetcher, "length", 0) is None and hasattr(fetcher, "batches")  # None in the sanity check


def numbered(name: str, found: list[Any]) -> dict[str, Any]:
    """Name a single object `name`, several ones `name_0`, `name_1`, ..."""
    return {name: found[0]} if len(found) == 1 else {f"{name}_{at}": one for at, one in enumerate(found)}


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Add a remedy to a BlobError raised in the block."""
    try:
        yield
    except BlobError as error:
        remedy = "save_hyperparameters(ignore=[...]), or `del checkpoint[...]` in on_save_checkpoint"
        raise BlobError(f"{what}: {error}. Use tensors and plain values, or exclude it: {remedy}") from error


# transformers


class TrainerStateBlob:
    """Trainer state of rank 0 as JSON, and the losses of all ranks since the last log."""

    same_on_all_ranks = True

    def __init__(self) -> None:
        self.text: str | None = None
        self.losses: list[float] = []
        self.logged = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the losses."""
        return {"state": self.text, "losses": self.losses, "logged": self.logged}

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Hold what was saved until the Trainer takes it."""
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


class AnotherPositionError(Exception):
    """The Trainer was started at a position other than the loaded one, whose state and place these are."""


@contextmanager
def started_at(trainer: Any, text: str | None, epoch: int, step: int) -> Iterator[str | None]:
    """Create a folder that gives the Trainer its state; the callback loads all else."""
    if text is None:
        yield None
        return
    begin = trainer._init_training_state

    def at_place(max_steps: int, per_epoch: int, epochs: int, *given: Any) -> tuple[int, int]:
        found: tuple[int, int] = begin(max_steps, per_epoch, epochs, *given)
        if epochs < sys.maxsize:
            return found
        skip = not trainer.args.ignore_data_skip  # without a length, the Trainer takes all for one epoch
        return epoch, step * trainer.args.gradient_accumulation_steps * skip

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _STATE_FILE).write_text(text)
        own = {"_load_from_checkpoint": lambda *_, **__: None, "_init_training_state": at_place}
        vars(trainer).update(own)  # the folder holds no weights
        try:
            yield folder
        finally:
            for name in own:
                del vars(trainer)[name]


def metrics_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the values logged at this step, except those that measure speed."""
    logs = [one for one in state["log_history"] if one.get("step") == state["global_step"]]
    return {
        name: value
        for one in logs
        for name, value in one.items()
        if isinstance(value, (int, float)) and name not in _NO_METRICS and not name.endswith(_SPEEDS)
    }
