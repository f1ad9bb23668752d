"""Attention as a recurrence over a state of fixed size, and the convolution that goes before it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.checkpoint.onnx_in.call import Call


def _unpacked(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads * size) as (batch, heads, length, size) in float32."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2).float()


def _linear_attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, past: Tensor | None = None, decay: Tensor | None = None,
    beta: Tensor | None = None,
) -> Any:  # fmt: skip
    heads, inner = call.need("q_num_heads"), call.need("kv_num_heads")
    rule = call.get("update_rule", "gated_delta")
    gated, delta = rule in ("gated", "gated_delta"), rule in ("delta", "gated_delta")
    if gated != (decay is not None) or delta != (beta is not None):
        raise call.fail(f"the rule {rule!r} takes decay and beta where it needs them, and nowhere else")
    queries, keys, values = _unpacked(q, heads), _unpacked(k, inner), _unpacked(v, inner)
    scale = call.get("scale", 0.0) or 1 / math.sqrt(queries.shape[-1])
    state = (
        queries.new_zeros(q.shape[0], inner, keys.shape[-1], values.shape[-1])
        if past is None
        else past.float()
    )
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
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None
) -> Any:
    length = weight.shape[2] - 1
    before = x.new_zeros(x.shape[0], x.shape[1], length) if past is None else past
    wide = torch.cat([before, x], 2)
    found = functional.conv1d(wide, weight, bias, groups=x.shape[1])
    found = functional.silu(found) if call.get("activation", "none") in ("silu", "swish") else found
    return found, wide[:, :, wide.shape[2] - length :]


OPERATORS: dict[str, Any] = {"LinearAttention": _linear_attention, "CausalConvWithState": _causal_conv}
