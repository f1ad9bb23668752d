"""`from_onnx`: an ONNX file as an nn.Module that can be trained, extended, cut and exported again.

Tensors of the file become parameters or buffers. Dots in names lead to nested containers, as in torch:
`layers.0.weight` is the parameter `weight` in `0` in `layers`. Names that are invalid there (an empty part,
the name of a method, a prefix of another name) are replaced, and hooks restore them in the state dict.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import Parameter, Signature
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from torchrelay.errors import UsageError
from torchrelay.jobs.session import warn
from torchrelay.models.onnx.importer.executor import (
    ExecutionPlan,
    Ints,
    Operator,
    Surroundings,
    known_ints,
    plan_of,
    run_plan,
)
from torchrelay.models.onnx.importer.graph import Graph, ModelContent, content_of, read_model
from torchrelay.models.onnx.importer.ops import arithmetic, cast, control_flow, layers, shape, spatial

_FAMILIES = (arithmetic, cast, control_flow, layers, shape, spatial)
OPERATORS = {
    kind: run if isinstance(run, Operator) else Operator(run)
    for kind, run in (
        {("", name): run for family in _FAMILIES for name, run in family.OPERATORS.items()}
        | layers.OF_DOMAINS
    ).items()
}
"""Operators by domain and name."""
Place = tuple[tuple[str, ...], str]
"""Containers that lead to a tensor, and its name in the last one."""

_ODD = "of_file"
CONSTANTS = "file_constants"
_EXPORTERS = re.compile(r"val_\d+")
"""Names used by torch's exporter, which fails if a module has them already."""


class Container(nn.Module):
    """A module for a part of a dotted name."""


_MODULE = frozenset(dir(nn.Module()))
"""Also the instance attributes, such as `training` and `_modules`."""


def _paths_of(names: Iterable[str], taken: object) -> dict[str, Place]:
    """Return the path of each name below a root that has the attributes `taken`."""
    names = list(names)
    prefixes = {name[:at] for name in names for at, one in enumerate(name) if one == "."}
    shadowing = _MODULE | frozenset(dir(taken)) | {"_paths", _ODD, CONSTANTS}
    found: dict[str, Place] = {}
    plain: set[str] = set()
    for name in names:
        *inside, last = name.split(".")
        odd = name in prefixes or any(not one or one in shadowing for one in (*inside, last))
        found[name] = (tuple(inside), last)
        if odd or _EXPORTERS.fullmatch(name):
            short = re.sub(r"\W", "_", name, flags=re.ASCII)
            if not short or short in plain or short in _MODULE:
                short = f"{short}_of_{len(plain)}"
            plain.add(short)
            found[name] = ((_ODD,), short)
    return found


