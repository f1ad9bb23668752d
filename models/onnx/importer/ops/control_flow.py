"""Recurrent layers with all options of the standard; operators that run inner graphs; sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrelay.errors import UsageError
from torchrelay.models.onnx.importer.executor import OpCall, Operator, as_ints
from torchrelay.models.onnx.importer.tensors import check_turns
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
        activations = [tuple(made[at * each : (at + 1) * each]) for at in range(directions)]
        parts = [
            _Direction(w[at], r[at], wb, rb, h[at], c[at], None if p is None else p[at], activations[at])
            for at in range(directions)
            for wb, rb in [b[at].chunk(2)]
        ]
        # True if torch has a kernel for this configuration.
        odd = lengths is not None or p is not None or call.has("clip") or call.get("input_forget", 0)
        before = call.node.operator == "GRU" and not call.get("linear_before_reset", 0)
        names = call.get("activations", default)
        if not (odd or before) and all(one == default[at % len(default)] for at, one in enumerate(names)):
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


def _loop(call: OpCall, trips: list[int] | None, condition: Tensor | None, *carried: Any) -> Any:
    body = call.graph("body")
    count = len(carried)
    _check_arity(call, body, 2 + count, 1 + count)
    most = trips[0] if trips else None
    values, scanned = list(carried), [[] for _ in body.outputs[1 + count :]]  # type: ignore[var-annotated]
    alive, turn = True if condition is None else bool(condition), 0
    while alive and (most is None or turn < most):
        check_turns(str(call.node), turn + 1)
        number = torch.tensor(turn, dtype=torch.int64, device=call.device)
        given = [number, torch.tensor(alive, device=call.device), *values]
        found, *results = call.enter(body, dict(zip(body.inputs, given, strict=True)))
        values = results[:count]
        for held, one in zip(scanned, results[count:], strict=True):
            held.append(call.tensor(one))
        alive, turn = bool(call.tensor(found)), turn + 1
    return tuple(values) + tuple(_stacked(call, held) for held in scanned)


def _stacked(call: OpCall, held: list[Tensor]) -> Tensor:
    return torch.stack(held) if held else torch.empty(0, device=call.device)


def _check_arity(call: OpCall, body: Any, inputs: int, outputs: int) -> None:
    if len(body.inputs) != inputs or len(body.outputs) < outputs:
        raise call.fail(
            f"its graph has {len(body.inputs)} inputs, {len(body.outputs)} outputs; {inputs} values are given"
        )


def _scanned(call: OpCall, given: list[Any]) -> tuple[Any, ...]:
    body, streams = call.graph("body"), call.need("num_scan_inputs")
    count = len(given) - streams
    if not 0 < streams <= len(given):
        raise call.fail(f"{streams} of {len(given)} inputs to scan")
    _check_arity(call, body, len(given), count)
    outs = len(body.outputs) - count
    axes = call.get("scan_input_axes", (0,) * streams)
    backwards = call.get("scan_input_directions" if call.version >= 9 else "directions", (0,) * streams)
    ways = call.get("scan_output_directions", (0,) * outs)
    out_axes = call.get("scan_output_axes", (0,) * outs)
    values = given[:count]
    slices = [one.movedim(axis, 0) for one, axis in zip(given[count:], axes, strict=True)]
    slices = [one.flip(0) if back else one for one, back in zip(slices, backwards, strict=True)]
    turns = slices[0].shape[0]
    check_turns(str(call.node), turns)
    scanned: list[list[Tensor]] = [[] for _ in range(outs)]
    for turn in range(turns):
        inputs = [*values, *(one[turn] for one in slices)]
        results = call.enter(body, dict(zip(body.inputs, inputs, strict=True)))
        values = list(results[:count])
        for held, one in zip(scanned, results[count:], strict=True):
            held.append(call.tensor(one))
    stacked = [
        _stacked(call, held[::-1] if back else held).movedim(0, axis)
        for held, back, axis in zip(scanned, ways, out_axes, strict=True)
    ]
    return (*values, *stacked)


def _scan_in_batches(call: OpCall, lengths: Tensor | None, *given: Any) -> Any:
    """Scan of operator set 8, with a batch dimension and individual lengths."""
    streams = call.need("num_scan_inputs")
    count = len(given) - streams
    batch, longest = given[count].shape[:2]
    ends = [longest] * batch if lengths is None else as_ints(lengths) or []
    runs = []
    for at in range(batch):
        one = [value[at] for value in given[:count]] + [value[at][: ends[at]] for value in given[count:]]
        runs.append(_scanned(call, one))
    found = []
    for place in range(len(runs[0])):
        parts = [run[place] for run in runs]
        if place >= count:
            parts = [torch.cat([one, one.new_zeros(longest - one.shape[0], *one.shape[1:])]) for one in parts]
        found.append(torch.stack(parts))
    return tuple(found)


def _get(call: OpCall, value: Any) -> Any:
    if value is None:
        raise call.fail("the value is missing")
    return value


def _insert(call: OpCall, sequence: list[Any], one: Any, place: list[int] | None = None) -> list[Any]:
    at = len(sequence) if place is None else place[0] + (len(sequence) if place[0] < 0 else 0)
    if not 0 <= at <= len(sequence):
        raise call.fail(f"index {at} of a sequence of {len(sequence)}")
    return [*sequence[:at], one, *sequence[at:]]


def _erase(call: OpCall, sequence: list[Any], place: list[int] | None = None) -> list[Any]:
    at = range(len(sequence))[-1 if place is None else place[0]]
    return sequence[:at] + sequence[at + 1 :]


def _split(call: OpCall, x: Tensor, sizes: Any = None) -> list[Tensor]:
    axis = call.get("axis", 0)
    if sizes is None:
        parts = list(x.split(1, axis))
        return parts if call.get("keepdims", 1) else [one.squeeze(axis) for one in parts]
    if isinstance(sizes, Tensor):
        sizes = int(sizes) if sizes.dim() == 0 else sizes.tolist()
    return list(torch.split(x, sizes, axis))


def _map(call: OpCall, sequence: list[Any], *others: Any) -> Any:
    body = call.graph("body")
    rows = []
    for at, one in enumerate(sequence):
        rest = [other[at] if isinstance(other, list) else other for other in others]
        rows.append(call.enter(body, dict(zip(body.inputs, [one, *rest], strict=True))))
    return tuple([call.tensor(row[at]) for row in rows] for at in range(len(body.outputs)))


OPERATORS: dict[str, Any] = {
    "RNN": _recurrent(1, 1, ("Tanh",)),
    "GRU": _recurrent(3, 2, ("Sigmoid", "Tanh")),
    "LSTM": _recurrent(4, 3, ("Sigmoid", "Tanh", "Tanh")),
    "If": lambda call, on: call.enter(call.graph("then_branch" if bool(on) else "else_branch"), {}),
    "Loop": Operator(_loop, ints=(0,)),
    "Scan": lambda call, *given: (
        _scanned(call, list(given)) if call.version >= 9 else _scan_in_batches(call, *given)
    ),
    "SequenceEmpty": lambda call: [],
    "SequenceConstruct": lambda call, *parts: list(parts),
    "SequenceLength": lambda call, sequence: torch.tensor(len(sequence), device=call.device),
    "SequenceAt": Operator(lambda call, sequence, place: sequence[place[0]], ints=(1,)),
    "SequenceInsert": Operator(_insert, ints=(2,)),
    "SequenceErase": Operator(_erase, ints=(1,)),
    "SplitToSequence": _split,
    "ConcatFromSequence": lambda call, sequence: (torch.stack if call.get("new_axis", 0) else torch.cat)(
        sequence, call.need("axis")
    ),
    "SequenceMap": _map,
    "Optional": lambda call, value=None: value,
    "OptionalGetElement": _get,
    "OptionalHasElement": lambda call, value=None: torch.tensor(value is not None, device=call.device),
}
