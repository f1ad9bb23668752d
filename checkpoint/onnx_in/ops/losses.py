"""Losses over classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.checkpoint.onnx_in.call import Call


def _likelihood(call: Call, logs: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
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


def _cross_entropy(call: Call, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Any:
    logs = functional.log_softmax(scores, 1)
    return _likelihood(call, logs, labels, weights), logs


OPERATORS: dict[str, Any] = {
    "NegativeLogLikelihoodLoss": _likelihood,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
}
