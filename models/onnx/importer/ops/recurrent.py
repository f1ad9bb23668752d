"""RNN, GRU and LSTM with all activations and options of the standard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrelay.errors import UsageError
from torchrelay.models.onnx.importer.operator import OpCall
from torchrelay.records import dataclass

Activation = Callable[[Tensor], Tensor]
_DEFAULTS = {
    "LeakyRelu": (0.01, 0.0), "ThresholdedRelu": (1.0, 0.0), "HardSigmoid": (0.2, 0.5), "Elu": (1.0, 0.0),
    "Affine": (1.0, 0.0), "ScaledTanh": (1.0, 1.0),
}  # fmt: skip


def _activation(name: str, alpha: float, beta: float) -> Activation:
    table: dict[str, Activation] = {
        "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
        "Softplus": torch.nn.functional.softplus,
        "Softsign": torch.nn.functional.softsign,
        "Affine": lambda x: alpha * x + beta,
        "LeakyRelu": lambda x: torch.where(x >= 0, x, alpha * x),
        "ThresholdedRelu": lambda x: torch.where(x >= alpha, x, torch.zeros_like(x)),
        "ScaledTanh": lambda x: alpha * torch.tanh(beta * x),
        "HardSigmoid": lambda x: torch.clamp(alpha * x + beta, 0, 1),
        "Elu": lambda x: torch.where(x >= 0, x, alpha * torch.expm1(x)),
    }  # fmt: skip
    if name not in table:
        raise UsageError(f"unknown activation {name!r}; known are {', '.join(table)}")
    return table[name]


@dataclass(frozen=True, eq=False)
class _Direction:
    """Weights and state of one direction, with gates concatenated in the rows of the weights."""

    w: Tensor
    r: Tensor
    wb: Tensor
    rb: Tensor
    h: Tensor
    c: Tensor
    peepholes: Tensor | None
    activations: tuple[Activation, ...]


def _activations(
    call: OpCall, each: int, default: tuple[str, ...], directions: int
) -> list[tuple[Activation, ...]]:
    names = call.get("activations", default * directions)
    if len(names) != each * directions:
        raise call.fail(f"{len(names)} activations for {directions} directions of {each} each")
    alphas, betas = list(call.get("activation_alpha", ())), list(call.get("activation_beta", ()))
    made = []
    for name in names:
        alpha, beta = _DEFAULTS.get(name, (0.0, 0.0))
        alpha = alphas.pop(0) if alphas and name in _DEFAULTS else alpha
        takes_beta = name in ("Affine", "ScaledTanh", "HardSigmoid")
        made.append(_activation(name, alpha, betas.pop(0) if betas and takes_beta else beta))
    return [tuple(made[at * each : (at + 1) * each]) for at in range(directions)]


def _clipped(call: OpCall, x: Tensor) -> Tensor:
    return x.clamp(-call.get("clip"), call.get("clip")) if call.has("clip") else x


def _rnn_step(call: OpCall, at: _Direction, gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return at.activations[0](_clipped(call, gates + h @ at.r.t() + at.rb)), c


def _gru_step(call: OpCall, at: _Direction, gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    size = h.shape[-1]
    f, g = at.activations
    rz, rr, rh = at.r.split(size)
    bz, br, bh = at.rb.split(size)
    xz, xr, xh = gates.split(size, -1)
    z = f(_clipped(call, xz + h @ rz.t() + bz))
    r = f(_clipped(call, xr + h @ rr.t() + br))
    inner = r * (h @ rh.t() + bh) if call.get("linear_before_reset", 0) else (r * h) @ rh.t() + bh
    return (1 - z) * g(_clipped(call, xh + inner)) + z * h, c


def _lstm_step(call: OpCall, at: _Direction, gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    size = h.shape[-1]
    f, g, last = at.activations
    i, o, forget, cell = (gates + h @ at.r.t() + at.rb).split(size, -1)
    pi, po, pf = at.peepholes.split(size) if at.peepholes is not None else (0.0, 0.0, 0.0)
    i = f(_clipped(call, i + pi * c))
    forget = 1 - i if call.get("input_forget", 0) else f(_clipped(call, forget + pf * c))
    c = forget * c + i * g(_clipped(call, cell))
    return f(_clipped(call, o + po * c)) * last(c), c


_STEPS = {"RNN": _rnn_step, "GRU": _gru_step, "LSTM": _lstm_step}


_ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}
"""Order of torch's gates among those of ONNX."""


