"""Small models as ONNX files, made without torch's exporter."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def random(*shape: int, seed: int = 0) -> Any:
    """Numbers around 0 in float32."""
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def model(
    nodes: list[Any],
    initializers: dict[str, Any],
    inputs: dict[str, list[Any]],
    outputs: list[str],
    opset: int = 20,
    **more: Any,
) -> Any:
    """A ModelProto; inputs are float32 with the shapes given."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [
            one if isinstance(one, TensorProto) else numpy_helper.from_array(np.asarray(one), name)
            for name, one in initializers.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, **more)


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """An operator; names are words, and - stands for one that is left out."""
    names = (["" if one == "-" else one for one in side.split()] for side in (inputs, outputs))
    return helper.make_node(kind, *names, name=f"{kind}_{outputs.split(maxsplit=1)[0]}", **attributes)


def mlp(opset: int = 20) -> Any:
    """X (batch, 4) -> Gemm, Relu, Gemm -> y (batch, 2)."""
    return model(
        [
            node("Gemm", "x body.0.weight body.0.bias", "hidden", transB=1),
            node("Relu", "hidden", "active"),
            node("Gemm", "active head/weight head/bias", "y", transB=1),
        ],
        {
            "body.0.weight": random(8, 4),
            "body.0.bias": random(8),
            "head/weight": random(2, 8),
            "head/bias": random(2),
        },
        {"x": ["batch", 4]},
        ["y"],
        opset,
    )


def normed() -> Any:
    """Convolution, batch normalization, dropout, and a loop over a constant."""
    return model(
        [
            node("Conv", "x conv.weight conv.bias", "c", pads=[1, 1, 1, 1]),
            node("BatchNormalization", "c bn.weight bn.bias bn.mean bn.var", "n", momentum=0.9),
            node("Dropout", "n ratio", "d"),
            node("GlobalAveragePool", "d", "p"),
            node("Reshape", "p shape", "y"),
        ],
        {
            "conv.weight": random(3, 1, 3, 3),
            "conv.bias": random(3),
            "bn.weight": np.ones(3, np.float32),
            "bn.bias": np.zeros(3, np.float32),
            "bn.mean": np.zeros(3, np.float32),
            "bn.var": np.ones(3, np.float32),
            "ratio": np.float32(0.5),
            "shape": np.array([0, -1]),
        },
        {"x": ["batch", 1, 4, 4]},
        ["y"],
    )


def saved(proto: Any, path: Any) -> Any:
    """The path, with the model written to it."""
    onnx.save(proto, str(path))
    return path
