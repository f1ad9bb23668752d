"""List gradients of an open accumulation window as leaves, and track what optimizer steps leave behind.

A gradient must be saved if the program may add to it later. It is not saved only if both are true:

- The last step of an optimizer left it behind: the same memory, not written since.
- The program was seen to clear gradients after a step: none was the same at two steps in a row.

So a loop that calls `zero_grad`, before or after a window, saves none between its windows. A loop that never
calls it saves all. Gradients are noted after each step of any optimizer of torch.optim, by weak references.

    @grad                          a value, if any: gradients that are zero, sparse, or a rank's own part
    @grad.<parameter's leaf>       a gradient
    @grad.<leaf>@<part>            a part of a sparse one, or the unreduced gradient of FSDP2
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.dtypes import is_storable
from torchrelay.checkpoint.state.leaf import OPTIM_GROUP, Leaf, Role, Value, is_sharded, memory_of_shard
from torchrelay.checkpoint.state.module_leaves import FsdpState, parts_of
from torchrelay.checkpoint.state.names import Kind, kind_of, local_part, memory_place
from torchrelay.checkpoint.state.tree_leaves import container_tensors
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.jobs.session import warn
from torchrelay.records import dataclass


class LastStep:
    """Gradients that an optimizer's last step used; made again when its parameters change."""

    def __init__(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.parameters = frozenset(map(id, parameters))
        self.count = len(parameters)
        self.plain = all(type(one) in (torch.Tensor, nn.Parameter) for one in parameters)
        self.beside: list[LastStep] = [one for one in STEPS.values() if one.parameters & self.parameters]
        """Those of other optimizers of the same parameters."""
        for one in self.beside:
            one.beside.append(self)
        self.grads: list[weakref.ref[torch.Tensor]] = []
        """Held here, so that a live gradient has the same reference at every look."""
        self.versions: list[int] = []
        """Version counters at the step."""
        self.begins_anew: bool | None = None
        """Whether no step so far used a gradient of the step before; None before the second."""

    def note(self, parameters: list[torch.Tensor]) -> None:
        """Record the gradients that a step used."""
        found = [grad for grad in map(_grad_of, parameters) if grad is not None]
        if not self.plain:
            found = list(map(written_memory, found))
        grads, before = list(map(weakref.ref, found)), self.grads
        if before and self.begins_anew is not False:
            if len(grads) == len(before) == self.count:
                self.begins_anew = not any(map(is_, grads, before))
            else:
                self.begins_anew = set(map(id, before)).isdisjoint(map(id, grads))
        self.grads, self.versions = grads, list(map(_version_of, found))
        for other in self.beside:
            # A nested step finds the same gradients as the outer one; else two optimizers alternate,
            # and each continues with what the other has left.
            known = dict(zip(map(id, other.grads), other.versions, strict=True))
            now = zip(map(id, grads), self.versions, strict=True)
            if any(known.get(key, version) != version for key, version in now):
                self.begins_anew = other.begins_anew = False

    def living(self) -> Iterator[tuple[torch.Tensor, int]]:
        """The live gradients, with their version counters."""
        found = ((one(), version) for one, version in zip(self.grads, self.versions, strict=True))
        return ((grad, version) for grad, version in found if grad is not None)


_grad_of = attrgetter("grad")

_version_of = attrgetter("_version")

STEPS: dict[int, LastStep] = {}

_installed: list[Any] = []


def watch_steps() -> None:
    """Record from now on what the steps of optimizers leave behind; for the life of the process.

    It runs in every step: about 1 microsecond, and 0.25 for each parameter.
    """
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_stepped))


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """Hook after each optimizer step."""
    if torch.compiler.is_compiling():
        return
    groups = optimizer.param_groups
    parameters = (
        groups[0]["params"] if len(groups) == 1 else [one for group in groups for one in group["params"]]
    )
    step = STEPS.get(id(optimizer))
    if step is None or step.count != len(parameters) or step.optimizer() is not optimizer:
        for number in [number for number, one in STEPS.items() if one.optimizer() in (None, optimizer)]:
            del STEPS[number]
        step = STEPS[id(optimizer)] = LastStep(optimizer, parameters)
    try:
        step.note(parameters)
    except Exception:  # gradients of a kind that cannot be followed are saved
        step.grads, step.versions, step.begins_anew = [], [], False


