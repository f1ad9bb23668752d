"""Export a copy of a module to an ONNX graph with torch, with errors in one line.

Parameters and buffers keep their names and values; nothing computed from them is folded into constants. The
model itself is only read and does not change, even after an error. This needs memory for a second model.
"""

from __future__ import annotations

import copy
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchrelay.checkpoint.state.names import innermost
from torchrelay.errors import UsageError
from torchrelay.models.onnx.exporter.inputs import Example

_DATA_DEPENDENT = "forward has control flow that depends on tensor values: use torch.where or torch.cond"
_CONVERTED = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_CONSTANT = re.compile(r"You marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)")
_LONGEST = 300


def refusal(error: Exception, model: str) -> UsageError:
    """Return the error for the user; raise it from torch's error, which has the details."""
    causes = _chain(error)
    place = next((found for one in causes if (found := _place(one))), "")
    return UsageError(f"{model} cannot be exported to ONNX{place}: {_why(causes)}")


def _why(causes: list[BaseException]) -> str:
    texts = [str(one) for one in causes]
    if any("DataDependent" in type(one).__name__ or "data-dependent" in str(one) for one in causes):
        return _DATA_DEPENDENT
    for text in texts:
        if found := _CONSTANT.search(text):
            return (
                f"its size {found[1]!r} is fixed to {found[2]} by a number in forward: take it from a "
                f"shape, or leave it fixed with dynamic="
            )
        if found := _CONVERTED.search(text):
            return f"the operator {found[1]} has no equivalent in ONNX: replace it in forward"
    return f"{type(causes[-1]).__name__}: {_line(texts[-1])}"


def _chain(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def _line(text: str) -> str:
    """Return the first line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "unknown reason"
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]} ..."


def _place(error: BaseException) -> str:
    """Return the location in the user's code: ` because of model.py:30 (if x.sum() > 0:)`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            shown = f" ({line[:80]})" if line else ""
            return f" because of {Path(frame.filename).name}:{frame.lineno}{shown}"
    return ""


def _is_users(file: str) -> bool:
    import torchrelay

    packages = [Path(torch.__file__).parent, Path(torchrelay.__file__).parent, Path(__file__).parents[2]]
    path = Path(file)
    ours = any(path.is_relative_to(one) for one in packages[:2]) or path.parent == Path(__file__).parent
    return path.is_file() and not ours and "site-packages" not in path.parts and "contextlib" not in path.name


if TYPE_CHECKING:
    import onnx_ir as ir

    Value = ir.Value
    Model = ir.Model


def graph_of(model: torch.nn.Module, example: Example, opset: int | None) -> tuple[Model, Mapping[str, str]]:
    """Export a module, which may change it; also returns the symbols of its sizes by name.

    Raises UsageError with one line if torch cannot export it.
    """
    extents = example.extents()
    grown = example.resized({size: max(extent, 2) for size, extent in extents.items()})
    dims = {size: torch.export.Dim(size, min=1) for size in extents}
    args, kwargs = grown.shapes(dims)
    try:
        program = torch.export.export(
            model, grown.args, grown.kwargs, dynamic_shapes=_by_parameter(model, args, kwargs), strict=False
        )
        made = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=opset, verbose=False)
        if made is None:
            raise RuntimeError("the exporter returned nothing")
        graph = made.model
        written = graph.opset_imports[""]
        if opset is not None and written != opset:  # it silently uses a supported version
            raise UsageError(
                f"opset={opset}: torch {torch.__version__} writes this model in operator set {written} "
                "instead; choose another one"
            )
        states = _states(graph, program)
        _simplify(graph, states)
        for value, name in states.values():  # torch renames a state if an input has its name
            if value.name != name and value.is_initializer():
                value.name = name
    except UsageError:
        raise
    except Exception as error:
        raise refusal(error, type(model).__name__) from error
    return graph, _symbols(graph, grown)


