"""The operators that a program may use, found by name; no other function can be reached by a stored name.

Tensor work is torch's own `aten` library: every one of its operators but those that touch files or take
memory on trust. Arithmetic with sizes is a fixed table. Operators of other libraries are not stored.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from torchrelay.errors import FormatError

_ATEN = re.compile(r"aten\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")
_NEVER = re.compile(
    r"from_file|save|print|_print|warn|format|set|set_|set_data|.*storage.*|_?nested.*|.*_unsafe|_reshape_alias"
    r"|.*_with_dims.*|sparse_resize.*|_?coalesced_?|_?(ccol_|crow_|col_|row_)?indices(_copy)?"
    r"|_convert_indices.*|_ctc_loss.*|ctc_loss.*|.*max_pool.*_backward|.*embedding.*_backward.*"
)
"""Files, foreign memory, constructors that skip the checks of what they are given, ways to change the indices
of sparse tensors after these were checked, and what torch 2.13 does not check: it writes where indices say.
"""

_PLAIN: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "getitem"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
    )
}
_PLAIN.update({f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")})
_PLAIN.update(
    {
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_not", "sym_int", "sym_float", "sym_ite", "sym_sum")
    }
)
_PLAIN["round"] = round
_NAMES = {id(function): name for name, function in _PLAIN.items()}


def name_of(target: Any) -> str | None:
    """The name under which an operator is stored; None for what a program may not use."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target) if _aten(str(target)) is target else None
    return _NAMES.get(id(target))


def operator_of(name: str) -> Callable[..., Any]:
    """The operator of a stored name; raises FormatError for any other name."""
    found = _PLAIN.get(name) or _aten(name)
    if found is None:
        raise FormatError(f"the program uses {name[:100]!r}, which is no operator that programs may use")
    return found


def _aten(name: str) -> Callable[..., Any] | None:
    matched = _ATEN.fullmatch(name)
    if matched is None or _NEVER.fullmatch(matched[1]):
        return None
    packet = getattr(torch.ops.aten, matched[1], None)
    found = getattr(packet, matched[2], None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(found, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(found.name()):
        return None  # not of the tensor library, but of TorchScript's, which knows files
    trusts = any(argument.name == "unsafe" for argument in found._schema.arguments)
    return None if trusts else found
