"""Store and rebuild tensor subclasses that wrap other tensors.

A wrapper lists its inner tensors and a context by `__tensor_flatten__`, and is built again by
`__tensor_unflatten__`. Stored are a description, as a value under the tensor's name, and each inner tensor as
`<name>.<inner>`. The description is only compared: a load needs a live tensor of the same description, whose
class builds the new one. No class is looked up by name.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from torchrelay.checkpoint.state.leaf import is_sharded
from torchrelay.errors import BlobError
from torchrelay.records import Json

_STEPS = ("__tensor_flatten__", "__tensor_unflatten__")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TEXT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_LEVELS = 8


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of named inner tensors; DTensors and nested tensors do not count."""
    if type(tensor) in _PLAIN or is_sharded(tensor) or tensor.is_nested:
        return False
    return all(callable(getattr(type(tensor), step, None)) for step in _STEPS)


def is_typed_memory(tensor: torch.Tensor) -> bool:
    """Whether a subclass only adds a type to plain memory: no inner tensors, no attributes."""
    stock = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return stock and not is_sharded(tensor) and not getattr(tensor, "__dict__", None)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its type, detached, sharing its memory."""
    return (tensor if type(tensor) in _PLAIN else tensor.as_subclass(torch.Tensor)).detach()


def inner_tensors(tensor: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """The inner tensors of a wrapper by name, not copied.

    Raises BlobError if the wrapper computes them, so that nothing could be loaded in place.
    """
    found = {inner: getattr(tensor, inner) for inner in _flattened(tensor)[0]}
    for inner, part in found.items():
        if not isinstance(part, torch.Tensor) or getattr(tensor, inner) is not part:
            raise BlobError(
                f"{name} is a {_class(tensor)} whose __tensor_flatten__ names {inner!r}, which is not a "
                "tensor that it keeps: name the tensors that it consists of"
            )
    return found


def description(tensor: torch.Tensor, name: str) -> dict[str, Json]:
    """What a wrapper is beside its inner tensors; raises BlobError for a context without a text form."""
    inner, context = _flattened(tensor)
    return {
        "class": _class(tensor),
        "context": _text(context, f"the context of {name} ({_class(tensor)})", _LEVELS),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "inner": list(inner),
        "shape": list(tensor.shape),
    }


def told(described: Json) -> str:
    """A description as text."""
    if not isinstance(described, dict):
        return "a value"
    context = "" if described.get("context") == "None" else f" with {described.get('context')}"
    return f"{described.get('class')} of {described.get('dtype')}{described.get('shape')}{context}"


def rebuilder(model: torch.Tensor) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Builds a wrapper like `model` around other inner tensors; does not keep `model` alive."""
    kind: Any = type(model)
    context, size, stride = _flattened(model)[1], model.shape, model.stride()
    return lambda inner: kind.__tensor_unflatten__(dict(inner), context, size, stride)


def _flattened(tensor: Any) -> tuple[list[str], Any]:
    """Names of inner tensors, and the context."""
    inner, context = tensor.__tensor_flatten__()
    return inner, context


def _class(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _text(value: Any, what: str, levels: int) -> str:
    """A text that is the same for equal contexts in every process; reads no attributes of unknown classes."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if levels == 0:
        raise BlobError(f"{what} is nested deeper than {_LEVELS} levels: give a flatter one")
    if isinstance(value, Enum):
        return f"{kind}.{value.name}"
    if type(value) in _TEXT:
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    parts = list(_parts(value, what, levels - 1))
    if type(value) in (set, frozenset):
        parts.sort()
    return f"{kind.removeprefix('builtins.')}({', '.join(parts)})"


def _parts(value: Any, what: str, levels: int) -> Iterator[str]:
    """Texts of the parts of a value."""
    if isinstance(value, (list, tuple)) or type(value) in (set, frozenset):
        yield from (_text(item, what, levels) for item in value)
    elif type(value) is dict:
        pairs = [f"{_text(k, what, levels)}: {_text(v, what, levels)}" for k, v in value.items()]
        yield from sorted(pairs)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield f"{field.name}={_text(getattr(value, field.name), what, levels)}"
    else:
        raise BlobError(
            f"{what} holds a {type(value).__module__}.{type(value).__qualname__}, which has no text "
            "form: let __tensor_flatten__ return numbers, text, types, enums or containers of these"
        )


def made_state(optimizer: Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """The state that the first step of an optimizer makes for a parameter, found with a copy of both.

    The optimizer, its parameters and torch's random streams do not change. Raises BlobError if the step
    fails.
    """
    group = next(one for one in optimizer.param_groups if any(p is parameter for p in one["params"]))
    kind: Any = type(optimizer)
    try:
        like = torch.zeros_like(parameter.detach()).requires_grad_()
        like.grad = torch.zeros_like(parameter.detach())
        trial: Any = object.__new__(kind)
        trial.__dict__.update({key: one for key, one in vars(optimizer).items() if key != "step"})
        trial.__dict__.update((key, OrderedDict()) for key in vars(optimizer) if key.endswith("_hooks"))
        trial.param_groups, trial.state = [{**group, "params": [like]}], defaultdict(dict)
        step = kind.step
        while getattr(step, "hooked", False):  # hooks, ours too, would count it as a step of the training
            step = step.__wrapped__
        devices = [] if like.is_cpu else [like.device.index or 0]
        with torch.random.fork_rng(devices, device_type="cuda" if like.is_cpu else like.device.type):
            step(trial)
    except Exception as error:
        raise BlobError(
            f"a step of a copy of {kind.__name__} raised {type(error).__name__}: {error}"
        ) from error
    return dict(trial.state.get(like, {}))


def check_made(
    optimizer: Optimizer, parameter: torch.Tensor, key: str, found: torch.Tensor, name: str
) -> None:
    """Raise BlobError for a wrapper in the state of a parameter that a resumed run could not recreate."""
    known = _checked.setdefault(optimizer, {})
    wanted = description(found, name)
    if known.get((id(parameter), key)) == wanted:
        return
    try:
        made = made_state(optimizer, parameter).get(key)
        why = "a step of a copy of the optimizer makes none"
    except BlobError as error:
        made, why = None, str(error)
    if not (isinstance(made, torch.Tensor) and is_wrapper(made) and description(made, name) == wanted):
        raise BlobError(
            f"{name} is a {_class(found)}, which a load could not build before the first step: {why}; "
            f"{_ADVICE}"
        )
    known[id(parameter), key] = wanted


_checked: weakref.WeakKeyDictionary[Optimizer, dict[tuple[int, str], dict[str, Json]]] = (
    weakref.WeakKeyDictionary()
)
_ADVICE = (
    "instead of the optimizer, register an object with its state_dict and load_state_dict, and with a "
    "method state_dict_to_load_into() that returns a state dict with such tensors before the first step"
)


def made_by_an_optimizer(described: Json) -> torch.Tensor | None:
    """A wrapper of this description that the first step of a live optimizer makes; else None.

    An object with `load_state_dict` may wrap an optimizer that is not registered.
    """
    if not isinstance(described, dict):
        return None
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]:
        seen: set[Any] = set()
        for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
            form = (parameter.shape, parameter.dtype, parameter.device)
            if list(parameter.shape) != described.get("shape") or form in seen:
                continue
            seen.add(form)
            try:
                made = made_state(optimizer, parameter).values()
                found = [one for one in made if isinstance(one, torch.Tensor) and is_wrapper(one)]
                alike = [one for one in found if description(one, "state") == described]
            except BlobError:
                continue
            if alike:
                return alike[0]
    return None
