"""Elementwise arithmetic, comparison and bit operators, reductions, Fourier transforms and windows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.models.onnx.importer.executor import OpCall, Operator
from torchrelay.models.onnx.importer.tensors import NARROW_BITS, check_made, dtype_of

WIDE = (torch.uint16, torch.uint32, torch.uint64)


def widened(run: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a function to wide unsigned inputs; integer results have the type of the inputs.

    Values of uint64 above 2**63 - 1 are refused, because they would become negative.
    """

    @functools.wraps(run)
    def wide(call: OpCall, *inputs: Any) -> Any:
        dtypes = [one.dtype for one in inputs if isinstance(one, torch.Tensor) and one.dtype in WIDE]
        if not dtypes:
            return run(call, *inputs)
        found = run(call, *[_signed(call, one) for one in inputs])
        if isinstance(found, tuple):
            return tuple(_back(one, dtypes[0]) for one in found)
        return _back(found, dtypes[0])

    return wide


def _signed(call: OpCall, one: Any) -> Any:
    if not isinstance(one, torch.Tensor) or one.dtype not in WIDE:
        return one
    signed = one.view(torch.int64) if one.dtype == torch.uint64 else one.to(torch.int64)
    if one.dtype == torch.uint64 and bool((signed < 0).any()):
        raise call.fail("numbers above 2**63 - 1 are not supported")
    return signed


def _back(one: Any, dtype: torch.dtype) -> Any:
    return one.to(dtype) if isinstance(one, torch.Tensor) and one.dtype == torch.int64 else one


def _div(call: OpCall, one: Tensor, other: Tensor) -> Tensor:
    if one.is_floating_point() or one.is_complex():
        return one / other
    return torch.div(one, other, rounding_mode="trunc")


def _equal(call: OpCall, one: Any, other: Any) -> Tensor:
    if isinstance(one, Tensor):
        return torch.eq(one, other)
    return torch.from_numpy(one == other)  # texts are numpy arrays


def _clip(call: OpCall, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    low, high = call.get("min", low), call.get("max", high)
    for bound, keep in ((low, torch.maximum), (high, torch.minimum)):
        if bound is not None:
            x = keep(x, torch.as_tensor(bound, dtype=x.dtype, device=x.device))
    return x


def _selu(call: OpCall, x: Tensor) -> Any:
    alpha, gamma = call.get("alpha", 1.6732632423543772), call.get("gamma", 1.0507009873554805)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(torch.minimum(x, torch.zeros_like(x))))


def _shrink(call: OpCall, x: Tensor) -> Tensor:
    lambd, bias = call.get("lambd", 0.5), call.get("bias", 0.0)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0)).to(x.dtype)


def _shift(call: OpCall, x: Tensor, by: Tensor) -> Tensor:
    wide, left = x.dtype == torch.uint64, call.need("direction") == "LEFT"
    bits, turns = (one.view(torch.int64) if wide else one.to(torch.int64) for one in (x, by))
    moved = bits << turns if left else bits >> turns
    if wide and not left:
        moved = torch.where(turns > 0, moved & ~(torch.tensor(-1) << (64 - turns).clamp(max=63)), moved)
    return moved.view(torch.uint64) if wide else moved.to(x.dtype)


def _bit_cast(call: OpCall, x: Tensor) -> Tensor:
    number = call.need("to")
    if number in NARROW_BITS:
        raise call.fail("types narrower than 8 bits are not supported")
    dtype = dtype_of(number, str(call.node))
    if dtype.itemsize != x.dtype.itemsize:
        raise call.fail(f"{x.dtype} and {dtype} differ in size")
    return x.view(dtype)


def _is_inf(call: OpCall, x: Tensor) -> Tensor:
    up, down = call.get("detect_positive", 1), call.get("detect_negative", 1)
    wide = x.float() if x.itemsize == 1 else x
    return (torch.isposinf(wide) & bool(up)) | (torch.isneginf(wide) & bool(down))