def _is_plain(call: OpCall, lengths: Tensor | None, p: Tensor | None, default: tuple[str, ...]) -> bool:
    """Return True if torch has a kernel for this configuration."""
    odd = lengths is not None or p is not None or call.has("clip") or call.get("input_forget", 0)
    before = call.node.operator == "GRU" and not call.get("linear_before_reset", 0)
    names = call.get("activations", default)
    return not (odd or before) and all(one == default[at % len(default)] for at, one in enumerate(names))


def _by_kernel(call: OpCall, x: Tensor, parts: list[_Direction]) -> tuple[Tensor, Tensor, Tensor]:
    """Use torch's kernel: as fast as nn.LSTM, and exported again as one operator."""
    order = _ORDER[call.node.operator]
    weights = [
        torch.cat([one.chunk(len(order))[gate] for gate in order])
        for part in parts
        for one in (part.w, part.r, part.wb, part.rb)
    ]
    h, c = torch.stack([one.h for one in parts]), torch.stack([one.c for one in parts])
    backwards = call.get("direction", "forward") == "reverse"
    x = x.flip(0) if backwards else x
    state, kernel = h, {"RNN": torch.rnn_tanh, "GRU": torch.gru}.get(call.node.operator)
    rest = (weights, True, 1, 0.0, call.training, len(parts) == 2, False)
    if kernel is None:
        y, state, c = torch.lstm(x, (h, c), *rest)
    else:
        y, state = kernel(x, h, *rest)
    y = y.reshape(y.shape[0], y.shape[1], len(parts), -1).transpose(1, 2)
    return (y.flip(0) if backwards else y), state, c


def _walk(
    call: OpCall, at: _Direction, x: Tensor, lengths: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one direction over `x` (time, batch, input); returns all states, the last one, the last cell."""
    step = _STEPS[call.node.operator]
    gates = x @ at.w.t() + at.wb
    h, c, states = at.h, at.c, []
    times = range(x.shape[0])
    for time in reversed(times) if backwards else times:
        new_h, new_c = step(call, at, gates[time], h, c)
        if lengths is not None:
            live = (time < lengths)[:, None]
            states.append(torch.where(live, new_h, torch.zeros_like(new_h)))
            h, c = torch.where(live, new_h, h), torch.where(live, new_c, c)
        else:
            h, c = new_h, new_c
            states.append(h)
    return torch.stack(states[::-1] if backwards else states), h, c


def _recurrent(gates: int, each: int, default: tuple[str, ...]) -> Callable[..., Any]:
    def run(
        call: OpCall, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
        h: Tensor | None = None, c: Tensor | None = None, p: Tensor | None = None,
    ) -> Any:  # fmt: skip
        batch_first = bool(call.get("layout", 0))
        x = x.transpose(0, 1) if batch_first else x
        h, c = (one.transpose(0, 1) if batch_first and one is not None else one for one in (h, c))
        directions, size = w.shape[0], r.shape[-1]
        zeros = x.new_zeros(directions, x.shape[1], size)
        b = x.new_zeros(directions, 2 * gates * size) if b is None else b
        h, c = (zeros if one is None else one for one in (h, c))
        activations = _activations(call, each, default, directions)
        parts = [
            _Direction(w[at], r[at], wb, rb, h[at], c[at], None if p is None else p[at], activations[at])
            for at in range(directions)
            for wb, rb in [b[at].chunk(2)]
        ]
        if _is_plain(call, lengths, p, default):
            y, last, cell = _by_kernel(call, x, parts)
        else:
            backwards = call.get("direction", "forward") == "reverse"
            walks = [_walk(call, part, x, lengths, backwards or at == 1) for at, part in enumerate(parts)]
            y = torch.stack([one[0] for one in walks], 1)
            last, cell = (torch.stack([one[k] for one in walks]) for k in (1, 2))
        if batch_first:
            return y.permute(2, 0, 1, 3), last.transpose(0, 1), cell.transpose(0, 1)
        return y, last, cell

    return run


_GRU, _LSTM = ("Sigmoid", "Tanh"), ("Sigmoid", "Tanh", "Tanh")
OPERATORS: dict[str, Any] = {
    "RNN": _recurrent(1, 1, ("Tanh",)),
    "GRU": _recurrent(3, 2, _GRU),
    "LSTM": _recurrent(4, 3, _LSTM),
}
