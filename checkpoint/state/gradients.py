"""Gradients of an open accumulation window: which of them are state, as leaves, and put back.

A gradient is state where the program is going to add to it. At a boundary it is known to be none only where

- it is what the last step of an optimizer left behind: the same memory, not written since, and
- the program has been seen to begin anew behind a step: no gradient was the same at two steps in a row.

Every other one is saved. So a loop that calls `zero_grad`, before a window or behind it, saves none between
its windows, a loop that never calls it saves all, and what nobody can know is saved. What the last steps
left behind is noted after each step of any optimizer of torch.optim, by weak references.

@grad                     a value, where there are any: gradients that are zero, sparse, or a rank's own part
@grad.<parameter's leaf>  a gradient; `@grad.<leaf>@<part>` a part of a sparse one, or what FSDP2 holds back
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.dtypes import is_storable
from torchrelay.checkpoint.state.flatten import parameter_names
from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.checkpoint.state.leaf import (
    OPTIM_GROUP,
    Leaf,
    LeafSpec,
    Role,
    Value,
    is_sharded,
    memory_of_shard,
)
from torchrelay.checkpoint.state.module_leaves import FsdpState, parts_of
from torchrelay.checkpoint.state.optimizer_leaves import STEPS, is_left, left_behind, written_memory
from torchrelay.checkpoint.state.reads import Read
from torchrelay.checkpoint.state.restore.plan import Draft
from torchrelay.checkpoint.state.tree_leaves import container_tensors
from torchrelay.errors import DamagedError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.jobs.session import warn
from torchrelay.records import dataclass

Names = Mapping[int, str]
REMEDY = "give the loop's window, ctx.steps(loader, accumulate=n), so that saves wait for its end"
_INDICES, _VALUES, _UNSHARDED = _ENDS = "@indices", "@values", "@unsharded"


# As leaves


def gradient_leaves(
    objects: Mapping[str, Any],
    names: Names,
    wanted: Callable[[str], bool] = lambda name: True,
    learning: Collection[str] = (),
) -> list[Leaf]:
    """The gradients that the next backward pass may add to; `names` are the leaf names of parameters.

    Only those of `wanted` parameters; of containers, only in those that are `learning`, which hold tensors
    with gradients. A kind that cannot be stored is left out, with a warning.
    """
    listing = _Listing(left_behind())
    held = {blob: objects[blob] for blob in learning if kind_of(objects[blob]) is Kind.CONTAINER}
    parameters = _parameters(objects, names)
    for name, parameter in {**parameters, **_in_containers(held, parameters.values())}.items():
        grad = parameter.grad if wanted(name) else None
        if grad is not None and not is_left(grad, listing.left):
            listing.add(name, grad)
    for name, holder in _held_back(objects, names).items():
        if wanted(name) and (grad := holder.pending()) is not None:
            listing.part(name, _UNSHARDED, grad)
            listing.forms.setdefault("unsharded", []).append(name)
    _warn_of(objects, names, listing)
    if not listing.leaves and not listing.forms:
        return []
    index = Value(values.encode(listing.forms, GRADIENTS))
    return [Leaf(GRADIENTS, GRADIENTS, Role.GRADIENT, OPTIM_GROUP, index), *listing.leaves]


def parameter_of(leaf: str) -> str:
    """The leaf of the parameter whose gradient a leaf belongs to."""
    name = leaf.removeprefix(f"{GRADIENTS}.")
    return next((name.removesuffix(end) for end in _ENDS if name.endswith(end)), name)


@dataclass
class _Listing:
    """Gradients as they become leaves; `forms` tells of those that are not one tensor of their own."""

    left: Mapping[int, int]
    leaves: list[Leaf] = field(default_factory=list)
    forms: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def part(self, name: str, end: str, content: torch.Tensor) -> None:
        leaf = f"{GRADIENTS}.{name}{end}"
        plain = content.detach()
        self.leaves.append(Leaf(leaf, GRADIENTS, Role.GRADIENT, OPTIM_GROUP, plain))

    def add(self, name: str, grad: torch.Tensor) -> None:
        if is_sharded(grad):
            placements = [str(one) for one in grad.placements]  # type: ignore[attr-defined]
            if all(one.is_shard() for one in grad.placements):  # type: ignore[attr-defined]
                self.part(name, "", grad)
            else:  # replicas may differ before they are summed up: each has its own
                self.part(name, "", memory_of_shard(grad))
                self.forms.setdefault("local", {})[name] = placements
        elif grad.layout is torch.sparse_coo:
            plain = grad.detach()
            self.part(name, _INDICES, plain._indices())
            self.part(name, _VALUES, plain._values())
            form = {"shape": list(plain.shape), "coalesced": plain.is_coalesced()}
            self.forms.setdefault("sparse", {})[name] = form
        elif (
            type(grad) is not torch.Tensor or grad.layout is not torch.strided or not is_storable(grad.dtype)
        ):
            self.left_out[name] = f"{type(grad).__name__} of layout {grad.layout}"
        elif _is_zero(grad):
            self.forms.setdefault("zeros", []).append(name)
        else:
            self.part(name, "", grad)


def _is_zero(grad: torch.Tensor) -> bool:
    """Whether all bits are zero: then the program wants zeros there, and they need no bytes."""
    flat = grad.detach().reshape(-1)
    if flat.numel() and bool(flat[:1].view(torch.uint8).any()):
        return False
    return not bool(flat.view(torch.uint8).any())


_warned: set[str] = set()


def _warn_of(objects: Mapping[str, Any], names: Names, listing: _Listing) -> None:
    found = [f"{name} ({why})" for name, why in listing.left_out.items()]
    for blob, value in objects.items():
        if isinstance(value, nn.Module) and any(
            getattr(group, "_partial_reduce_output", None) is not None for group in _fsdp_groups(value)
        ):
            found.append(f"{blob} (FSDP2 without the sums over its replicas)")
    unnamed = [
        (what, one.grad)
        for what, one in _unnamed(objects, names)
        if what not in _warned and one.grad is not None
    ]
    if unnamed:
        used = {
            id(grad): (version, step.begins_anew)
            for step in STEPS.values()
            for grad, version in step.living()
        }
        found += dict.fromkeys(what for what, grad in unnamed if _is_open(written_memory(grad), used))
    new = [one for one in found if one not in _warned]
    _warned.update(new)
    if new:
        warn(
            f"gradients of an open window are not saved: {', '.join(new[:4])}. A run that resumes from here "
            f"lacks them; {REMEDY}",
            stacklevel=2,
        )


def _unnamed(objects: Mapping[str, Any], names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters whose gradients no save has, as they have no names, each once with what has it."""
    held = [
        (f"{blob} (FSDP1)", one)
        for blob, value in objects.items()
        if isinstance(value, FsdpState)
        for one in value.module.parameters()
    ]
    for step in list(STEPS.values()):
        optimizer = step.optimizer()
        if optimizer is not None and not step.parameters <= names.keys():
            what = f"parameters of {type(optimizer).__name__} that no blob has by name"
            held += [(what, one) for group in optimizer.param_groups for one in group["params"]]
    yield from {id(one): (what, one) for what, one in reversed(held) if id(one) not in names}.values()


