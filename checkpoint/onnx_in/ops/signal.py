"""Fourier transforms, windows and mel weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.checkpoint.onnx_in.element_types import dtype_of
from torchrelay.checkpoint.onnx_in.limits import check_made
from torchrelay.checkpoint.onnx_in.ops.operator import Operator


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)


def _dft(call: Call, x: Tensor, length: list[int] | None = None, axis: list[int] | None = None) -> Tensor:
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
    call: Call, x: Tensor, step: list[int], window: Tensor | None = None, length: list[int] | None = None
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
    def run(call: Call, size: list[int]) -> Tensor:
        check_made(str(call.node), size)
        count = size[0] if call.get("periodic", 1) else size[0] - 1
        turns = torch.arange(size[0], dtype=torch.float64, device=call.device) * (2 * math.pi / max(count, 1))
        found = sum(weight * torch.cos(k * turns) for k, weight in enumerate(weights))
        return torch.as_tensor(found).to(dtype_of(call.get("output_datatype", 1), str(call.node)))

    return Operator(run, ints=(0,))


def _mel(call: Call, bins: Tensor, length: Tensor, rate: Tensor, low: Tensor, high: Tensor) -> Tensor:
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
    "DFT": Operator(_dft, ints=(1, 2)),
    "STFT": Operator(_stft, ints=(1, 3)),
    "HannWindow": _window(0.5, -0.5),
    "HammingWindow": _window(25 / 46, -21 / 46),
    "BlackmanWindow": _window(0.42, -0.5, 0.08),
    "MelWeightMatrix": _mel,
}
