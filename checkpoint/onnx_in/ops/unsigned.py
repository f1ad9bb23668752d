"""Arithmetic of unsigned integers of more than 8 bits, done in 64 bits with sign: torch has hardly any."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchrelay.checkpoint.onnx_in.call import Call

WIDE = (torch.uint16, torch.uint32, torch.uint64)


def widened(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for wide unsigned inputs too; results of integers come back in the inputs' type.

    Values of uint64 above 2**63 - 1 are refused, as they would be taken for negative ones.
    """

    @functools.wraps(run)
    def wide(call: Call, *inputs: Any) -> Any:
        dtypes = [one.dtype for one in inputs if isinstance(one, torch.Tensor) and one.dtype in WIDE]
        if not dtypes:
            return run(call, *inputs)
        found = run(call, *[_signed(call, one) for one in inputs])
        if isinstance(found, tuple):
            return tuple(_back(one, dtypes[0]) for one in found)
        return _back(found, dtypes[0])

    return wide


def _signed(call: Call, one: Any) -> Any:
    if not isinstance(one, torch.Tensor) or one.dtype not in WIDE:
        return one
    signed = one.view(torch.int64) if one.dtype == torch.uint64 else one.to(torch.int64)
    if one.dtype == torch.uint64 and bool((signed < 0).any()):
        raise call.fail("numbers above 2**63 - 1 cannot be computed with here")
    return signed


def _back(one: Any, dtype: torch.dtype) -> Any:
    return one.to(dtype) if isinstance(one, torch.Tensor) and one.dtype == torch.int64 else one