def keep(
    root: nn.Module, paths: Mapping[str, Place], tensors: Mapping[str, torch.Tensor], trained: frozenset[str]
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
        root.register_state_dict_post_hook(_Renaming(odd))
        root.register_load_state_dict_pre_hook(_Renaming({name: inner for inner, name in odd.items()}))


class _Renaming:
    """Hook that replaces names in a state dict."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for old, new in self._names.items():
            if prefix + old in state:
                state[prefix + new] = state.pop(prefix + old)


def kept(root: nn.Module, path: Place) -> torch.Tensor:
    """Return the current tensor at a path."""
    holder = root
    for part in path[0]:
        holder = holder._modules[part]  # type: ignore[assignment]
    found = holder._parameters.get(path[1])
    return holder._buffers[path[1]] if found is None else found  # type: ignore[return-value]


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


def trained_initializers(
    content: ModelContent, kept: Sequence[str], trainable: Sequence[str]
) -> frozenset[str]:
    """Return the keys that become parameters: floats with a use that receives gradients."""
    floats = {key: key for key in kept if content.initializers[key].dtype.is_floating_point}
    found = set(matching(floats, trainable))
    for key in floats:
        tensor, uses = content.initializers[key], content.uses.get(key, ())
        constant = tensor.numel() == 1 and _MADE_UP.fullmatch(key)
        if tensor.itemsize > 1 and not constant:  # float8 has no arithmetic for training
            found |= {key for operator, at in uses if at not in _WITHOUT_GRADIENT.get(operator, ())}
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
    graph = content.graph
    values: dict[tuple[str, ...], torch.Tensor]
    values = {(name,): content.initializers[key] for name, key in graph.initializers.items()}
    values.update(((name,), content.constants[at]) for name, at in graph.constants.items())
    return any(
        node.attributes.get("training_mode") == 1
        if node.operator == "BatchNormalization"
        else node.operator == "Dropout" and bool(values.get(node.inputs[2:3], torch.zeros(1)).any())
        for node in graph.nodes
    )


_Ends = tuple[tuple[str, ...] | None, tuple[str, ...], int]


class OnnxModule(nn.Module):
    """The model of an ONNX file, with the names of the file's initializers in its state dict.

    Call it with the inputs in order or by name; several outputs are returned as a tuple. In a subclass,
    `super().forward(x, aux=("v1",))` returns intermediate values. Batch normalization and dropout follow
    `train()` and `eval()`; a file exported for training begins in train mode.

    Args:
        source: A path, the bytes of a file, a ModelProto, or the result of torch.onnx.export.
        folder: Folder of the external data of a ModelProto or bytes.
        outputs: Names of values that become the outputs; unused weights are dropped.
        drop_last: Number of operators to remove at the end.
        freeze: Patterns of parameters without gradients, such as `conv1.*`.
        trainable: Patterns of one-element constants of exporters (`val_7`) to make parameters.

    Example:
        model = OnnxModule("resnet.onnx", drop_last=1)
    """

    def __init__(
        self,
        source: Any,
        *,
        folder: str | os.PathLike[str] | None = None,
        outputs: Sequence[str] | None = None,
        drop_last: int = 0,
        freeze: Sequence[str] = (),
        trainable: Sequence[str] = (),
    ) -> None:
        super().__init__()
        model, beside = read_model(source)
        if model.training_info:
            warn(
                "the file has training_info (an optimizer and initial values), which is ignored: train the "
                "module with an optimizer of torch",
                stacklevel=2,
            )
        content = content_of(
            model, Path(folder) if folder is not None else beside, {*OPERATORS, ("", "Constant")}
        )
        self._graph = content.graph
        self._ends: _Ends = (_names(outputs), (), drop_last)
        self._plans: dict[_Ends, ExecutionPlan] = {}
        self._inner_plans: dict[int, ExecutionPlan] = {}
        self._known: dict[int | str, tuple[torch.Tensor, int, Ints | None]] = {}
        self.signature = content.signature
        # State dict keys: all for the whole model, else those of the plan.
        plan = self._plan(self._ends)
        if plan.results == content.graph.outputs:
            keys = list(content.initializers)
        else:
            needed = {key for name, key in content.graph.initializers.items() if name in plan.needed}
            nodes = [node for node, _ in plan.steps]
            while nodes:
                for one in nodes.pop().attributes.values():
                    if isinstance(one, Graph):
                        needed.update(one.initializers.values())
                        nodes.extend(one.nodes)
            keys = [key for key in content.initializers if key in needed]
        self._paths = _paths_of(keys, self)
        keep(self, self._paths, content.initializers, trained_initializers(content, keys, trainable))
        holder = Container()
        for at, tensor in enumerate(content.constants):
            holder.register_buffer(f"c{at}", tensor, persistent=False)
        self.add_module(CONSTANTS, holder)
        # Read tensors that may be sizes, so that the model can be traced before it has run.
        small: dict[int | str, torch.Tensor] = {key: kept(self, path) for key, path in self._paths.items()}
        small.update(enumerate(self.get_submodule(CONSTANTS).buffers()))
        for key, tensor in small.items():
            sizes = not tensor.is_floating_point() or tensor.numel() <= 16
            if sizes and not isinstance(tensor, nn.Parameter):
                self._read_again(key, tensor)
        self.freeze(*as_patterns(freeze))
        self.train(begins_in_training(content))

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """`forward(*inputs, outputs=None, aux=(), drop_last=None)`.

        `aux`: names of values to return after the outputs, in a tuple. `outputs`: names of values to return
        instead of the file's outputs. `drop_last`: number of operators to remove at the end. Only needed
        operators are run. This is a property, so that the signature has the model's input names.
        """
        return _Forward(self)

    def values(self) -> tuple[str, ...]:
        """Return the names of all computed values in order, for `aux` and `outputs`."""
        return tuple(name for node in self._graph.nodes for name in node.outputs if name)

    def trains_otherwise(self) -> bool:
        """Return True if an operator behaves differently in train mode."""
        return any(node.operator in ("BatchNormalization", "Dropout") for node in self._graph.nodes)

    def freeze(self, *patterns: str) -> None:
        """Disable gradients of matching parameters; raises UsageError for a pattern without a match."""
        for one in matching(self._named(), patterns):
            one.requires_grad_(False)

    def unfreeze(self, *patterns: str) -> None:
        """Enable gradients of matching parameters; raises UsageError for a pattern without a match."""
        for one in matching(self._named(), patterns):
            one.requires_grad_(True)

    def run(
        self,
        given: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        aux: Sequence[str] = (),
        drop_last: int | None = None,
    ) -> Any:
        """Compute outputs from inputs by their names in the file.

        Args:
            given: Tensors by the names of the file's inputs.
            outputs: Names of values to return; by default the outputs of the file.
            aux: Names of intermediate values to return after them.
            drop_last: Number of operators to leave out at the end.

        Returns:
            A tensor, or a tuple of several.

        Raises:
            UsageError: An input is missing.

        Example:
            features = model.run({"image": images}, outputs=["pooled"])
        """
        ends = self._ends if outputs is None and drop_last is None else (_names(outputs), (), drop_last or 0)
        plan = self._plan((ends[0], tuple(_names(aux) or ()), ends[2]))
        missing = [name for name in plan.needed & set(self._graph.inputs) if name not in given]
        if missing:
            raise UsageError(f"the model needs {', '.join(map(repr, sorted(missing)))}, which is missing")
        _check_content(given)
        tensors = (one for one in given.values() if isinstance(one, torch.Tensor))
        device = next((one.device for one in tensors), torch.device("cpu"))
        around = Surroundings(
            OPERATORS, self.training, device, self._stored, self._known_ints, self._inner_plans
        )
        found = run_plan(self._graph, plan, given, around)
        results = tuple(one.tensor(device) if isinstance(one, Ints) else one for one in found)
        return results[0] if len(results) == 1 else results

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__.get("_modules", {}).get(name)
        if isinstance(held, Container) and not isinstance(value, Container):
            raise UsageError(f"the name {name!r} is taken by initializers of the file: choose another name")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Describe inputs and outputs."""
        taken = ", ".join(f"{one.name}{list(one.shape)}" for one in self.signature.inputs)
        given = ", ".join(one.name for one in self.signature.outputs)
        return f"{taken} -> {given}; {len(self._graph.nodes)} operators"

    def _named(self) -> dict[str, nn.Parameter]:
        tensors = {name: kept(self, path) for name, path in self._paths.items()}
        return {name: one for name, one in tensors.items() if isinstance(one, nn.Parameter)}

    def _plan(self, ends: _Ends) -> ExecutionPlan:
        if ends not in self._plans:
            self._plans[ends] = plan_of(self._graph, *ends)
        plan = self._plans[ends]
        initializers = self._graph.initializers
        there = self.__dict__.get("_paths", self._graph.initializers.values())
        lost = [one for one in plan.needed & initializers.keys() if initializers[one] not in there]
        if lost:
            raise UsageError(f"this model was cut when it was created, so {lost[0]!r} does not exist")
        return plan

    def _stored(self, graph: Graph, name: str) -> torch.Tensor:
        key = graph.initializers.get(name)
        return kept(self, ((CONSTANTS,), f"c{graph.constants[name]}") if key is None else self._paths[key])

    def _known_ints(self, graph: Graph, name: str) -> Ints | None:
        """Return small tensors as numbers, cached while they do not change."""
        key = graph.initializers[name] if name in graph.initializers else graph.constants[name]
        return self._read_again(key, self._stored(graph, name))

    def _read_again(self, key: int | str, tensor: torch.Tensor) -> Ints | None:
        held = self._known.get(key)
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:  # while tracing
            if held is None:
                return None
            tensor = held[0]
        version = -1 if tensor.is_inference() else tensor._version
        if held is None or held[0] is not tensor or held[1] != version or version < 0:
            with _disable_current_modes():  # read the real tensor while tracing
                held = self._known[key] = (tensor, version, known_ints(tensor))
        return held[2]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_inner_plans": {}}


class _Forward:
    """The forward of one model, whose signature has its input names."""

    def __init__(self, module: OnnxModule) -> None:
        self._module = module

    @property
    def __code__(self) -> CodeType:
        """Code object, which torch.export requires."""
        return type(self).__call__.__code__

    @property
    def __signature__(self) -> Signature:
        names = python_names(self._module._graph.inputs)
        plain = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        rest = {"outputs": None, "aux": (), "drop_last": None}
        options = [Parameter(name, Parameter.KEYWORD_ONLY, default=one) for name, one in rest.items()]
        return Signature([*plain, *options])

    def __call__(
        self,
        *inputs: Any,
        outputs: Sequence[str] | None = None,
        aux: Sequence[str] = (),
        drop_last: int | None = None,
        **named: Any,
    ) -> Any:
        names = self._module._graph.inputs
        if len(inputs) > len(names):
            raise UsageError(
                f"the model takes {len(names)} inputs, {', '.join(names)}; {len(inputs)} were given"
            )
        given = dict(zip(names, inputs, strict=False))
        spelled = {**dict(zip(python_names(names), names, strict=True)), **{name: name for name in names}}
        for name, value in named.items():
            if name not in spelled or spelled[name] in given:
                raise UsageError(
                    f"{name!r} is not an input of the model, or is given twice; it takes {', '.join(names)}"
                )
            given[spelled[name]] = value
        return self._module.run(given, outputs, aux, drop_last)


def python_names(names: Sequence[str]) -> list[str]:
    """Convert the names to unique Python argument names."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII) or "x"
        plain = f"_{plain}" if plain[0].isdigit() or plain in ("outputs", "aux", "drop_last") else plain
        found.append(plain if plain not in found else f"{plain}_{len(found)}")
    return found


def from_onnx(
    source: Any,
    *,
    folder: str | os.PathLike[str] | None = None,
    outputs: Sequence[str] | None = None,
    drop_last: int = 0,
    freeze: Sequence[str] = (),
    trainable: Sequence[str] = (),
) -> OnnxModule:
    """Load an ONNX file as a trainable nn.Module with the names of the file.

    Float initializers become parameters; integers, running statistics and values without gradients become
    buffers. Only the file's operators are executed, and no file outside its folder is read. Supports operator
    sets 7 to 28.

    Args:
        source: A path, the bytes of a file, a ModelProto, or the result of torch.onnx.export.
        folder: Folder of the external data of a ModelProto or bytes.
        outputs: Names of values that become the outputs; unused weights are dropped.
        drop_last: Number of operators to remove at the end.
        freeze: Patterns of parameters without gradients, such as `conv1.*`.
        trainable: Patterns of one-element constants of exporters (`val_7`) to make parameters.

    Returns:
        The module.

    Raises:
        UsageError: Operators or features are unsupported; lists all such operators.
        DamagedError: The file is damaged, or not an ONNX model.
        StorageError: Reading failed.

    Example:
        model = from_onnx("resnet.onnx", drop_last=1, freeze=("conv1.*",))
    """
    return OnnxModule(
        source, folder=folder, outputs=outputs, drop_last=drop_last, freeze=freeze, trainable=trainable
    )


def _names(given: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(given, str):
        raise UsageError(f"expected a tuple of names such as ({given!r},), not a str")
    return None if given is None else tuple(given)


def _check_content(given: Mapping[str, Any]) -> None:
    """Raise UsageError for mappings and arrays of numbers; accepts a tracer's proxies and arrays of texts."""
    for name, value in given.items():
        kind = type(value)
        array = kind.__module__.partition(".")[0] == "numpy" and value.dtype.kind not in "OSU"
        if isinstance(value, (Mapping, str)) or array:
            raise UsageError(f"the input {name!r} is a {kind.__name__}: expected a tensor (torch.as_tensor)")
