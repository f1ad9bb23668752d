"""Trace a model with `torch.export`, without output or side effects; initialise lazy and meta modules.

`compile` is a dry run that initialises lazy and meta modules and records the signature.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from types import FunctionType
from typing import Any

import torch
from torch import nn

from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.runtime import Signature, Size, TensorSpec
from torchrelay.models.archive.api import Recorded, checked, record, shared_parameters, tie_again, unready
from torchrelay.models.package.graph_lowering import (
    Dynamic,
    ForwardCall,
    LoweredProgram,
    call_of,
    fixed_sizes,
    mapped,
    plain,
    rewritten,
)
from torchrelay.models.package.program import tree_of

_LOGGERS = (
    *("torch", "torch.__trace", "torch.onnx", "torch.export", "torch.fx", "torch._dynamo"),
    *("onnxscript", "onnx_ir"),
)


@contextmanager
def undisturbing() -> Iterator[None]:
    """Context manager for an export without side effects; other threads can still print."""
    streams = RandomStreams.capture()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), saying_nothing():
            yield
    finally:
        streams.restore()


@contextmanager
def saying_nothing() -> Iterator[None]:
    """Context manager that suppresses torch's output while tracing; errors report it in one line."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        stack.enter_context(redirect_stdout(_Others(sys.stdout)))
        stack.enter_context(redirect_stderr(_Others(sys.stderr)))
        yield


class _Others:
    """A text stream that drops the output of the thread that created it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._mute = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._mute else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager for eval mode; restores the mode of every part."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


_UNLIKE_IN_TRAINING = (
    *(nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU),
    *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)


_OF_LIBRARIES = ("torch.", "torchrelay.", "builtins.")


def parts_that_train_otherwise(model: nn.Module) -> list[str]:
    """List the parts of a model that behave, or may behave, differently in training mode."""
    return [
        f"{name or 'the model'} ({type(part).__name__})"
        for name, part in model.named_modules()
        if _trains_otherwise(part)
    ]


def _trains_otherwise(part: nn.Module) -> bool:
    if isinstance(part, _UNLIKE_IN_TRAINING):
        return getattr(part, "p", 1) != 0
    if type(part).__module__.startswith("torch.nn."):  # recurrent layers, attention, encoders
        return isinstance(dropout := getattr(part, "dropout", 0), (int, float)) and dropout > 0
    if callable(says := getattr(part, "trains_otherwise", None)) and says():  # a model of an ONNX file
        return True
    own = [kind for kind in type(part).__mro__ if not f"{kind.__module__}.".startswith(_OF_LIBRARIES)]
    functions = [one for kind in own for one in vars(kind).values() if isinstance(one, FunctionType)]
    return any("training" in one.__code__.co_names for one in functions)


def export(
    model: nn.Module, inputs: Any, dynamic: Dynamic | None = None, *, drop_unused: bool = False
) -> LoweredProgram:
    """Trace the model in eval mode; UsageError for other inputs, BlobError if it cannot be traced."""
    call = call_of(model, inputs, dynamic)
    try:
        with evaluating(model), saying_nothing():
            traced = _traced(model, call)
    except (UsageError, BlobError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BlobError(f"torch.export cannot trace {type(model).__name__}: {first[:300]}") from error
    return rewritten(traced, call, drop_unused=drop_unused)


def _traced(model: nn.Module, call: ForwardCall) -> torch.export.ExportedProgram:
    """Trace with equal names as equal sizes; sizes that the traced model fixes become fixed.

    Sizes that torch made dynamic by itself are not used, because it may have excluded the value 1.
    """
    every = {text for sizes in call.sizes.values() for text in sizes.values()}
    try:
        return _attempt(model, call, {text: torch.export.Dim(text) for text in every})
    except Exception:
        looked = _attempt(model, call, dict.fromkeys(every, torch.export.Dim.AUTO))
    free = every - fixed_sizes(looked, call)
    try:
        return _attempt(model, call, {text: torch.export.Dim(text) for text in free})
    except Exception:
        return _attempt(model, call, {})


def _attempt(model: nn.Module, call: ForwardCall, size_of: Mapping[str, Any]) -> torch.export.ExportedProgram:
    """Trace with these dynamic sizes; each becomes at least 2, because torch treats a size of 1 as fixed."""
    grown, shapes = dict[int, torch.Tensor](), dict[int, dict[int, Any]]()
    for name, tensor in call.leaves:
        key, long = id(tensor), tensor
        shapes[key] = {at: size_of[text] for at, text in call.sizes.get(name, {}).items() if text in size_of}
        for at in shapes[key]:
            long = torch.cat([long, long], at) if long.shape[at] == 1 else long
        grown[key] = long
    bound = inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    dynamic = {
        name: mapped(value, lambda one: shapes[id(one)], None) for name, value in bound.arguments.items()
    }
    for name in list(dynamic):
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            dynamic.update(dynamic.pop(name))
    args, kwargs = mapped((call.args, dict(call.kwargs)), lambda one: grown[id(one)])
    return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic)


def _materialise(model: nn.Module) -> None:
    """Initialise tensors on the meta device with `reset_parameters`; UsageError, before anything changes."""
    parts = [
        (name, part)
        for name, part in model.named_modules()
        if any(one.is_meta for one in (*part.parameters(recurse=False), *part.buffers(recurse=False)))
    ]
    unable = [name or type(part).__name__ for name, part in parts if not hasattr(part, "reset_parameters")]
    if unable:
        raise UsageError(
            f"{', '.join(unable[:8])} are on the meta device and have no reset_parameters: "
            "create the model on a real device"
        )
    ties = shared_parameters(model)
    for _, part in parts:
        part.to_empty(device="cpu", recurse=False)
    tie_again(model, ties)
    for _, part in parts:
        part.reset_parameters()


def compile(
    model: nn.Module, inputs: Any, *, dynamic: Dynamic | None = None, graph: bool | Mapping[str, Any] = False
) -> Signature:
    """Run the model once on example inputs, so that all its states have content, and record its signature.

    Lazy modules take their shapes from the inputs. Modules on the meta device are moved to the CPU and
    initialised by their `reset_parameters`. The forward pass runs in eval mode without gradients; it does not
    change buffers or random streams, except for the initialisation. `save` uses the record.

    Args:
        model: The model, changed in place.
        inputs: A tensor, a tuple of arguments, or a dict by name; meta tensors stand for zeros.
        dynamic: Names of dynamic sizes; default: the first size shared by all inputs is "batch".
        graph: Also compile the model in place with `torch.compile`; a dict has its options.

    Returns:
        The signature of the model.

    Raises:
        UsageError: `forward` does not accept the inputs, or a module cannot be initialised.

    Example:
        compile(model, torch.zeros(1, 28, 28))
    """
    checked(model)
    if any(nn.parameter.is_lazy(one) for one in (*model.parameters(), *model.buffers())):
        call = call_of(model, _real(inputs, model))
        with evaluating(model), torch.no_grad():
            _called(model, lambda: model(*call.args, **call.kwargs))
        state = model.state_dict(keep_vars=True)
        if names := [name for name in unready(model) if name in state and nn.parameter.is_lazy(state[name])]:
            raise UsageError(
                f"{', '.join(names[:8])} were not initialised: forward does not use them with these inputs"
            )
    _materialise(model)
    signature = _signature(model, call_of(model, _real(inputs, model), dynamic))
    record(model, Recorded(inputs, dynamic, signature))
    if graph:
        model.compile(**(graph if isinstance(graph, Mapping) else {}))
    return signature


def _real(inputs: Any, model: nn.Module) -> Any:
    """Replace meta tensors in the inputs with zeros on the model's device."""
    tensors = (*model.parameters(), *model.buffers())
    device = next((one.device for one in tensors), torch.device("cpu"))
    return mapped(inputs, lambda one: torch.zeros_like(one, device=device) if one.is_meta else one)


