"""Tensors of a file as state of a module: which are parameters, which buffers, under which names.

A dot in a name leads into a nested container, as it does for torch's own modules, so `layers.0.weight` is a
parameter `weight` in `0` in `layers`. Names that torch cannot have there (an empty part, the name of a
method, a name that is also the beginning of another) are kept under another, and hooks put the real ones
into the state dict.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from torchrelay.errors import UsageError
from torchrelay.models.onnx.importer.executor import ExecutionPlan
from torchrelay.models.onnx.importer.graph import Graph, GraphNode, ModelContent

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


T = TypeVar("T")

_WITHOUT_GRADIENT = {
    "BatchNormalization": (3, 4), "Resize": (1, 2, 3), "Upsample": (1,), "Pad": (2,), "Dropout": (1, 2),
    "Range": (0, 1, 2), "OneHot": (0, 1), "NonMaxSuppression": (0, 1, 2, 3, 4), "Shape": (0,), "Size": (0,),
    "ArgMax": (0,), "ArgMin": (0,), "CastLike": (1,), "NonZero": (0,), "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
}  # fmt: skip
"""Inputs that training does not change by gradient: running statistics, sizes, scales of quantization."""
_MADE_UP = re.compile(
    r"val_\d+|scalar_tensor_default(_\d+)?|_val_\d+|onnx::\w+_\d+|.*/Constant(_\d+)?_output_\d+"
)
"""Names that exporters of torch give to constants that they found in the code."""


def kept_initializers(content: ModelContent, plan: ExecutionPlan) -> list[str]:
    """State dict keys: all where the whole model was asked for, else what the plan needs."""
    whole = plan.results == content.graph.outputs
    inner = {key for node, _ in plan.steps for key in _inner_keys(node)}
    needed = inner | {key for name, key in content.graph.initializers.items() if name in plan.needed}
    return [key for key in content.initializers if whole or key in needed]


def _inner_keys(node: GraphNode) -> Iterable[str]:
    for one in node.attributes.values():
        if isinstance(one, Graph):
            yield from one.initializers.values()
            for inside in one.nodes:
                yield from _inner_keys(inside)


def trained_initializers(
    content: ModelContent, kept: Sequence[str], trainable: Sequence[str]
) -> frozenset[str]:
    """The keys that become parameters: floats that something uses where a gradient reaches them."""
    floats = {key: key for key in kept if content.initializers[key].dtype.is_floating_point}
    found = set(matching(floats, trainable))
    for key in floats:
        tensor = content.initializers[key]
        constant = tensor.numel() == 1 and _MADE_UP.fullmatch(key) is not None
        if tensor.itemsize > 1 and not constant:  # float8 has no arithmetic to be trained in
            uses = content.uses.get(key, frozenset())
            if any(at not in _WITHOUT_GRADIENT.get(operator, ()) for operator, at in uses):
                found.add(key)
    return frozenset(found)


def as_patterns(patterns: Sequence[str]) -> Sequence[str]:
    """The patterns themselves; UsageError for one text, whose signs would be taken for patterns."""
    if isinstance(patterns, str):
        raise UsageError(f"patterns are a tuple, as ({patterns!r},), not one text")
    return patterns


def matching(named: Mapping[str, T], patterns: Sequence[str]) -> list[T]:
    """What is named by patterns with * and ?; UsageError for a pattern that names nothing."""
    found: dict[str, T] = {}
    for pattern in as_patterns(patterns):
        hits = {name: one for name, one in named.items() if fnmatchcase(name, pattern)}
        if not hits:
            raise UsageError(
                f"pattern {pattern!r} matches no parameter; there are {', '.join(list(named)[:8])}"
            )
        found.update(hits)
    return list(found.values())


def begins_in_training(content: ModelContent) -> bool:
    """Whether the file was made for training: a batch normalization or a dropout that says so."""
    return any(
        (node.operator == "BatchNormalization" and node.attributes.get("training_mode") == 1)
        or (node.operator == "Dropout" and len(node.inputs) > 2 and _is_true(content, node.inputs[2]))
        for node in content.graph.nodes
    )


def _is_true(content: ModelContent, name: str) -> bool:
    graph = content.graph
    if name in graph.initializers:
        return bool(content.initializers[graph.initializers[name]].any())
    return name in graph.constants and bool(content.constants[graph.constants[name]].any())