def _is_open(grad: torch.Tensor, used: Mapping[int, tuple[int, bool | None]]) -> bool:
    """Whether a gradient is one that a program with a window adds to; `used` are those that steps used.

    It is not where it is zero, or was used, unless it was written since by a program that was seen to go on
    with such: losses of another model add to what is cleared at the next step, as in a GAN.
    """
    version, begins_anew = used.get(id(grad), (None, False))
    if version is not None and (begins_anew is not False or version == grad._version):
        return False
    try:
        return not _is_zero(grad)
    except (RuntimeError, TypeError):  # of a kind that has no bytes to look at
        return True


# Where they are


def _parameters(objects: Mapping[str, Any], names: Names) -> dict[str, torch.Tensor]:
    """What may have a gradient, each once, by the name of its leaf."""
    found: dict[str, torch.Tensor] = {}
    for one in _tensors(objects):
        name = names.get(id(one))
        if name is not None:
            found[name] = one
    return found


def _tensors(objects: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in objects.values():
        if isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_leaf:
                yield value
        elif isinstance(value, Optimizer):
            for group in value.param_groups:
                yield from group["params"]


def _in_containers(objects: Mapping[str, Any], others: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What may have a gradient in containers, and is none of the `others`."""
    known = set(map(id, others))
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for blob, value in objects.items():
        for name, one in container_tensors(blob, value) if kind_of(value) is Kind.CONTAINER else ():
            if one.requires_grad and one.is_leaf and id(one) not in known:
                found.setdefault(id(one), (name, one))
    return dict(found.values())


@dataclass(frozen=True)
class _HeldBack:
    """A parameter of FSDP2, whose gradient is whole and its rank's own until it is reduced."""

    param: Any

    def pending(self) -> torch.Tensor | None:
        held: torch.Tensor | None = getattr(self.param, "unsharded_accumulated_grad", None)
        if held is None:
            unsharded = getattr(self.param, "_unsharded_param", None)
            held = None if unsharded is None else unsharded.grad
        return held

    def set(self, grad: torch.Tensor | None) -> None:
        unsharded = getattr(self.param, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None
        if grad is not None:
            grad = grad.to(memory_of_shard(self.param.sharded_param).device)
        self.param.unsharded_accumulated_grad = grad


def _held_back(objects: Mapping[str, Any], names: Names) -> dict[str, _HeldBack]:
    modules = [value for value in objects.values() if isinstance(value, nn.Module)]
    params = [one for module in modules for group in _fsdp_groups(module) for one in group.fsdp_params]
    found = {names.get(id(one.sharded_param)): _HeldBack(one) for one in params}
    return {name: one for name, one in found.items() if name is not None}


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """The parameter groups of FSDP2; torch has no public way to what it holds back."""
    found: list[Any] = []
    for part in parts_of(module):
        if (state := getattr(part, "_get_fsdp_state", None)) is not None:
            found += getattr(state(), "_fsdp_param_groups", None) or [state()._fsdp_param_group]
    return [one for one in found if one is not None]


class Gradients:
    """Gradients of a node that were loaded, or that there are none; `reads` are to be made before `install`.

    That comes last, for what the program does before its loop may clear them. `kept` tensors get none.
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
        self._parameters = _parameters(objects, names)
        self._held_back = _held_back(objects, names)
        draft = Draft(specs, stored, {})
        self._made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._pending: dict[str, Callable[[], torch.Tensor]] = {}
        forms = draft.value(specs[GRADIENTS]) if GRADIENTS in specs else {}
        try:
            self._draft(draft, specs, forms)
            for name in kept:
                self._made.pop(name, None)
                self._pending.pop(name, None)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"the gradients that the checkpoint holds are none: {error}") from None
        self.reads: Sequence[Read] = tuple(draft.reads)
        self.steps: Sequence[Callable[[], None]] = tuple(step for _, step in (*draft.fills, *draft.steps))

    def _draft(self, draft: Draft, specs: Mapping[str, LeafSpec], forms: Any) -> None:
        def memory(leaf: str) -> Callable[[], torch.Tensor]:
            return draft.fresh(specs[f"{GRADIENTS}.{leaf}"]).memory

        here = self._parameters
        self._made.update(dict.fromkeys(forms.get("zeros", ()), torch.zeros_like))
        for name in filter(self._held_back.__contains__, forms.get("unsharded", ())):
            self._pending[name] = memory(name + _UNSHARDED)
        for name, form in forms.get("sparse", {}).items():
            if name in here:
                self._made[name] = _sparse(memory(name + _INDICES), memory(name + _VALUES), form)
        for name, placements in forms.get("local", {}).items():
            if name in here:
                self._made[name] = _local(memory(name), placements)
        for leaf, spec in specs.items():
            name = leaf.removeprefix(f"{GRADIENTS}.")
            if leaf == GRADIENTS or name in self._made or name.endswith(_ENDS):
                continue
            if name in here:
                self._made[name] = _dense(draft.alike(spec, here[name]))
            elif spec.sharding is None and name not in forms.get("local", ()):
                self._made[name] = _dense(draft.fresh(spec).on)  # of a tensor that the load may make

    def made(self, created: Mapping[str, Any]) -> None:
        """Tensors and containers that the load has made, which may have gradients too."""
        self._objects.update(created)

    def install(self) -> None:
        """Give every parameter the gradient that it had, or none; at once, and only once."""
        made, pending, self._made, self._pending = self._made, self._pending, {}, {}
        with torch.no_grad():
            for step in self.steps:
                step()
            self.reads, self.steps = (), ()
            for name, parameter in self._parameters.items():
                _put(parameter, made[name](parameter) if name in made else None)
            alone = {blob: one for blob, one in self._objects.items() if isinstance(one, torch.Tensor)}
            held = _in_containers(self._objects, self._parameters.values())
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
        # As backward lays a gradient out, which decides in what order a norm of it is summed up.
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
    """A gradient that lies in a buffer of the program's (a view) is written there, and not replaced."""
    live = parameter.grad
    if live is None or not live._is_view():
        parameter.grad = grad
    elif grad is None:
        live.zero_()
    else:
        live.copy_(grad)
