"""Normalization, attention, matrix products, losses, optimizer steps, and classical machine learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.models.onnx.importer.executor import OpCall
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


def _heads(call: OpCall, x: Tensor, heads: str) -> Tensor:
    """Convert to (batch, heads, length, size), also packed heads."""
    if x.dim() == 4:
        return x
    return x.reshape(x.shape[0], x.shape[1], call.need(heads), -1).transpose(1, 2)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _attention(
    call: OpCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, past_key: Tensor | None = None,
    past_value: Tensor | None = None, valid: Tensor | None = None,
) -> Any:  # fmt: skip
    packed = q.dim() == 3
    q = _heads(call, q, "q_num_heads")
    k, v = (_heads(call, one, "kv_num_heads") for one in (k, v))
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    scale = call.get("scale", 0.0) or 1 / math.sqrt(q.shape[-1])
    root = math.sqrt(scale)
    keys, values = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    raw = torch.matmul(q * root, (keys * root).transpose(-1, -2))
    cap = call.get("softcap", 0.0)
    capped = cap * torch.tanh(raw / cap) if cap else raw
    bias = _bias(call, capped, mask, valid, past)
    biased = capped if bias is None else capped + bias
    precision = call.get("softmax_precision", 0)
    wide = biased.to(dtype_of(precision, str(call.node))) if precision else biased
    alone = torch.isneginf(wide).all(-1, keepdim=True)  # a row without attention gives 0
    found = torch.softmax(torch.where(alone, torch.zeros_like(wide), wide), -1)
    weights = torch.where(alone, torch.zeros_like(found), found).to(biased.dtype)
    y = torch.matmul(weights.to(values.dtype), values)
    y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1) if packed else y
    seen = (raw, capped, biased, weights)[call.get("qk_matmul_output_mode", 0)]
    return (y, k, v, seen)[: max(call.outputs, 1)]


def _bias(
    call: OpCall, scores: Tensor, mask: Tensor | None, valid: Tensor | None, past: int
) -> Tensor | None:
    """Return the bias of the scores, with minus infinity for masked keys; None if there is none."""
    rows, columns = scores.shape[-2:]
    total: Tensor | None = None
    if mask is not None:
        missing = columns - mask.shape[-1]
        total = _closed(~mask, scores.dtype) if mask.dtype == torch.bool else mask.to(scores.dtype)
        total = functional.pad(total, [0, missing], value=-math.inf) if missing else total
    hidden = _hidden(call, rows, columns, past, valid, scores.device)
    if hidden is None:
        return total
    closed = _closed(hidden, scores.dtype)
    return closed if total is None else total + closed


def _closed(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -math.inf)


def _hidden(
    call: OpCall, rows: Any, columns: Any, past: int, valid: Tensor | None, device: torch.device
) -> Tensor | None:
    left, right = call.get("left_window_size", -1), call.get("right_window_size", -1)
    causal = call.get("is_causal", 0)
    keys = torch.arange(columns, device=device)
    found = None if valid is None else (keys >= valid[:, None])[:, None, None]
    if not causal and left < 0 and right < 0:
        return found
    ahead = past if valid is None else (valid - rows)[:, None, None, None]
    places = torch.arange(rows, device=device)[:, None] + ahead
    rules = [keys > places] if causal else []
    rules += [keys < places - left] if left >= 0 else []
    rules += [keys > places + right] if right >= 0 else []
    for rule in rules:
        found = rule if found is None else found | rule
    return found


def _flex(call: OpCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = call.get("scale", 0.0) or 1 / math.sqrt(q.shape[-1])
    default = 11 if q.dtype == torch.float64 else 1
    wide = dtype_of(call.get("softmax_precision", default) or default, str(call.node))
    keys, values = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    scores = torch.matmul(q.to(wide), keys.to(wide).transpose(-1, -2)) * scale
    scores = _modified(call, "score_mod", scores)
    probabilities = _modified(call, "prob_mod", torch.softmax(scores, -1))
    return torch.matmul(probabilities, values.to(wide)).to(q.dtype)


def _modified(call: OpCall, name: str, x: Tensor) -> Tensor:
    if not call.has(name):
        return x
    graph = call.graph(name)
    found: Tensor = call.enter(graph, {graph.inputs[0]: x})[0]
    return found


def _rotary(call: OpCall, x: Tensor, cos: Tensor, sin: Tensor, places: Tensor | None = None) -> Tensor:
    """Rotary positions (Su and others, 2021)."""
    four = x if x.dim() == 4 else _heads(call, x, "num_heads")
    four = four.transpose(1, 2)  # batch, length, heads, size
    turned = call.get("rotary_embedding_dim", 0) or four.shape[-1]
    head, rest = four[..., :turned], four[..., turned:]
    if places is not None:
        cos, sin = cos[places], sin[places]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if call.get("interleaved", 0):
        one, other = head[..., 0::2], head[..., 1::2]
    else:
        one, other = head.chunk(2, -1)
    parts = (cos * one - sin * other, sin * one + cos * other)
    head = torch.stack(parts, -1).flatten(-2) if call.get("interleaved", 0) else torch.cat(parts, -1)
    found = torch.cat([head, rest], -1)
    return found.transpose(1, 2) if x.dim() == 4 else found.reshape(x.shape)


def _unpacked(x: Tensor, heads: int) -> Tensor:
    """Convert (batch, length, heads * size) to (batch, heads, length, size) in float32."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2).float()


