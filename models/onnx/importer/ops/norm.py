"""Normalization layers, losses, optimizer steps, and operators of classical machine learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.models.onnx.importer.operator import OpCall
from torchrelay.models.onnx.importer.tensors import dtype_of


def _batch_norm(call: OpCall, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Any:
    """Batch normalization in the mode of the module; training updates running statistics as in torch.

    Statistics outputs follow ONNX: population variance, and momentum applied to the old value.
    """
    eps, momentum = call.get("epsilon", 1e-5), call.get("momentum", 0.9)
    if not call.training:
        found = functional.batch_norm(
            x, mean.to(x.dtype), variance.to(x.dtype), scale.to(x.dtype), bias.to(x.dtype), False, 0.0, eps
        )
        return (found, mean, variance, mean, variance)[: max(call.outputs, 1)]
    own = {3, 4} <= call.own
    if call.outputs == 1:
        held = (mean, variance) if own else (mean.clone(), variance.clone())
        share = round(1 - momentum, 6)  # the value before it was stored as float32
        return functional.batch_norm(x, *held, scale, bias, True, share, eps)
    axes = [at for at in range(x.dim()) if at != 1]
    now, spread = x.mean(axes), x.var(axes, correction=0)
    moved = mean * momentum + now.to(mean.dtype) * (1 - momentum)
    widened = variance * momentum + spread.to(variance.dtype) * (1 - momentum)
    if own:
        with torch.no_grad():
            mean.copy_(moved)
            variance.copy_(widened)
    found = functional.batch_norm(x, None, None, scale.to(x.dtype), bias.to(x.dtype), True, 0.0, eps)
    return (found, moved, widened, now, spread)[: call.outputs]


def _layer_norm(call: OpCall, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    axis, eps = call.get("axis", -1) % x.dim(), call.get("epsilon", 1e-5)
    shape = tuple(x.shape[axis:])
    if call.outputs == 1 and tuple(scale.shape) == shape and (bias is None or tuple(bias.shape) == shape):
        return functional.layer_norm(x, shape, scale, bias, eps)
    axes = list(range(axis, x.dim()))
    wide = x.to(dtype_of(call.get("stash_type", 1), str(call.node)))
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt(wide.var(axes, correction=0, keepdim=True) + eps)
    found = ((wide - mean) * inverse).to(x.dtype) * scale
    return (found if bias is None else found + bias, mean, inverse)


def _rms_norm(call: OpCall, x: Tensor, scale: Tensor) -> Tensor:
    axis, eps = call.get("axis", -1) % x.dim(), call.get("epsilon", 1e-5)
    wide = x.to(dtype_of(call.get("stash_type", 1), str(call.node)))
    size = torch.rsqrt(wide.pow(2).mean(list(range(axis, x.dim())), keepdim=True) + eps)
    return (wide * size).to(x.dtype) * scale


def _group_norm(call: OpCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups, eps = call.need("num_groups"), call.get("epsilon", 1e-5)
    if call.version >= 21 or scale.shape[0] == x.shape[1] != groups:
        return functional.group_norm(x, groups, scale, bias, eps)
    each = x.shape[1] // groups  # older versions have a scale per group
    return functional.group_norm(x, groups, scale.repeat_interleave(each), bias.repeat_interleave(each), eps)


def _lrn(call: OpCall, x: Tensor) -> Tensor:
    size = call.need("size")
    low = (size - 1) // 2
    squares = functional.pad(x * x, [0, 0] * (x.dim() - 2) + [low, size - 1 - low])
    total = squares.unfold(1, size, 1).sum(-1)
    bias, alpha, beta = call.get("bias", 1.0), call.get("alpha", 1e-4), call.get("beta", 0.75)
    divisor: Tensor = (bias + alpha / size * total) ** beta
    return x / divisor


def _lp_norm(call: OpCall, x: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x, call.get("p", 2), call.get("axis", -1), keepdim=True)
    return torch.where(
        size == 0, torch.zeros_like(x), x / torch.where(size == 0, torch.ones_like(size), size)
    )


def _likelihood(call: OpCall, logs: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    ignored = call.get("ignore_index")
    places = target.to(torch.int64)
    out = torch.zeros_like(places, dtype=torch.bool) if ignored is None else places == ignored
    safe = torch.where(out, torch.zeros_like(places), places)
    each = -logs.gather(1, safe.unsqueeze(1)).squeeze(1)
    share = torch.ones_like(each) if weight is None else weight[safe].to(each.dtype)
    share = torch.where(out, torch.zeros_like(share), share)
    loss = torch.where(out, torch.zeros_like(each), each * share)
    match call.get("reduction", "mean"):
        case "none":
            return loss
        case "sum":
            return loss.sum()
    return loss.sum() / share.sum()


Step = Callable[..., tuple[Tensor, ...]]


def _grouped(step: Step, states: int) -> Callable[..., Any]:
    def run(call: OpCall, rate: Tensor, count: Tensor, *tensors: Tensor) -> Any:
        each = len(tensors) // (2 + states)
        rows = [step(call, rate, count, *tensors[at::each]) for at in range(each)]
        return tuple(row[place] for place in range(1 + states) for row in rows)

    return run


def _adagrad(call: OpCall, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, squares: Tensor) -> Any:
    now = rate / (1 + count * call.get("decay_factor", 0.0))
    gradient = gradient + call.get("norm_coefficient", 0.0) * x
    squares = squares + gradient * gradient
    return x - now * gradient / (squares.sqrt() + call.get("epsilon", 1e-6)), squares


def _adam(
    call: OpCall, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, mean: Tensor, squares: Tensor
) -> Any:
    a, b = call.get("alpha", 0.9), call.get("beta", 0.999)
    gradient = gradient + call.get("norm_coefficient", 0.0) * x
    mean, squares = a * mean + (1 - a) * gradient, b * squares + (1 - b) * gradient * gradient
    times = count.to(torch.float64)
    corrected = rate * torch.sqrt(1 - b**times) / (1 - a**times) if int(count) > 0 else rate
    x = x - corrected.to(x.dtype) * mean / (squares.sqrt() + call.get("epsilon", 1e-6))
    return (1 - call.get("norm_coefficient_post", 0.0)) * x, mean, squares


def _momentum(call: OpCall, rate: Tensor, count: Tensor, x: Tensor, gradient: Tensor, speed: Tensor) -> Any:
    a = call.need("alpha")
    gradient = gradient + call.need("norm_coefficient") * x
    speed = a * speed + (call.need("beta") if int(count) > 0 else 1.0) * gradient
    step = gradient + a * speed if call.need("mode") == "nesterov" else speed
    return x - rate * step, speed


def _mean_variance(call: OpCall, x: Tensor) -> Tensor:
    axes = list(call.get("axes", (0, 2, 3)))
    mean = x.mean(axes, keepdim=True)
    return (x - mean) / (torch.sqrt((x * x).mean(axes, keepdim=True) - mean * mean) + 1e-9)


def _cross_entropy(call: OpCall, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Any:
    logs = functional.log_softmax(scores, 1)
    return _likelihood(call, logs, labels, weights), logs


def _extract(call: OpCall, x: Tensor, places: Tensor) -> Tensor:
    found = x.index_select(-1, places.reshape(-1))
    return found.reshape(1, -1) if x.dim() == 1 else found


OPERATORS: dict[str, Any] = {
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "InstanceNormalization": lambda call, x, scale, bias: functional.instance_norm(
        x, None, None, scale, bias, True, 0.0, call.get("epsilon", 1e-5)
    ),
    "GroupNormalization": _group_norm,
    "LRN": _lrn,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "NegativeLogLikelihoodLoss": _likelihood,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
}
TRAINING_OPERATORS: dict[str, Any] = {
    "Adagrad": _grouped(_adagrad, 1),
    "Adam": _grouped(_adam, 2),
    "Momentum": _grouped(_momentum, 1),
}
ML_OPERATORS: dict[str, Any] = {
    "ArrayFeatureExtractor": _extract,
    "Binarizer": lambda call, x: (x > call.get("threshold", 0.0)).to(x.dtype),
}
