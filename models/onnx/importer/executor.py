"""Plan and run the operators needed for the requested values, releasing each value after its last use.

Tensors of the file become parameters or buffers. Dots in names lead to nested containers, as in torch:
`layers.0.weight` is the parameter `weight` in `0` in `layers`. Names that are invalid there (an empty part,
the name of a method, a prefix of another name) are replaced, and hooks restore them in the state dict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn

from torchrelay.errors import RelayError, UsageError
from torchrelay.models.onnx.importer.graph import Graph, GraphNode, ModelContent
from torchrelay.models.onnx.importer.operator import Ints, OpCall, Operator, as_ints, as_numbers, on_ints
from torchrelay.models.onnx.importer.tensors import check_entered
from torchrelay.records import dataclass


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """A plan: `steps` are operators, each with the values to release after it; `results` are the outputs.

    `needed` are the names of the stored values and inputs that are used.
    """

    steps: tuple[tuple[GraphNode, tuple[str, ...]], ...]
    results: tuple[str, ...]
    needed: frozenset[str]


def plan_of(
    graph: Graph, outputs: Sequence[str] | None = None, aux: Sequence[str] = (), drop_last: int = 0
) -> ExecutionPlan:
    """Return the plan for `outputs` and then `aux`; by default the graph's outputs, cut by `drop_last`.

    Raises UsageError for unknown names, and if `drop_last` exceeds the number of operators.
    """
    if drop_last and outputs is not None:
        raise UsageError("outputs= and drop_last= cannot be combined")
    wanted = [*(ends_without(graph, drop_last) if outputs is None else outputs), *aux]
    known = {name for node in graph.nodes for name in node.outputs if name}
    known |= {*graph.inputs, *graph.initializers, *graph.constants, *graph.captured}
    for name in wanted:
        if name not in known:
            near = ", ".join(map(repr, get_close_matches(name, known, 3)))
            hint = f"similar names: {near}" if near else "values() of the model lists all"
            raise UsageError(f"the model has no value {name!r}; {hint}")
    needed, later, steps = set(wanted), set(wanted), []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs) - {""}:
            needed |= inputs_of(node)
            touched = inputs_of(node) | {name for name in node.outputs if name}
            steps.append((node, tuple(touched - later)))
            later |= touched
    taken = {name for node, _ in steps for name in inputs_of(node)} | set(wanted)
    return ExecutionPlan(tuple(steps[::-1]), tuple(wanted), frozenset(taken))


def inputs_of(node: GraphNode) -> set[str]:
    """Yield the values that a node uses, including those of its inner graphs."""
    inner = {name for one in node.attributes.values() if isinstance(one, Graph) for name in one.captured}
    return {name for name in node.inputs if name} | inner


def ends_without(graph: Graph, drop_last: int) -> tuple[str, ...]:
    """Return the outputs of the graph without its last `drop_last` operators.

    These are the remaining outputs, then the values used only by dropped operators that depend on the
    contents of an input (not transposed weights or sizes).
    """
    if drop_last < 0 or drop_last >= len(graph.nodes) + (drop_last == 0):
        most = max(len(graph.nodes) - 1, 0)
        raise UsageError(
            f"invalid drop_last={drop_last}: expected 0 to {most}, the model has {len(graph.nodes)} operators"
        )
    if drop_last == 0:
        return graph.outputs
    kept, dropped = graph.nodes[:-drop_last], graph.nodes[-drop_last:]
    made = [name for node in kept for name in node.outputs if name]
    living = set(graph.inputs)  # values that depend on the contents of the inputs, not only on their sizes
    for node in kept:
        if node.operator not in ("Shape", "Size") and inputs_of(node) & living:
            living |= {name for name in node.outputs if name}
    taken = {name for node in kept if living & set(node.outputs) for name in inputs_of(node)}
    wanted = {name for node in dropped for name in inputs_of(node)}
    left = [name for name in graph.outputs if name in {*made, *graph.inputs}]
    loose = [name for name in made if name in wanted - taken and name in living and name not in left]
    if not (left or loose):
        raise UsageError(f"without its last {drop_last} operators the model has no outputs")
    return (*left, *loose)


PREVIEW, TRAINING, ML = "ai.onnx.preview", "ai.onnx.preview.training", "ai.onnx.ml"


@cache
def operators() -> Mapping[tuple[str, str], Operator]:
    """Return the table (domain, name) -> operator."""
    # Imported with the first model, because they are large.
    from torchrelay.models.onnx.importer.ops import (
        arithmetic,
        attention,
        cast,
        control_flow,
        conv,
        norm,
        recurrent,
        resize,
        shape,
    )

    families = (
        arithmetic, attention, cast, control_flow, conv, norm, recurrent, resize, shape,
    )  # fmt: skip
    tables: list[tuple[str, Mapping[str, Any]]] = [("", family.OPERATORS) for family in families]
    tables += [(PREVIEW, attention.PREVIEW_OPERATORS), (TRAINING, norm.TRAINING_OPERATORS)]
    return {
        (domain, name): run if isinstance(run, Operator) else Operator(run)
        for domain, table in [*tables, (ML, norm.ML_OPERATORS)]
        for name, run in table.items()
    }


def supported(domain: str, name: str) -> bool:
    """Return True if the operator is supported."""
    return (domain, name) in operators() or (domain, name) == ("", "Constant")


@dataclass(frozen=True, eq=False)
class Surroundings:
    """State of the module for a run: its mode and stored values."""

    training: bool
    device: torch.device
    stored: Callable[[Graph, str], Any]
    """Returns the module's tensor for a name of a graph."""
    known: Callable[[Graph, str], Ints | None]
    """Returns the same as integers if it is a small integer constant."""
    plans: dict[int, ExecutionPlan]
    """Plans of inner graphs by id."""
    entered: Iterator[int] = field(default_factory=lambda: count(1))
    """Number of runs of inner graphs."""


