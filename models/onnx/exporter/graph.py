"""Example inputs with names and dynamic sizes, and the export of a copied module to an ONNX graph.

Parameters and buffers keep their names and values; nothing computed from them is folded into constants. The
model itself is only read and does not change, even after an error. This needs memory for a second model.
"""

from __future__ import annotations

import copy
import inspect
import linecache
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree as pytree

from torchrelay.checkpoint.state.names import innermost
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import onnx_ir as ir

    Value = ir.Value
    Model = ir.Model


def name_of_path(path: Sequence[Any], head: str = "") -> str:
    """Return a name with keys after dots and positions after underscores: `batch.x`, `output_1`."""
    name = head
    for key in path:
        if isinstance(key, pytree.SequenceKey):
            name = f"{name or 'output'}_{key.idx}"
            continue
        part = str(key.key if isinstance(key, pytree.MappingKey) else getattr(key, "name", key))
        name = f"{name}.{part}" if name else part
    return name


def leaf_names(names: Sequence[str]) -> list[str]:
    """Return these names, made unique with numbers."""
    taken: Counter[str] = Counter()
    found = []
    for name in names:
        wanted, number = name, taken[name]
        while wanted in found:
            number += 1
            wanted = f"{name}_{number}"
        taken[name] = number
        found.append(wanted)
    return found


BATCH = "batch"
Sizes = Mapping[int, str]
Dynamic = bool | Mapping[str, Sizes]


@dataclass(frozen=True)
class Example:
    """A call of `forward` with `args` and `kwargs` on the CPU.

    `names` and `sizes` (the named dimensions) are those of the tensors, in order.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    sizes: tuple[Sizes, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the inputs, in the order of `names`."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def extents(self) -> dict[str, int]:
        """Return the values of the named sizes; raises UsageError if a name has two values."""
        found: dict[str, int] = {}
        for name, tensor, sizes in zip(self.names, self.tensors, self.sizes, strict=True):
            for dim, size in sizes.items():
                if found.setdefault(size, tensor.shape[dim]) != tensor.shape[dim]:
                    raise UsageError(
                        f"the size {size!r} is {found[size]} and, as dimension {dim} of {name!r}, "
                        f"{tensor.shape[dim]}: a name must have one size; give dynamic= for {name!r}"
                    )
        return found

    def resized(self, wanted: Mapping[str, int]) -> Example:
        """Resize the named sizes: rows are dropped, or repeated from the beginning."""
        sizes = iter(self.sizes)

        def one(tensor: torch.Tensor) -> torch.Tensor:
            for dim, size in next(sizes).items():
                tensor = tensor.index_select(dim, torch.arange(wanted[size]) % tensor.shape[dim])
            return tensor

        args, kwargs = pytree.tree_map_only(torch.Tensor, one, (self.args, self.kwargs))
        return Example(args, kwargs, self.names, self.sizes)

    def shapes(self, dims: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return torch.export's description of every leaf: named dimensions, None for other values."""
        sizes = iter(self.sizes)

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return None
            return {dim: dims[size] for dim, size in next(sizes).items()}

        args, kwargs = pytree.tree_map(one, (self.args, self.kwargs))
        return args, kwargs


def example_of(model: torch.nn.Module, inputs: Any, names: Sequence[str] | None, dynamic: Dynamic) -> Example:
    """Convert a tensor, a sequence of arguments, or a mapping of them by name; UsageError."""
    # Positional and named arguments, in the order of `forward`.
    by_name = dict(inputs) if isinstance(inputs, Mapping) else {}
    given = () if by_name else tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*given, **by_name)
    except TypeError as error:
        raise UsageError(
            f"inputs do not fit {type(model).__name__}.forward{signature}: {error}; give a tensor, a "
            "sequence of arguments, or a mapping of them by name (a dict as an argument: in a tuple)"
        ) from None
    args, kwargs = pytree.tree_map_only(torch.Tensor, _on_cpu, (bound.args, bound.kwargs))
    leaves = pytree.tree_flatten_with_path((args, kwargs))[0]
    found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not found:
        raise UsageError("inputs contain no tensor: give example inputs of forward")
    own = leaf_names([_name(model, args, kwargs, path) for path, _ in found])
    chosen = chosen_names("input_names", names, own)
    tensors = dict(zip(chosen, (leaf for _, leaf in found), strict=True))
    return Example(args, kwargs, chosen, _sizes(tensors, dynamic))


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise UsageError("an input is on the meta device and has no values: give examples with values")
    return tensor.detach().to("cpu", copy=True)


