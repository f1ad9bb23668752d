"""Sums, extremes and other reductions along axes; Fourier transforms, windows, mel weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrelay.models.onnx.importer.operator import OpCall, Operator
from torchrelay.models.onnx.importer.ops.elementwise import widened
from torchrelay.models.onnx.importer.tensors import check_made, dtype_of

Reduction = Callable[[Tensor, list[int], bool], Tensor]


def _reducing(reduce: Reduction) -> Operator:
    def run(call: OpCall, x: Tensor, axes: list[int] | None = None) -> Tensor:
        chosen = list(call.get("axes", axes) or ())
        if not chosen:
            if call.get("noop_with_empty_axes", 0):
                return reduce(x.unsqueeze(0), [0], False)  # each element is a group of its own
            chosen = list(range(x.dim()))
        places = [at % max(x.dim(), 1) for at in chosen]
        if x.dim() == 0:
            return reduce(x.unsqueeze(0), [0], False)
        return reduce(x, places, bool(call.get("keepdims", 1)))

    return Operator(widened(run), ints=(1,))


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return x.mean(axes, keepdim=keep)
    count = math.prod(x.shape[at] for at in axes)
    return torch.div(x.sum(axes, keepdim=keep), count, rounding_mode="trunc").to(x.dtype)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for at in sorted(axes, reverse=True):
        x = x.prod(at, keepdim=keep, dtype=x.dtype)
    return x


def _extreme(find: Callable[[Tensor, list[int], bool], Tensor], of_none: float) -> Reduction:
    """The reduction that gives `of_none`, or the number next to it, where there are no elements."""

    def run(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if not any(type(x.shape[at]) is int and x.shape[at] == 0 for at in axes):
            return find(x.to(torch.uint8) if x.dtype == torch.bool else x, axes, keep).to(x.dtype)
        value: Any = of_none
        if not x.is_floating_point():
            bounds = torch.iinfo(torch.uint8 if x.dtype == torch.bool else x.dtype)
            value = bounds.max if of_none > 0 else bounds.min
        return torch.full_like(x.sum(axes, keepdim=keep), value, dtype=x.dtype)

    return run


def _place_of(find: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(call: OpCall, x: Tensor) -> Tensor:
        axis, keep = call.get("axis", 0), bool(call.get("keepdims", 1))
        if not call.get("select_last_index", 0):
            return torch.as_tensor(find(x, axis, keepdim=keep))
        return torch.as_tensor(x.shape[axis] - 1 - find(x.flip(axis), axis, keepdim=keep))

    return run


def _cumulative(total: Callable[..., Tensor], neutral: int) -> Operator:
    def run(call: OpCall, x: Tensor, axis: list[int]) -> Tensor:
        at = axis[0]
        x = x.flip(at) if call.get("reverse", 0) else x
        if call.get("exclusive", 0):
            first = torch.full_like(x.narrow(at, 0, 1), neutral)
            x = torch.cat([first, x.narrow(at, 0, x.shape[at] - 1)], at)
        found = total(x, at, dtype=x.dtype)
        return found.flip(at) if call.get("reverse", 0) else found

    return Operator(widened(run), ints=(1,))


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)


def _dft(call: OpCall, x: Tensor, length: list[int] | None = None, axis: list[int] | None = None) -> Tensor:
    inverse, onesided = call.get("inverse", 0), call.get("onesided", 0)
    at = call.get("axis", 1) if call.version < 20 else (axis[0] if axis else -2)
    at = at % x.dim()
    if length:
        check_made(str(call.node), length)
    count = length[0] if length else None
    wave = _complex(x)
    if onesided and inverse:
        real: Tensor = torch.fft.irfft(wave, count, at)
        return real.unsqueeze(-1)
    if inverse:
        return torch.view_as_real(torch.fft.ifft(wave, count, at))
    return torch.view_as_real(torch.fft.rfft(wave, count, at) if onesided else torch.fft.fft(wave, count, at))


def _stft(
    call: OpCall, x: Tensor, step: list[int], window: Tensor | None = None, length: list[int] | None = None
) -> Tensor:
    wave = _complex(x) if x.dim() == 3 else x
    size = length[0] if length else (window.shape[0] if window is not None else 0)
    if size < 1 or step[0] < 1:
        raise call.fail("frames have at least one element, and steps too")
    frames = wave.unfold(1, size, step[0])
    frames = frames if window is None else frames * window
    onesided = call.get("onesided", 1) and not frames.is_complex()
    found = torch.fft.rfft(frames, dim=-1) if onesided else torch.fft.fft(frames, dim=-1)
    return torch.view_as_real(found)


def _window(*weights: float) -> Operator:
    def run(call: OpCall, size: list[int]) -> Tensor:
        check_made(str(call.node), size)
        count = size[0] if call.get("periodic", 1) else size[0] - 1
        turns = torch.arange(size[0], dtype=torch.float64, device=call.device) * (2 * math.pi / max(count, 1))
        found = sum(weight * torch.cos(k * turns) for k, weight in enumerate(weights))
        return torch.as_tensor(found).to(dtype_of(call.get("output_datatype", 1), str(call.node)))

    return Operator(run, ints=(0,))


def _mel(call: OpCall, bins: Tensor, length: Tensor, rate: Tensor, low: Tensor, high: Tensor) -> Tensor:
    count, spectrum = int(bins), int(length) // 2 + 1
    check_made(str(call.node), [spectrum, count])
    least, most = (2595 * math.log10(1 + float(edge) / 700) for edge in (low, high))
    steps = torch.arange(count + 2, dtype=torch.float64)
    edges = 700 * (10 ** ((steps * (most - least) / (count + 2) + least) / 2595) - 1)
    places = torch.floor((int(length) + 1) * edges / int(rate)).long().tolist()
    found = torch.zeros(spectrum, count, dtype=torch.float64)
    for at in range(count):
        begin, middle, end = places[at : at + 3]
        if middle == begin:
            found[middle, at] = 1
        else:
            found[begin : middle + 1, at] = (torch.arange(begin, middle + 1) - begin) / (middle - begin)
        if end > middle:
            found[middle:end, at] = (end - torch.arange(middle, end)) / (end - middle)
    return found.to(call.device, dtype_of(call.get("output_datatype", 1), str(call.node)))


OPERATORS: dict[str, Any] = {
    "ReduceSum": _reducing(_sum),
    "ReduceMean": _reducing(_mean),
    "ReduceMax": _reducing(_extreme(torch.amax, -math.inf)),
    "ReduceMin": _reducing(_extreme(torch.amin, math.inf)),
    "ReduceProd": _reducing(_prod),
    "ReduceL1": _reducing(lambda x, axes, keep: _sum(x.abs(), axes, keep)),
    "ReduceL2": _reducing(lambda x, axes, keep: _sum(x * x, axes, keep).sqrt().to(x.dtype)),
    "ReduceLogSum": _reducing(lambda x, axes, keep: _sum(x, axes, keep).log().to(x.dtype)),
    "ReduceLogSumExp": _reducing(_extreme(torch.logsumexp, -math.inf)),
    "ReduceSumSquare": _reducing(lambda x, axes, keep: _sum(x * x, axes, keep)),
    "ArgMax": _place_of(torch.argmax),
    "ArgMin": _place_of(torch.argmin),
    "CumSum": _cumulative(torch.cumsum, 0),
    "CumProd": _cumulative(torch.cumprod, 1),
    "DFT": Operator(_dft, ints=(1, 2)),
    "STFT": Operator(_stft, ints=(1, 3)),
    "HannWindow": _window(0.5, -0.5),
    "HammingWindow": _window(25 / 46, -21 / 46),
    "BlackmanWindow": _window(0.42, -0.5, 0.08),
    "MelWeightMatrix": _mel,
}
