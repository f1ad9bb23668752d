"""While a model is exported nothing is printed, no random stream moves, no gradient is recorded."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from torchrelay.jobs.random import RandomStreams

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