def run_plan(
    graph: Graph, plan: ExecutionPlan, given: Mapping[str, Any], around: Surroundings
) -> tuple[Any, ...]:
    """Run a plan; `given` are the inputs, and for inner graphs the captured values."""
    values = dict(given)
    known: dict[str, Ints] = {}
    for name in plan.needed:
        if name in graph.initializers or name in graph.constants:
            values[name] = around.stored(graph, name)
            ints = None if values[name].is_floating_point() else around.known(graph, name)
            if ints is not None:
                known[name] = ints
    for node, done in plan.steps:
        _run_node(graph, node, values, known, around)
        for name in done:
            values.pop(name, None)
    return tuple(values[name] for name in plan.results)


def _run_node(
    graph: Graph, node: GraphNode, values: dict[str, Any], known: Mapping[str, Ints], around: Surroundings
) -> None:
    inputs = [values[name] if name else None for name in node.inputs]
    made: Any = None
    if not node.domain and any(isinstance(one, Ints) for one in inputs):  # arithmetic on sizes
        given = [known.get(name, one) for name, one in zip(node.inputs, inputs, strict=True)]
        made = on_ints(node.operator, dict(node.attributes), given)
    if made is None:
        made = _on_tensors(graph, node, inputs, values, known, around)
    results = made if isinstance(made, tuple) else (made,)
    for name, value in zip(node.outputs, results, strict=False):
        if name:
            values[name] = value


def _on_tensors(
    graph: Graph,
    node: GraphNode,
    inputs: list[Any],
    values: Mapping[str, Any],
    known: Mapping[str, Ints],
    around: Surroundings,
) -> Any:
    operator = operators()[node.kind]
    own = frozenset(at for at, name in enumerate(node.inputs) if name in graph.initializers)
    fixed = own | {at for at, name in enumerate(node.inputs) if name in graph.constants}
    device = _device(inputs, around)
    call = OpCall(node, around.training, device, own, fixed, _entering(values, known, around))

    def wanted(at: int, name: str, value: Any) -> Any:
        """Convert an input to the form that the operator expects."""
        if at in operator.ints:
            return as_ints(known.get(name, value))
        if at not in operator.numbers:
            return call.tensor(value)
        return as_numbers((around.known(graph, name) if at in fixed else None) or value)

    if not operator.raw:
        inputs = [wanted(*one) for one in zip(count(), node.inputs, inputs)]
    try:
        return operator.run(call, *inputs)
    except RelayError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        if type(error).__module__.startswith("torch."):
            raise  # errors of tracing belong to the tracer
        raise UsageError(f"{node} failed on {_description(inputs)}: {error}") from error


