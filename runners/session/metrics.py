"""Metrics of an epoch: accumulated without synchronising a device, reduced over steps and ranks.

A reduced metric is the reduction of all logged values of all nodes, concatenated in rank order. `mean` is
weighted, `sum` adds value times weight, `last`, `min` and `max` take any value whose weight is not 0. NaN is
a value like any other (it wins) unless its weight is 0. A name whose weights are all 0 is not reported.

Progress displays read running values without synchronisation: the first read only requests a value on a GPU;
the next `log` starts a non-blocking copy to host memory; the following read returns it.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torchrelay.errors import UsageError
from torchrelay.jobs.session import Peers
from torchrelay.metadata.fs import finite
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    from torch import Tensor


Number: TypeAlias = "float | Tensor"
REDUCTIONS = ("mean", "sum", "last", "min", "max")
_NAME = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]{0,198}[^\s\x00-\x1f\x7f])?")
_START = {"mean": 0.0, "sum": 0.0, "last": math.nan, "min": math.inf, "max": -math.inf}


@dataclass
class Accumulator:
    """Running reduction of one metric on one node; for a mean `value` is the weighted total.

    Tensors stay on their device, detached, and are never changed in place.
    """

    reduce: str
    value: Number
    weight: Number = 0.0

    @classmethod
    def of(cls, reduce: str) -> Accumulator:
        """Start without a value."""
        return cls(reduce, _START[reduce])

    def add(self, value: Number, weight: Number) -> None:
        """Add a value; never synchronises a device."""
        if isinstance(weight, float) and weight == 0:
            return
        given = value * weight if self.reduce in ("mean", "sum") else value
        self.value = _combined(self.reduce, self.value, given, weight != 0)
        self.weight = self.weight + weight

    def joined(self, later: Accumulator) -> Accumulator:
        """Append the values of the next node in rank order."""
        value = _combined(self.reduce, self.value, later.value, later.weight != 0)
        return Accumulator(self.reduce, value, self.weight + later.weight)

    @property
    def on_host(self) -> bool:
        """True if the state can be read without synchronising a device."""
        return all(isinstance(one, float) or one.device.type == "cpu" for one in (self.value, self.weight))

    @property
    def result(self) -> float | None:
        """The reduced value; None if no value had a weight. Synchronises the device."""
        value, weight = float(self.value), float(self.weight)
        if weight == 0:
            return None
        return value / weight if self.reduce == "mean" else value

    def encode(self) -> Json:
        """Encode as JSON, synchronising the device; numbers that JSON lacks become strings."""
        return [self.reduce, finite(float(self.value)), finite(float(self.weight))]

    @classmethod
    def decode(cls, json: Json) -> Accumulator:
        """Decode what `encode` returned."""
        reduce, value, weight = json
        return cls(reduce, float(value), float(weight))


class SentValue:
    """A running value on its way to the host. Values on a CPU are there at once."""

    def __init__(self, running: Accumulator) -> None:
        numbers, self._arrived = (running.value, running.weight), None
        if any(not isinstance(one, float) and one.device.type == "cuda" for one in numbers):
            numbers, self._arrived = to_host(numbers)
        self._running = Accumulator(running.reduce, *numbers)

    def here(self) -> bool:
        """Return True if it can be read without blocking."""
        return bool(self._arrived.query()) if self._arrived is not None else self._running.on_host

    def result(self) -> float | None:
        """Return the reduced value, None if nothing had a weight; synchronises the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._running.result


def to_host(numbers: tuple[Number, Number]) -> tuple[tuple[Any, Any], Any]:
    """Start copies to host memory; return them and the event after which they are complete.

    Numbers of the host are filled in on the device, as a copy would synchronise it.
    """
    import torch

    device = next(one.device for one in numbers if isinstance(one, torch.Tensor))
    pair = [
        one.to(device, torch.float64)
        if isinstance(one, torch.Tensor)
        else torch.full((), one, dtype=torch.float64, device=device)
        for one in numbers
    ]
    room = torch.empty(2, dtype=torch.float64, pin_memory=True)
    room.copy_(torch.stack(pair), non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))
    return (room[0], room[1]), arrived


class MetricLog:
    """Values that one node logged since the last reduction; thread-safe."""

    def __init__(self) -> None:
        self._accumulators: dict[str, Accumulator] = {}
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        """Names of values on a device that `running` has requested; the next `log` sends them."""
        self._sent: dict[str, SentValue] = {}

    def log(
        self,
        name: str,
        value: Any,
        reduce: str = "mean",
        weight: Any = 1,
        also: Callable[[Number, Number], None] | None = None,
    ) -> None:
        """Add a value; `also` is called with the value and weight that were added."""
        _check(name, reduce)
        number, scale = _number(name, "value", value), _number(name, "weight", weight)
        if isinstance(scale, float) and not (0 <= scale < math.inf):
            raise UsageError(f"metric {name!r}: invalid weight {scale}: expected a finite number, at least 0")
        with self._lock:
            accumulator = self._accumulators.setdefault(name, Accumulator.of(reduce))
            if accumulator.reduce != reduce:
                raise _conflict(name, accumulator.reduce, reduce)
            accumulator.add(number, scale)
            if name in self._asked:
                self._asked.discard(name)
                with suppress(RuntimeError):  # a device error here must not fail the training
                    self._sent[name] = SentValue(accumulator)
        if also is not None:
            also(number, scale)

    def running(self) -> dict[str, float]:
        """Return the running values; those on a device are the ones of the previous read."""
        found: dict[str, float] = {}
        for name, accumulator in self.snapshot().items():
            value: SentValue | None = SentValue(accumulator) if accumulator.on_host else self._sent.get(name)
            if not accumulator.on_host:
                self._asked.add(name)
            if value is not None and value.here() and (result := value.result()) is not None:
                found[name] = result
        return found

    def take(self) -> dict[str, Accumulator]:
        """Return the state in order of first use, and start again."""
        with self._lock:
            taken, self._accumulators = self._accumulators, {}
        return taken

    def snapshot(self) -> dict[str, Accumulator]:
        """Copy the current state without synchronising a device."""
        with self._lock:
            return {name: replace(one) for name, one in self._accumulators.items()}

    def restore(self, state: Mapping[str, Accumulator]) -> None:
        """Continue from this state."""
        with self._lock:
            self._accumulators = {name: replace(one) for name, one in state.items()}


