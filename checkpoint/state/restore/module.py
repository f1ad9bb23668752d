"""Load leaves back into a module: in place, and through its load hooks if it has some.

Load hooks, and overrides of `load_state_dict` or `_load_from_state_dict`, may accept an older form of the
module: they rename, drop or compute entries. If stored names or shapes differ from the module's, its own code
is therefore rehearsed once with tensors without content. The copies it makes show which tensors to read in
place, and which entries to pass to the hooks later.

The load makes tensors on the meta device, and buffers that the module has not created yet or has in another
shape. The module gets them once everything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchrelay.checkpoint.format.dtypes import by_name, torch_dtype
from torchrelay.checkpoint.format.value_decoding import decode, references
from torchrelay.checkpoint.state.leaf import LeafSpec, Role, is_sharded
from torchrelay.checkpoint.state.module_leaves import ModuleEntry, parts_of
from torchrelay.checkpoint.state.names import Part
from torchrelay.checkpoint.state.restore.plan import LeafValue, RestorePlan
from torchrelay.checkpoint.state.tensor_memory import (
    dtype_name,
    empty,
    form,
    outside_inference_mode,
    take_memory_of,
)
from torchrelay.records import dataclass

_QUIET = (
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed.algorithms._checkpoint.",
    "torchrelay.checkpoint.state.steps",
)
"""Modules of hooks that look at no entry, or only add the prefix of a wrapper."""
_LIVE = (_QUIET[0], _QUIET[2])
"""Modules of hooks that look at the module's own tensors, or wait for others."""
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def has_load_code(parts: Sequence[nn.Module]) -> bool:
    """Whether `load_state_dict` does more than copying tensors for a module of these parts."""
    kinds: set[Any] = set(map(type, parts))
    base = nn.Module.load_state_dict, nn.Module._load_from_state_dict
    for kind in kinds:
        own = (kind.load_state_dict, kind._load_from_state_dict) != base
        if own and not kind.__module__.startswith("torch."):  # those of torch only convert old formats
            return True
    hooks = (hook for part in parts for name in _HOOKS for hook in getattr(part, name).values())
    return not all(_home(hook).startswith(_QUIET) for hook in hooks)


def draft_with_hooks(
    draft: RestorePlan, blob: str, module: nn.Module, entries: Sequence[ModuleEntry]
) -> bool:
    """Plan to load a module whose hooks know the stored form; False, with nothing noted, if they do not."""
    parts = draft.states.parts(module)
    live = {id(entry.value): entry for entry in reversed(entries) if entry.role is not None}
    if any(one.value.is_meta or nn.parameter.is_lazy(one.value) for one in live.values()):
        return False
    stored = _stored(draft, blob, parts, entries)
    given = {key: _without_content(draft, spec) for key, spec in stored.items()}
    twins = {id(entry.value): _twin(entry.value) for entry in live.values()}
    kept = {one.key: twins.get(id(one.value)) for one in entries if one.name in draft.kept}
    found = _rehearsed(module, [part for _, _, part in parts], {**kept, **given}, twins)
    if found is None:
        return False
    specs = {id(given[key]): spec for key, spec in stored.items()}
    of_twin = {id(twin): live[number] for number, twin in twins.items()}
    direct = [
        (spec, of_twin[id(to)])
        for to, source in found.copies
        if (spec := specs.get(id(source))) is not None and id(to) in of_twin
    ]
    filled = {id(of_twin[id(to)].value) for to, _ in found.copies if id(to) in of_twin}
    computed = bool(filled - {id(entry.value) for _, entry in direct})
    if computed and any(is_sharded(entry.value) for entry in live.values()):
        draft.unlike(f"{blob}: its load hooks compute entries, which cannot be done with sharded tensors")
    for error in found.errors:
        draft.unlike(f"{blob}: {error}")
    for entry in entries:
        there = id(entry.value) in filled
        if entry.role is None:
            there = entry.key in given or any(key.endswith(entry.key) for key in found.extra)
        if found.missing and not there:
            draft.lacks(entry.name)
    unexpected = [stored[key].name if key in stored else f"{blob}.{key}" for key in found.unexpected]
    draft.findings.unexpected += unexpected
    values: dict[str, Any] = {one.key: partial(_itself, one.value) for one in entries if one.key in kept}
    places = {spec.name: entry.value for spec, entry in direct}
    for spec, entry in direct:
        draft.renamed(entry.value, spec.name)
        draft.into(blob, spec, entry.value)
    for key, spec in stored.items():
        draft.find(spec.name)
        if spec.name in places:
            values[key] = partial(_itself, places[spec.name])
        elif spec.kind == "value":
            values[key] = partial(LeafValue(draft, spec), None)
        elif spec.name not in unexpected:
            values[key] = draft.fresh(spec).memory
    strict = not (found.missing or unexpected)
    draft.steps.append((blob, lambda: _load(module, {}, values, strict=strict)))
    return True


