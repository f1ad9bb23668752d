"""Operators that go element by element: arithmetic, also of unsigned integers, comparison, bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.models.onnx.importer.operator import OpCall, Operator
from torchrelay.models.onnx.importer.tensors import NARROW_BITS, dtype_of

WIDE = (torch.uint16, torch.uint32, torch.uint64)


def widened(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for wide unsigned inputs too; results of integers come back in the inputs' type.

    Values of uint64 above 2**63 - 1 are refused, as they would be taken for negative ones.
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
        raise call.fail("numbers above 2**63 - 1 cannot be computed with here")
    return signed


def _back(one: Any, dtype: torch.dtype) -> Any:
    return one.to(dtype) if isinstance(one, torch.Tensor) and one.dtype == torch.int64 else one


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return widened(lambda call, x: function(x))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return widened(lambda call, one, other: function(one, other))


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return widened(lambda call, *parts: functools.reduce(function, parts))


def _div(call: OpCall, one: Tensor, other: Tensor) -> Tensor:
    if one.is_floating_point() or one.is_complex():
        return one / other
    return torch.div(one, other, rounding_mode="trunc")


def _equal(call: OpCall, one: Any, other: Any) -> Tensor:
    if isinstance(one, Tensor):
        return torch.eq(one, other)
    return torch.from_numpy(one == other)  # texts, which come as arrays of numpy


def _mod(call: OpCall, one: Tensor, other: Tensor) -> Tensor:
    return torch.fmod(one, other) if call.get("fmod", 0) else torch.remainder(one, other)


def _pow(call: OpCall, base: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(base, exponent).to(base.dtype)


def _mean(call: OpCall, *parts: Tensor) -> Tensor:
    return functools.reduce(torch.add, parts) / len(parts)


def _clip(call: OpCall, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    low, high = call.get("min", low), call.get("max", high)
    for bound, keep in ((low, torch.maximum), (high, torch.minimum)):
        if bound is not None:
            x = keep(x, torch.as_tensor(bound, dtype=x.dtype, device=x.device))
    return x


def _prelu(call: OpCall, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _leaky_relu(call: OpCall, x: Tensor) -> Tensor:
    return functional.leaky_relu(x, call.get("alpha", 0.01))


def _elu(call: OpCall, x: Tensor) -> Tensor:
    return functional.elu(x, call.get("alpha", 1.0))


def _celu(call: OpCall, x: Tensor) -> Tensor:
    return functional.celu(x, call.get("alpha", 1.0))


def _selu(call: OpCall, x: Tensor) -> Tensor:
    alpha, gamma = call.get("alpha", 1.6732632423543772), call.get("gamma", 1.0507009873554805)
    found: Tensor = gamma * torch.where(x > 0, x, alpha * torch.expm1(torch.minimum(x, torch.zeros_like(x))))
    return found


def _hard_sigmoid(call: OpCall, x: Tensor) -> Tensor:
    return torch.clamp(x * call.get("alpha", 0.2) + call.get("beta", 0.5), 0, 1)


def _hard_swish(call: OpCall, x: Tensor) -> Tensor:
    return x * torch.clamp(x / 6 + 0.5, 0, 1)


def _thresholded_relu(call: OpCall, x: Tensor) -> Tensor:
    return torch.where(x > call.get("alpha", 1.0), x, torch.zeros_like(x))


def _shrink(call: OpCall, x: Tensor) -> Tensor:
    lambd, bias = call.get("lambd", 0.5), call.get("bias", 0.0)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0)).to(x.dtype)


def _gelu(call: OpCall, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=call.get("approximate", "none"))


def _swish(call: OpCall, x: Tensor) -> Tensor:
    return x * torch.sigmoid(call.get("alpha", 1.0) * x)


def _swiglu(call: OpCall, x: Tensor, gate: Tensor | None = None) -> Tensor:
    if gate is None:
        raise call.fail("the second input is missing")
    return x * torch.sigmoid(call.get("alpha", 1.0) * x) * gate


def _is_inf(call: OpCall, x: Tensor) -> Tensor:
    up, down = call.get("detect_positive", 1), call.get("detect_negative", 1)
    wide = x.float() if x.itemsize == 1 else x
    return (torch.isposinf(wide) & bool(up)) | (torch.isneginf(wide) & bool(down))


def _is_nan(call: OpCall, x: Tensor) -> Tensor:
    return torch.isnan(x.float() if x.itemsize == 1 else x)


def _sign(x: Tensor) -> Tensor:
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


def _flattened(call: OpCall, x: Tensor, compute: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Along an axis; before operator set 13 everything from the axis on was one dimension."""
    if call.version >= 13:
        return compute(x, call.get("axis", -1))
    axis = call.get("axis", 1) % max(x.dim(), 1)
    flat = x.reshape(math.prod(x.shape[:axis]), -1)
    return compute(flat, 1).reshape(x.shape)


