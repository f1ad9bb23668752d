"""`compile`: a dry run that gives lazy and meta modules their content and learns the signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature, Size, TensorSpec
from torchrelay.models.archive.states import Recorded, checked, record, shared_parameters, tie_again, unready
from torchrelay.models.package.export import evaluating
from torchrelay.models.package.graph_lowering import (
    Dynamic,
    ForwardCall,
    call_of,
    dynamic_names,
    mapped,
    plain,
)
from torchrelay.models.package.program import tree_of


def materialise(model: nn.Module, device: str = "cpu") -> None:
    """Give content to every tensor on the meta device; models without one are left alone.

    Raises UsageError, before anything changes, for parts that have such tensors and no
    `reset_parameters`: what their values should be only their author knows.
    """
    parts = [
        (name, part)
        for name, part in model.named_modules()
        if any(one.is_meta for one in (*part.parameters(recurse=False), *part.buffers(recurse=False)))
    ]
    unable = [name or type(part).__name__ for name, part in parts if not hasattr(part, "reset_parameters")]
    if unable:
        raise UsageError(
            f"{', '.join(unable[:8])} lie on the meta device and have no reset_parameters, so nobody "
            "knows their first values: make the model on a real device, or load states into it"
        )
    ties = shared_parameters(model)
    for _, part in parts:
        part.to_empty(device=device, recurse=False)
    tie_again(model, ties)
    for _, part in parts:
        part.reset_parameters()


def compile(
    model: nn.Module,
    inputs: Any,
    *,
    dynamic: Dynamic | None = None,
    graph: bool | Mapping[str, Any] = False,
) -> Signature:
    """Run the model once on examples, so that all its states have content; returns its signature.

    `inputs` is a tensor, a tuple of arguments, or a dict by name; tensors on the meta device stand for zeros.
    Lazy modules take their shapes from it; modules on the meta device are made on the CPU and initialised by
    their `reset_parameters`. The forward pass runs in eval mode, without gradients; buffers and random
    streams are as before (initialising draws from torch's stream, as a constructor does). `dynamic` names the
    sizes that may differ, by default the first one of all inputs that share it is "batch". `save` uses what
    is learned here. With `graph` the model is also compiled by `torch.compile`, in place; a dict has its
    options. Raises UsageError for inputs that `forward` does not take, or what cannot be initialised.
    """
    checked(model)
    _fill_lazy(model, inputs)
    materialise(model)
    call = call_of(model, _real(inputs, model))
    names = dynamic_names(call, dynamic)
    signature = _signature(model, call, names)
    record(model, Recorded(inputs, dynamic, signature))
    if graph:
        model.compile(**(graph if isinstance(graph, Mapping) else {}))
    return signature


def _real(inputs: Any, model: nn.Module) -> Any:
    """The inputs with zeros on the model's device in place of meta tensors."""
    tensors = (*model.parameters(), *model.buffers())
    device = next((one.device for one in tensors), torch.device("cpu"))
    return mapped(inputs, lambda one: torch.zeros_like(one, device=device) if one.is_meta else one)


def _fill_lazy(model: nn.Module, inputs: Any) -> None:
    if any(nn.parameter.is_lazy(one) for one in (*model.parameters(), *model.buffers())):
        call = call_of(model, _real(inputs, model))
        with evaluating(model), torch.no_grad():
            _called(model, lambda: model(*call.args, **call.kwargs))
        state = model.state_dict(keep_vars=True)
        if names := [name for name in unready(model) if name in state and nn.parameter.is_lazy(state[name])]:
            raise UsageError(
                f"{', '.join(names[:8])} got no content: forward does not use them with these inputs"
            )


def _called(model: nn.Module, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UsageError(
            f"{type(model).__name__} does not run on these inputs: {type(error).__name__}: {error}"
        ) from error


def _outputs(model: nn.Module, call: ForwardCall, grown: Mapping[str, int]) -> list[tuple[str, Any]]:
    """The outputs of a run that leaves no trace, with some inputs one longer in one dimension."""
    tensors = {id(one): _longer(one, grown.get(name)) for name, one in call.leaves}
    args, kwargs = mapped((call.args, dict(call.kwargs)), lambda one: tensors[id(one)])
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with evaluating(model), torch.no_grad(), torch.random.fork_rng():
        found = _called(model, lambda: torch.func.functional_call(model, buffers, args, kwargs))
    return tree_of(plain(found), lambda one: isinstance(one, (torch.Tensor, int, float)), "output")[1]


def _longer(tensor: torch.Tensor, dimension: int | None) -> torch.Tensor:
    if dimension is None:
        return tensor
    return torch.cat([tensor, tensor.narrow(dimension, 0, 1)], dimension)


def _signature(model: nn.Module, call: ForwardCall, names: Mapping[str, Mapping[int, str]]) -> Signature:
    first = _outputs(model, call, {})
    sizes: list[list[Size]] = [list(_shape(value)) for _, value in first]
    free: set[str] = set()
    for text in dict.fromkeys(text for dims in names.values() for text in dims.values()):
        where = {name: at for name, dims in names.items() for at, named in dims.items() if named == text}
        length = next(tensor.shape[where[name]] for name, tensor in call.leaves if name in where)
        try:
            second = _outputs(model, call, where)
        except UsageError:
            continue  # the model fixes this size
        free.add(text)
        for shape, (_, before), (_, after) in zip(sizes, first, second, strict=True):
            for at, (size, longer) in enumerate(zip(_shape(before), _shape(after), strict=True)):
                if longer != size:
                    shape[at] = _text(text, longer - size, size - (longer - size) * length)
    inputs = [
        TensorSpec(
            name,
            tuple(
                names[name][at] if names.get(name, {}).get(at) in free else size
                for at, size in enumerate(tensor.shape)
            ),
            _dtype(tensor),
        )
        for name, tensor in call.leaves
    ]
    outputs = [
        TensorSpec(name, tuple(shape), _dtype(value))
        for shape, (name, value) in zip(sizes, first, strict=True)
    ]
    return Signature(tuple(inputs), tuple(outputs))


def _text(name: str, times: int, more: int) -> str:
    """A size that grows by `times` with each one of `name`."""
    return (name if times == 1 else f"{times}*{name}") + (
        f" + {more}" if more > 0 else f" - {-more}" if more else ""
    )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _dtype(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return "float64" if isinstance(value, float) else "int64"
