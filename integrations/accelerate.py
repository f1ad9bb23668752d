"""Checkpoints for training loops that use Hugging Face's `accelerate.Accelerator`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.errors import UsageError, install_command
from torchrelay.integrations.trainer_state import LoaderGenerators
from torchrelay.jobs.data.data_parallel import bare_ddp_instances
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import warn
from torchrelay.runners.own_loop.checkpointer import Checkpointer

try:
    from accelerate import Accelerator, skip_first_batches
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType, broadcast
except ImportError as missing:
    raise UsageError(
        f"torchrelay.integrations.accelerate needs accelerate: {install_command('accelerate')}"
    ) from missing

_ELSEWHERE = {
    DistributedType.DEEPSPEED: "DeepSpeed keeps them in its engine",
    DistributedType.MEGATRON_LM: "Megatron-LM keeps them in its engine",
}


class AcceleratorCheckpointer(Checkpointer):
    """A `Checkpointer` for the objects that `accelerator.prepare` returned.

    It saves the state of the wrapped objects, so that a process without accelerate can load it. The gradient
    scaler, the count of accumulated steps and the objects of `register_for_checkpointing` are saved too.

    Args:
        accelerator: The accelerator that prepared the objects.
        where: Directory or URL of the checkpoints.
        blobs: Objects to save, by name: prepared model, optimizer, scheduler, loaders, and other values.
        options: Options of `Checkpointer`.

    Raises:
        UsageError: `blobs` is empty, a name is reserved, or the objects do not hold their state (DeepSpeed,
            Megatron-LM, FSDP 1).

    Example:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        blobs = dict(model=model, optimizer=optimizer, loader=loader)
        ckpt = AcceleratorCheckpointer(accelerator, "runs/x/checkpoints", blobs)
        start = ckpt.resume()
        for epoch in range(start.epoch + 1 if start else 1, 11):
            for batch in ckpt.batches(loader):
                train(batch)
                if ckpt.step % 100 == 0:
                    ckpt.save(epoch - 1, ckpt.step)
            ckpt.save(epoch)
        ckpt.close()
    """

    def __init__(
        self, accelerator: Accelerator, where: str | Path, blobs: Mapping[str, Any], **options: Any
    ) -> None:
        check_kind(accelerator)
        self._places: dict[int, LoaderPlace] = {}
        self._current: LoaderPlace | None = None
        inner = {name: self._unwrapped(accelerator, value) for name, value in blobs.items()}
        own: dict[str, Any] = {"accumulation": _Accumulation(accelerator)}
        if accelerator.scaler is not None:
            own["scaler"] = accelerator.scaler
        own |= {f"registered_{number}": one for number, one in enumerate(accelerator._custom_objects)}
        if taken := sorted(own.keys() & inner.keys()):
            raise UsageError(
                f"blob name {taken[0]!r} is reserved for a part of the Accelerator: use another name"
            )
        super().__init__(where, inner | own, **options)
        for number, place in enumerate(self._places.values()):
            self._job.blobs.add({f"generators_{number}": place.generators}, reshard="by_rank")
        if accelerator.num_processes > 2 and bare_ddp_instances():
            warn(
                "DistributedDataParallel regroups gradients after its first step, so on more than 2 ranks a "
                "resumed run is not bit-identical: pass Accelerator(kwargs_handlers="
                "[DistributedDataParallelKwargs(find_unused_parameters=True)])"
            )

    def _unwrapped(self, accelerator: Accelerator, value: Any) -> Any:
        """Return the object that holds the state; for a prepared loader, its position."""
        if isinstance(value, AcceleratedOptimizer):
            return value.optimizer
        if isinstance(value, AcceleratedScheduler):
            return value.scheduler
        if isinstance(value, nn.Module):
            return accelerator.unwrap_model(value, keep_torch_compile=False)
        if isinstance(value, (DataLoaderShard, DataLoaderDispatcher)) and not value.use_stateful_dataloader:
            return self._places.setdefault(id(value), LoaderPlace(accelerator, value))
        return value

    @property
    def step(self) -> int:
        """Number of batches that `batches` yielded in this epoch, including those before a resume."""
        return 0 if self._current is None else self._current.taken

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over an epoch of a prepared loader; after a resume, over the rest of it.

        Loaders for evaluation do not need `batches`: iterate over them directly.

        Args:
            loader: One of the blobs, as `accelerator.prepare` returned it.

        Yields:
            The batches of this rank.

        Raises:
            UsageError: The loader is not one of the blobs.
        """
        place = self._places.get(id(loader))
        if place is None:
            raise UsageError(
                f"this {type(loader).__name__} is not one of the blobs: pass the loader that "
                "accelerator.prepare returned, for example blobs=dict(..., loader=loader)"
            )
        before, self._current = self._current, place
        yield from place.batches()
        self._current = before

    def save(
        self,
        epoch: int,
        step: int = 0,
        *,
        metrics: Mapping[str, float] | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Save all objects in their current state; see `Checkpointer.save`.

        Args:
            epoch: Number of finished epochs.
            step: Number of finished steps of the next epoch: `ckpt.step`, or 0 after a whole epoch.
            metrics: Values of this epoch, identical on all ranks.
            asynchronous: Return as soon as the objects may change again.

        Raises:
            SaveFailedError: The save failed on at least one rank. Nothing is committed then.
        """
        for place in self._places.values():
            place.within = place.generators.within = step > 0
        super().save(epoch, step, metrics=metrics, asynchronous=asynchronous)


class LoaderPlace:
    """Position of a prepared loader: epoch, state that determines its order, and batches taken."""

    same_on_all_ranks = True
    """All ranks share one order, so its state is saved once."""

    def __init__(self, accelerator: Accelerator, loader: Any) -> None:
        self._accelerator, self._loader = accelerator, loader
        self.taken = 0
        self.within = False
        """True while the position to save is within an epoch."""
        self._begin: torch.Tensor | None = None
        self.generators = LoaderGenerators(loader)
        self._left = False

    def batches(self) -> Iterator[Any]:
        """Iterate over the rest of an interrupted epoch, or over a whole one."""
        loader, left = self._loader, self._left and self.taken > 0
        self._left, epoch, streams = False, loader.iteration, None
        if left:
            streams = RandomStreams.capture()
            self._set_order(self._begin)
            loader.set_epoch(epoch)
            dispatched = isinstance(loader, DataLoaderDispatcher) and not loader.split_batches
            joined = dispatched and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
            counted = self.taken * (self._accelerator.num_processes if joined else 1)
            source = skip_first_batches(loader, counted)
        else:
            self.taken, self._begin, source = 0, self._order(), loader
            self.generators.begin()
        for batch in source:
            if streams is not None:  # as it was when these batches had been fetched
                streams.restore()
                streams = None
            self.taken += 1
            yield batch
        if streams is not None:
            streams.restore()
        loader.iteration, self.taken, self._begin = epoch + 1, 0, None

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the order of this epoch, or of the next one after its end."""
        within = self.within and self.taken > 0
        generator, sampler = self._generator, _sampler(self._loader)
        order = self._begin if within else None if generator is None else generator.get_state()
        return {
            "epoch": self._loader.iteration,
            "taken": self.taken if within else 0,
            "batch_size": self._batch_size,
            "own_generator": generator is not None,
            "order": order,
            "seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position; other numbers of ranks need the sample to begin a batch."""
        taken, size, sampler = state["taken"], self._batch_size, _sampler(self._loader)
        if taken and size != state["batch_size"]:
            samples = taken * state["batch_size"]
            if not size or not state["batch_size"] or samples % size:
                raise UsageError(
                    f"the epoch was interrupted after {samples} samples, which is not a multiple of the "
                    f"global batch size {size}: use resume(epoch={state['epoch']})"
                )
            taken = samples // size
        if taken and self._generator is not None and not state["own_generator"]:
            raise UsageError(
                "the epoch was interrupted in a run of one process, whose data order several ranks cannot "
                f"reproduce: use resume(epoch={state['epoch']})"
            )
        if isinstance(sampler, SeedableRandomSampler) and state["seed"] is not None:
            sampler.initial_seed = state["seed"]
        elif state["own_generator"] and self._generator is None and hasattr(sampler, "generator"):
            sampler.generator = torch.Generator()
        self._loader.iteration, self.taken, self._left = state["epoch"], taken, taken > 0
        self._begin = state["order"] if taken else None
        if not taken and self._generator is not None:
            self._set_order(state["order"])

    def _order(self) -> torch.Tensor:
        """Return the random state that the order of this epoch is drawn from, identical on all ranks."""
        state = (self._generator or torch.default_generator).get_state()
        if self._generator is not None or self._accelerator.num_processes == 1:
            return state
        shared: torch.Tensor = broadcast(state.to(self._accelerator.device))
        return shared.cpu()

    def _set_order(self, state: torch.Tensor | None) -> None:
        """Restore the random state that the order is drawn from."""
        if state is not None:
            (self._generator or torch.default_generator).set_state(state)

    @property
    def _generator(self) -> torch.Generator | None:
        """Return the generator of the sampler; None if it draws from the global random state."""
        sampler = _sampler(self._loader)
        if isinstance(sampler, SeedableRandomSampler):  # drawn from its seed and the epoch
            return None
        found = getattr(sampler, "generator", None) or getattr(self._loader, "synchronized_generator", None)
        return found if isinstance(found, torch.Generator) else None

    @property
    def _batch_size(self) -> int:
        """Number of samples of a step over all ranks; 0 if unknown."""
        loader, dispatched = self._loader, isinstance(self._loader, DataLoaderDispatcher)
        one = getattr(loader.batch_sampler, "batch_size", None) or (dispatched and loader.batch_size) or 0
        split = getattr(loader if dispatched else loader.batch_sampler, "split_batches", False)
        return int(one) if split else int(one) * self._accelerator.num_processes


class _Accumulation:
    """Number of finished batches in the current window of `accelerator.accumulate`."""

    same_on_all_ranks = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]


def _sampler(loader: Any) -> Any:
    """Return the sampler below accelerate's wrappers; None for an iterable dataset."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def check_kind(accelerator: Accelerator) -> None:
    """Raise UsageError if the model and the optimizer do not hold their state themselves."""
    reason = _ELSEWHERE.get(accelerator.distributed_type)
    if accelerator.distributed_type is DistributedType.FSDP and not accelerator.is_fsdp2:
        reason = "FSDP 1 keeps flat parts; set fsdp_version=2"
    if reason is not None:
        raise UsageError(
            f"{accelerator.distributed_type} does not keep its states in the prepared objects: {reason}"
        )
