"""Calling a module so that the same call gives the same bits later: in `eval`, seeded, without traces."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchrelay.jobs.random import RandomStreams
from torchrelay.runners.replay.trees import Json, put_together, taken_apart

SEED = 0
_MOST_THREADS = 1024
"""A file that asks for more would end the process."""


def device_of(module: nn.Module) -> torch.device:
    """Where the module's first tensor lies; the CPU for a module without any."""
    for one in (*module.parameters(), *module.buffers()):
        return one.device
    return torch.device("cpu")


def play(module: nn.Module, form: Json, tensors: Sequence[torch.Tensor]) -> tuple[Json, list[torch.Tensor]]:
    """Call the module with recorded arguments; the form of what it gives, and the tensors of that.

    Leaves the module, its buffers, and all random streams as they were. UsageError for outputs that are no
    tensors, numbers or texts; else what `forward` raises.
    """
    args, kwargs = put_together(form, tensors, device_of(module))
    with _untouched(module), torch.no_grad():
        outputs = module(*args, **kwargs)
    found: list[torch.Tensor] = []
    return taken_apart(outputs, found), found


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    modes = {inner: inner.training for inner in module.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    streams = RandomStreams.capture()
    torch.manual_seed(SEED)
    try:
        module.eval()
        yield
    finally:
        for inner, training in modes.items():
            inner.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        streams.restore()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the CPU are of one type and shape and have the same bytes, NaN included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def settings_now(device: torch.device) -> dict[str, Any]:
    """What the bits of a result hang on, beside code, weights and inputs."""
    cuda = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
    }


@contextmanager
def as_it_was(settings: dict[str, Any]) -> Iterator[None]:
    """While the block runs, what can be set of recorded settings is as it was then."""
    before = settings_now(torch.device("cpu"))
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: dict[str, Any]) -> None:
    threads, precision = settings.get("threads"), settings.get("matmul_precision")
    if type(threads) is int and 0 < threads <= _MOST_THREADS:
        torch.set_num_threads(threads)
    if precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(str(precision))
    torch.use_deterministic_algorithms(settings.get("deterministic") is True)
    dtype = getattr(torch, str(settings.get("default_dtype")).removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        torch.set_default_dtype(dtype)
