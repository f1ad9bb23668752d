"""Leaves back into a module: in place, and through `load_state_dict` where the module asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchrelay.checkpoint.state.module_leaves import module_entries, parts_of
from torchrelay.checkpoint.state.restoring import Draft

_FSDP = "torch.distributed.fsdp._fully_shard."
"""Where FSDP2's hooks are from: one before `state_dict` and loads that reshards, one after loads."""


def draft_module(draft: Draft, blob: str, module: nn.Module) -> None:
    """Plan to load a module.

    `load_state_dict` is called only where there is something that reading in place does not do: extra
    state, entries that a hook computed, load hooks and overridden load methods. It is given the
    module's own tensors for all that was read in place, and copies nothing then. FSDP2 (`fully_shard`)
    has hooks that look at no entry: they are called by themselves, for to "copy" a DTensor onto itself
    takes torch a millisecond, and the first time on a mesh fifty.
    """
    state = module.state_dict(keep_vars=True)
    computed: dict[str, Callable[[], Any]] = {}
    for entry in module_entries(blob, module, state):
        if (spec := draft.take(entry.name)) is None:
            continue
        if entry.role is not None:
            draft.into(blob, spec, entry.value)
        elif spec.kind == "value":
            tree = draft.tree(spec)
            computed[entry.key] = lambda tree=tree: tree(None)  # type: ignore[misc]
        else:
            computed[entry.key] = draft.fresh(spec).memory
    draft.note_rest(blob)
    if computed or has_load_code(module):
        draft.steps.append((blob, lambda: _load(module, state, computed)))
    else:
        draft.steps.append((blob, lambda: _tell_fsdp(module)))


def _load(module: nn.Module, state: dict[str, Any], computed: dict[str, Callable[[], Any]]) -> None:
    for key, build in computed.items():
        state[key] = build()
    module.load_state_dict(state)


def _tell_fsdp(module: nn.Module) -> None:
    """Let FSDP2 look at its shards again; the hooks before loads were called when the state was listed."""
    for part in parts_of(module):
        for hook in list(part._load_state_dict_post_hooks.values()):
            hook(part, None)


def has_load_code(module: nn.Module) -> bool:
    """Whether `load_state_dict` does more for a module than to copy tensors and to tell FSDP2."""
    return any(_hooked(part) or _overrides(type(part)) for part in parts_of(module))


def _hooked(module: nn.Module) -> bool:
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return not all(str(getattr(hook, "__module__", None)).startswith(_FSDP) for hook in hooks)


def _overrides(kind: type[nn.Module]) -> bool:
    own = (
        kind.load_state_dict is not nn.Module.load_state_dict,
        kind._load_from_state_dict is not nn.Module._load_from_state_dict,
    )
    # torch's own overrides only convert old formats of their layers.
    return any(own) and not kind.__module__.startswith("torch.")
