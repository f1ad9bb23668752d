"""Operators that run inner graphs (If, Loop, Scan), sequences and optional values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrelay.models.onnx.importer.operator import OpCall, Operator, as_ints
from torchrelay.models.onnx.importer.tensors import check_turns


def _loop(call: OpCall, trips: list[int] | None, go_on: Tensor | None, *carried: Any) -> Any:
    body = call.graph("body")
    count = len(carried)
    _check_arity(call, body, 2 + count, 1 + count)
    most = trips[0] if trips else None
    values, scanned = list(carried), [[] for _ in body.outputs[1 + count :]]  # type: ignore[var-annotated]
    alive, turn = True if go_on is None else bool(go_on), 0
    while alive and (most is None or turn < most):
        check_turns(str(call.node), turn + 1)
        number = torch.tensor(turn, dtype=torch.int64, device=call.device)
        given = [number, torch.tensor(alive, device=call.device), *values]
        found, *results = call.enter(body, dict(zip(body.inputs, given, strict=True)))
        values = results[:count]
        for held, one in zip(scanned, results[count:], strict=True):
            held.append(call.tensor(one))
        alive, turn = bool(call.tensor(found)), turn + 1
    return tuple(values) + tuple(_stacked(call, held) for held in scanned)


def _stacked(call: OpCall, held: list[Tensor]) -> Tensor:
    return torch.stack(held) if held else torch.empty(0, device=call.device)


def _check_arity(call: OpCall, body: Any, inputs: int, outputs: int) -> None:
    if len(body.inputs) != inputs or len(body.outputs) < outputs:
        raise call.fail(
            f"its graph has {len(body.inputs)} inputs, {len(body.outputs)} outputs; {inputs} values are given"
        )


def _scan(call: OpCall, *given: Any) -> Any:
    return _scanned(call, list(given)) if call.version >= 9 else _scan_in_batches(call, *given)


def _scanned(call: OpCall, given: list[Any]) -> tuple[Any, ...]:
    body, streams = call.graph("body"), call.need("num_scan_inputs")
    count = len(given) - streams
    if not 0 < streams <= len(given):
        raise call.fail(f"{streams} of {len(given)} inputs to scan")
    _check_arity(call, body, len(given), count)
    outs = len(body.outputs) - count
    axes = call.get("scan_input_axes", (0,) * streams)
    backwards = call.get("scan_input_directions" if call.version >= 9 else "directions", (0,) * streams)
    ways = call.get("scan_output_directions", (0,) * outs)
    out_axes = call.get("scan_output_axes", (0,) * outs)
    values = given[:count]
    slices = [one.movedim(axis, 0) for one, axis in zip(given[count:], axes, strict=True)]
    slices = [one.flip(0) if back else one for one, back in zip(slices, backwards, strict=True)]
    turns = slices[0].shape[0]
    check_turns(str(call.node), turns)
    scanned: list[list[Tensor]] = [[] for _ in range(outs)]
    for turn in range(turns):
        inputs = [*values, *(one[turn] for one in slices)]
        results = call.enter(body, dict(zip(body.inputs, inputs, strict=True)))
        values = list(results[:count])
        for held, one in zip(scanned, results[count:], strict=True):
            held.append(call.tensor(one))
    stacked = [
        _stacked(call, held[::-1] if back else held).movedim(0, axis)
        for held, back, axis in zip(scanned, ways, out_axes, strict=True)
    ]
    return (*values, *stacked)


def _scan_in_batches(call: OpCall, lengths: Tensor | None, *given: Any) -> Any:
    """Scan of operator set 8, with a batch dimension and individual lengths."""
    streams = call.need("num_scan_inputs")
    count = len(given) - streams
    batch, longest = given[count].shape[:2]
    ends = [longest] * batch if lengths is None else as_ints(lengths) or []
    runs = []
    for at in range(batch):
        one = [value[at] for value in given[:count]] + [value[at][: ends[at]] for value in given[count:]]
        runs.append(_scanned(call, one))
    found = []
    for place in range(len(runs[0])):
        parts = [run[place] for run in runs]
        if place >= count:
            parts = [torch.cat([one, one.new_zeros(longest - one.shape[0], *one.shape[1:])]) for one in parts]
        found.append(torch.stack(parts))
    return tuple(found)


def _concat(call: OpCall, sequence: list[Tensor]) -> Tensor:
    return (torch.stack if call.get("new_axis", 0) else torch.cat)(sequence, call.need("axis"))


def _get(call: OpCall, value: Any) -> Any:
    if value is None:
        raise call.fail("the value is missing")
    return value


def _insert(call: OpCall, sequence: list[Any], one: Any, place: list[int] | None = None) -> list[Any]:
    at = len(sequence) if place is None else place[0] + (len(sequence) if place[0] < 0 else 0)
    if not 0 <= at <= len(sequence):
        raise call.fail(f"index {at} of a sequence of {len(sequence)}")
    return [*sequence[:at], one, *sequence[at:]]


def _erase(call: OpCall, sequence: list[Any], place: list[int] | None = None) -> list[Any]:
    at = range(len(sequence))[-1 if place is None else place[0]]
    return sequence[:at] + sequence[at + 1 :]


def _split(call: OpCall, x: Tensor, sizes: Any = None) -> list[Tensor]:
    axis = call.get("axis", 0)
    if sizes is None:
        parts = list(x.split(1, axis))
        return parts if call.get("keepdims", 1) else [one.squeeze(axis) for one in parts]
    if isinstance(sizes, Tensor):
        sizes = int(sizes) if sizes.dim() == 0 else sizes.tolist()
    return list(torch.split(x, sizes, axis))


def _map(call: OpCall, sequence: list[Any], *others: Any) -> Any:
    body = call.graph("body")
    rows = []
    for at, one in enumerate(sequence):
        rest = [other[at] if isinstance(other, list) else other for other in others]
        rows.append(call.enter(body, dict(zip(body.inputs, [one, *rest], strict=True))))
    return tuple([call.tensor(row[at]) for row in rows] for at in range(len(body.outputs)))


OPERATORS: dict[str, Any] = {
    "If": lambda call, on: call.enter(call.graph("then_branch" if bool(on) else "else_branch"), {}),
    "Loop": Operator(_loop, ints=(0,)),
    "Scan": _scan,
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
