"""`torchrelay ckpt export|import`: convert epochs to other formats, including ONNX, and back.

torch is imported only when a subcommand runs, so `--help` stays quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.runners.monitoring.console import Output, arg, either, flag, verb
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.cli.arguments import BLOBS, MODEL_OPTIONS, run_epoch

_OTHERS = {"blobs": None, "prefix": "", "dtype": None}


def _onnx_options(parser: argparse.ArgumentParser) -> None:
    only = parser.add_argument_group("onnx")
    for one in (*MODEL_OPTIONS, arg("--opset", "ONNX opset version", "N", type=int)):
        one(only)


def export_onnx(chosen: argparse.Namespace, output: Output) -> int:
    """Write the ONNX file and report the largest difference between onnxruntime and torch."""
    from torchrelay.runners.artifacts.rebuild import named, run_to_onnx, typed_inputs
    from torchrelay.runners.remote_runs.resolve import parse_selector

    for name, default in _OTHERS.items():
        if getattr(chosen, name) != default:
            raise UsageError(f"--{name} is not supported with --to onnx, which exports the whole model")
    source = parse_selector(chosen.path)
    model = None if chosen.model is None else named(chosen.model, "--model")
    tensors, named_sizes = typed_inputs(chosen.input or ())
    dynamic: Any = named_sizes if chosen.input else True
    done = run_to_onnx(
        source.path, chosen.output, source.epoch, model=model, blob=chosen.blob,
        inputs=tensors or None, dynamic=dynamic, opset=chosen.opset, overwrite=chosen.overwrite,
    )  # fmt: skip
    takes, gives = (
        ", ".join(f"{one.name} {one.dtype}[{', '.join(map(str, one.shape))}]" for one in side)
        for side in (done.signature.inputs, done.signature.outputs)
    )
    found = {
        "path": done.path, "bytes": done.bytes, "opset": done.opset,
        "signature": done.signature.to_json(), "compared": [dict(one) for one in done.compared],
        "difference": done.difference,
    }  # fmt: skip
    written = f"{takes} -> {gives}: {done.path} ({human_bytes(done.bytes)}, opset {done.opset})"
    output.result(found, [written, f"onnxruntime and torch differ by at most {done.difference:.3g}"])
    return 0


FORMATS = ("safetensors", "hf", "torch", "dcp")
ONNX = "onnx"
_NAMED = 5


@verb(
    "convert an epoch to another format, verifying it",
    run_epoch(),
    arg("--to", "target format; hf and dcp write directories", choices=(*FORMATS, ONNX), required=True),
    arg("-o --output", "path or URL to write; must not exist", "PATH", required=True),
    BLOBS,
    arg(
        "--nodes --node",
        "node whose value to take where tensors differ between nodes, such as trainer_0",
        "NODE",
        dest="nodes",
    ),
    arg("--prefix", "prefix to strip from tensor names, such as model.", "TEXT", default=""),
    arg("--dtype", "convert floating-point tensors to this type, such as bfloat16", "TYPE"),
    arg("--shard-bytes", "largest size of a file of hf", "N", type=int, default=5_000_000_000),
    flag("--overwrite", "replace an existing file (never a directory)"),
    _onnx_options,
)
def export(chosen: argparse.Namespace, output: Output) -> int:
    """Write one epoch and report what was written and left out."""
    if chosen.to == ONNX:
        return export_onnx(chosen, output)
    for name in ("model", "input", "blob", "opset"):
        if getattr(chosen, name) is not None:
            raise UsageError(f"--{name} needs --to {ONNX}")
    from torchrelay.checkpoint.files.interop import export_checkpoint
    from torchrelay.runners.remote_runs.resolve import parse_selector

    source = parse_selector(chosen.path)
    with output.works():
        done = export_checkpoint(
            source.path, chosen.output, source.epoch, to=chosen.to, blobs=chosen.blobs, prefix=chosen.prefix,
            dtype=_dtype(chosen.dtype), shard_bytes=chosen.shard_bytes, overwrite=chosen.overwrite,
            nodes=chosen.nodes,
        )  # fmt: skip
    found = {
        **_counts(done),
        "left_out": list(done.left_out),
        "nodes": dict(done.nodes),
    }
    output.result(found, f"{_size(done)}, {done.values} values in {done.path}")
    if done.nodes and not output.json:
        output.notice(f"of {chosen.nodes}: {_some(list(done.nodes))}, which differ between nodes")
    if done.left_out and not output.json:
        output.notice(f"left out: {_some(done.left_out)}")
    return 0


def _counts(done: Any) -> dict[str, Any]:
    return {"path": str(done.path), "tensors": done.tensors, "values": done.values, "bytes": done.bytes}


def _size(done: Any) -> str:
    return f"{done.tensors} tensors ({human_bytes(done.bytes)})"


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} ({len(names)} in all)"


@verb(
    "create a checkpoint directory from a file of another format",
    arg("path", "file, directory or URL to read", "PATH"),
    arg("--from", "format of PATH", dest="format", choices=FORMATS, required=True),
    arg("-o --output", "checkpoint directory to create", "PREFIX", required=True),
    either(
        arg("--blob", "blob for top-level tensors", "NAME", default="model"),
        flag("--split-names", "use the first part of each name as its blob"),
    ),
    flag("--i-trust-this", "unpickle DCP files, which can run arbitrary code"),
)
def import_(chosen: argparse.Namespace, output: Output) -> int:
    """Create the checkpoint directory and report its contents."""
    from torchrelay.checkpoint.files.interop import import_checkpoint

    blob = None if chosen.split_names else chosen.blob
    with output.works():
        done = import_checkpoint(
            chosen.path, chosen.output, format=chosen.format, blob=blob, trust=chosen.i_trust_this
        )
    output.result(_counts(done), f"{_size(done)}, {done.values} values: epoch 0 of {done.path}")
    return 0


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"invalid --dtype {name}: expected a torch type such as bfloat16 or float32")
    return found