def _flattened(call: OpCall, x: Tensor, compute: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply along an axis; before operator set 13, to all dimensions from the axis on as one."""
    if call.version >= 13:
        return compute(x, call.get("axis", -1))
    axis = call.get("axis", 1) % max(x.dim(), 1)
    flat = x.reshape(math.prod(x.shape[:axis]), -1)
    return compute(flat, 1).reshape(x.shape)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter_(axis, x.argmax(axis, keepdim=True), 1)


def _dropout(call: OpCall, x: Tensor, ratio: Any = None, training: Any = None) -> Any:
    """Dropout in the mode of the module, unless an input of the model sets it."""
    share = call.get("ratio", 0.5) if ratio is None else ratio[0]
    on = call.training if training is None or 2 in call.fixed else bool(training)
    if not on or share == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = torch.rand_like(x) >= share
    return x * mask / (1 - share), mask


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "Log": torch.log, "Neg": torch.neg,
    "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round,
    "Sigmoid": torch.sigmoid, "Sin": torch.sin, "Sinh": torch.sinh, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "Tanh": torch.tanh, "Softsign": functional.softsign, "Mish": functional.mish,
    "BitwiseNot": torch.bitwise_not,
    "Sign": lambda x: torch.where(torch.isnan(x), x, torch.sign(x)),
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt,
    "LessOrEqual": torch.le, "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor, "MatMul": torch.matmul,
}  # fmt: skip
"""Operators that are a function of their inputs."""


def _folded(by: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    return widened(lambda call, *parts: functools.reduce(by, parts))


Reduction = Callable[[Tensor, list[int], bool], Tensor]


def _reducing(reduce: Reduction) -> Operator:
    def run(call: OpCall, x: Tensor, axes: list[int] | None = None) -> Tensor:
        chosen = list(call.get("axes", axes) or ())
        if not chosen:
            if call.get("noop_with_empty_axes", 0):
                return reduce(x.unsqueeze(0), [0], False)  # each element is its own group
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
    """Return the reduction that gives `of_none`, or the nearest number, for empty inputs."""

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
        raise call.fail("frame length and step must be at least 1")
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
    **{name: widened(lambda call, *x, run=run: run(*x)) for name, run in _PLAIN.items()},
    "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum),
    "Sum": _folded(torch.add),
    "Softmax": lambda call, x: _flattened(call, x, functional.softmax),
    "LogSoftmax": lambda call, x: _flattened(call, x, functional.log_softmax),
    "Hardmax": lambda call, x: _flattened(call, x, _hardmax),
    "Identity": lambda call, x: x,
    "Equal": widened(_equal),
    "Div": widened(_div),
    "Mod": widened(lambda call, x, by: (torch.fmod if call.get("fmod", 0) else torch.remainder)(x, by)),
    "Pow": widened(lambda call, base, exponent: torch.pow(base, exponent).to(base.dtype)),
    "Mean": lambda call, *parts: functools.reduce(torch.add, parts) / len(parts),
    "Clip": widened(_clip),
    "PRelu": widened(lambda call, x, slope: torch.where(x < 0, x * slope, x)),
    "LeakyRelu": lambda call, x: functional.leaky_relu(x, call.get("alpha", 0.01)),
    "Elu": lambda call, x: functional.elu(x, call.get("alpha", 1.0)),
    "Celu": lambda call, x: functional.celu(x, call.get("alpha", 1.0)),
    "Selu": _selu,
    "HardSigmoid": lambda call, x: (x * call.get("alpha", 0.2) + call.get("beta", 0.5)).clamp(0, 1),
    "HardSwish": lambda call, x: x * torch.clamp(x / 6 + 0.5, 0, 1),
    "ThresholdedRelu": lambda call, x: torch.where(x > call.get("alpha", 1.0), x, torch.zeros_like(x)),
    "Shrink": widened(_shrink),
    "Gelu": lambda call, x: functional.gelu(x, approximate=call.get("approximate", "none")),
    "Swish": lambda call, x: x * torch.sigmoid(call.get("alpha", 1.0) * x),
    "SwiGLU": lambda call, x, gate: x * torch.sigmoid(call.get("alpha", 1.0) * x) * gate,
    "IsInf": _is_inf,
    "IsNaN": lambda call, x: torch.isnan(x.float() if x.itemsize == 1 else x),
    "Dropout": Operator(_dropout, numbers=(1,)),
    "Where": widened(lambda call, condition, one, other: torch.where(condition, one, other)),
    "BitShift": _shift,
    "BitCast": _bit_cast,
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
