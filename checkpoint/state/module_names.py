"""The one source of names: what the parameters and buffers of a module are called, whatever wraps what.

Names come from one walk over the tree of modules. The children that torch's wrappers insert are left out of
it: `module` of DistributedDataParallel and DataParallel, `_orig_mod` of torch.compile, and
`_checkpoint_wrapped_module` of activation checkpointing and offloading, at any depth and in any order.
FSDP2, `replicate` and `module.compile()` insert nothing. The names of stored leaves that older versions
wrote with such children inside are read in the same way (`current_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

Part = tuple[str, str, nn.Module]
"""A module of a tree: what its names and its state dict keys begin with (a dot behind), and itself."""

EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
"""What torch calls the state of a module that `get_extra_state` gives."""

_COMPILED, _ACTIVATIONS = "_orig_mod", "_checkpoint_wrapped_module"
"""Children that nobody but torch calls so."""


def module_parts(module: nn.Module) -> list[Part]:
    """A module and all modules below it, in the order of its state dict; a shared one under each path.

    Where no wrapper is above a part, what its names and its keys begin with are one object.
    """
    found: list[Part] = []
    todo: list[Part] = [("", "", module)]
    while todo:
        part = todo.pop()
        found.append(part)
        path, key, one = part
        if not one._modules:
            continue
        inserted = _inserted(type(one))  # type: ignore[arg-type]
        for name, child in reversed(one._modules.items()):
            if child is None:
                continue
            if name == inserted:
                # The hooks of activation wrappers take this child out of state dict keys.
                todo.append((path, key if name == _ACTIVATIONS else f"{key}{name}.", child))
            else:
                below = f"{path}{name}."
                todo.append((below, below if key is path else f"{key}{name}.", child))
    return found


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module itself, without those below it, has state that is no tensor of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def key_names(parts: Sequence[Part]) -> Callable[[str, Any], str] | None:
    """From a state dict key and its value to the canonical name; None where names and keys are the same.

    Keys that hooks of a user's class have changed are recognised by the tensor; keys that they made up stay
    as they are.
    """
    if all(path is key for path, key, _ in parts):
        return None
    known = {
        f"{key}{name}": f"{path}{name}"
        for path, key, part in parts
        for name in (*part._parameters, *part._buffers, EXTRA_STATE)
    }
    paths: dict[int, list[list[tuple[str, bool]]]] = {}

    def name_of(key: str, value: Any) -> str:
        if (name := known.get(key)) is not None:
            return name
        if not paths:
            paths.update(_tensor_paths(parts[0][2]))
        for path in paths.get(id(value), ()):
            if (name := _aligned(key.split("."), path)) is not None:
                return name
        return without_reserved(key)

    return name_of


def spellings(module: nn.Module) -> Mapping[int, set[str]]:
    """Every name that a tensor of a module has or had, by id: canonical ones, and with wrappers inside."""
    found: dict[int, set[str]] = {}
    for path, _, part in module_parts(module):
        for name, one in (*part._parameters.items(), *part._buffers.items()):
            found.setdefault(id(one), set()).add(f"{path}{name}")
    for number, paths in _tensor_paths(module).items():
        found[number].update(".".join(segment for segment, _ in path) for path in paths)
    return found


def current_names(stored: str) -> Iterator[str]:
    """What a stored leaf may be called today, where an older version left children of wrappers in its name.

    `module` is an ordinary name too, so what is without it comes last. Empty for a name with no such child.
    """
    first = without_reserved(stored)
    if first != stored:
        yield first
    if ".module." in first:
        yield ".".join(one for one in first.split(".") if one != "module")


def without_reserved(name: str) -> str:
    """A name without the children that nobody but torch calls so."""
    if _COMPILED not in name and _ACTIVATIONS not in name:
        return name
    return ".".join(one for one in name.split(".") if one not in (_COMPILED, _ACTIVATIONS))


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The part of a module that a canonical name means, whatever wraps what; None where there is none."""
    current = innermost(module)
    for name in path.split("."):
        child = current._modules.get(name)
        if child is None:
            return None
        current = innermost(child)
    return current


def innermost(module: nn.Module) -> nn.Module:
    """What is inside of all wrappers around a module; the module itself where there are none."""
    while (inner := module._modules.get(_inserted(type(module)) or "")) is not None:  # type: ignore[arg-type]
        module = inner
    return module


@lru_cache(maxsize=256)
def _inserted(kind: type) -> str | None:
    """What a wrapper of this class calls its one child; None for other modules."""
    if issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    # By name, as to import these loads the compiler; FSDP2 and `replicate` make classes below them.
    classes = {one.__name__ for one in kind.__mro__ if one.__module__.startswith("torch.")}
    if "OptimizedModule" in classes:
        return _COMPILED
    return _ACTIVATIONS if "ActivationWrapper" in classes else None


def _tensor_paths(module: nn.Module) -> dict[int, list[list[tuple[str, bool]]]]:
    """Where each tensor lies, by id: the names from the module down, and whether a wrapper inserted each."""
    found: dict[int, list[list[tuple[str, bool]]]] = {}
    todo: list[tuple[list[tuple[str, bool]], nn.Module]] = [([], module)]
    while todo:
        path, part = todo.pop()
        for name, one in (*part._parameters.items(), *part._buffers.items()):
            if isinstance(one, torch.Tensor):
                found.setdefault(id(one), []).append([*path, (name, False)])
        inserted = _inserted(type(part))  # type: ignore[arg-type]
        for name, child in reversed(part._modules.items()):
            if child is not None:
                todo.append(([*path, (name, name == inserted)], child))
    return found


def _aligned(key: Sequence[str], path: Sequence[tuple[str, bool]]) -> str | None:
    """The key without what wrappers inserted, where it is the path with some names left out; else None."""
    kept: list[str] = []
    left = list(key)
    for name, inserted in reversed(path):
        if left and left[-1] == name:
            left.pop()
            if not inserted:
                kept.append(name)
    return None if left else ".".join(reversed(kept))