def unsaved_optimizers(
    names: Mapping[int, str], held: Iterable[Any], leaves: Iterable[Leaf], known: Container[Optimizer]
) -> Iterator[tuple[Optimizer, str]]:
    """Optimizers that stepped tensors of these names, are not `known`, and whose state is not saved.

    Yields each with one such name. An object of `held` saves its own state; with a `state_dict` also that of
    optimizers among its attributes, except modules and schedulers. So does any object with tensors of an
    optimizer's state among its leaves.
    """
    saved: set[int] = set()
    for one in held:
        saved.update((id(one), id(local_part(one)) if isinstance(one, Optimizer) else id(one)))
        if not isinstance(one, nn.Module | LRScheduler) and kind_of(one) is not Kind.OPTIMIZER:
            for value in getattr(one, "__dict__", {}).values():
                saved.update(map(id, value if isinstance(value, list | tuple) else [value]))
    for step in STEPS.values():
        optimizer = step.optimizer()
        name = next((names[one] for one in step.parameters if one in names), None)
        if optimizer is None or name is None or id(optimizer) in saved or optimizer in known:
            continue
        own = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        stored = (leaf.content for leaf in leaves if not isinstance(leaf.content, Value))
        if own and {*map(memory_place, own)}.isdisjoint(map(memory_place, stored)):
            yield optimizer, name


def is_left(grad: torch.Tensor, left: Mapping[int, int]) -> bool:
    """Whether a gradient is what a step left behind, not written since."""
    memory = written_memory(grad)
    known = left.get(id(memory))
    return known is not None and known == memory._version and not grad.requires_grad


