"""From a model and example inputs to a program: what `torch.export` traced, rewritten as data."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from torchrelay.checkpoint.package import arguments
from torchrelay.checkpoint.package.operators import name_of
from torchrelay.checkpoint.package.program import CONSTANT, STATE, Argument, Program, Step
from torchrelay.checkpoint.package.trees import tree_of
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.signature import Signature, Size, TensorSpec

BATCH = "batch"
Dynamic = Mapping[str, Mapping[int, str]]
"""Names of sizes that may differ, by input and dimension: {"tokens": {0: "batch", 1: "length"}}."""


@dataclass(frozen=True)
class Exported:
    """A program, what it takes and gives, and the constants that it computes with beside the states."""

    program: Program
    json: Any
    signature: Signature
    constants: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """How `forward` is called: example arguments, each under its name, and the tensors among them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: tuple[Argument, ...]
    leaves: tuple[tuple[str, torch.Tensor], ...]


def call_of(model: nn.Module, inputs: Any) -> Call:
    """The call that `inputs` mean: a tensor, a tuple of positional arguments, or a dict by name.

    Raises UsageError where `forward` does not take them.
    """
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{type(model).__name__}.forward does not take these inputs: {error}") from None
    found: list[Argument] = []
    leaves: list[tuple[str, torch.Tensor]] = []
    for name, value, positional in _by_name(bound, len(args)):
        tree, own = tree_of(value, lambda one: isinstance(one, torch.Tensor), name)
        found.append(Argument(name, _shifted(tree, len(leaves)), positional))
        leaves.extend(own)
    return Call(args, kwargs, tuple(found), tuple(leaves))


def _by_name(bound: inspect.BoundArguments, positional: int) -> Iterator[tuple[str, Any, bool]]:
    at = 0
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            for number, item in enumerate(value):
                yield f"{name}_{number}", item, True
                at += 1
        elif kind is inspect.Parameter.VAR_KEYWORD:
            for key, item in value.items():
                yield key, item, False
        else:
            yield name, value, at < positional
            at += 1


def _shifted(tree: Any, by: int) -> Any:
    match tree:
        case {"leaf": at}:
            return {"leaf": at + by}
        case {"dict": pairs}:
            return {"dict": [[key, _shifted(item, by)] for key, item in pairs]}
        case {"list": items}:
            return {"list": [_shifted(item, by) for item in items]}
        case {"tuple": items}:
            return {"tuple": [_shifted(item, by) for item in items]}
    return tree


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; afterwards every part is in the mode that it was in."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def export(model: nn.Module, inputs: Any, dynamic: Dynamic | None = None) -> Exported:
    """Trace the model in eval mode. The first size of inputs may differ unless `dynamic` says otherwise.

    Raises UsageError for inputs that do not fit, BlobError for a model of which no program can be made;
    the message says why.
    """
    call = call_of(model, inputs)
    names = dynamic_names(call, dynamic)
    try:
        with evaluating(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = _traced(model, call, names, default=dynamic is None)
    except (UsageError, BlobError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BlobError(f"torch.export cannot trace {type(model).__name__}: {first[:300]}") from error
    return _rewritten(traced, call, names)


def dynamic_names(call: Call, dynamic: Dynamic | None) -> dict[str, dict[int, str]]:
    """The names of sizes that may differ, by tensor. By default the first, of all inputs that share it."""
    known = {name for name, _ in call.leaves}
    if dynamic is not None:
        if strange := sorted(set(dynamic) - known):
            raise UsageError(f"there is no input {strange[0]!r}; there are {', '.join(sorted(known))}")
        return {name: dict(sizes) for name, sizes in dynamic.items()}
    firsts = [(name, tensor.shape[0]) for name, tensor in call.leaves if tensor.dim()]
    return {name: {0: BATCH} for name, size in firsts if size == firsts[0][1]}


def _traced(
    model: nn.Module, call: Call, names: Mapping[str, Mapping[int, str]], *, default: bool
) -> torch.export.ExportedProgram:
    """With the named sizes as one each; where the model fixes them and nobody asked, as it can be."""
    dims = {text: torch.export.Dim(text) for sizes in names.values() for text in sizes.values()}
    grown = _grown(call, names)

    def attempt(size_of: Mapping[str, Any]) -> torch.export.ExportedProgram:
        wanted = {name: {at: size_of[text] for at, text in sizes.items()} for name, sizes in names.items()}
        shapes = _like(call, wanted, model)
        return torch.export.export(model, grown.args, dict(grown.kwargs), dynamic_shapes=shapes)

    try:
        return attempt(dims)
    except Exception:
        if not default:
            raise
    return attempt(dict.fromkeys(dims, torch.export.Dim.AUTO))


def _grown(call: Call, names: Mapping[str, Mapping[int, str]]) -> Call:
    """The call with every named size at least 2, because torch takes a size of 1 for a fixed one."""

    def grown(name: str, tensor: torch.Tensor) -> torch.Tensor:
        for at in names.get(name, {}):
            if tensor.shape[at] == 1:
                tensor = torch.cat([tensor, tensor], at)
        return tensor

    tensors = {id(tensor): grown(name, tensor) for name, tensor in call.leaves}
    args, kwargs = _mapped((call.args, dict(call.kwargs)), lambda tensor: tensors[id(tensor)])
    return Call(args, kwargs, call.arguments, call.leaves)


def _like(call: Call, wanted: Mapping[str, Any], model: nn.Module) -> Any:
    """What `torch.export` wants to know of sizes, put together as the bound arguments are."""
    by_id = {id(tensor): wanted.get(name) for name, tensor in call.leaves}
    bound = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    parameters = inspect.signature(model.forward).parameters
    shapes = {name: _mapped(value, lambda tensor: by_id[id(tensor)], None) for name, value in bound.items()}
    for name in list(shapes):
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            shapes.update(shapes.pop(name))
    return shapes


def _mapped(value: Any, of_tensor: Any, *rest: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, of_tensor, *rest) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, of_tensor, *rest) for item in value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, of_tensor, *rest) for key, item in value.items()}
    return rest[0] if rest else value