def _device(inputs: list[Any], around: Surroundings) -> torch.device:
    return next((one.device for one in inputs if isinstance(one, torch.Tensor)), around.device)


def _description(inputs: list[Any]) -> str:
    shapes = (
        f"{tuple(one.shape)} {one.dtype}" if isinstance(one, torch.Tensor) else str(one)[:60]
        for one in inputs
    )
    return ", ".join(shapes) or "no inputs"


def _entering(
    values: Mapping[str, Any], known: Mapping[str, Ints], around: Surroundings
) -> Callable[[Graph, Mapping[str, Any]], tuple[Any, ...]]:
    def enter(inner: Graph, given: Mapping[str, Any]) -> tuple[Any, ...]:
        check_entered(f"graph {inner.name!r}", next(around.entered))
        if id(inner) not in around.plans:
            around.plans[id(inner)] = plan_of(inner)
        outer = {name: known.get(name, values[name]) for name in inner.captured}
        return run_plan(inner, around.plans[id(inner)], {**outer, **given}, around)

    return enter


Path = tuple[tuple[str, ...], str]
"""Containers that lead to a tensor, and its name in the last one."""

_ODD = "of_file"
CONSTANTS = "file_constants"
_EXPORTERS = re.compile(r"val_\d+")
"""Names used by torch's exporter, which fails if a module has them already."""


class Container(nn.Module):
    """A module for a part of a dotted name."""


_MODULE = frozenset(dir(nn.Module()))
"""Also the instance attributes, such as `training` and `_modules`."""


def paths_of(names: Iterable[str], taken: object) -> dict[str, Path]:
    """Return the path of each name below a root that has the attributes `taken`."""
    names = list(names)
    prefixes = {name[:at] for name in names for at, one in enumerate(name) if one == "."}
    shadowing = _MODULE | frozenset(dir(taken)) | {"_paths", _ODD, CONSTANTS}
    found: dict[str, Path] = {}
    plain: set[str] = set()
    for name in names:
        *inside, last = name.split(".")
        odd = name in prefixes or any(not one or one in shadowing for one in (*inside, last))
        if odd or _EXPORTERS.fullmatch(name):
            short = _short(name, plain)
            plain.add(short)
            found[name] = ((_ODD,), short)
        else:
            found[name] = (tuple(inside), last)
    return found


def _short(name: str, taken: Collection[str]) -> str:
    """Return a free attribute name similar to `name`."""
    short = re.sub(r"\W", "_", name, flags=re.ASCII)
    return short if short and short not in taken and short not in _MODULE else f"{short}_of_{len(taken)}"


def keep(
    root: nn.Module, paths: Mapping[str, Path], tensors: Mapping[str, torch.Tensor], trained: frozenset[str]
) -> None:
    """Register the tensors below `root` as parameters (`trained`) or buffers; hooks map invalid names."""
    for name, (inside, last) in paths.items():
        holder = root
        for part in inside:
            if part not in holder._modules:
                holder.add_module(part, Container())
            holder = holder._modules[part]  # type: ignore[assignment]
        if name in trained:
            holder.register_parameter(last, nn.Parameter(tensors[name]))
        else:
            holder.register_buffer(last, tensors[name])
    odd = {f"{_ODD}.{last}": name for name, (inside, last) in paths.items() if inside == (_ODD,)}
    if odd:
        root.register_state_dict_post_hook(_Renaming(odd, out=True))
        root.register_load_state_dict_pre_hook(_Renaming(odd, out=False))


class _Renaming:
    """Hook that replaces numbered names in a state dict by those of the file, or back."""

    def __init__(self, names: Mapping[str, str], out: bool) -> None:
        self._names, self._out = dict(names), out

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for inner, name in self._names.items():
            old, new = (inner, name) if self._out else (name, inner)
            if prefix + old in state:
                state[prefix + new] = state.pop(prefix + old)