def check_apart(inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Raise UsageError if an input and an output have the same name."""
    if both := sorted(set(inputs) & set(outputs)):
        raise UsageError(
            f"{', '.join(both)}: an input and an output share a name; give input_names= or output_names="
        )


def named(graph: Model, inputs: Sequence[str], outputs: Sequence[str], symbols: Mapping[str, str]) -> Model:
    """Rename inputs, outputs and sizes in place; raises UsageError if names collide."""
    import onnx_ir as ir

    for index, value in enumerate(list(graph.graph.outputs)):
        before = graph.graph.outputs[:index]
        if value.is_graph_input() or value.is_initializer() or any(value is one for one in before):
            node = ir.Node("", "Identity", [value], name=f"output_{index}_is")
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            graph.graph.append(node)
            graph.graph.outputs[index] = node.outputs[0]
    wanted = dict(zip([*inputs, *outputs], [*graph.graph.inputs, *graph.graph.outputs], strict=True))
    for name in sorted(wanted.keys() & graph.graph.initializers.keys()):
        raise UsageError(
            f"{name!r} is an input or output and also a parameter or buffer: give input_names= or "
            "output_names="
        )
    _rename(graph, wanted)
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([_size(dim, symbols) for dim in value.shape])
    return graph


def without_unused(graph: Model) -> None:
    """Remove unused inputs in place."""
    for value in [one for one in graph.graph.inputs if not one.uses()]:
        graph.graph.inputs.remove(value)


def _by_parameter(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Convert specifications to torch.export's form: by position, or all by parameter name."""
    if not kwargs:
        return args
    import inspect

    names = list(inspect.signature(model.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _states(graph: Model, program: torch.export.ExportedProgram) -> dict[int, tuple[Value, str]]:
    """Return the names of initializers that are parameters and buffers, by `id` of the value."""
    tensors = {**dict(program.named_buffers()), **program.state_dict}
    places = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor.numel()}
    found = {}
    for value in graph.graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor) and (name := places.get(raw.data_ptr())) is not None:
            found[id(value)] = (value, name)
    return found


def _simplify(graph: Model, states: Mapping[int, Any]) -> None:
    """Fold constants and remove unused nodes.

    onnxscript's `optimize` would also merge states with equal values.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    def folds(node: Any) -> bool | None:
        return False if any(id(one) in states for one in node.inputs) else None

    optimizer.inline(graph)
    for _ in range(2):
        optimizer.fold_constants(graph, onnx_shape_inference=True, should_fold=folds)
        optimizer.remove_unused_nodes(graph)
    common.CommonSubexpressionEliminationPass()(graph)
    common.RemoveUnusedOpsetsPass()(graph)


def _symbols(graph: Model, example: Example) -> dict[str, str]:
    """Map the exporter's symbols to the names of sizes."""
    found = {}
    for value, sizes in zip(graph.graph.inputs, example.sizes, strict=True):
        for dim, size in sizes.items():
            symbol = None if value.shape is None else value.shape[dim]
            if symbol is not None and not isinstance(symbol, int):
                found[str(symbol.value)] = size
    return found


def _size(dim: Any, symbols: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return re.sub(r"\w+", lambda word: symbols.get(word[0], word[0]), str(dim.value))


def _rename(graph: Model, wanted: Mapping[str, Value]) -> None:
    """Rename values; others with one of these names get a new name."""
    mine = {id(value) for value in wanted.values()}
    for value in _values(graph):
        if value.name in wanted and id(value) not in mine:
            value.name = f"{value.name}.inner"
    for number, value in enumerate(wanted.values()):
        value.name = f"torchrelay.{number}"
    for name, value in wanted.items():
        value.name = name


def _values(graph: Model) -> list[Value]:
    nodes = [one for node in graph.graph.all_nodes() for one in node.outputs]
    return [*graph.graph.inputs, *graph.graph.initializers.values(), *nodes]


def own_copy(model: nn.Module) -> nn.Module:
    """Copy the module without torch's wrappers; raises UsageError if it cannot be copied."""
    bare = bare_module(model)
    _check_whole(bare)
    known = {id(tensor): _copied(tensor) for tensor in _tensors(bare)}
    try:
        copied = copy.deepcopy(bare, dict[int, Any](known))
    except Exception as error:
        raise UsageError(
            f"{type(bare).__name__} cannot be copied for the export ({error}): "
            "give a model that supports copy.deepcopy"
        ) from error
    return copied.eval()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Context manager that restores changed or replaced buffers."""
    before = [(module, name, buffer, buffer if buffer is None else buffer.clone())
              for module in model.modules() for name, buffer in module._buffers.items()]  # fmt: skip
    try:
        yield
    finally:
        for module, name, buffer, values in before:
            module._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)


def bare_module(model: Any) -> nn.Module:
    """Return the module inside torch's wrappers; raises UsageError for anything else."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{model!r:.80} is not a torch.nn.Module: give the model itself")
    return innermost(model)


def _check_whole(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if hasattr(tensor, "full_tensor"):
            raise UsageError(
                f"{name} is sharded over ranks (DTensor): export a plain model that has loaded "
                "ctx.full_state_dict(module), or use OnnxExport(build=...)"
            )
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) or tensor.is_meta:
            raise UsageError(f"{name} has no values yet (lazy or meta): call the model once, or load it")


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and other tensors of modules, such as computed weights."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (one for one in vars(module).values() if isinstance(one, torch.Tensor))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
