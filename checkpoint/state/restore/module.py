"""Leaves back into a module: in place, and through `load_state_dict` where the module asks for it.

Some tensors are made by the load, because there is no memory to read into: what lies on the meta device,
and buffers that the module had not made yet, or of another shape, when it was built. The module gets them
once everything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.checkpoint.state.leaf import LeafSpec, Role, order_of
from torchrelay.checkpoint.state.leaves.module import ModuleEntry, named_parameters, parts_of
from torchrelay.checkpoint.state.leaves.optimizer import orphans
from torchrelay.checkpoint.state.leaves.tree import container_tensors
from torchrelay.checkpoint.state.names import Part
from torchrelay.checkpoint.state.reads import dtype_name, empty, form, outside_inference_mode, take_memory_of
from torchrelay.checkpoint.state.restore.hooks import draft_with_hooks, has_load_code
from torchrelay.checkpoint.state.restore.plan import Draft


def draft_module(draft: Draft, blob: str, module: nn.Module) -> None:
    """Plan to load a module.

    `load_state_dict` is called only where there is something that reading in place does not do: extra
    state, entries that a hook computed, load hooks and overridden load methods. It is given the
    module's own tensors for all that was read in place, and copies nothing then. FSDP2 (`fully_shard`)
    has hooks that look at no entry: they are called by themselves, for to "copy" a DTensor onto itself
    takes torch a millisecond, and the first time on a mesh fifty. Where stored names or shapes are others,
    load hooks are asked first what they make of them.
    """
    state = draft.states.of(module)
    computed: dict[str, Callable[[], Any]] = {}
    made = _Made(module, draft.states.parts(module))
    entries = draft.states.entries(blob, module)
    load_code = has_load_code(parts_of(module))
    if load_code and _differs(draft, blob, made, entries) and draft_with_hooks(draft, blob, module, entries):
        return
    absent: list[ModuleEntry] = []
    for entry in entries:
        if (spec := draft.find(entry.name)) is None:
            absent.append(entry)
            continue
        if entry.role is not None:
            live = made.in_place_of(entry, spec)
            if live is not entry.value and live.shape != entry.value.shape:
                draft.reshaped.append(f"{spec.name} is {form(entry.value)} here, {spec} in the checkpoint")
            draft.into(blob, spec, live)
        elif spec.kind == "value":
            tree = draft.tree(spec)
            computed[entry.key] = lambda tree=tree: tree(None)  # type: ignore[misc]
        else:
            computed[entry.key] = draft.fresh(spec).memory
    _note_differences(draft, blob, made, entries, absent)
    if made:
        draft.steps.append((blob, made.install))
    if computed or load_code:
        draft.steps.append((blob, lambda: _load(module, None if made else state, computed)))
    else:
        draft.steps.append((blob, lambda: _tell_fsdp(module)))


def _differs(draft: Draft, blob: str, made: _Made, entries: list[ModuleEntry]) -> bool:
    """Whether what is stored has other names or shapes than a module, buffers that can be made aside."""
    found = {entry.name: draft.known(entry.name) for entry in entries}
    if any(spec is None and name not in draft.kept for name, spec in found.items()):
        return True
    for entry in entries:
        spec = found[entry.name] if entry.role is Role.PARAMETER else None
        if spec is not None and spec.kind == "tensor" and spec.shape != tuple(entry.value.shape):
            return True
    known = {spec.name for spec in found.values() if spec is not None}
    inner = tuple(f"{spec.name}." for spec in draft.stored(blob) if spec.kind == "value")
    return any(
        spec.name not in known
        and not (inner and spec.name.startswith(inner))
        and made.owner_of(spec, *_split(spec.name[len(blob) + 1 :])) is None
        for spec in draft.stored(blob)
    )


def _split(name: str) -> tuple[str, str]:
    path, _, last = name.rpartition(".")
    return path, last


def _note_differences(
    draft: Draft, blob: str, made: _Made, entries: list[ModuleEntry], absent: list[ModuleEntry]
) -> None:
    """Say what only one side has; `absent` are the entries that are not stored."""
    for entry in absent:
        draft.lacks(entry.name, made.stands_for(entry.value) if entry.role else None)
    for spec in draft.rest(blob):
        path, name = _split(spec.name[len(blob) + 1 :])
        if (owner := made.owner_of(spec, path, name)) is not None:
            draft.take(spec.name)
            plan = partial(_add_buffer, draft, spec, owner, name, made.device())
            draft.late[spec.name] = plan, name in owner._buffers
    draft.note_rest(blob)
    for name in made.still_empty(entries):
        draft.findings.refused.append(
            f"{blob}.{name} is on the meta device and no checkpoint has it (persistent=False): give it its "
            "values first"
        )


class _Made:
    """Tensors that a load makes for a module, and puts into it when their content is read.

    They are parameters where those on the meta device were, and tied where those were tied. They lie where
    the module's other tensors lie, on the CPU if there is no other.
    """

    def __init__(self, module: nn.Module, parts: Sequence[Part]) -> None:
        self._module = module
        self._named = parts
        self._instead: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._parts: dict[str, nn.Module] | None = None

    def __bool__(self) -> bool:
        return bool(self._instead)

    def in_place_of(self, entry: ModuleEntry, spec: LeafSpec) -> torch.Tensor:
        """The tensor to read into for an own tensor of the module: that one, if it can be."""
        live: torch.Tensor = entry.value
        if type(live) not in (torch.Tensor, nn.Parameter) or spec.kind != "tensor":
            return live
        reshaped = (
            entry.role is Role.BUFFER
            and spec.dtype == dtype_name(live.dtype)
            and spec.sharding is None
            and spec.shape != live.shape
        )
        if not live.is_meta and not reshaped:
            return live
        if id(live) not in self._instead:
            device = self.device() if live.is_meta else live.device
            if reshaped:
                fresh = empty(spec, device)
            else:
                with outside_inference_mode():
                    fresh = torch.empty_like(live.detach(), device=device)
            self._instead[id(live)] = (live, fresh)
        return self._instead[id(live)][1]

    def owner_of(self, spec: LeafSpec, path: str, name: str) -> nn.Module | None:
        """The part that a stored buffer can be made for: it has this name as None, or has it not at all."""
        if spec.role is not Role.BUFFER or spec.kind != "tensor" or spec.sharding is not None:
            return None
        if self._parts is None:
            # A wrapper and what it wraps have one name; the inner one comes later and is meant.
            self._parts = {path.removesuffix("."): part for path, _, part in self._named}
        owner = self._parts.get(path)
        if owner is None or (
            owner._buffers[name] is not None if name in owner._buffers else hasattr(owner, name)
        ):
            return None
        return owner

    def still_empty(self, entries: list[ModuleEntry]) -> list[str]:
        """The names of tensors on the meta device that are in no state dict."""
        listed = {id(entry.value) for entry in entries}
        return [
            f"{path}{name}"
            for path, _, part in (self._named if self._instead else ())
            for name, one in (*part._parameters.items(), *part._buffers.items())
            if one is not None and one.is_meta and id(one) not in listed
        ]

    def stands_for(self, live: torch.Tensor) -> torch.Tensor:
        """What is read instead of a tensor of the module; that tensor itself where nothing else is."""
        return self._instead[id(live)][1] if id(live) in self._instead else live

    def install(self) -> None:
        """Put all of them into the module."""
        for part in parts_of(self._module):
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for own in tables:
                for name, live in own.items():
                    if live is not None and live.is_meta and id(live) in self._instead:
                        own[name] = self._alike(live)
        for live, fresh in self._instead.values():
            if not live.is_meta:
                take_memory_of(fresh, live)

    def _alike(self, live: torch.Tensor) -> torch.Tensor:
        fresh = self._instead[id(live)][1]
        if isinstance(live, nn.Parameter) and not isinstance(fresh, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=live.requires_grad)
            fresh.__dict__.update(live.__dict__)
            self._instead[id(live)] = (live, fresh)
        return fresh

    def device(self) -> torch.device:
        """Where the module's other tensors lie."""
        for part in parts_of(self._module):
            for one in (*part._parameters.values(), *part._buffers.values()):
                if one is not None and not one.is_meta:
                    return one.device
        return torch.device("cpu")