def keep_constants(root: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Register constants as buffers that are not in the state dict."""
    holder = Container()
    for at, tensor in enumerate(tensors):
        holder.register_buffer(f"c{at}", tensor, persistent=False)
    root.add_module(CONSTANTS, holder)


def kept(root: nn.Module, path: Path) -> torch.Tensor:
    """Return the current tensor at a path."""
    holder = root
    for part in path[0]:
        holder = holder._modules[part]  # type: ignore[assignment]
    found = holder._parameters.get(path[1])
    return holder._buffers[path[1]] if found is None else found  # type: ignore[return-value]


def constant(root: nn.Module, at: int) -> torch.Tensor:
    """Return the constant with this number."""
    return root._modules[CONSTANTS]._buffers[f"c{at}"]  # type: ignore[union-attr, return-value]


T = TypeVar("T")

_WITHOUT_GRADIENT = {
    "BatchNormalization": (3, 4), "Resize": (1, 2, 3), "Upsample": (1,), "Pad": (2,), "Dropout": (1, 2),
    "Range": (0, 1, 2), "OneHot": (0, 1), "NonMaxSuppression": (0, 1, 2, 3, 4), "Shape": (0,), "Size": (0,),
    "ArgMax": (0,), "ArgMin": (0,), "CastLike": (1,), "NonZero": (0,), "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
}  # fmt: skip
"""Inputs without gradients: running statistics, sizes, scales of quantization."""
_MADE_UP = re.compile(
    r"val_\d+|scalar_tensor_default(_\d+)?|_val_\d+|onnx::\w+_\d+|.*/Constant(_\d+)?_output_\d+"
)
"""Names given by torch's exporters to constants in the code."""


def kept_initializers(content: ModelContent, plan: ExecutionPlan) -> list[str]:
    """Return the state dict keys: all for the whole model, else those of the plan."""
    whole = plan.results == content.graph.outputs
    inner = {key for node, _ in plan.steps for key in _inner_keys(node)}
    needed = inner | {key for name, key in content.graph.initializers.items() if name in plan.needed}
    return [key for key in content.initializers if whole or key in needed]


def _inner_keys(node: GraphNode) -> Iterable[str]:
    for one in node.attributes.values():
        if isinstance(one, Graph):
            yield from one.initializers.values()
            for inside in one.nodes:
                yield from _inner_keys(inside)


def trained_initializers(
    content: ModelContent, kept: Sequence[str], trainable: Sequence[str]
) -> frozenset[str]:
    """Return the keys that become parameters: floats with a use that receives gradients."""
    floats = {key: key for key in kept if content.initializers[key].dtype.is_floating_point}
    found = set(matching(floats, trainable))
    for key in floats:
        tensor = content.initializers[key]
        constant = tensor.numel() == 1 and _MADE_UP.fullmatch(key) is not None
        if tensor.itemsize > 1 and not constant:  # float8 has no arithmetic for training
            uses = content.uses.get(key, frozenset())
            if any(at not in _WITHOUT_GRADIENT.get(operator, ()) for operator, at in uses):
                found.add(key)
    return frozenset(found)


def as_patterns(patterns: Sequence[str]) -> Sequence[str]:
    """Return the patterns; raises UsageError for a single str instead of a tuple."""
    if isinstance(patterns, str):
        raise UsageError(f"expected a tuple of patterns such as ({patterns!r},), not a str")
    return patterns


def matching(named: Mapping[str, T], patterns: Sequence[str]) -> list[T]:
    """Return the names that match the patterns; raises UsageError for a pattern without a match."""
    found: dict[str, T] = {}
    for pattern in as_patterns(patterns):
        hits = {name: one for name, one in named.items() if fnmatchcase(name, pattern)}
        if not hits:
            raise UsageError(
                f"pattern {pattern!r} matches no parameter; known are {', '.join(list(named)[:8])}"
            )
        found.update(hits)
    return list(found.values())


def begins_in_training(content: ModelContent) -> bool:
    """Return True if a batch normalization or dropout of the file is in training mode."""
    return any(
        (node.operator == "BatchNormalization" and node.attributes.get("training_mode") == 1)
        or (node.operator == "Dropout" and len(node.inputs) > 2 and _is_true(content, node.inputs[2]))
        for node in content.graph.nodes
    )


def _is_true(content: ModelContent, name: str) -> bool:
    graph = content.graph
    if name in graph.initializers:
        return bool(content.initializers[graph.initializers[name]].any())
    return name in graph.constants and bool(content.constants[graph.constants[name]].any())
