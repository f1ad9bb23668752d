"""Operators that move, gather and scatter elements, or create tensors from shapes, ranges and random numbers.

Random numbers use torch's streams, which checkpoints restore. Seeds of single operators in the file are
ignored, because every step would draw the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchrelay.models.onnx.importer.executor import Ints, OpCall, Operator, as_ints
from torchrelay.models.onnx.importer.tensors import check_made, dtype_of

List = list[Any]


def _shape(call: OpCall, x: Any) -> Ints:
    shape = (len(x.values),) * (not x.scalar) if isinstance(x, Ints) else tuple(x.shape)
    return Ints(tuple(shape)[slice(call.get("start", 0), call.get("end"))])


def _reshape(call: OpCall, x: Tensor, shape: List | None = None) -> Tensor:
    sizes = list(call.get("shape", ())) if shape is None else shape
    if not call.get("allowzero", 0):
        sizes = [x.shape[at] if type(one) is int and one == 0 else one for at, one in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(call: OpCall, x: Tensor) -> Tensor:
    axis = call.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1 if x.numel() else math.prod(x.shape[axis:]))


def _squeeze(call: OpCall, x: Tensor, axes: List | None = None) -> Tensor:
    chosen = call.get("axes", axes)
    if chosen is None:
        chosen = [at for at, size in enumerate(x.shape) if size == 1]
    for at in chosen:
        if x.shape[at] != 1:
            raise call.fail(f"dimension {at} of {tuple(x.shape)} is not 1")
    return torch.squeeze(x, tuple(chosen)) if chosen else x


def _unsqueeze(call: OpCall, x: Tensor, axes: List | None = None) -> Tensor:
    chosen = list(call.get("axes", axes) or ())
    rank = x.dim() + len(chosen)
    for at in sorted(at + rank if at < 0 else at for at in chosen):
        x = x.unsqueeze(at)
    return x


def _expand(call: OpCall, x: Tensor, shape: List) -> Tensor:
    more = len(shape) - x.dim()
    x = x.reshape((1,) * max(more, 0) + tuple(x.shape))
    wanted = [1] * max(-more, 0) + list(shape)
    ones = (type(want) is int and want == 1 for want in wanted)
    return x.expand([have if one else want for one, want, have in zip(ones, wanted, x.shape, strict=True)])


def _tile(call: OpCall, x: Tensor, repeats: List) -> Tensor:
    check_made(str(call.node), [size * times for size, times in zip(x.shape, repeats, strict=True)])
    return x.repeat(repeats)


def _split(call: OpCall, x: Tensor, sizes: List | None = None) -> tuple[Tensor, ...]:
    axis, parts = call.get("axis", 0), call.get("split", sizes)
    if parts is None:
        count = call.get("num_outputs", len(call.node.outputs))
        whole = -(-x.shape[axis] // count)
        parts = [min(whole, max(x.shape[axis] - at * whole, 0)) for at in range(count)]
    return tuple(torch.split(x, list(parts), axis))


def _slice(
    call: OpCall,
    x: Tensor,
    starts: List | None = None,
    ends: List | None = None,
    axes: List | None = None,
    steps: List | None = None,
) -> Tensor:
    starts, ends = list(call.get("starts", starts)), list(call.get("ends", ends))
    axes = list(call.get("axes", axes) or range(len(starts)))
    for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(starts), strict=True):
        if step == 0:
            raise call.fail("a step of 0")
        if step > 0:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(start, end, step),)]
            continue
        places = range(x.shape[axis])[slice(start, None if end < -x.shape[axis] else end, step)]
        x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))
    return x


def _pad(
    call: OpCall, x: Tensor, pads: List | None = None, value: Any = None, axes: List | None = None
) -> Tensor:
    widths = list(call.get("pads", pads))
    fill = value[0] if value else call.get("value", 0.0)
    axes = [at % x.dim() for at in (axes or range(x.dim()))]
    before, after = widths[: len(axes)], widths[len(axes) :]
    sizes = list(x.shape)
    for at, one, other in zip(axes, before, after, strict=True):
        sizes[at] = sizes[at] + one + other
    check_made(str(call.node), sizes)
    mode = call.get("mode", "constant")
    for at, one, other in zip(axes, before, after, strict=True):
        x = _padded(call, x, at, one, other, mode, fill)
    return x


def _padded(call: OpCall, x: Tensor, axis: int, before: Any, after: Any, mode: str, fill: Any) -> Tensor:
    if mode == "constant":
        widths = [0, 0] * (x.dim() - 1 - axis) + [before, after]
        return torch.nn.functional.pad(x, widths, value=fill)
    size = x.shape[axis]
    places = torch.arange(-before, size + after, device=x.device)
    if mode == "edge":
        places = places.clamp(0, size - 1)
    elif mode == "wrap":
        places = places % size
    elif mode == "reflect":
        turn = max(2 * (size - 1), 1)
        places = places % turn
        places = torch.where(places >= size, turn - places, places)
    else:
        raise call.fail(f"unknown mode {mode!r} of padding")
    return x.index_select(axis, places)


def _depth_to_space(call: OpCall, x: Tensor) -> Tensor:
    (n, c, h, w), b = x.shape, call.need("blocksize")
    if call.get("mode", "DCR") == "DCR":
        parts = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c // (b * b), h * b, w * b)


def _space_to_depth(call: OpCall, x: Tensor) -> Tensor:
    (n, c, h, w), b = x.shape, call.need("blocksize")
    order = (0, 3, 5, 1, 2, 4) if call.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return x.reshape(n, c, h // b, b, w // b, b).permute(order).reshape(n, c * b * b, h // b, w // b)


def _center_crop_pad(call: OpCall, x: Tensor, shape: List) -> Tensor:
    axes = [at % x.dim() for at in call.get("axes", range(x.dim()))]
    for at, wanted in zip(axes, shape, strict=True):
        check_made(str(call.node), [wanted])
        less = x.shape[at] - wanted
        if less > 0:
            x = x.narrow(at, less // 2, wanted)
        elif less < 0:
            x = _padded(call, x, at, -less // 2, -less - (-less // 2), "constant", 0)
    return x


def _reverse_sequence(call: OpCall, x: Tensor, lengths: Tensor) -> Tensor:
    batch, time = call.get("batch_axis", 1), call.get("time_axis", 0)
    steps = torch.arange(x.shape[time], device=x.device)
    ends = lengths[:, None]
    places = torch.where(steps < ends, ends - 1 - steps, steps)  # batch, time
    places = places if batch == 0 else places.t()
    shape = [size if at in (batch, time) else 1 for at, size in enumerate(x.shape)]
    return torch.gather(x, time, places.reshape(shape).expand(x.shape))


def _constant_of_shape(call: OpCall, shape: list[Any]) -> Tensor:
    check_made(str(call.node), shape)
    value = call.get("value", torch.zeros(1))
    return torch.full(shape, value.item(), dtype=value.dtype, device=call.device)


def _range(call: OpCall, start: Any, limit: Any, step: Any) -> Tensor:
    dtype = start.dtype if isinstance(start, Tensor) else torch.int64
    if dtype in (torch.int64, torch.int32, torch.int16):
        (first,), (end,), (by,) = (as_ints(one) or [0] for one in (start, limit, step))
        if by == 0:
            raise call.fail("a step of 0")
        if all(type(one) is int for one in (first, end, by)):
            check_made(str(call.node), [max(-(-(end - first) // by), 0)])
            if (end - first) * by <= 0:
                return torch.empty(0, dtype=dtype, device=call.device)
        return torch.arange(first, end, by, dtype=dtype, device=call.device)
    first, end, by = (float(one) for one in (start, limit, step))
    if by == 0 or not all(map(math.isfinite, (first, end, by))):
        raise call.fail("a step of 0, or bounds that are not finite")
    count = max(math.ceil((end - first) / by), 0)
    check_made(str(call.node), [count])
    return (first + by * torch.arange(count, device=call.device, dtype=torch.float64)).to(dtype)


def _eye_like(call: OpCall, x: Tensor) -> Tensor:
    down, right = (torch.arange(size, device=x.device) for size in x.shape)
    hit: Tensor = right[None] - down[:, None] == call.get("k", 0)
    return hit.to(_dtype(call, x))


def _one_hot(call: OpCall, places: Tensor, depth: list[Any], values: Tensor) -> Tensor:
    axis, count = call.get("axis", -1), depth[0]
    check_made(str(call.node), [*places.shape, count])
    off, on = values[0], values[1]
    whole = torch.remainder(places.to(torch.int64), count)
    inside = (places >= -count) & (places < count)
    axis = axis + places.dim() + 1 if axis < 0 else axis
    shape = [1] * (places.dim() + 1)
    shape[axis] = count
    hit = (
        whole.unsqueeze(axis) == torch.arange(count, device=places.device).reshape(shape)
    ) & inside.unsqueeze(axis)
    return torch.where(hit, on, off)


def _dtype(call: OpCall, like: Tensor | None = None) -> torch.dtype:
    if call.has("dtype") or like is None:
        return dtype_of(call.get("dtype", 1), str(call.node))
    return like.dtype


def _multinomial(call: OpCall, x: Tensor) -> Tensor:
    count = call.get("sample_size", 1)
    check_made(str(call.node), [x.shape[0], count])
    found = torch.multinomial(torch.softmax(x, -1), count, replacement=True)
    return found.to(dtype_of(call.get("dtype", 6), str(call.node)))


def _random(call: OpCall, like: Tensor | None = None) -> Tensor:
    shape = call.need("shape") if like is None else tuple(like.shape)
    check_made(str(call.node), shape)
    made = torch.empty(shape, dtype=_dtype(call, like), device=call.device)
    if call.node.operator.startswith("RandomNormal"):
        return made.normal_(call.get("mean", 0.0), call.get("scale", 1.0))
    return made.uniform_(call.get("low", 0.0), call.get("high", 1.0))


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _positive(places: Tensor, size: Any) -> Tensor:
    places = places.to(torch.int64)
    return torch.where(places < 0, places + size, places)


def _gather(call: OpCall, x: Tensor, places: Tensor) -> Tensor:
    axis = call.get("axis", 0) % x.dim()
    flat = _positive(places, x.shape[axis])
    if axis == 0:  # like an embedding
        rows = x.dim() == 2 and x.is_floating_point()
        return torch.nn.functional.embedding(flat, x) if rows else x[flat]
    if places.dim() == 0:
        return x.index_select(axis, flat.reshape(1)).squeeze(axis)
    found = x.index_select(axis, flat.reshape(-1))
    return found.reshape(x.shape[:axis] + tuple(flat.shape) + x.shape[axis + 1 :])


def _places_nd(x: Tensor, places: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Return index tensors for the leading dimensions of `x`: `batch` by counting, others by `places`."""
    rest = range(places.dim() - 1)
    counted = [
        torch.arange(x.shape[at], device=x.device).reshape([-1 if one == at else 1 for one in rest])
        for at in range(batch)
    ]
    given = [_positive(places[..., at], x.shape[batch + at]) for at in range(places.shape[-1])]
    return (*counted, *given)