def _load(
    module: nn.Module,
    state: dict[str, Any],
    computed: Mapping[str, Callable[[], Any]],
    *,
    strict: bool = True,
) -> None:
    state.update((key, build()) for key, build in computed.items())
    module.load_state_dict(state, **({} if strict else {"strict": False}))  # an override may have no `strict`


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _stored(
    draft: RestorePlan, blob: str, parts: Sequence[Part], entries: Sequence[ModuleEntry]
) -> dict[str, LeafSpec]:
    """The stored leaves of a module by their current state dict keys."""
    found = {one.key: spec for one in entries if (spec := draft.known(one.name)) is not None}
    known = {spec.name for spec in found.values()}
    all_specs = draft.stored(blob)
    trees = [spec for spec in all_specs if spec.kind == "value"]
    inside = {str(name) for spec in trees for name in references(draft.json(spec))}
    below = tuple(f"{spec.name}." for spec in trees if spec.role is Role.SUBCLASS)
    keys = {path: key for path, key, _ in parts}
    for spec in all_specs:
        if spec.name in known or spec.name in inside or (below and spec.name.startswith(below)):
            continue
        name = spec.name[len(blob) + 1 :]
        path = name
        while path and (path := path[: path.rfind(".") + 1]) not in keys:  # the module above
            path = path.removesuffix(".")
        found[f"{keys[path]}{name[len(path) :]}"] = spec
    return found


def _without_content(draft: RestorePlan, spec: LeafSpec) -> Any:
    """A tensor without content for a stored leaf."""
    if spec.kind == "value" and spec.role is not Role.SUBCLASS:
        return decode(draft.json(spec), tensor=lambda name: torch.empty(0, device="meta"))
    if spec.role is Role.SUBCLASS:
        described: Any = draft.json(spec)
        dtype = getattr(torch, described["dtype"])
        return torch.empty(described["shape"], dtype=dtype, device="meta")
    return torch.empty(spec.shape, dtype=torch_dtype(by_name(spec.dtype or "")), device="meta")


def _twin(live: torch.Tensor) -> torch.Tensor:
    """A tensor without content like a live one."""
    twin = torch.empty(live.shape, dtype=live.dtype, device="meta")
    return nn.Parameter(twin, requires_grad=live.requires_grad) if isinstance(live, nn.Parameter) else twin


@dataclass
class _Rehearsal:
    """Result of `load_state_dict`: the copies that it made, and its errors."""

    copies: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class _Copies(TorchFunctionMode):
    def __init__(self, found: _Rehearsal) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            self._found.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _rehearsed(
    module: nn.Module, parts: Sequence[nn.Module], state: dict[str, Any], twins: Mapping[int, torch.Tensor]
) -> _Rehearsal | None:
    """Run `load_state_dict` with tensors that have no content; None if its code needs the content."""
    found = _Rehearsal()

    def ended(_: nn.Module, keys: Any) -> None:
        found.missing, found.unexpected = list(keys.missing_keys), list(keys.unexpected_keys)
        keys.missing_keys.clear()
        keys.unexpected_keys.clear()

    with _no_content(parts, twins, found), _Copies(found):
        handle = module.register_load_state_dict_post_hook(ended)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            if not lines or "meta" in str(error):
                return None
            found.errors = lines
        except Exception:
            return None
        finally:
            handle.remove()
    return found


@contextmanager
def _no_content(
    parts: Sequence[nn.Module], twins: Mapping[int, torch.Tensor], found: _Rehearsal
) -> Iterator[None]:
    """Give the modules tensors without content, and disable hooks and methods with other effects."""
    names = ("_parameters", "_buffers", *_HOOKS)
    before = [(part, {name: part.__dict__[name] for name in names}) for part in dict.fromkeys(parts)]
    made: dict[int, torch.Tensor] = dict(twins)

    def twin(one: torch.Tensor | None) -> torch.Tensor | None:
        return None if one is None else made.setdefault(id(one), _twin(one))

    try:
        for part, own in before:
            for name in ("_parameters", "_buffers"):
                part.__dict__[name] = {key: twin(one) for key, one in own[name].items()}
            for name in _HOOKS:
                hooks = {key: hook for key, hook in own[name].items() if not _home(hook).startswith(_LIVE)}
                part.__dict__[name] = type(own[name])(hooks)
            if type(part).set_extra_state is not nn.Module.set_extra_state:
                part.__dict__["set_extra_state"] = lambda state: found.extra.append("_extra_state")
        yield
    finally:
        for part, own in before:
            part.__dict__.update(own)
            part.__dict__.pop("set_extra_state", None)


def _home(hook: object) -> str:
    return str(getattr(hook, "__module__", None))


