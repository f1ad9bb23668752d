"""`torchrelay export --to onnx`: the model of an epoch as an ONNX file."""

from __future__ import annotations

import argparse
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.runners.commands.command_line_arguments import add_model_options
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.monitoring.text import human_bytes

_OTHERS = {"blobs": None, "prefix": "", "dtype": None}


def add_onnx_options(parser: argparse.ArgumentParser) -> None:
    """Define what only `--to onnx` takes."""
    only = parser.add_argument_group("onnx")
    add_model_options(only)
    only.add_argument("--opset", metavar="N", type=int, help="the version of ONNX's operators")


def export_onnx(chosen: argparse.Namespace, output: Output) -> int:
    """Write the file and say how far onnxruntime and torch are apart."""
    from torchrelay.runners.artifacts.loaded_model import named, typed_inputs
    from torchrelay.runners.artifacts.run_to_onnx import run_to_onnx
    from torchrelay.runners.remote_runs.resolve import parse_selector

    for name, default in _OTHERS.items():
        if getattr(chosen, name) != default:
            raise UsageError(f"--{name} is for exports of tensors; an ONNX file has the whole model")
    source = parse_selector(chosen.path)
    model = None if chosen.model is None else named(chosen.model, "--model")
    given = typed_inputs(chosen.input or ())
    dynamic: Any = given.dynamic if chosen.input else True
    done = run_to_onnx(
        source.path, chosen.output, source.epoch, model=model, blob=chosen.blob,
        inputs=given.tensors or None, dynamic=dynamic, opset=chosen.opset, overwrite=chosen.overwrite,
    )  # fmt: skip
    if output.json:
        output.value(
            {
                "path": done.path,
                "bytes": done.bytes,
                "opset": done.opset,
                "signature": done.signature.to_json(),
                "compared": [dict(one) for one in done.compared],
                "difference": done.difference,
            }
        )
        return 0
    takes, gives = (
        ", ".join(f"{one.name} {one.dtype}[{', '.join(map(str, one.shape))}]" for one in side)
        for side in (done.signature.inputs, done.signature.outputs)
    )
    output.line(f"{takes} -> {gives}: {done.path} ({human_bytes(done.bytes)}, opset {done.opset})")
    output.line(f"onnxruntime and torch differ by at most {done.difference:.3g}")
    return 0