def _name(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], path: Any) -> str:
    """Return the name of a tensor: the parameter and the path in it; only keys for a single dict."""
    which, first, *rest = path
    head = str(first.key) if which.idx == 1 else _parameter(model, first.idx)
    if rest and len(args) + len(kwargs) == 1 and isinstance((*args, *kwargs.values())[0], Mapping):
        return name_of_path(rest)
    return name_of_path(rest, head)


def _parameter(model: torch.nn.Module, index: int) -> str:
    parameters = list(inspect.signature(model.forward).parameters.values())
    for at, one in enumerate(parameters):
        if one.kind is one.VAR_POSITIONAL:
            return f"{one.name}_{index - at}"
        if at == index:
            return one.name
    return f"input_{index}"


def chosen_names(option: str, given: Sequence[str] | None, own: Sequence[str]) -> tuple[str, ...]:
    """Return the names that the user chose, by default their own ones; UsageError for another number."""
    if given is None:
        return tuple(own)
    if isinstance(given, str) or len(given) != len(own) or len(set(given)) != len(given):
        raise UsageError(
            f"{option}={given!r}: give {len(own)} different names, one for each of {', '.join(own)}"
        )
    return tuple(given)


def _sizes(tensors: Mapping[str, torch.Tensor], dynamic: Dynamic) -> tuple[Sizes, ...]:
    """Return the named dimensions of every tensor; equal first dimensions are the batch."""
    given = {} if isinstance(dynamic, bool) else dict(dynamic)
    for name in given:
        if name not in tensors:
            raise UsageError(f"dynamic has the unknown input {name!r}; known are {', '.join(tensors)}")
    shapes = [tensor.shape for tensor in tensors.values() if tensor.ndim]
    batch = shapes[0][0] if shapes and dynamic is not False else None
    found = []
    for name, tensor in tensors.items():
        default = {0: BATCH} if tensor.ndim and tensor.shape[0] == batch else {}
        sizes = dict(given.get(name, default))
        for dim, size in sizes.items():
            if type(dim) is not int or not 0 <= dim < tensor.ndim:
                said = f"dynamic={{{name!r}: {{{dim!r}: ...}}}}"
                raise UsageError(f"{said}: {name!r} has {tensor.ndim} dimensions")
            if not isinstance(size, str) or not size.isidentifier():
                raise UsageError(
                    f"invalid size name {size!r} of {name!r} in dynamic: expected one like 'batch'"
                )
            if not tensor.shape[dim]:
                raise UsageError(f"dimension {dim} of the example {name!r} is empty: give at least one row")
        found.append(sizes)
    return tuple(found)


_DATA_DEPENDENT = "forward has control flow that depends on tensor values: use torch.where or torch.cond"
_CONVERTED = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_CONSTANT = re.compile(r"You marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)")
_LONGEST = 300


