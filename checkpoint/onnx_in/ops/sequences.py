"""Sequences, which are lists here, and values that may be missing, which are None then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.ops.operator import Operator


def _insert(call: Call, sequence: list[Any], one: Any, place: list[int] | None = None) -> list[Any]:
    at = len(sequence) if place is None else place[0] + (len(sequence) if place[0] < 0 else 0)
    if not 0 <= at <= len(sequence):
        raise call.fail(f"place {at} of a sequence of {len(sequence)}")
    return [*sequence[:at], one, *sequence[at:]]


def _erase(call: Call, sequence: list[Any], place: list[int] | None = None) -> list[Any]:
    at = range(len(sequence))[-1 if place is None else place[0]]
    return sequence[:at] + sequence[at + 1 :]


def _split(call: Call, x: Tensor, sizes: Any = None) -> list[Tensor]:
    axis = call.get("axis", 0)
    if sizes is None:
        parts = list(x.split(1, axis))
        return parts if call.get("keepdims", 1) else [one.squeeze(axis) for one in parts]
    if isinstance(sizes, Tensor):
        sizes = int(sizes) if sizes.dim() == 0 else sizes.tolist()
    return list(torch.split(x, sizes, axis))


def _concat(call: Call, sequence: list[Tensor]) -> Tensor:
    axis = call.need("axis")
    return torch.stack(sequence, axis) if call.get("new_axis", 0) else torch.cat(sequence, axis)


def _map(call: Call, sequence: list[Any], *others: Any) -> Any:
    body = call.graph("body")
    rows = []
    for at, one in enumerate(sequence):
        rest = [other[at] if isinstance(other, list) else other for other in others]
        rows.append(call.enter(body, dict(zip(body.inputs, [one, *rest], strict=True))))
    return tuple([call.tensor(row[at]) for row in rows] for at in range(len(body.outputs)))


def _get(call: Call, value: Any) -> Any:
    if value is None:
        raise call.fail("the value is missing")
    return value


OPERATORS: dict[str, Any] = {
    "SequenceEmpty": lambda call: [],
    "SequenceConstruct": lambda call, *parts: list(parts),
    "SequenceLength": lambda call, sequence: torch.tensor(len(sequence), device=call.device),
    "SequenceAt": Operator(lambda call, sequence, place: sequence[place[0]], ints=(1,)),
    "SequenceInsert": Operator(_insert, ints=(2,)),
    "SequenceErase": Operator(_erase, ints=(1,)),
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
    "SequenceMap": _map,
    "Optional": lambda call, value=None: value,
    "OptionalGetElement": _get,
    "OptionalHasElement": lambda call, value=None: torch.tensor(value is not None, device=call.device),
}
