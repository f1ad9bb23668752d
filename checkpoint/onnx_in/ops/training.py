"""Steps of optimizers as operators; all tensors of a call come in groups, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call

Step = Callable[..., tuple[Tensor, ...]]


def _grouped(step: Step, states: int) -> Callable[..., Any]:
    def run(call: Call, rate: Tensor, count: Tensor, *tensors: Tensor) -> Any:
        each = len(tensors) // (2 + states)
        rows = [step(call, rate, count, *tensors[at::each]) for at in range(each)]
        return tuple(row[place] for place in range(1 + states) for row in rows)

    return run


def _adagrad(call: Call, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, squares: Tensor) -> Any:
    now = rate / (1 + count * call.get("decay_factor", 0.0))
    gradient = gradient + call.get("norm_coefficient", 0.0) * x
    squares = squares + gradient * gradient
    return x - now * gradient / (squares.sqrt() + call.get("epsilon", 1e-6)), squares


def _adam(
    call: Call, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, mean: Tensor, squares: Tensor
) -> Any:
    a, b = call.get("alpha", 0.9), call.get("beta", 0.999)
    gradient = gradient + call.get("norm_coefficient", 0.0) * x
    mean, squares = a * mean + (1 - a) * gradient, b * squares + (1 - b) * gradient * gradient
    times = count.to(torch.float64)
    corrected = rate * torch.sqrt(1 - b**times) / (1 - a**times) if int(count) > 0 else rate
    x = x - corrected.to(x.dtype) * mean / (squares.sqrt() + call.get("epsilon", 1e-6))
    return (1 - call.get("norm_coefficient_post", 0.0)) * x, mean, squares


def _momentum(call: Call, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, speed: Tensor) -> Any:
    a = call.need("alpha")
    gradient = gradient + call.need("norm_coefficient") * x
    speed = a * speed + (call.need("beta") if int(count) > 0 else 1.0) * gradient
    step = gradient + a * speed if call.need("mode") == "nesterov" else speed
    return x - rate * step, speed


OPERATORS: dict[str, Any] = {
    "Adagrad": _grouped(_adagrad, 1),
    "Adam": _grouped(_adam, 2),
    "Momentum": _grouped(_momentum, 1),
}