def written_memory(grad: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counts writes: FSDP2 adds to the local part of a DTensor."""
    return memory_of_shard(grad) if is_sharded(grad) else grad


Names = Mapping[int, str]
REMEDY = "give the loop's window, ctx.steps(loader, accumulate=n), so that saves wait for its end"
INDICES, VALUES, UNSHARDED = ENDS = "@indices", "@values", "@unsharded"


# Leaves


def gradient_leaves(
    objects: Mapping[str, Any],
    names: Names,
    wanted: Callable[[str], bool] = lambda name: True,
    learning: Collection[str] = (),
) -> list[Leaf]:
    """The gradients that a later backward pass may add to; `names` are the leaf names of parameters.

    Only those of `wanted` parameters; in containers only of `learning` ones, which hold tensors with
    gradients. Kinds that cannot be stored are left out, with a warning.
    """
    listing = _Listing(
        {id(grad): version for step in STEPS.values() if step.begins_anew for grad, version in step.living()}
    )
    held = {blob: objects[blob] for blob in learning if kind_of(objects[blob]) is Kind.CONTAINER}
    parameters = learning_parameters(objects, names)
    for name, parameter in {**parameters, **learning_in_containers(held, parameters.values())}.items():
        grad = parameter.grad if wanted(name) else None
        if grad is not None and not is_left(grad, listing.left):
            listing.add(name, grad)
    for name, holder in held_back(objects, names).items():
        if wanted(name) and (grad := holder.pending()) is not None:
            listing.part(name, UNSHARDED, grad)
            listing.forms.setdefault("unsharded", []).append(name)
    _warn_of(objects, names, listing)
    if not listing.leaves and not listing.forms:
        return []
    index = Value(values.encode(listing.forms, GRADIENTS))
    return [Leaf(GRADIENTS, GRADIENTS, Role.GRADIENT, OPTIM_GROUP, index), *listing.leaves]


def parameter_of(leaf: str) -> str:
    """The leaf of the parameter whose gradient a leaf belongs to."""
    name = leaf.removeprefix(f"{GRADIENTS}.")
    return next((name.removesuffix(end) for end in ENDS if name.endswith(end)), name)


@dataclass
class _Listing:
    """Collects gradients as leaves; `forms` describes those that are not a single tensor.

    `left` is what steps left behind, by id, with version counters.
    """

    left: Mapping[int, int]
    leaves: list[Leaf] = field(default_factory=list)
    forms: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def part(self, name: str, end: str, content: torch.Tensor) -> None:
        """Add a part of a gradient."""
        leaf = f"{GRADIENTS}.{name}{end}"
        plain = content.detach()
        self.leaves.append(Leaf(leaf, GRADIENTS, Role.GRADIENT, OPTIM_GROUP, plain))

    def add(self, name: str, grad: torch.Tensor) -> None:
        """Add a gradient."""
        if is_sharded(grad):
            placements = [str(one) for one in grad.placements]  # type: ignore[attr-defined]
            if all(one.is_shard() for one in grad.placements):  # type: ignore[attr-defined]
                self.part(name, "", grad)
            else:  # replicas may differ before they are reduced: each has its own
                self.part(name, "", memory_of_shard(grad))
                self.forms.setdefault("local", {})[name] = placements
        elif grad.layout is torch.sparse_coo:
            plain = grad.detach()
            self.part(name, INDICES, plain._indices())
            self.part(name, VALUES, plain._values())
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
    """Whether all bits are zero, so that no bytes are needed."""
    flat = grad.detach().reshape(-1)
    if flat.numel() and bool(flat[:1].view(torch.uint8).any()):
        return False
    return not bool(flat.view(torch.uint8).any())


_warned: set[str] = set()


def _warn_of(objects: Mapping[str, Any], names: Names, listing: _Listing) -> None:
    """Warn of gradients that are not saved."""
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
    """Parameters without a name, whose gradients are not saved, each once with its owner."""
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
    """Whether a later backward pass may add to a gradient; `used` are those that steps used.

    False if it is zero, or was used and not written since. A used gradient that was written since counts only
    if the program accumulates across steps: a loss of another model, as in a GAN, adds to gradients that are
    cleared before the next step.
    """
    version, begins_anew = used.get(id(grad), (None, False))
    if version is not None and (begins_anew is not False or version == grad._version):
        return False
    try:
        return not _is_zero(grad)
    except (RuntimeError, TypeError):  # of a kind whose bytes cannot be read
        return True


# Parameters


def learning_parameters(objects: Mapping[str, Any], names: Names) -> dict[str, torch.Tensor]:
    """Tensors that may have a gradient, each once, by the name of its leaf."""
    found: dict[str, torch.Tensor] = {}
    for one in _tensors(objects):
        name = names.get(id(one))
        if name is not None:
            found[name] = one
    return found


def _tensors(objects: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """All parameters and registered tensors."""
    for value in objects.values():
        if isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_leaf:
                yield value
        elif isinstance(value, Optimizer):
            for group in value.param_groups:
                yield from group["params"]


def learning_in_containers(
    objects: Mapping[str, Any], others: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors in containers that may have a gradient, without the `others`."""
    known = set(map(id, others))
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for blob, value in objects.items():
        for name, one in container_tensors(blob, value) if kind_of(value) is Kind.CONTAINER else ():
            if one.requires_grad and one.is_leaf and id(one) not in known:
                found.setdefault(id(one), (name, one))
    return dict(found.values())


@dataclass(frozen=True)
class _HeldBack:
    """A parameter of FSDP2 with an unreduced gradient, whole and local to its rank."""

    param: Any

    def pending(self) -> torch.Tensor | None:
        """The unreduced gradient."""
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


def held_back(objects: Mapping[str, Any], names: Names) -> dict[str, _HeldBack]:
    """The parameters of FSDP2 in modules, by the names of their leaves."""
    modules = [value for value in objects.values() if isinstance(value, nn.Module)]
    params = [one for module in modules for group in _fsdp_groups(module) for one in group.fsdp_params]
    found = {names.get(id(one.sharded_param)): _HeldBack(one) for one in params}
    return {name: one for name, one in found.items() if name is not None}


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """The parameter groups of FSDP2; torch has no public API for unreduced gradients."""
    found: list[Any] = []
    for part in parts_of(module):
        if (state := getattr(part, "_get_fsdp_state", None)) is not None:
            found += getattr(state(), "_fsdp_param_groups", None) or [state()._fsdp_param_group]
    return [one for one in found if one is not None]
