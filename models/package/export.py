"""From a model and example inputs to a program by `torch.export`, which prints and changes nothing."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.random import RandomStreams
from torchrelay.models.package.graph_lowering import (
    Dynamic,
    ForwardCall,
    LoweredProgram,
    call_of,
    dynamic_names,
    fixed_sizes,
    mapped,
    rewritten,
)

_LOGGERS = (
    "torch",
    "torch.__trace",
    "torch.onnx",
    "torch.export",
    "torch.fx",
    "torch._dynamo",
    "onnxscript",
    "onnx_ir",
)


@contextmanager
def undisturbing() -> Iterator[None]:
    """Export inside of this; other threads go on printing."""
    streams = RandomStreams.capture()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.enter_context(saying_nothing())
            yield
    finally:
        streams.restore()


@contextmanager
def saying_nothing() -> Iterator[None]:
    """What torch prints and logs while it traces stays unsaid: errors tell it in one line."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_silent_loggers())
        for name in ("stdout", "stderr"):
            stack.enter_context(_without_this_thread(name))
        yield


@contextmanager
def _silent_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)


@contextmanager
def _without_this_thread(name: str) -> Iterator[None]:
    before = getattr(sys, name)
    ours = _Others(before)
    setattr(sys, name, ours)
    try:
        yield
    finally:
        if getattr(sys, name) is ours:
            setattr(sys, name, before)


class _Others:
    """A text stream on which the thread that made it is not heard."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._mute = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._mute:
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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


_UNLIKE_IN_TRAINING = (
    *(nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU),
    *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)


_OF_LIBRARIES = ("torch.", "torchrelay.", "builtins.")


def parts_that_train_otherwise(model: nn.Module) -> list[str]:
    """The parts of a model that do, or may do, something else in training than in eval mode."""
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
    if callable(says := getattr(part, "trains_otherwise", None)) and says():  # the model of an ONNX file
        return True
    own = [kind for kind in type(part).__mro__ if not f"{kind.__module__}.".startswith(_OF_LIBRARIES)]
    functions = [one for kind in own for one in vars(kind).values() if isinstance(one, FunctionType)]
    return any("training" in one.__code__.co_names for one in functions)


def export(
    model: nn.Module, inputs: Any, dynamic: Dynamic | None = None, *, drop_unused: bool = False
) -> LoweredProgram:
    """Trace the model in eval mode. The first size of inputs may differ unless `dynamic` says otherwise.

    Raises UsageError for inputs that do not fit, BlobError for a model of which no program can be made;
    the message says why.
    """
    call = call_of(model, inputs)
    names = dynamic_names(call, dynamic)
    try:
        with evaluating(model), saying_nothing():
            traced = _traced(model, call, names)
    except (UsageError, BlobError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BlobError(f"torch.export cannot trace {type(model).__name__}: {first[:300]}") from error
    return rewritten(traced, call, names, drop_unused=drop_unused)


def _traced(
    model: nn.Module, call: ForwardCall, names: Mapping[str, Mapping[int, str]]
) -> torch.export.ExportedProgram:
    """With sizes of one name as one, of any length; those that the model, traced, fixes are fixed.

    Sizes that torch chose to be free by itself are not taken over: it may have ruled out a length of 1.
    """
    every = {text for sizes in names.values() for text in sizes.values()}
    try:
        return _attempt(model, call, names, {text: torch.export.Dim(text) for text in every})
    except Exception:
        looked = _attempt(model, call, names, dict.fromkeys(every, torch.export.Dim.AUTO))
    free = every - fixed_sizes(looked, call, names)
    try:
        return _attempt(model, call, names, {text: torch.export.Dim(text) for text in free})
    except Exception:
        return _attempt(model, call, names, {})


def _attempt(
    model: nn.Module, call: ForwardCall, names: Mapping[str, Mapping[int, str]], size_of: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    wanted = {
        name: {at: size_of[text] for at, text in sizes.items() if text in size_of}
        for name, sizes in names.items()
    }
    free = {
        name: {at: text for at, text in sizes.items() if text in size_of} for name, sizes in names.items()
    }
    grown = _grown(call, free)
    shapes = _like(call, wanted, model)
    return torch.export.export(model, grown.args, dict(grown.kwargs), dynamic_shapes=shapes)


def _grown(call: ForwardCall, names: Mapping[str, Mapping[int, str]]) -> ForwardCall:
    """The call with every named size at least 2, because torch takes a size of 1 for a fixed one."""

    def grown(name: str, tensor: torch.Tensor) -> torch.Tensor:
        for at in names.get(name, {}):
            if tensor.shape[at] == 1:
                tensor = torch.cat([tensor, tensor], at)
        return tensor

    tensors = {id(tensor): grown(name, tensor) for name, tensor in call.leaves}
    args, kwargs = mapped((call.args, dict(call.kwargs)), lambda tensor: tensors[id(tensor)])
    return ForwardCall(args, kwargs, call.arguments, call.leaves)


def _like(call: ForwardCall, wanted: Mapping[str, Any], model: nn.Module) -> Any:
    """What `torch.export` wants to know of sizes, put together as the bound arguments are."""
    by_id = {id(tensor): wanted.get(name) for name, tensor in call.leaves}
    bound = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    parameters = inspect.signature(model.forward).parameters
    shapes = {name: mapped(value, lambda tensor: by_id[id(tensor)], None) for name, value in bound.items()}
    for name in list(shapes):
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            shapes.update(shapes.pop(name))
    return shapes