def _refusal(error: Exception, model: str) -> UsageError:
    """Return the error for the user; raise it from torch's error, which has the details."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    place = next((found for one in causes if (found := _place(one))), "")
    return UsageError(f"{model} cannot be exported to ONNX{place}: {_why(causes)}")


def _why(causes: list[BaseException]) -> str:
    texts = [str(one) for one in causes]
    if any("DataDependent" in type(one).__name__ or "data-dependent" in str(one) for one in causes):
        return _DATA_DEPENDENT
    for text in texts:
        if found := _CONSTANT.search(text):
            return (
                f"its size {found[1]!r} is fixed to {found[2]} by a number in forward: take it from a shape"
            )
        if found := _CONVERTED.search(text):
            return f"the operator {found[1]} has no equivalent in ONNX: replace it in forward"
    first = next(filter(None, map(str.strip, texts[-1].splitlines())), "unknown reason")
    shown = first if len(first) <= _LONGEST else f"{first[:_LONGEST]} ..."
    return f"{type(causes[-1]).__name__}: {shown}"


def _place(error: BaseException) -> str:
    """Return the location in the user's code: ` because of model.py:30 (if x.sum() > 0:)`."""
    import torchrelay

    packages = [Path(module.__file__ or "").parent for module in (torch, torchrelay)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        ours = path.parent == Path(__file__).parent or any(map(path.is_relative_to, packages))
        library = "site-packages" in path.parts or "contextlib" in path.name
        if path.is_file() and not (ours or library):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            shown = f" ({line[:80]})" if line else ""
            return f" because of {path.name}:{frame.lineno}{shown}"
    return ""


def graph_of(model: torch.nn.Module, example: Example, opset: int | None) -> tuple[Model, Mapping[str, str]]:
    """Export a module, which may change; returns also the symbols of its sizes by name. UsageError."""
    extents = example.extents()
    grown = example.resized({size: max(extent, 2) for size, extent in extents.items()})
    dims = {size: torch.export.Dim(size, min=1) for size in extents}
    shapes: Any
    shapes, named_shapes = grown.shapes(dims)
    if named_shapes:  # torch.export's form is by position, or all by parameter name
        parameters = inspect.signature(model.forward).parameters
        shapes = {**dict(zip(parameters, shapes, strict=False)), **named_shapes}
    try:
        program = torch.export.export(model, grown.args, grown.kwargs, dynamic_shapes=shapes, strict=False)
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
        # Names of initializers that are parameters and buffers, by `id` of the value.
        tensors = {**dict(program.named_buffers()), **program.state_dict}
        places = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor.numel()}
        states = {}
        for value in graph.graph.initializers.values():
            raw = getattr(value.const_value, "raw", None)
            if isinstance(raw, torch.Tensor) and (name := places.get(raw.data_ptr())) is not None:
                states[id(value)] = (value, name)
        _simplify(graph, states)
        for value, name in states.values():  # torch renames a state if an input has its name
            if value.name != name and value.is_initializer():
                value.name = name
    except UsageError:
        raise
    except Exception as error:
        raise _refusal(error, type(model).__name__) from error
    symbols = {}  # the exporter's, to the names of sizes
    for value, sizes in zip(graph.graph.inputs, grown.sizes, strict=True):
        for dim, size in sizes.items():
            symbol = None if value.shape is None else value.shape[dim]
            if symbol is not None and not isinstance(symbol, int):
                symbols[str(symbol.value)] = size
    return graph, symbols


def named(graph: Model, inputs: Sequence[str], outputs: Sequence[str], symbols: Mapping[str, str]) -> Model:
    """Rename inputs, outputs and sizes in place; raises UsageError if names collide."""
    import onnx_ir as ir

    def size(dim: Any) -> int | str | None:
        if isinstance(dim, int) or dim.value is None:
            return dim if isinstance(dim, int) else None
        return re.sub(r"\w+", lambda word: symbols.get(word[0], word[0]), str(dim.value))

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
    mine = {id(value) for value in wanted.values()}
    for value in _values(graph):
        if value.name in wanted and id(value) not in mine:
            value.name = f"{value.name}.inner"
    for number, value in enumerate(wanted.values()):
        value.name = f"torchrelay.{number}"
    for name, value in wanted.items():
        value.name = name
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([size(dim) for dim in value.shape])
    return graph


def _simplify(graph: Model, states: Mapping[int, Any]) -> None:
    """Fold constants and remove unused nodes; onnxscript's `optimize` would also merge equal states."""
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


def _values(graph: Model) -> list[Value]:
    nodes = [one for node in graph.graph.all_nodes() for one in node.outputs]
    return [*graph.graph.inputs, *graph.graph.initializers.values(), *nodes]


def own_copy(model: nn.Module) -> nn.Module:
    """Copy the module without torch's wrappers; raises UsageError if it cannot be copied."""
    bare = bare_module(model)
    for name, tensor in [*bare.named_parameters(), *bare.named_buffers()]:
        if hasattr(tensor, "full_tensor"):
            raise UsageError(
                f"{name} is sharded over ranks (DTensor): export a plain model that has loaded "
                "ctx.full_state_dict(module), or use OnnxExport(build=...)"
            )
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) or tensor.is_meta:
            raise UsageError(f"{name} has no values yet (lazy or meta): call the model once")
    # Also other tensors of modules, such as computed weights.
    others = [one for part in bare.modules() for one in vars(part).values() if isinstance(one, torch.Tensor)]
    known: dict[int, Any] = {}
    for tensor in (*bare.parameters(), *bare.buffers(), *others):
        values = tensor.detach().to("cpu", copy=True)
        parameter = isinstance(tensor, nn.Parameter)
        known[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if parameter else values
    try:
        copied = copy.deepcopy(bare, known)
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
