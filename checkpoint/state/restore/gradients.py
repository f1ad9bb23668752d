"""List gradients of an open accumulation window as leaves, and restore loaded ones after everything else.

A gradient must be saved if the program may add to it later. It is not saved only if both are true:

- The last step of an optimizer left it behind: the same memory, not written since.
- The program was seen to clear gradients after a step: none was the same at two steps in a row.

So a loop that calls `zero_grad`, before or after a window, saves none between its windows. A loop that never
calls it saves all.

    @grad                          a value, if any: gradients that are zero, sparse, or a rank's own part
    @grad.<parameter's leaf>       a gradient
    @grad.<leaf>@<part>            a part of a sparse one, or the unreduced gradient of FSDP2
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.dtypes import is_storable
from torchrelay.checkpoint.state.flatten import parameter_names
from torchrelay.checkpoint.state.leaf import (
    GRADIENT_PARTS,
    INDICES,
    OPTIM_GROUP,
    UNSHARDED,
    VALUES,
    Leaf,
    LeafSpec,
    Role,
    Value,
    is_sharded,
    memory_of_shard,
)
from torchrelay.checkpoint.state.module_leaves import FsdpState, parts_of
from torchrelay.checkpoint.state.names import Kind, kind_of
from torchrelay.checkpoint.state.restore.plan import RestorePlan
from torchrelay.checkpoint.state.steps import STEPS, is_left, written_memory
from torchrelay.checkpoint.state.tensor_memory import Read
from torchrelay.checkpoint.state.tree_leaves import container_tensors
from torchrelay.errors import DamagedError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.jobs.session import warn
from torchrelay.records import Json, dataclass

Names = Mapping[int, str]
REMEDY = "give the loop's window, ctx.steps(loader, accumulate=n), so that saves wait for its end"


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
    for name, param in held_back(objects, names).items():
        if wanted(name) and (grad := _unreduced(param)) is not None:
            listing.part(name, UNSHARDED, grad)
            listing.forms.setdefault("unsharded", []).append(name)
    _warn_of(objects, names, listing)
    if not listing.leaves and not listing.forms:
        return []
    index = Value(values.encode(listing.forms, GRADIENTS))
    return [Leaf(GRADIENTS, GRADIENTS, Role.GRADIENT, OPTIM_GROUP, index), *listing.leaves]


@dataclass
class _Listing:
    """Leaves of gradients, and `forms` of other kinds; `left` is what steps left, with versions."""

    left: Mapping[int, int]
    leaves: list[Leaf] = field(default_factory=list)
    forms: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def part(self, name: str, end: str, content: torch.Tensor) -> None:
        leaf = f"{GRADIENTS}.{name}{end}"
        self.leaves.append(Leaf(leaf, GRADIENTS, Role.GRADIENT, OPTIM_GROUP, content.detach()))

    def add(self, name: str, grad: torch.Tensor) -> None:
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
    without_name = [
        (f"{blob} (FSDP1)", one)
        for blob, value in objects.items()
        if isinstance(value, FsdpState)
        for one in value.module.parameters()
    ]
    for step in list(STEPS.values()):
        optimizer = step.optimizer()
        if optimizer is not None and not step.parameters <= names.keys():
            what = f"parameters of {type(optimizer).__name__} that no blob has by name"
            without_name += [(what, one) for group in optimizer.param_groups for one in group["params"]]
    owners = {id(one): (what, one) for what, one in reversed(without_name) if id(one) not in names}
    unnamed = [
        (what, one.grad) for what, one in owners.values() if what not in _warned and one.grad is not None
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


def learning_parameters(objects: Mapping[str, Any], names: Names) -> dict[str, torch.Tensor]:
    """Tensors that may have a gradient, each once, by the name of its leaf."""
    found: dict[str, torch.Tensor] = {}
    for value in objects.values():
        own: Iterable[torch.Tensor] = ()
        if isinstance(value, nn.Module):
            own = value.parameters()
        elif isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
            own = [value]
        elif isinstance(value, Optimizer):
            own = (one for group in value.param_groups for one in group["params"])
        found.update((names[id(one)], one) for one in own if id(one) in names)
    return found


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


def _unreduced(param: Any) -> torch.Tensor | None:
    """The unreduced gradient of a parameter of FSDP2, whole and local to its rank."""
    held: torch.Tensor | None = getattr(param, "unsharded_accumulated_grad", None)
    if held is None:
        held = getattr(getattr(param, "_unsharded_param", None), "grad", None)
    return held


def held_back(objects: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """The parameters of FSDP2 in modules, by the names of their leaves."""
    modules = [value for value in objects.values() if isinstance(value, nn.Module)]
    params = [one for module in modules for group in _fsdp_groups(module) for one in group.fsdp_params]
    return {names[id(one.sharded_param)]: one for one in params if id(one.sharded_param) in names}


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """The parameter groups of FSDP2; torch has no public API for unreduced gradients."""
    found: list[Any] = []
    for part in parts_of(module):
        if (state := getattr(part, "_get_fsdp_state", None)) is not None:
            found += getattr(state(), "_fsdp_param_groups", None) or [state()._fsdp_param_group]
    return [one for one in found if one is not None]


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

    @property
    def any(self) -> bool:
        """Whether a window was open."""
        return bool(self._made or self._pending)

    def _draft(self, draft: RestorePlan, specs: Mapping[str, LeafSpec], forms: Any) -> None:

        def memory(leaf: str) -> Callable[[], torch.Tensor]:
            return draft.fresh(specs[f"{GRADIENTS}.{leaf}"]).memory

        here = self._parameters
        self._made.update(dict.fromkeys(forms.get("zeros", ()), torch.zeros_like))
        for name in filter(self._held_back.__contains__, forms.get("unsharded", ())):
            self._pending[name] = memory(name + UNSHARDED)
        for name, form in forms.get("sparse", {}).items():
            if name in here:
                self._made[name] = partial(
                    _sparse,
                    memory(name + INDICES),
                    memory(name + VALUES),
                    tuple(form["shape"]),
                    bool(form["coalesced"]),
                )
        for name, placements in forms.get("local", {}).items():
            if name in here:
                self._made[name] = partial(_local, memory(name), placements)
        for leaf, spec in specs.items():
            name = leaf.removeprefix(f"{GRADIENTS}.")
            if leaf == GRADIENTS or name in self._made or name.endswith(GRADIENT_PARTS):
                continue
            if name in here:
                self._made[name] = partial(_dense, draft.alike(spec, here[name]))
            elif spec.sharding is None and name not in forms.get("local", ()):
                self._made[name] = partial(_dense, draft.fresh(spec).on)  # of a tensor that the load may make

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
            for name, param in self._held_back.items():
                if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
                    unsharded.grad = None
                device = memory_of_shard(param.sharded_param).device
                param.unsharded_accumulated_grad = pending[name]().to(device) if name in pending else None


def _dense(maker: Callable[[torch.device | None], torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    found = maker(parameter.device)
    if is_sharded(found):
        return found
    # The layout of backward, which decides the order of summation in a norm.
    usual = torch.empty_like(parameter, dtype=found.dtype)
    return found if usual.stride() == found.stride() else usual.copy_(found)


def _sparse(
    indices: Callable[[], torch.Tensor],
    content: Callable[[], torch.Tensor],
    shape: tuple[int, ...],
    coalesced: bool,
    parameter: torch.Tensor,
) -> torch.Tensor:
    parts = indices().to(parameter.device), content().to(parameter.device)
    return torch.sparse_coo_tensor(*parts, shape, is_coalesced=coalesced, check_invariants=True)


def _local(content: Callable[[], torch.Tensor], placements: list[str], parameter: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    known: dict[str, Any] = {"R": Replicate()}
    known.update((f"S({dim})", Shard(dim)) for dim in range(parameter.dim()))
    known.update((f"P({how})", Partial(how)) for how in ("sum", "avg", "min", "max", "product"))
    whole = torch.empty(parameter.shape, device="meta")
    return DTensor.from_local(
        content().to(memory_of_shard(parameter).device),
        parameter.device_mesh,
        [known[one] for one in placements],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _put(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set a gradient; a view into a buffer of the program is written in place instead."""
    live = parameter.grad
    if live is None or not live._is_view():
        parameter.grad = grad
    elif grad is None:
        live.zero_()
    else:
        live.copy_(grad)
