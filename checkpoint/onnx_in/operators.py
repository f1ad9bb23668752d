"""All operators that can be run, by domain and name: the tables of the families in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torchrelay.checkpoint.onnx_in.ops.operator import Operator

PREVIEW, TRAINING, ML = "ai.onnx.preview", "ai.onnx.preview.training", "ai.onnx.ml"


@cache
def operators() -> Mapping[tuple[str, str], Operator]:
    """(domain, name) -> what runs it."""
    found: dict[tuple[str, str], Operator] = {}
    for domain, tables in _families().items():
        for table in tables:
            for name, run in table.items():
                found[domain, name] = run if isinstance(run, Operator) else Operator(run)
    return found


def supported(domain: str, name: str) -> bool:
    """Whether this operator can be imported."""
    return (domain, name) in operators() or (domain, name) == ("", "Constant")


def _families() -> dict[str, tuple[Mapping[str, Operator | Callable[..., Any]], ...]]:
    # Imported when the first model is read, because together they are not small.
    from torchrelay.checkpoint.onnx_in.ops import (
        attention,
        bits,
        casting,
        control,
        convolution,
        features,
        indexing,
        linear_attention,
        losses,
        making,
        matrix,
        normalization,
        pointwise,
        pooling,
        quantization,
        recurrent,
        reduction,
        resizing,
        sampling,
        selecting,
        sequences,
        shaping,
        signal,
        training,
    )

    main = (
        attention, bits, casting, control, convolution, indexing, linear_attention, losses, making, matrix,
        normalization, pointwise, pooling, quantization, recurrent, reduction, resizing, sampling, selecting,
        sequences, shaping, signal,
    )  # fmt: skip
    return {
        "": tuple(family.OPERATORS for family in main),
        PREVIEW: (attention.PREVIEW_OPERATORS,),
        TRAINING: (training.OPERATORS,),
        ML: (features.OPERATORS,),
    }