def draft_module(draft: RestorePlan, blob: str, module: nn.Module) -> None:
    """Plan to load a module.

    `load_state_dict` is called only if reading in place is not enough: for extra state, entries that a hook
    computed, load hooks and overridden load methods. Its arguments are the module's own tensors, filled
    already. FSDP2 (`fully_shard`) has hooks that look at no entry; they are called separately, because
    "copying" a DTensor onto itself is slow (1 ms, and 50 ms the first time on a mesh). If stored names or
    shapes differ, load hooks are rehearsed first.
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
            tree = LeafValue(draft, spec)
            computed[entry.key] = lambda tree=tree: tree(None)  # type: ignore[misc]
        else:
            computed[entry.key] = draft.fresh(spec).memory
    _note_differences(draft, blob, made, entries, absent)
    if made:
        draft.steps.append((blob, made.install))
    if computed or load_code:
        draft.steps.append(
            (blob, lambda: _load(module, module.state_dict(keep_vars=True) if made else state, computed))
        )
    else:
        draft.steps.append((blob, partial(_notify_fsdp, module)))


def _differs(draft: RestorePlan, blob: str, made: _Made, entries: list[ModuleEntry]) -> bool:
    """Whether stored names or shapes differ from a module's, apart from buffers that can be made."""
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
        spec.name not in known and not (inner and spec.name.startswith(inner)) and made.owner_of(spec) is None
        for spec in draft.stored(blob)
    )


def _note_differences(
    draft: RestorePlan, blob: str, made: _Made, entries: list[ModuleEntry], absent: list[ModuleEntry]
) -> None:
    """Note leaves that only one side has; `absent` are the entries that are not stored."""
    for entry in absent:
        _, live = made.instead.get(id(entry.value), (None, entry.value))
        draft.lacks(entry.name, live if entry.role else None)
    for spec in draft.rest(blob):
        if (owner := made.owner_of(spec)) is not None:
            draft.take(spec.name)
            name = spec.name.rpartition(".")[2]
            plan = partial(_add_buffer, draft, spec, owner, name, made.device())
            draft.late[spec.name] = plan, name in owner._buffers
    draft.note_rest(blob)
    listed = {id(entry.value) for entry in entries}
    draft.findings.refused += (
        f"{blob}.{path}{name} is on the meta device and in no checkpoint (persistent=False): initialise it "
        "first"
        for path, _, part in (made.parts if made else ())
        for name, one in (*part._parameters.items(), *part._buffers.items())
        if one is not None and one.is_meta and id(one) not in listed
    )


class _Made:
    """Tensors that a load makes for a module, and installs when their content is read.

    They are parameters, or tied, as those on the meta device were. They are on the device of the module's
    other tensors, or the CPU.
    """

    def __init__(self, module: nn.Module, parts: Sequence[Part]) -> None:
        self._module = module
        self.parts = parts
        self.instead: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The tensors that are made, by the identities of those that they replace."""

    def __bool__(self) -> bool:
        return bool(self.instead)

    def in_place_of(self, entry: ModuleEntry, spec: LeafSpec) -> torch.Tensor:
        """The tensor to read into for an own tensor of the module: that one, if possible."""
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
        if id(live) not in self.instead:
            device = self.device() if live.is_meta else live.device
            if reshaped:
                fresh = empty(spec, device)
            else:
                with outside_inference_mode():
                    fresh = torch.empty_like(live.detach(), device=device)
            self.instead[id(live)] = (live, fresh)
        return self.instead[id(live)][1]

    @cached_property
    def _by_path(self) -> dict[str, nn.Module]:
        # A wrapper and its child have one name; the child comes later and is used.
        return {path.removesuffix("."): part for path, _, part in self.parts}

    def owner_of(self, spec: LeafSpec) -> nn.Module | None:
        """The part that a stored buffer can be made for: it has this name as None, or lacks it."""
        if spec.role is not Role.BUFFER or spec.kind != "tensor" or spec.sharding is not None:
            return None
        path, _, name = spec.name[len(spec.blob) + 1 :].rpartition(".")
        owner = self._by_path.get(path)
        if owner is None or (
            owner._buffers[name] is not None if name in owner._buffers else hasattr(owner, name)
        ):
            return None
        return owner

    def install(self) -> None:
        for part in parts_of(self._module):
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for own in tables:
                for name, live in own.items():
                    if live is not None and live.is_meta and id(live) in self.instead:
                        own[name] = self._alike(live)
        for live, fresh in self.instead.values():
            if not live.is_meta:
                take_memory_of(fresh, live)

    def _alike(self, live: torch.Tensor) -> torch.Tensor:
        fresh = self.instead[id(live)][1]
        if isinstance(live, nn.Parameter) and not isinstance(fresh, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=live.requires_grad)
            fresh.__dict__.update(live.__dict__)
            self.instead[id(live)] = (live, fresh)
        return fresh

    def device(self) -> torch.device:
        for part in parts_of(self._module):
            for one in (*part._parameters.values(), *part._buffers.values()):
                if one is not None and not one.is_meta:
                    return one.device
        return torch.device("cpu")


def _add_buffer(
    draft: RestorePlan, spec: LeafSpec, owner: nn.Module, name: str, device: torch.device
) -> None:
    """Plan to read a leaf into a new buffer of a module; shared with the leaf that it is an alias of."""
    if (buffer := draft.live(spec)) is None:
        buffer = empty(spec, device)
        draft.into(spec.blob, spec, buffer)
    draft.steps.append((spec.blob, lambda: owner.register_buffer(name, buffer)))


def _notify_fsdp(module: nn.Module) -> None:
    """Notify FSDP2 of its new shards; the hooks before loads were called when the state was listed."""
    for part in parts_of(module):
        for hook in list(part._load_state_dict_post_hooks.values()):
            hook(part, None)