def _linear_attention(
    call: OpCall, q: Tensor, k: Tensor, v: Tensor, past: Tensor | None = None, decay: Tensor | None = None,
    beta: Tensor | None = None,
) -> Any:  # fmt: skip
    heads, inner = call.need("q_num_heads"), call.need("kv_num_heads")
    rule = call.get("update_rule", "gated_delta")
    gated, delta = rule in ("gated", "gated_delta"), rule in ("delta", "gated_delta")
    if gated != (decay is not None) or delta != (beta is not None):
        raise call.fail(f"the inputs decay and beta do not fit the rule {rule!r}")
    queries, keys, values = _unpacked(q, heads), _unpacked(k, inner), _unpacked(v, inner)
    scale = call.get("scale", 0.0) or 1 / math.sqrt(queries.shape[-1])
    empty = queries.new_zeros(q.shape[0], inner, keys.shape[-1], values.shape[-1])
    state = empty if past is None else past.float()
    fading = None if decay is None else _unpacked(decay, inner).exp()
    rates = None if beta is None else beta.float().transpose(1, 2).unsqueeze(-1)
    outs = []
    for at in range(q.shape[1]):
        key, value = keys[:, :, at], values[:, :, at]
        state = state if fading is None else state * fading[:, :, at].unsqueeze(-1)
        if rates is not None:
            value = rates[:, :, at] * (value - torch.einsum("bhdm,bhd->bhm", state, key))
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        seen = state.repeat_interleave(heads // inner, 1)
        outs.append(scale * torch.einsum("bhd,bhdm->bhm", queries[:, :, at], seen))
    found = torch.stack(outs, 1).flatten(2).to(q.dtype)
    return found, state.to(q.dtype if past is None else past.dtype)


def _causal_conv(
    call: OpCall, x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None
) -> Any:
    length = weight.shape[2] - 1
    before = x.new_zeros(x.shape[0], x.shape[1], length) if past is None else past
    wide = torch.cat([before, x], 2)
    found = functional.conv1d(wide, weight, bias, groups=x.shape[1])
    found = functional.silu(found) if call.get("activation", "none") in ("silu", "swish") else found
    return found, wide[:, :, wide.shape[2] - length :]


def _gemm(call: OpCall, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.t() if call.get("transA", 0) else a
    b = b.t() if call.get("transB", 0) else b
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if c is not None and c.dim() == 1 and alpha == beta == 1 and a.is_floating_point():
        return functional.linear(a, b.t(), c) if c.shape[0] == b.shape[1] else a @ b + c
    product = a @ b
    product = product if alpha == 1 else (product * alpha).to(a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else (c * beta).to(a.dtype))


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
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    "LinearAttention": _linear_attention,
    "CausalConvWithState": _causal_conv,
    "Gemm": _gemm,
    "Einsum": lambda call, *parts: torch.einsum(call.need("equation"), *parts),
    "Det": lambda call, x: torch.linalg.det(x),
}
OF_DOMAINS: dict[tuple[str, str], Any] = {
    ("ai.onnx.preview.training", "Adagrad"): _grouped(_adagrad, 1),
    ("ai.onnx.preview.training", "Adam"): _grouped(_adam, 2),
    ("ai.onnx.preview.training", "Momentum"): _grouped(_momentum, 1),
    ("ai.onnx.preview", "FlexAttention"): _flex,
    ("ai.onnx.ml", "ArrayFeatureExtractor"): _extract,
    ("ai.onnx.ml", "Binarizer"): lambda call, x: (x > call.get("threshold", 0.0)).to(x.dtype),
}
"""Operators of other domains than ONNX's main one."""