def _called(model: nn.Module, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UsageError(
            f"{type(model).__name__} does not run on these inputs: {type(error).__name__}: {error}"
        ) from error


def _outputs(model: nn.Module, call: ForwardCall, grown: Mapping[str, int]) -> list[tuple[str, Any]]:
    """Return the outputs of a run without side effects, with some inputs longer by one in a dimension."""
    tensors = {id(one): one for _, one in call.leaves}
    for name, one in call.leaves:
        if name in grown:
            tensors[id(one)] = torch.cat([one, one.narrow(grown[name], 0, 1)], grown[name])
    args, kwargs = mapped((call.args, dict(call.kwargs)), lambda one: tensors[id(one)])
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with evaluating(model), torch.no_grad(), torch.random.fork_rng():
        found = _called(model, lambda: torch.func.functional_call(model, buffers, args, kwargs))
    return tree_of(plain(found), lambda one: isinstance(one, (torch.Tensor, int, float)), "output")[1]


def _signature(model: nn.Module, call: ForwardCall) -> Signature:
    first = _outputs(model, call, {})
    sizes: list[list[Size]] = [list(_shape(value)) for _, value in first]
    free: set[str] = set()
    for text in dict.fromkeys(text for dims in call.sizes.values() for text in dims.values()):
        where = {name: at for name, dims in call.sizes.items() for at, named in dims.items() if named == text}
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
    inputs = []
    for name, tensor in call.leaves:
        named = {at: text for at, text in call.sizes.get(name, {}).items() if text in free}
        shape_of = tuple(named.get(at, size) for at, size in enumerate(tensor.shape))
        inputs.append(TensorSpec(name, shape_of, _dtype(tensor)))
    outputs = [
        TensorSpec(name, tuple(shape), _dtype(value))
        for shape, (name, value) in zip(sizes, first, strict=True)
    ]
    return Signature(tuple(inputs), tuple(outputs))


def _text(name: str, times: int, more: int) -> str:
    """Return the text of a size that grows by `times` per unit of `name`."""
    return (name if times == 1 else f"{times}*{name}") + (
        f" + {more}" if more > 0 else f" - {-more}" if more else ""
    )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _dtype(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return "float64" if isinstance(value, float) else "int64"
