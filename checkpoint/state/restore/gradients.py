"""Restore loaded gradients, after everything else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from torchrelay.checkpoint.state.flatten import parameter_names
from torchrelay.checkpoint.state.gradients import (
    ENDS,
    INDICES,
    UNSHARDED,
    VALUES,
    held_back,
    learning_in_containers,
    learning_parameters,
)
from torchrelay.checkpoint.state.leaf import LeafSpec, is_sharded, memory_of_shard
from torchrelay.checkpoint.state.reads import Read
from torchrelay.checkpoint.state.restore.plan import RestorePlan
from torchrelay.errors import DamagedError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.records import Json


class Gradients:
    """Loaded gradients of a node, or none; fill `reads` before `install`.

    `install` comes last, because the program may clear gradients before its loop. `kept` tensors get none.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        specs: Mapping[str, LeafSpec],
        stored: Mapping[str, Json],
        kept: Collection[str] = (),
    ) -> None:
        names = parameter_names(objects)
        self._objects = dict(objects)
        self._parameters = learning_parameters(objects, names)
        self._held_back = held_back(objects, names)
        draft = RestorePlan(specs, stored, {})
        self._made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._pending: dict[str, Callable[[], torch.Tensor]] = {}
        forms = draft.value(specs[GRADIENTS]) if GRADIENTS in specs else {}
        try:
            self._draft(draft, specs, forms)
            for name in kept:
                self._made.pop(name, None)
                self._pending.pop(name, None)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"the gradients in the checkpoint are malformed: {error}") from None
        self.reads: Sequence[Read] = tuple(draft.reads)
        self.steps: Sequence[Callable[[], None]] = tuple(step for _, step in (*draft.fills, *draft.steps))

    def _draft(self, draft: RestorePlan, specs: Mapping[str, LeafSpec], forms: Any) -> None:

        def memory(leaf: str) -> Callable[[], torch.Tensor]:
            return draft.fresh(specs[f"{GRADIENTS}.{leaf}"]).memory

        here = self._parameters
        self._made.update(dict.fromkeys(forms.get("zeros", ()), torch.zeros_like))
        for name in filter(self._held_back.__contains__, forms.get("unsharded", ())):
            self._pending[name] = memory(name + UNSHARDED)
        for name, form in forms.get("sparse", {}).items():
            if name in here:
                self._made[name] = _sparse(memory(name + INDICES), memory(name + VALUES), form)
        for name, placements in forms.get("local", {}).items():
            if name in here:
                self._made[name] = _local(memory(name), placements)
        for leaf, spec in specs.items():
            name = leaf.removeprefix(f"{GRADIENTS}.")
            if leaf == GRADIENTS or name in self._made or name.endswith(ENDS):
                continue
            if name in here:
                self._made[name] = _dense(draft.alike(spec, here[name]))
            elif spec.sharding is None and name not in forms.get("local", ()):
                self._made[name] = _dense(draft.fresh(spec).on)  # of a tensor that the load may make

    def made(self, created: Mapping[str, Any]) -> None:
        """Note tensors and containers that the load has made, which may have gradients too."""
        self._objects.update(created)

    def install(self) -> None:
        """Give every parameter its saved gradient, or none; only once."""
        made, pending, self._made, self._pending = self._made, self._pending, {}, {}
        with torch.no_grad():
            for step in self.steps:
                step()
            self.reads, self.steps = (), ()
            for name, parameter in self._parameters.items():
                _put(parameter, made[name](parameter) if name in made else None)
            alone = {blob: one for blob, one in self._objects.items() if isinstance(one, torch.Tensor)}
            held = learning_in_containers(self._objects, self._parameters.values())
            for name, one in {**alone, **held}.items():
                if name not in self._parameters:
                    _put(one, made[name](one) if name in made and one.requires_grad else None)
            for name, holder in self._held_back.items():
                holder.set(pending[name]() if name in pending else None)


def _dense(maker: Callable[[torch.device | None], torch.Tensor]) -> Callable[..., torch.Tensor]:

    def make(parameter: torch.Tensor) -> torch.Tensor:
        found = maker(parameter.device)
        if is_sharded(found):
            return found
        # The layout of backward, which decides the order of summation in a norm.
        usual = torch.empty_like(parameter, dtype=found.dtype)
        return found if usual.stride() == found.stride() else usual.copy_(found)

    return make


def _sparse(
    indices: Callable[[], torch.Tensor], content: Callable[[], torch.Tensor], form: Mapping[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape, coalesced = tuple(form["shape"]), bool(form["coalesced"])

    def make(parameter: torch.Tensor) -> torch.Tensor:
        parts = indices().to(parameter.device), content().to(parameter.device)
        return torch.sparse_coo_tensor(*parts, shape, is_coalesced=coalesced, check_invariants=True)

    return make


def _local(content: Callable[[], torch.Tensor], placements: list[str]) -> Callable[..., torch.Tensor]:
    """Builds a gradient of a DTensor."""

    def make(parameter: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        known: dict[str, Any] = {"R": Replicate()}
        known.update((f"S({dim})", Shard(dim)) for dim in range(parameter.dim()))
        known.update((f"P({how})", Partial(how)) for how in ("sum", "avg", "min", "max", "product"))
        whole = torch.empty(parameter.shape, device="meta")
        return DTensor.from_local(
            content().to(memory_of_shard(parameter).device),
            parameter.device_mesh,  # type: ignore[attr-defined]
            [known[one] for one in placements],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    return make


def _put(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set a gradient; a view into a buffer of the program is written in place instead."""
    live = parameter.grad
    if live is None or not live._is_view():
        parameter.grad = grad
    elif grad is None:
        live.zero_()
    else:
        live.copy_(grad)