def _scatter_elements(call: OpCall, x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    axis = call.get("axis", 0)
    places = _positive(places, x.shape[axis])
    how = call.get("reduction", "none")
    if how == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _REDUCTIONS[how], include_self=True)


def _scatter_nd(call: OpCall, x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    how = call.get("reduction", "none")
    where = _places_nd(x, places, 0)
    if how in ("none", "add"):
        return x.index_put(where, updates, accumulate=how == "add")
    depth = places.shape[-1]
    rows = math.prod(x.shape[:depth])
    strides = [math.prod(x.shape[at + 1 : depth]) for at in range(depth)]
    flat = torch.stack([one * stride for one, stride in zip(where, strides, strict=True)]).sum(0).reshape(-1)
    inner = x.reshape(rows, -1)
    chosen = flat[:, None].expand(-1, inner.shape[1])
    updates = updates.reshape(chosen.shape)
    return inner.scatter_reduce(0, chosen, updates, _REDUCTIONS[how], include_self=True).reshape(x.shape)


def _tensor_scatter(call: OpCall, past: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
    axis = call.get("axis", -2) % past.dim()
    size, length = past.shape[axis], update.shape[axis]
    begin = torch.zeros(past.shape[0], dtype=torch.int64, device=past.device) if starts is None else starts
    places = begin[:, None] + torch.arange(length, device=past.device)
    places = places % size if call.get("mode", "linear") == "circular" else places
    shape = [1] * past.dim()
    shape[0], shape[axis] = past.shape[0], length
    return past.scatter(axis, places.reshape(shape).expand(update.shape), update)


def _top_k(call: OpCall, x: Tensor, k: list[int] | None = None) -> tuple[Tensor, Tensor]:
    axis, largest = call.get("axis", -1), bool(call.get("largest", 1))
    count = call.get("k") if k is None else k[0]
    wide = x.to(torch.int64) if x.dtype in (torch.uint16, torch.uint32, torch.uint64) else x
    order = torch.sort(wide, dim=axis, descending=largest, stable=True)  # the first of equal ones
    return order.values.narrow(axis, 0, count).to(x.dtype), order.indices.narrow(axis, 0, count)


def _compress(call: OpCall, x: Tensor, condition: Tensor) -> Tensor:
    axis = call.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    return x.index_select(axis, condition.reshape(-1).nonzero().reshape(-1))


def _unique(call: OpCall, x: Tensor) -> tuple[Tensor, ...]:
    axis = call.get("axis")
    rows = x.reshape(-1, 1) if axis is None else x.movedim(axis, 0).reshape(x.shape[axis], -1)
    _, inverse, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    size = counts.shape[0]
    places = torch.arange(rows.shape[0], device=x.device)
    first = torch.full((size,), rows.shape[0], device=x.device).scatter_reduce(0, inverse, places, "amin")
    if not call.get("sorted", 1):
        order = torch.argsort(first)
        back = torch.empty_like(order).scatter(0, order, torch.arange(size, device=x.device))
        first, counts, inverse = first[order], counts[order], back[inverse]
    values = x.reshape(-1)[first] if axis is None else x.index_select(axis, first)
    return values, first, inverse, counts


def _suppress(
    call: OpCall,
    boxes: Tensor,
    scores: Tensor,
    most: list[int] | None = None,
    overlap: Any = None,
    least: Any = None,
) -> Tensor:
    """Return the best boxes of each class, without those that overlap a better one."""
    limit = most[0] if most else 0
    share = 0.0 if overlap is None else float(overlap)
    floor = None if least is None else float(least)
    if call.get("center_point_box", 0):
        half = boxes[..., 2:] / 2
        corners = torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)
    else:
        low = torch.minimum(boxes[..., :2], boxes[..., 2:])
        corners = torch.cat([low, torch.maximum(boxes[..., :2], boxes[..., 2:])], -1)
    found: list[tuple[int, int, int]] = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            chosen = _best(corners[batch], scores[batch, kind], limit, share, floor)
            found += [(batch, kind, one) for one in chosen]
    return torch.tensor(found, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


def _best(corners: Tensor, scores: Tensor, limit: int, share: float, least: float | None) -> list[int]:
    order = torch.sort(scores, descending=True, stable=True).indices
    if least is not None:
        order = order[scores[order] > least]
    chosen: list[int] = []
    while order.numel() and len(chosen) < limit:
        first, order = order[0], order[1:]
        chosen.append(int(first))
        # Intersection over union.
        one = corners[first]
        others = corners[order]
        sides = torch.minimum(one[2:], others[:, 2:]) - torch.maximum(one[:2], others[:, :2])
        common = sides.clamp(min=0).prod(1)
        areas = (others[:, 2:] - others[:, :2]).prod(1) + (one[2:] - one[:2]).prod()
        order = order[(common / (areas - common)) <= share]
    return chosen


OPERATORS: dict[str, Any] = {
    "Shape": Operator(_shape, raw=True),
    "Size": Operator(
        lambda call, x: Ints((len(x.values) if isinstance(x, Ints) else x.numel(),), scalar=True), raw=True
    ),
    "Reshape": Operator(_reshape, ints=(1,)),
    "Flatten": _flatten,
    "Transpose": lambda call, x: x.permute(call.get("perm") or tuple(reversed(range(x.dim())))),
    "Squeeze": Operator(_squeeze, ints=(1,)),
    "Unsqueeze": Operator(_unsqueeze, ints=(1,)),
    "Expand": Operator(_expand, ints=(1,)),
    "Tile": Operator(_tile, ints=(1,)),
    "Concat": lambda call, *parts: torch.cat(parts, call.get("axis", 1)),
    "Split": Operator(_split, ints=(1,)),
    "Slice": Operator(_slice, ints=(1, 2, 3, 4)),
    "Pad": Operator(_pad, ints=(1, 3), numbers=(2,)),
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "CenterCropPad": Operator(_center_crop_pad, ints=(1,)),
    "ReverseSequence": _reverse_sequence,
    "Trilu": Operator(
        lambda call, x, k=None: (torch.triu if call.get("upper", 1) else torch.tril)(x, k[0] if k else 0),
        ints=(1,),
    ),
    "ConstantOfShape": Operator(_constant_of_shape, ints=(0,)),
    "Range": Operator(_range, raw=True),
    "EyeLike": _eye_like,
    "OneHot": Operator(_one_hot, ints=(1,)),
    "RandomNormal": _random,
    "RandomNormalLike": _random,
    "RandomUniform": _random,
    "RandomUniformLike": _random,
    "Bernoulli": lambda call, x: torch.bernoulli(x.float()).to(_dtype(call, x)),
    "Multinomial": _multinomial,
    "Gather": _gather,
    "GatherElements": lambda call, x, places: torch.gather(
        x, axis := call.get("axis", 0), _positive(places, x.shape[axis])
    ),
    "GatherND": lambda call, x, places: x[_places_nd(x, places, call.get("batch_dims", 0))],
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "TopK": Operator(_top_k, ints=(1,)),
    "Compress": _compress,
    "NonZero": lambda call, x: x.nonzero().t() if x.dim() else (x.reshape(1) != 0).nonzero()[:, :0].t(),
    "Unique": _unique,
    "NonMaxSuppression": Operator(_suppress, ints=(2,)),
}
