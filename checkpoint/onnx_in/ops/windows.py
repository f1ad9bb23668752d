"""How windows lie over an input: strides, dilations and the padding that a file says or implies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from torchrelay.checkpoint.onnx_in.call import Call
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Windows:
    """Per spatial dimension: size of the window, step, distance inside of it, what is added around."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]

    @property
    def even(self) -> bool:
        """Whether as much is added before as after."""
        return self.before == self.after

    def spans(self) -> tuple[int, ...]:
        """Elements from the first to the last of a window."""
        return tuple(
            (size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True)
        )


def windows_of(call: Call, sizes: Sequence[Any], kernel: Sequence[int]) -> Windows:
    """The windows of a convolution or pooling over an input with these spatial sizes."""
    rank = len(kernel)
    strides = tuple(call.get("strides", (1,) * rank))
    dilations = tuple(call.get("dilations", (1,) * rank))
    plain = Windows(tuple(kernel), strides, dilations, (0,) * rank, (0,) * rank)
    if any(one < 1 for one in (*kernel, *strides, *dilations)) or not len(strides) == len(dilations) == rank:
        raise call.fail("sizes, strides and dilations of windows are at least 1, one for each dimension")
    mode = call.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        return _same(plain, sizes, upper=mode == "SAME_UPPER")
    pads = tuple(call.get("pads", (0,) * (2 * rank))) if mode == "NOTSET" else (0,) * (2 * rank)
    if len(pads) != 2 * rank or any(type(one) is int and one < 0 for one in pads):
        raise call.fail(f"pads {pads} are no two numbers for each of {rank} dimensions")
    return Windows(plain.kernel, strides, dilations, pads[:rank], pads[rank:])


def _same(plain: Windows, sizes: Sequence[Any], upper: bool) -> Windows:
    before, after = [], []
    for size, stride, span in zip(sizes, plain.strides, plain.spans(), strict=True):
        total = max((-(-size // stride) - 1) * stride + span - size, 0)
        small = total // 2
        before.append(small if upper else total - small)
        after.append(total - small if upper else small)
    return Windows(plain.kernel, plain.strides, plain.dilations, tuple(before), tuple(after))


def padded(x: Tensor, before: Sequence[Any], after: Sequence[Any], value: float = 0.0) -> Tensor:
    """`x` with elements added around its spatial dimensions."""
    widths = [one for pair in zip(reversed(before), reversed(after), strict=True) for one in pair]
    return functional.pad(x, widths, value=value) if any(type(one) is not int or one for one in widths) else x