def reduce_metrics(peers: Peers, logs: Sequence[MetricLog]) -> dict[str, float]:
    """Reduce what the hosted nodes (`logs`, in node order) and all other processes logged.

    One exchange; every process gets the same mapping, sorted by name, and the logs are emptied. Raises
    UsageError on all processes if two nodes reduce one name differently.
    """
    own = [{name: summary.encode() for name, summary in log.take().items()} for log in logs]
    logged = peers.exchange("metrics of the epoch", own)
    return joined(
        {name: Accumulator.decode(it) for name, it in node.items()} for nodes in logged for node in nodes
    )


def joined(nodes: Iterable[Mapping[str, Accumulator]]) -> dict[str, float]:
    """Reduce summaries of nodes in rank order."""
    totals = sorted(joined_summaries(nodes).items())
    return {name: result for name, total in totals if (result := total.result) is not None}


def joined_summaries(nodes: Iterable[Mapping[str, Accumulator]]) -> dict[str, Accumulator]:
    """Concatenate the summaries of nodes in rank order."""
    totals: dict[str, Accumulator] = {}
    for node in nodes:
        for name, summary in node.items():
            before = totals.get(name)
            if before is not None and before.reduce != summary.reduce:
                raise _conflict(name, before.reduce, summary.reduce)
            totals[name] = summary if before is None else before.joined(summary)
    return totals


def _combined(reduce: str, before: Any, value: Any, counted: Any) -> Any:
    """Return the next running value; `counted` (a bool or a tensor): `value` has a weight."""
    if reduce in ("mean", "sum"):
        return before + _chosen(counted, value, 0.0)
    if reduce in ("min", "max"):
        value = _extreme(reduce, before, value)
    return _chosen(counted, value, before)


def _chosen(counted: Any, value: Any, otherwise: Any) -> Any:
    """Return `value` if counted, else `otherwise`, without reading a tensor."""
    if isinstance(counted, bool):
        return value if counted else otherwise
    import torch

    def lifted(number: Any) -> Tensor:
        return torch.as_tensor(number, dtype=_wide(counted.device), device=counted.device)

    return torch.where(counted, lifted(value), lifted(otherwise))


def _extreme(reduce: str, one: Any, other: Any) -> Any:
    """Return the smaller or larger of two numbers; NaN wins."""
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.nan
        return min(one, other) if reduce == "min" else max(one, other)
    import torch

    like = one if isinstance(one, torch.Tensor) else other
    pair = [torch.as_tensor(number, dtype=like.dtype, device=like.device) for number in (one, other)]
    return torch.minimum(*pair) if reduce == "min" else torch.maximum(*pair)


def _number(name: str, what: str, given: Any) -> Number:
    """Convert to a float, or a detached 0-d tensor with its own memory; UsageError otherwise."""
    if isinstance(given, (bool, int, float)):
        return float(given)
    import torch

    if not isinstance(given, torch.Tensor):
        try:
            return float(given)  # numpy scalars and other convertible objects
        except (TypeError, ValueError):
            raise UsageError(
                f"metric {name!r}: the {what} is a {type(given).__name__}; "
                "log a number or a tensor of one element"
            ) from None
    if given.numel() != 1 or given.is_complex():
        raise UsageError(
            f"metric {name!r}: the {what} is a {given.dtype} tensor of shape {tuple(given.shape)}; "
            "log one real number, e.g. its mean()"
        )
    whole = given.detach()
    if hasattr(whole, "full_tensor"):  # a DTensor: the whole value instead of this rank's part
        whole = whole.full_tensor()
    return whole.reshape(()).to(_wide(whole.device), copy=True)


def _wide(device: Any) -> Any:
    """Return double precision if the device has it."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


def _check(name: str, reduce: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"invalid metric name {name!r}: expected up to 200 printable characters, e.g. 'train/loss'"
        )
    if reduce not in REDUCTIONS:
        raise UsageError(f"metric {name!r}: invalid reduce={reduce!r}: expected {', '.join(REDUCTIONS)}")


def _conflict(name: str, one: str, other: str) -> UsageError:
    return UsageError(
        f"metric {name!r} is logged with reduce={one!r} and with reduce={other!r}: "
        "use another name for one of them"
    )
