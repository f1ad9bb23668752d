"""Example inputs with names and dynamic sizes, and the comparison of an ONNX file with the model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchrelay.errors import UsageError
from torchrelay.records import dataclass


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

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            for dim, size in next(sizes).items():
                rows = torch.arange(wanted[size]) % leaf.shape[dim]
                leaf = leaf.index_select(dim, rows)
            return leaf

        args, kwargs = pytree.tree_map(one, (self.args, self.kwargs))
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
    """Convert the user's inputs: a tensor, a sequence of arguments, or a mapping of them by name.

    Raises UsageError for inputs that `forward` does not accept, wrong names, and empty dimensions.
    """
    args, kwargs = _bound(model, inputs)
    args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
    found = [
        (path, leaf)
        for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]
        if isinstance(leaf, torch.Tensor)
    ]
    if not found:
        raise UsageError("inputs contain no tensor: give example inputs of forward")
    own = leaf_names([_name(model, args, kwargs, path) for path, _ in found])
    chosen = _chosen_names("input_names", names, own)
    tensors = dict(zip(chosen, (leaf for _, leaf in found), strict=True))
    return Example(args, kwargs, chosen, _sizes(tensors, dynamic))


def _bound(model: torch.nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments, in the order of `forward`."""
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"inputs do not fit {type(model).__name__}.forward{signature}: {error}; give a tensor, a "
            "sequence of arguments, or a mapping of them by name (a dict as an argument: in a tuple)"
        ) from None
    return bound.args, bound.kwargs


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        raise UsageError("an input is on the meta device and has no values: give examples with values")
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


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


def _chosen_names(option: str, given: Sequence[str] | None, own: Sequence[str]) -> tuple[str, ...]:
    if given is None:
        return tuple(own)
    if isinstance(given, str) or len(given) != len(own) or len(set(given)) != len(given):
        raise UsageError(
            f"{option}={given!r}: give {len(own)} different names, one for each of {', '.join(own)}"
        )
    return tuple(given)


def _sizes(tensors: Mapping[str, torch.Tensor], dynamic: Dynamic) -> tuple[Sizes, ...]:
    """Return the named dimensions of every tensor; equal first dimensions are the batch."""
    said = {} if isinstance(dynamic, bool) else dict(dynamic)
    for name in said:
        if name not in tensors:
            raise UsageError(f"dynamic has the unknown input {name!r}; known are {', '.join(tensors)}")
    shapes = [tensor.shape for tensor in tensors.values() if tensor.ndim]
    batch = shapes[0][0] if shapes and dynamic is not False else None
    found = []
    for name, tensor in tensors.items():
        default = {0: BATCH} if tensor.ndim and tensor.shape[0] == batch else {}
        sizes = dict(said.get(name, default))
        _check_sizes(name, tensor, sizes)
        found.append(sizes)
    return tuple(found)


def _check_sizes(name: str, tensor: torch.Tensor, sizes: Sizes) -> None:
    for dim, size in sizes.items():
        if type(dim) is not int or not 0 <= dim < tensor.ndim:
            raise UsageError(f"dynamic={{{name!r}: {{{dim!r}: ...}}}}: {name!r} has {tensor.ndim} dimensions")
        if not isinstance(size, str) or not size.isidentifier():
            raise UsageError(f"invalid size name {size!r} of {name!r} in dynamic: expected one like 'batch'")
        if not tensor.shape[dim]:
            raise UsageError(f"dimension {dim} of the example {name!r} is empty: give at least one row")


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference: |onnx - torch| <= `atol` + `rtol` * |torch|; integers must be equal."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class Case:
    """Inputs with torch's outputs."""

    extents: Mapping[str, int]
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]


def cases_of(model: torch.nn.Module, example: Example, output_names: Sequence[str] | None) -> list[Case]:
    """Return the example, and with dynamic sizes also resized ones; raises UsageError."""
    extents = example.extents()
    first = _case(model, example, extents, output_names, "")
    if not extents:
        return [first]
    # Prefer smaller sizes (at least 2), because a model may limit its sizes.
    other = {size: extent - 1 if extent > 2 else extent + 1 for size, extent in extents.items()}
    remedy = "; omit fixed sizes from dynamic="
    return [first, _case(model, example.resized(other), other, output_names, remedy)]


def compare(path: Path, cases: Sequence[Case], tolerance: Tolerance) -> float:
    """Return the largest difference; raises UsageError if it exceeds the tolerance, or a run fails."""
    session = _session(path)
    taken = [one.name for one in session.get_inputs()]
    worst = 0.0
    for case in cases:
        try:
            found = session.run(None, {name: case.inputs[name].numpy() for name in taken})
        except Exception as error:
            raise UsageError(_not_run(error)) from error
        for (name, wanted), answer in zip(case.outputs.items(), found, strict=True):
            worst = max(worst, _difference(name, torch.from_numpy(answer), wanted, tolerance, case.extents))
    return worst


def _case(
    model: torch.nn.Module,
    example: Example,
    extents: Mapping[str, int],
    names: Sequence[str] | None,
    remedy: str,
) -> Case:
    inputs = [tensor.clone() for tensor in example.tensors]
    try:
        answer = model(*example.args, **example.kwargs)
    except Exception as error:
        said = ", ".join(f"{size} {extent}" for size, extent in extents.items())
        raise UsageError(
            f"the model itself fails with the inputs ({said or 'as given'}): {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]:.200}{remedy}"
        ) from error
    outputs = _outputs(answer, names)
    return Case(extents, dict(zip(example.names, inputs, strict=True)), outputs)


def _outputs(answer: Any, names: Sequence[str] | None) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_flatten_with_path(answer)[0]
    own = leaf_names([name_of_path(path) or "output" for path, leaf in leaves if leaf is not None])
    tensors = [leaf for _, leaf in leaves if leaf is not None]
    for name, leaf in zip(own, tensors, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise UsageError(f"forward returns {leaf!r:.60} as {name!r}: ONNX supports tensors only")
    if not tensors:
        raise UsageError("forward returns no tensor, so there is nothing to export")
    chosen = _chosen_names("output_names", names, own)
    return dict(zip(chosen, (one.detach().clone() for one in tensors), strict=True))


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UsageError(_not_run(error)) from error


def _not_run(error: Exception) -> str:
    reason = " ".join(str(error).split())
    return (
        f"onnxruntime cannot run the exported model, so nothing was written: {reason:.300}; "
        "compare=False skips the comparison"
    )


def _difference(
    name: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: Tolerance, extents: Mapping[str, int]
) -> float:
    where = ", ".join(f"{size} {extent}" for size, extent in extents.items()) or "the inputs as given"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise UsageError(
            f"output {name!r} is {found.dtype} {list(found.shape)} in ONNX and {wanted.dtype} "
            f"{list(wanted.shape)} in torch, with {where}: nothing was written"
        )
    exact = not wanted.is_floating_point()
    rtol, atol = (0.0, 0.0) if exact else (tolerance.rtol, tolerance.atol)
    ours, theirs = found.double(), wanted.double()
    apart = (ours - theirs).abs().nan_to_num(nan=0.0, posinf=float("inf"))
    apart[ours == theirs] = 0.0
    greatest = float(apart.max()) if apart.numel() else 0.0
    if not torch.allclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True):
        raise UsageError(
            f"output {name!r} differs by up to {greatest:.3g} between ONNX and torch, with {where} "
            f"(allowed: {atol:g} + {rtol:g} of the value): nothing was written"
        )
    return greatest