def _add_buffer(draft: Draft, spec: LeafSpec, owner: nn.Module, name: str, device: torch.device) -> None:
    """Plan to read a leaf into a new buffer of a module; it is the one that the leaf is an alias of."""
    if (buffer := draft.live(spec)) is None:
        buffer = empty(spec, device)
        draft.into(spec.blob, spec, buffer)
    draft.steps.append((spec.blob, lambda: owner.register_buffer(name, buffer)))


def restore_requires_grad(objects: Mapping[str, Any], specs: Mapping[str, LeafSpec]) -> list[str]:
    """Make parameters and registered tensors learn, or not, as when they were saved; gives their names.

    For a run that is resumed. A load into another model leaves this to the program.
    """
    changed: list[str] = []
    for blob, value in objects.items():
        for name, tensor in _with_gradients(blob, value):
            spec = specs.get(name)
            if spec is None or spec.frozen is None or tensor.requires_grad != spec.frozen:
                continue
            if spec.frozen or tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_(not spec.frozen)
                changed.append(name)
    return changed


def stay_as_built(objects: Mapping[str, Any], specs: dict[str, LeafSpec]) -> list[str]:
    """With a process group, let what learns lie as it does where the training had laid it otherwise; names.

    Once it is made, DistributedDataParallel mixes up the elements of parameters that are laid otherwise
    (torch 2.13), and nothing tells which ones it has.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    changed = {name for name, spec in specs.items() if spec.order_changed}
    turned = [
        name
        for blob, value in (objects.items() if changed else ())
        for name, one in (
            orphans(blob, value) if kind_of(value) is Kind.OPTIMIZER else _with_gradients(blob, value)
        )
        if name in changed and one.requires_grad and order_of(one) != specs[name].order
    ]
    specs.update((name, replace(specs[name], order_changed=False)) for name in turned)
    return turned


def _with_gradients(blob: str, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors that a program may train, by the names of their leaves."""
    if isinstance(value, nn.Module):
        return named_parameters(blob, value)
    found = [(blob, value)] if isinstance(value, torch.Tensor) else []
    if kind_of(value) is Kind.CONTAINER:
        found = list(container_tensors(blob, value))
    return [(name, one) for name, one in found if one.is_leaf]


def _load(module: nn.Module, listed: dict[str, Any] | None, computed: dict[str, Callable[[], Any]]) -> None:
    state = module.state_dict(keep_vars=True) if listed is None else listed
    for key, build in computed.items():
        state[key] = build()
    module.load_state_dict(state)


def _tell_fsdp(module: nn.Module) -> None:
    """Let FSDP2 look at its shards again; the hooks before loads were called when the state was listed."""
    for part in parts_of(module):
        for hook in list(part._load_state_dict_post_hooks.values()):
            hook(part, None)