class _Rewriting:
    """Nodes of the traced graph to steps; what cannot be one is collected, to be told all at once."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.refused: dict[str, None] = {}
        self.aliases: dict[fx.Node, Any] = {}
        """Nodes that stand for the value of another, or for several."""

    def graph(self, module: fx.GraphModule, nodes: Sequence[fx.Node], prefix: str = "") -> Any:
        """All calls of a graph; what its output node gives."""
        for node in nodes:
            if node.op == "call_function":
                self._call(module, node, prefix)
            elif node.op == "output":
                return self.value(node.args[0])
        return None

    def _call(self, module: fx.GraphModule, node: fx.Node, prefix: str) -> None:
        target = str(getattr(node.target, "__name__", node.target))
        if target == "wrap_with_set_grad_enabled":
            self._inlined(module, node, prefix)
            return
        source = self.value(node.args[0]) if target == "getitem" else None
        if isinstance(source, (list, tuple)):
            self.aliases[node] = source[node.args[1]]  # type: ignore[index]
            return
        name = name_of(node.target)
        if name is None:
            self.refused.setdefault(str(node.target))
            return
        args, kwargs = self.value(tuple(node.args)), self.value(dict(node.kwargs))
        self.aliases[node] = arguments.Ref(prefix + node.name)
        self.steps.append(Step(prefix + node.name, name, tuple(args), kwargs))

    def _inlined(self, module: fx.GraphModule, node: fx.Node, prefix: str) -> None:
        """Whether gradients are recorded changes no answer, so the part is taken in as it is."""
        part = module.get_submodule(str(node.args[1].target))  # type: ignore[union-attr]
        assert isinstance(part, fx.GraphModule)
        nodes = list(part.graph.nodes)
        given = [self.value(argument) for argument in node.args[2:]]
        inner = (one for one in nodes if one.op == "placeholder")
        self.aliases.update(zip(inner, given, strict=True))
        self.aliases[node] = self.graph(part, nodes, f"{prefix}{node.name}.")

    def value(self, argument: Any) -> Any:
        """An argument with nodes replaced by what they stand for."""
        if isinstance(argument, fx.Node):
            return self.aliases.get(argument, arguments.Ref(argument.name))
        if isinstance(argument, (list, tuple)):
            return [self.value(item) for item in argument]
        if isinstance(argument, dict):
            return {key: self.value(item) for key, item in argument.items()}
        return argument


def _encoded(argument: Any) -> Any:
    return arguments.encode(argument, lambda one: one.name if isinstance(one, arguments.Ref) else None)


def _rewritten(
    traced: torch.export.ExportedProgram, call: Call, names: Mapping[str, Mapping[int, str]]
) -> Exported:
    signature = traced.graph_signature
    if odd := {spec.kind.name for spec in signature.output_specs} - {"USER_OUTPUT", "BUFFER_MUTATION"}:
        raise BlobError(f"the model's forward pass gives back {', '.join(sorted(odd))}, which no program does")
    rewriting = _Rewriting()
    flat = rewriting.graph(traced.graph_module, list(traced.graph.nodes))
    if rewriting.refused:
        raise BlobError(
            f"the model uses {len(rewriting.refused)} operators that no program may use: "
            f"{', '.join(rewriting.refused)}"
        )
    for spec, value in zip(signature.output_specs, flat, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            buffer = next(one.arg.name for one in signature.input_specs if one.target == spec.target)
            step = f"{buffer}.changed"
            rewriting.steps.append(Step(step, "aten.copy_.default", (arguments.Ref(buffer), value), {}))
    users = [
        value
        for spec, value in zip(signature.output_specs, flat, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    tensors, constants = _tensors(traced)
    inputs = _inputs(traced)
    result, outputs, output_specs = _result(traced, users, _size_names(traced, call, names))
    program = Program(call.arguments, inputs, tensors, tuple(rewriting.steps), tuple(outputs), result)
    input_specs = tuple(
        TensorSpec(name, _sizes(tensor.shape, names.get(name, {})), _dtype(tensor)) for name, tensor in call.leaves
    )
    fixed = _fixed(traced, call, input_specs, names)
    return Exported(program, program.to_json(_encoded), Signature(fixed, output_specs), constants)


def _inputs(traced: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The tensors among what the user gives; constants are part of the traced graph."""
    specs = traced.graph_signature.input_specs
    return tuple(
        spec.arg.name
        for spec in specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    )


