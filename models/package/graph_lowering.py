"""Convert the graph of `torch.export` to the steps of a program, without unused inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.models.package.program import (
    CONSTANT,
    STATE,
    Argument,
    PackagedProgram,
    ProgramStep,
    Ref,
    Tree,
    name_of,
    names_in,
    tree_of,
)
from torchrelay.records import dataclass

BATCH = "batch"
Dynamic = Mapping[str, Mapping[int, str]]
"""Names of dynamic sizes by input and dimension: {"tokens": {0: "batch", 1: "length"}}."""


@dataclass(frozen=True)
class ForwardCall:
    """A call of `forward`: example arguments by name, and their tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: tuple[Argument, ...]
    leaves: tuple[tuple[str, torch.Tensor], ...]
    sizes: Mapping[str, Mapping[int, str]]
    """Names of dynamic sizes by tensor and dimension."""


def call_of(model: nn.Module, inputs: Any, dynamic: Dynamic | None = None) -> ForwardCall:
    """Convert a tensor, a tuple of positional arguments, or a dict by name to a call; raises UsageError."""
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{type(model).__name__}.forward does not accept these inputs: {error}") from None
    found: list[Argument] = []
    leaves: list[tuple[str, torch.Tensor]] = []
    for name, value, positional in _by_name(bound, len(args)):
        tree, own = tree_of(value, lambda one: isinstance(one, torch.Tensor), name, len(leaves))
        found.append(Argument(name, tree, positional))
        leaves.extend(own)
    if dynamic is not None:
        known = {name for name, _ in leaves}
        if strange := sorted(set(dynamic) - known):
            raise UsageError(f"unknown input {strange[0]!r}; known are {', '.join(sorted(known))}")
        return ForwardCall(args, kwargs, tuple(found), tuple(leaves), dynamic)
    firsts = [(name, tensor.shape[0]) for name, tensor in leaves if tensor.dim()]
    sizes = {name: {0: BATCH} for name, size in firsts if size == firsts[0][1]}
    return ForwardCall(args, kwargs, tuple(found), tuple(leaves), sizes)


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


