"""Tensors of a file as state of a module whose state dict keys are the very names that they have in the file.

A dot in a name leads into a nested container, as it does for torch's own modules, so `layers.0.weight` is a
parameter `weight` in `0` in `layers`. Names that torch cannot have there (an empty part, the name of a
method, a name that is also the beginning of another) are kept under another, and hooks put the real ones
into the state dict.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

Path = tuple[tuple[str, ...], str]
"""The containers that lead to a tensor, and its name in the last of them."""

_ODD = "of_file"
CONSTANTS = "file_constants"
_EXPORTERS = re.compile(r"val_\d+")
"""Names that torch's exporter gives to values of its own; it fails on a module that has them already."""


class Container(nn.Module):
    """A part of a dotted name; it computes nothing."""


_MODULE = frozenset(dir(nn.Module()))
"""Not of the class: `training` and `_modules` are of each module."""


def paths_of(names: Iterable[str], taken: object) -> dict[str, Path]:
    """Where each name is kept below a root with the attributes of `taken`."""
    names = list(names)
    prefixes = {name[:at] for name in names for at, one in enumerate(name) if one == "."}
    shadowing = _MODULE | frozenset(dir(taken)) | {"_paths", _ODD, CONSTANTS}
    found: dict[str, Path] = {}
    plain: set[str] = set()
    for name in names:
        *inside, last = name.split(".")
        odd = name in prefixes or any(not one or one in shadowing for one in (*inside, last))
        if odd or _EXPORTERS.fullmatch(name):
            short = _short(name, plain)
            plain.add(short)
            found[name] = ((_ODD,), short)
        else:
            found[name] = (tuple(inside), last)
    return found


def _short(name: str, taken: Collection[str]) -> str:
    """A name for an attribute that is like `name` and none of those taken."""
    short = re.sub(r"\W", "_", name, flags=re.ASCII)
    return short if short and short not in taken and short not in _MODULE else f"{short}_of_{len(taken)}"


def keep(
    root: nn.Module, paths: Mapping[str, Path], tensors: Mapping[str, torch.Tensor], trained: frozenset[str]
) -> None:
    """Register the tensors below `root`: parameters where `trained`, else buffers; odd names by hooks."""
    for name, (inside, last) in paths.items():
        holder = root
        for part in inside:
            if part not in holder._modules:
                holder.add_module(part, Container())
            holder = holder._modules[part]  # type: ignore[assignment]
        if name in trained:
            holder.register_parameter(last, nn.Parameter(tensors[name]))
        else:
            holder.register_buffer(last, tensors[name])
    odd = {f"{_ODD}.{last}": name for name, (inside, last) in paths.items() if inside == (_ODD,)}
    if odd:
        root.register_state_dict_post_hook(_Renaming(odd, out=True))
        root.register_load_state_dict_pre_hook(_Renaming(odd, out=False))


class _Renaming:
    """Puts the names of a file in place of numbered ones in a state dict, or back."""

    def __init__(self, names: Mapping[str, str], out: bool) -> None:
        self._names, self._out = dict(names), out

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for inner, name in self._names.items():
            old, new = (inner, name) if self._out else (name, inner)
            if prefix + old in state:
                state[prefix + new] = state.pop(prefix + old)


def keep_constants(root: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Constants move with the module and are not in its state dict: the file has them, not the training."""
    holder = Container()
    for at, tensor in enumerate(tensors):
        holder.register_buffer(f"c{at}", tensor, persistent=False)
    root.add_module(CONSTANTS, holder)


def kept(root: nn.Module, path: Path) -> torch.Tensor:
    """The tensor at a path, as it is now."""
    holder = root
    for part in path[0]:
        holder = holder._modules[part]  # type: ignore[assignment]
    found = holder._parameters.get(path[1])
    return holder._buffers[path[1]] if found is None else found  # type: ignore[return-value]


def constant(root: nn.Module, at: int) -> torch.Tensor:
    """The constant of this number."""
    return root._modules[CONSTANTS]._buffers[f"c{at}"]  # type: ignore[union-attr, return-value]
