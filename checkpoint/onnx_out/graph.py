"""From a module to an ONNX graph: torch's exporter, then the names that people know.

Parameters and buffers keep the names that they have in the module, and their values: nothing that is
computed of them is folded into constants, so that the file holds the states themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchrelay.checkpoint.onnx_out.example import Example
from torchrelay.checkpoint.onnx_out.refusals import refusal
from torchrelay.errors import UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

    Value = ir.Value
    Model = ir.Model


def graph_of(model: torch.nn.Module, example: Example, opset: int | None) -> tuple[Model, Mapping[str, str]]:
    """Export a module that may be changed by it; the symbols of its sizes by the names that they have here.

    Raises UsageError, one line, for whatever torch cannot export.
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
            raise RuntimeError("the exporter made nothing")
        graph = made.model
        _check_operator_set(graph, opset)
        states = _states(graph, program)
        _simplify(graph, states)
        _name_states(states)
    except UsageError:
        raise
    except Exception as error:
        raise refusal(error, type(model).__name__) from error
    return graph, _symbols(graph, grown)


def _check_operator_set(graph: Model, opset: int | None) -> None:
    """Torch's exporter goes on with a version that it knows where it cannot write the wanted one."""
    made = graph.opset_imports[""]
    if opset is not None and made != opset:
        raise UsageError(
            f"opset={opset}: torch {torch.__version__} writes this model in operator set {made} instead; "
            "give another (--opset), or leave it out"
        )


def check_apart(inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Raise UsageError where an input and an output have one name."""
    if both := sorted(set(inputs) & set(outputs)):
        raise UsageError(
            f"{', '.join(both)}: an input and an output of one name; give input_names= or output_names="
        )


def named(graph: Model, inputs: Sequence[str], outputs: Sequence[str], symbols: Mapping[str, str]) -> Model:
    """Give inputs, outputs and sizes their names, in place; raises UsageError where names collide."""
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
    """Take inputs out, in place, that no node reads."""
    for value in [one for one in graph.graph.inputs if not one.uses()]:
        graph.graph.inputs.remove(value)


def _by_parameter(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`torch.export` takes specifications by position, or all of them by the name of the parameter."""
    if not kwargs:
        return args
    import inspect

    names = list(inspect.signature(model.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _states(graph: Model, program: torch.export.ExportedProgram) -> dict[int, tuple[Value, str]]:
    """The initializers that are parameters and buffers, with their names there; by `id` of the value."""
    tensors = {**dict(program.named_buffers()), **program.state_dict}
    places = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor.numel()}
    found = {}
    for value in graph.graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor) and (name := places.get(raw.data_ptr())) is not None:
            found[id(value)] = (value, name)
    return found


def _simplify(graph: Model, states: Mapping[int, Any]) -> None:
    """Compute what follows from constants alone and drop what nobody uses.

    onnxscript's own `optimize` would also make one initializer of two states that have equal values.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(graph)
    for _ in range(2):
        optimizer.fold_constants(
            graph, onnx_shape_inference=True, should_fold=lambda node: _folds(node, states)
        )
        optimizer.remove_unused_nodes(graph)
    common.CommonSubexpressionEliminationPass()(graph)
    common.RemoveUnusedOpsetsPass()(graph)


def _folds(node: Any, states: Mapping[int, Any]) -> bool | None:
    return False if any(id(one) in states for one in node.inputs) else None


def _name_states(states: Mapping[int, tuple[Value, str]]) -> None:
    """The exporter gives a state another name where an input has that; inputs are named later."""
    for value, name in states.values():
        if value.name != name and value.is_initializer():
            value.name = name


def _symbols(graph: Model, example: Example) -> dict[str, str]:
    """What the exporter calls the sizes that have names."""
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
    """Name values; others that have one of these names get another one."""
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
