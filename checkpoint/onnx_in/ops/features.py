"""The few operators of classical learning that are plain arithmetic."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrelay.checkpoint.onnx_in.call import Call


def _extract(call: Call, x: Tensor, places: Tensor) -> Tensor:
    found = x.index_select(-1, places.reshape(-1))
    return found.reshape(1, -1) if x.dim() == 1 else found


def _binarize(call: Call, x: Tensor) -> Tensor:
    above: Tensor = x > call.get("threshold", 0.0)
    return above.to(x.dtype)


OPERATORS: dict[str, Any] = {"ArrayFeatureExtractor": _extract, "Binarizer": _binarize}