def _softmax(call: OpCall, x: Tensor) -> Tensor:
    return _flattened(call, x, functional.softmax)


def _log_softmax(call: OpCall, x: Tensor) -> Tensor:
    return _flattened(call, x, functional.log_softmax)


def _hardmax(call: OpCall, x: Tensor) -> Tensor:
    def first(one: Tensor, axis: int) -> Tensor:
        return torch.zeros_like(one).scatter_(axis, one.argmax(axis, keepdim=True), 1)

    return _flattened(call, x, first)


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _dropout(call: OpCall, x: Tensor, ratio: Any = None, training: Any = None) -> Any:
    """Follows the mode of the module; an input of the model that says otherwise is obeyed."""
    share = call.get("ratio", 0.5) if ratio is None else ratio[0]
    on = call.training if training is None or 2 in call.fixed else bool(training)
    if not on or share == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = torch.rand_like(x) >= share
    return x * mask / (1 - share), mask


def _where(call: OpCall, condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(condition, one, other)


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "Log": torch.log, "Neg": torch.neg,
    "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round,
    "Sigmoid": torch.sigmoid, "Sign": _sign, "Sin": torch.sin, "Sinh": torch.sinh, "Sqrt": torch.sqrt,
    "Tan": torch.tan, "Tanh": torch.tanh, "Softplus": _softplus, "Softsign": functional.softsign,
    "Mish": functional.mish,
    "Identity": lambda x: x,
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "Greater": torch.gt, "GreaterOrEqual": torch.ge,
    "Less": torch.lt, "LessOrEqual": torch.le,
}  # fmt: skip
_FOLDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add,
}  # fmt: skip

OPERATORS: dict[str, Any] = {
    **{name: _unary(function) for name, function in _UNARY.items() if name != "Identity"},
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{name: _folded(function) for name, function in _FOLDED.items()},
    "Identity": lambda call, x: x,
    "Equal": widened(_equal),
    "Div": widened(_div),
    "Mod": widened(_mod),
    "Pow": widened(_pow),
    "Mean": _mean,
    "Clip": widened(_clip),
    "PRelu": widened(_prelu),
    "LeakyRelu": _leaky_relu,
    "Elu": _elu,
    "Celu": _celu,
    "Selu": _selu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "ThresholdedRelu": _thresholded_relu,
    "Shrink": widened(_shrink),
    "Gelu": _gelu,
    "Swish": _swish,
    "SwiGLU": _swiglu,
    "IsInf": _is_inf,
    "IsNaN": _is_nan,
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "Hardmax": _hardmax,
    "Dropout": Operator(_dropout, numbers=(1,)),
    "Where": widened(_where),
}


def _shift(call: OpCall, x: Tensor, by: Tensor) -> Tensor:
    return x << by if call.need("direction") == "LEFT" else x >> by


def _shift_wide(call: OpCall, x: Tensor, by: Tensor) -> Tensor:
    wide = x.dtype == torch.uint64
    bits = x.view(torch.int64) if wide else x.to(torch.int64)
    turns = by.view(torch.int64) if wide else by.to(torch.int64)
    moved = _shift(call, bits, turns)
    if wide and call.need("direction") != "LEFT":
        moved = torch.where(turns > 0, moved & ~(torch.tensor(-1) << (64 - turns).clamp(max=63)), moved)
    return moved.view(torch.uint64) if wide else moved.to(x.dtype)


def _bit_cast(call: OpCall, x: Tensor) -> Tensor:
    number = call.need("to")
    if number in NARROW_BITS:
        raise call.fail("bits of numbers narrower than 8 bits are not packed here")
    dtype = dtype_of(number, str(call.node))
    if dtype.itemsize != x.dtype.itemsize:
        raise call.fail(f"{x.dtype} and {dtype} differ in size")
    return x.view(dtype)


BIT_OPERATORS: dict[str, Any] = {
    "BitShift": _shift_wide,
    "BitwiseAnd": widened(lambda call, one, other: one & other),
    "BitwiseOr": widened(lambda call, one, other: one | other),
    "BitwiseXor": widened(lambda call, one, other: one ^ other),
    "BitwiseNot": widened(lambda call, x: ~x),
    "BitCast": _bit_cast,
}