def _tensors(
    traced: torch.export.ExportedProgram,
) -> tuple[dict[str, tuple[str, str]], dict[str, torch.Tensor]]:
    states, constants = traced.state_dict, traced.constants
    found: dict[str, tuple[str, str]] = {}
    kept: dict[str, torch.Tensor] = {}
    for spec in traced.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        if not isinstance(spec.arg, TensorArgument) or spec.target is None:
            raise BlobError(f"the model's forward pass needs {spec.kind.name} {spec.target!r}, which is no tensor")
        if spec.target in states:
            found[spec.arg.name] = (STATE, spec.target)
        else:
            found[spec.arg.name] = (CONSTANT, spec.target)
            kept[spec.target] = constants[spec.target]  # type: ignore[assignment]
    return found, kept


def _nodes(traced: torch.export.ExportedProgram) -> dict[str, fx.Node]:
    return {node.name: node for node in traced.graph.nodes}


def _size_names(
    traced: torch.export.ExportedProgram, call: Call, names: Mapping[str, Mapping[int, str]]
) -> dict[str, str]:
    """What torch calls a size to what we call it."""
    nodes, found = _nodes(traced), {}
    for placeholder, (name, _) in zip(_inputs(traced), call.leaves, strict=True):
        for at, text in names.get(name, {}).items():
            size = nodes[placeholder].meta["val"].shape[at]
            if not isinstance(size, int):
                found[str(size)] = text
    return found


def _fixed(
    traced: torch.export.ExportedProgram,
    call: Call,
    specs: Sequence[TensorSpec],
    names: Mapping[str, Mapping[int, str]],
) -> tuple[TensorSpec, ...]:
    """The inputs' specs, with the number for each size that the model turned out to fix."""
    nodes, found = _nodes(traced), []
    for placeholder, spec in zip(_inputs(traced), specs, strict=True):
        shape = nodes[placeholder].meta["val"].shape
        sizes = [int(size) if isinstance(size, int) else spec.shape[at] for at, size in enumerate(shape)]
        found.append(TensorSpec(spec.name, tuple(sizes), spec.dtype))
    return tuple(found)


def _sizes(shape: Sequence[int], names: Mapping[int, str]) -> tuple[Size, ...]:
    return tuple(names.get(at, int(size)) for at, size in enumerate(shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _result(
    traced: torch.export.ExportedProgram, users: Sequence[Any], size_names: Mapping[str, str]
) -> tuple[Any, list[Any], tuple[TensorSpec, ...]]:
    """How outputs are put together; constants among them stay constants."""
    whole = traced.call_spec.out_spec
    assert whole is not None
    tree, leaves = tree_of(_plain(whole.unflatten([_Slot(value) for value in users])), _is_slot, "output")
    nodes, specs, outputs = _nodes(traced), [], []
    for name, slot in leaves:
        value = slot.value
        outputs.append(value)
        meta = nodes[value.name].meta.get("val") if isinstance(value, arguments.Ref) and value.name in nodes else None
        if isinstance(meta, torch.Tensor):
            sizes = tuple(int(s) if isinstance(s, int) else _size_text(str(s), size_names) for s in meta.shape)
            specs.append(TensorSpec(name, sizes, _dtype(meta)))
        else:
            specs.append(TensorSpec(name, (), "int64"))
    return tree, outputs, tuple(specs)


@dataclass(frozen=True)
class _Slot:
    value: Any


def _is_slot(one: Any) -> bool:
    return isinstance(one, _Slot)


def _plain(value: Any) -> Any:
    """Results of classes of their own (of Hugging Face, say) that are mappings become dicts."""
    return dict(value) if isinstance(value, Mapping) else value


def _size_text(text: str, names: Mapping[str, str]) -> str:
    for symbol, name in sorted(names.items(), key=lambda item: -len(item[0])):
        text = text.replace(symbol, name)
    return text
