"""`torchrelay ckpt export|import`: convert epochs to other formats, including ONNX, and back.

torch is imported only when a subcommand runs, so `--help` stays quick.
"""

from __future__ import annotations

import argparse
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.cli.arguments import Add, add_blobs, add_epoch, add_model_options

_OTHERS = {"blobs": None, "prefix": "", "dtype": None}


def add_onnx_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--to onnx`."""
    only = parser.add_argument_group("onnx")
    add_model_options(only)
    only.add_argument("--opset", metavar="N", type=int, help="ONNX opset version")


def export_onnx(chosen: argparse.Namespace, output: Output) -> int:
    """Write the ONNX file and report the largest difference between onnxruntime and torch."""
    from torchrelay.runners.artifacts.loaded_model import named, run_to_onnx, typed_inputs
    from torchrelay.runners.remote_runs.resolve import parse_selector

    for name, default in _OTHERS.items():
        if getattr(chosen, name) != default:
            raise UsageError(f"--{name} is not supported with --to onnx, which exports the whole model")
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


FORMATS = ("safetensors", "hf", "torch", "dcp")
ONNX = "onnx"
_NAMED = 5


def add_export(add: Add) -> None:
    """Define `export`."""
    parser = add("convert an epoch to another format, verifying it", export)
    add_epoch(parser)
    formats = (*FORMATS, ONNX)
    parser.add_argument(
        "--to", choices=formats, required=True, help="target format; hf and dcp write directories"
    )
    parser.add_argument(
        "-o", "--output", metavar="PATH", required=True, help="path or URL to write; must not exist"
    )
    add_blobs(parser)
    parser.add_argument(
        "--nodes", "--node", metavar="NODE", dest="nodes",
        help="node whose value to take where tensors differ between nodes, such as trainer_0",
    )  # fmt: skip
    parser.add_argument(
        "--prefix", metavar="TEXT", default="", help="prefix to strip from tensor names, such as model."
    )
    parser.add_argument(
        "--dtype", metavar="TYPE", help="convert floating-point tensors to this type, such as bfloat16"
    )
    parser.add_argument(
        "--shard-bytes", metavar="N", type=int, default=5_000_000_000, help="largest size of a file of hf"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing file (never a directory)"
    )
    add_onnx_options(parser)


def add_import(add: Add) -> None:
    """Define `import`."""
    parser = add("create a checkpoint directory from a file of another format", import_)
    parser.add_argument("path", metavar="PATH", help="file, directory or URL to read")
    parser.add_argument("--from", dest="format", choices=FORMATS, required=True, help="format of PATH")
    parser.add_argument(
        "-o", "--output", metavar="PREFIX", required=True, help="checkpoint directory to create"
    )
    names = parser.add_mutually_exclusive_group()
    names.add_argument("--blob", metavar="NAME", default="model", help="blob for top-level tensors")
    names.add_argument(
        "--split-names", action="store_true", help="use the first part of each name as its blob"
    )
    parser.add_argument(
        "--i-trust-this", action="store_true", help="unpickle DCP files, which can run arbitrary code"
    )


def export(chosen: argparse.Namespace, output: Output) -> int:
    """Write one epoch and report what was written and left out."""
    if chosen.to == ONNX:
        return export_onnx(chosen, output)
    _refuse_onnx_options(chosen)
    from torchrelay.checkpoint.files.interop import export_checkpoint
    from torchrelay.runners.remote_runs.resolve import parse_selector

    source = parse_selector(chosen.path)
    with output.works():
        done = export_checkpoint(
            source.path, chosen.output, source.epoch, to=chosen.to, blobs=chosen.blobs, prefix=chosen.prefix,
            dtype=_dtype(chosen.dtype), shard_bytes=chosen.shard_bytes, overwrite=chosen.overwrite,
            nodes=chosen.nodes,
        )  # fmt: skip
    if output.json:
        output.value(
            {
                "path": str(done.path),
                "tensors": done.tensors,
                "values": done.values,
                "bytes": done.bytes,
                "left_out": list(done.left_out),
                "nodes": dict(done.nodes),
            }
        )
        return 0
    output.line(f"{done.tensors} tensors ({human_bytes(done.bytes)}), {done.values} values in {done.path}")
    if done.nodes:
        more = ", ..." if len(done.nodes) > _NAMED else ""
        output.notice(
            f"of {chosen.nodes}: {', '.join(list(done.nodes)[:_NAMED])}{more} ({len(done.nodes)} in all), "
            "which differ between nodes"
        )
    if done.left_out:
        more = ", ..." if len(done.left_out) > _NAMED else ""
        output.notice(f"left out: {', '.join(done.left_out[:_NAMED])}{more} ({len(done.left_out)} in all)")
    return 0


def _refuse_onnx_options(chosen: argparse.Namespace) -> None:
    for name in ("model", "input", "blob", "opset"):
        if getattr(chosen, name) is not None:
            raise UsageError(f"--{name} needs --to {ONNX}")


def import_(chosen: argparse.Namespace, output: Output) -> int:
    """Create the checkpoint directory and report its contents."""
    from torchrelay.checkpoint.files.interop import import_checkpoint

    blob = None if chosen.split_names else chosen.blob
    with output.works():
        done = import_checkpoint(
            chosen.path, chosen.output, format=chosen.format, blob=blob, trust=chosen.i_trust_this
        )
    if output.json:
        output.value(
            {"path": str(done.path), "tensors": done.tensors, "values": done.values, "bytes": done.bytes}
        )
    else:
        size = human_bytes(done.bytes)
        output.line(f"{done.tensors} tensors ({size}), {done.values} values: epoch 0 of {done.path}")
    return 0


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"invalid --dtype {name}: expected a torch type such as bfloat16 or float32")
    return found