def mapped(value: Any, of_tensor: Any, *rest: Any) -> Any:
    """Map the tensors of a value, and with `rest` also everything else."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, of_tensor, *rest) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, of_tensor, *rest) for item in value)
    if isinstance(value, Mapping):
        return {key: mapped(item, of_tensor, *rest) for key, item in value.items()}
    return rest[0] if rest else value


def _kept(tree: Tree, numbers: Mapping[int, int]) -> Tree | None:
    """Return the tree of the kept leaves, renumbered; None if no leaf is kept."""
    match tree:
        case {"leaf": at}:
            return {"leaf": numbers[at]} if at in numbers else None
        case {"dict": pairs}:
            found = [[key, one] for key, item in pairs if (one := _kept(item, numbers)) is not None]
            return {"dict": found} if found or not pairs else None
        case {"list": items} | {"tuple": items}:
            inside = [one for item in items if (one := _kept(item, numbers)) is not None]
            return {next(iter(tree)): inside} if inside or not items else None
    return tree


@dataclass(frozen=True)
class LoweredProgram:
    """A program with its signature and its constants."""

    program: PackagedProgram
    json: Any
    signature: Signature
    constants: Mapping[str, torch.Tensor]
    fixed: tuple[str, ...]
    """Requested dynamic sizes that the traced model fixes."""


class _Rewriting:
    """Converts nodes of the traced graph to steps and collects all unsupported ones."""

    def __init__(self) -> None:
        self.steps: list[ProgramStep] = []
        self.refused: dict[str, None] = {}
        self.aliases: dict[fx.Node, Any] = {}
        """Nodes that are aliases of other values."""

    def graph(self, module: fx.GraphModule, nodes: Sequence[fx.Node], prefix: str = "") -> Any:
        """Convert all calls of a graph; returns its output."""
        for node in nodes:
            if node.op == "call_function":
                self._call(module, node, prefix)
            elif node.op == "output":
                return self.value(node.args[0])
        return None

    def _call(self, module: fx.GraphModule, node: fx.Node, prefix: str) -> None:
        target = str(getattr(node.target, "__name__", node.target))
        if target == "wrap_with_set_grad_enabled":
            # Inline a part that runs with or without gradients, which does not affect the outputs.
            part: Any = module.get_submodule(str(node.args[1].target))  # type: ignore[union-attr]
            nodes = list(part.graph.nodes)
            given = [self.value(argument) for argument in node.args[2:]]
            inner = (one for one in nodes if one.op == "placeholder")
            self.aliases.update(zip(inner, given, strict=True))
            self.aliases[node] = self.graph(part, nodes, f"{prefix}{node.name}.")
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
        self.aliases[node] = Ref(prefix + node.name)
        self.steps.append(ProgramStep(prefix + node.name, name, tuple(args), kwargs))

    def value(self, argument: Any) -> Any:
        """Replace the nodes in an argument by their values."""
        return fx.node.map_arg(argument, lambda node: self.aliases.get(node, Ref(node.name)))


def rewritten(
    traced: torch.export.ExportedProgram, call: ForwardCall, *, drop_unused: bool = False
) -> LoweredProgram:
    """Return the program of a traced model; raises BlobError with all unsupported operators."""
    signature = traced.graph_signature
    if odd := {spec.kind.name for spec in signature.output_specs} - {"USER_OUTPUT", "BUFFER_MUTATION"}:
        raise BlobError(
            f"the model's forward pass gives back {', '.join(sorted(odd))}, which programs do not support"
        )
    rewriting = _Rewriting()
    flat = rewriting.graph(traced.graph_module, list(traced.graph.nodes))
    if rewriting.refused:
        raise BlobError(
            f"the model uses {len(rewriting.refused)} operators that programs do not support: "
            f"{', '.join(rewriting.refused)}"
        )
    for spec, value in zip(signature.output_specs, flat, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            buffer = next(one.arg.name for one in signature.input_specs if one.target == spec.target)
            step = f"{buffer}.changed"
            rewriting.steps.append(ProgramStep(step, "aten.copy_.default", (Ref(buffer), value), {}))
    users = [
        value
        for spec, value in zip(signature.output_specs, flat, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    tensors, constants = _tensors(traced)
    inputs = _inputs(traced)
    symbols = {str(size): text for size, text in _named_sizes(traced, call) if not _is_fixed(size)}
    result, outputs, output_specs = _result(traced, users, symbols)
    program = PackagedProgram(call.arguments, inputs, tensors, tuple(rewriting.steps), tuple(outputs), result)
    # Input specs, with numbers for sizes that the model fixes.
    found = []
    for name, tensor, shape in _shapes(traced, call):
        known = call.sizes.get(name, {})
        sizes = tuple(int(size) if _is_fixed(size) else known[at] for at, size in enumerate(shape))
        found.append(TensorSpec(name, sizes, _dtype(tensor)))
    specs, fixed = tuple(found), tuple(sorted(fixed_sizes(traced, call)))
    if drop_unused:
        # Remove inputs that no step and no output uses, and arguments that become empty.
        used = set(names_in(list(program.outputs)))
        for one in program.steps:
            used.update(names_in([*one.args, *one.kwargs.values()]))
        kept = [at for at, name in enumerate(program.inputs) if name in used]
        numbers = {at: number for number, at in enumerate(kept)}
        arguments = tuple(
            replace(one, tree=tree)
            for one in program.arguments
            if (tree := _kept(one.tree, numbers)) is not None
        )
        inputs = tuple(program.inputs[at] for at in kept)
        program, specs = replace(program, arguments=arguments, inputs=inputs), tuple(specs[at] for at in kept)
    return LoweredProgram(program, program.to_json(), Signature(specs, output_specs), constants, fixed)


def _inputs(traced: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Return the tensor inputs; constants are part of the traced graph."""
    return tuple(
        spec.arg.name
        for spec in traced.graph_signature.input_specs
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
            raise BlobError(
                f"the model's forward pass needs {spec.kind.name} {spec.target!r}, which is not a tensor"
            )
        if spec.target in states:
            found[spec.arg.name] = (STATE, spec.target)
        else:
            found[spec.arg.name] = (CONSTANT, spec.target)
            kept[spec.target] = constants[spec.target]
    return found, kept


def _nodes(traced: torch.export.ExportedProgram) -> dict[str, fx.Node]:
    return {node.name: node for node in traced.graph.nodes}


def _shapes(
    traced: torch.export.ExportedProgram, call: ForwardCall
) -> list[tuple[str, torch.Tensor, torch.Size]]:
    """Return the traced shapes of the inputs by name."""
    nodes = _nodes(traced)
    return [
        (name, tensor, nodes[placeholder].meta["val"].shape)
        for placeholder, (name, tensor) in zip(_inputs(traced), call.leaves, strict=True)
    ]


def _is_fixed(size: Any) -> bool:
    """Return True if a traced size has a single value, even if torch kept a symbol for it."""
    return isinstance(size, int) or str(size).isdigit()


def fixed_sizes(traced: torch.export.ExportedProgram, call: ForwardCall) -> set[str]:
    """Return the names of sizes that are fixed in some input."""
    return {text for size, text in _named_sizes(traced, call) if _is_fixed(size)}


def _named_sizes(traced: torch.export.ExportedProgram, call: ForwardCall) -> list[tuple[Any, str]]:
    """Return the traced sizes that have names."""
    shapes = _shapes(traced, call)
    return [(shape[at], text) for name, _, shape in shapes for at, text in call.sizes.get(name, {}).items()]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _result(
    traced: torch.export.ExportedProgram, users: Sequence[Any], size_names: Mapping[str, str]
) -> tuple[Any, list[Any], tuple[TensorSpec, ...]]:
    """Return the structure of the outputs, including constants."""
    slots = traced.call_spec.out_spec.unflatten([_Slot(value) for value in users])
    tree, leaves = tree_of(plain(slots), lambda one: isinstance(one, _Slot), "output")
    nodes, specs, outputs = _nodes(traced), [], []
    for name, slot in leaves:
        value = slot.value
        outputs.append(value)
        meta = nodes[value.name].meta.get("val") if isinstance(value, Ref) and value.name in nodes else None
        if isinstance(meta, torch.Tensor):
            texts = [str(size) for size in meta.shape]
            for symbol, known in sorted(size_names.items(), key=lambda item: -len(item[0])):
                texts = [text.replace(symbol, known) for text in texts]
            sizes = [
                size if isinstance(size, int) else text for size, text in zip(meta.shape, texts, strict=True)
            ]
            specs.append(TensorSpec(name, tuple(sizes), _dtype(meta)))
        else:
            specs.append(TensorSpec(name, (), "int64"))
    return tree, outputs, tuple(specs)


@dataclass(frozen=True)
class _Slot:
    value: Any


def plain(value: Any) -> Any:
    """Convert mappings of other classes (such as Hugging Face's outputs) to dicts."""
    return dict(value) if isinstance(value, Mapping) else value
