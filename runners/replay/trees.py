"""What a module takes and gives, as JSON with the tensors beside it: lists, tuples, mappings, batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.data.fetch import Batch, MappingBatch, make_batch

Json = Any
_PLAIN = (type(None), bool, int, float, str)


def taken_apart(tree: Any, tensors: list[torch.Tensor]) -> Json:
    """The form of a tree; its tensors are copied to the CPU and appended. UsageError for other objects."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree.detach().to("cpu", copy=True).contiguous())
        return ["tensor", len(tensors) - 1]
    if type(tree) in _PLAIN:
        return ["value", tree]
    if isinstance(tree, (Batch, MappingBatch)):
        inside = [taken_apart(one, tensors) for one in (tree.data, tree.indices)]
        return ["batch", *inside, float(tree.weight)]
    if isinstance(tree, Mapping) and all(isinstance(name, str) for name in tree):
        return ["dict", [[name, taken_apart(one, tensors)] for name, one in tree.items()]]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [taken_apart(one, tensors) for one in tree]]
    raise UsageError(f"a {type(tree).__name__} is no tensor, number, text, list, tuple, dict or batch")


def put_together(form: Json, tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
    """The tree again, its tensors on a device. A mapping comes back as a dict."""
    match form:
        case ["tensor", int(number)]:
            return tensors[number].to(device)
        case ["value", value]:
            return value
        case ["batch", data, indices, float(weight)]:
            parts = [put_together(one, tensors, device) for one in (data, indices)]
            return make_batch(parts[0], weight=weight, indices=parts[1])
        case ["dict", [*items]]:
            return {str(name): put_together(one, tensors, device) for name, one in items}
        case [("list" | "tuple") as kind, [*items]]:
            found = [put_together(one, tensors, device) for one in items]
            return found if kind == "list" else tuple(found)
    raise UsageError(f"no form of inputs or outputs: {str(form)[:100]}")
