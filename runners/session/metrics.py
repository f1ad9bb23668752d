"""Metrics of an epoch: accumulated without waiting for a device, reduced over steps and ranks.

The law: a reduced metric is what `reduce` gives for all logged values of all nodes, written one
after another in rank order. `mean` is weighted, `sum` adds value times weight, `last`, `min` and
`max` take any value whose weight is not 0. NaN is a value like any other (it wins) unless its
weight is 0. A name whose weights are all 0 is not reported.

People who watch get glimpses: who looks asks; the next `log` of that metric sends its value to memory of the
host behind the device's work, and the next look finds it there. So what is seen is as old as the look before.
Nothing asks the device.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from torchrelay.errors import UsageError
from torchrelay.jobs.session import Peers
from torchrelay.metadata.fs import finite
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Glimpses:
    """Of one node's metrics; `send` is called by the training, `look` by another thread."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self._sent: dict[str, Tensor] = {}

    def send(self, name: str, accumulator: Accumulator) -> None:
        """Have the value come to the host where somebody asked for it; returns at once."""
        if not self._asked or name not in self._asked:
            return
        import torch

        self._asked.discard(name)
        with suppress(RuntimeError):  # a device that is in no state for it must not fail the training
            device = next(one.device for one in accumulator.numbers if isinstance(one, torch.Tensor))
            pair = on_device(accumulator.numbers, device, torch.float32)
            room = self._sent.get(name)
            if room is None:
                room = torch.full((2,), math.nan, dtype=torch.float32, pin_memory=device.type == "cuda")
                self._sent[name] = room
            room.copy_(pair, non_blocking=True)

    def look(self, running: Mapping[str, Accumulator]) -> dict[str, float]:
        """The running values that are here; the others are asked for."""
        found: dict[str, float] = {}
        for name, accumulator in running.items():
            summary = None
            if all(isinstance(one, float) or one.device.type == "cpu" for one in accumulator.numbers):
                summary = accumulator.summary()
            else:
                self._asked.add(name)
                if (room := self._sent.get(name)) is not None:
                    summary = MetricSummary(accumulator.reduce, *room.tolist())
            # a weight of NaN: none has come yet
            if summary and not math.isnan(summary.weight) and (result := summary.result) is not None:
                found[name] = result
        return found


def on_device(numbers: tuple[Number, Number], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Both in one tensor there. Numbers of the host are filled in, for a copy would wait for the device."""
    import torch

    return torch.stack(
        [
            one.to(device, dtype)
            if isinstance(one, torch.Tensor)
            else torch.full((), one, dtype=dtype, device=device)
            for one in numbers
        ]
    )


Number: TypeAlias = "float | Tensor"
REDUCTIONS = ("mean", "sum", "last", "min", "max")
_NAME = re.compile(r"[^\s\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]{0,198}[^\s\x00-\x1f\x7f])?")
_START = {"mean": 0.0, "sum": 0.0, "last": math.nan, "min": math.inf, "max": -math.inf}


@dataclass(frozen=True)
class MetricSummary:
    """One metric of one node as it is told to the others: `value` is the weighted total of a mean."""

    reduce: str
    value: float
    weight: float

    def joined(self, later: MetricSummary) -> MetricSummary:
        """Return this node's values followed by those of the next one in rank order."""
        value = _combined(self.reduce, self.value, later.value, later.weight != 0)
        return MetricSummary(self.reduce, value, self.weight + later.weight)

    @property
    def result(self) -> float | None:
        """The reduced value; None when no value had a weight."""
        if self.weight == 0:
            return None
        return self.value / self.weight if self.reduce == "mean" else self.value

    def encode(self) -> Json:
        """JSON without the numbers that JSON lacks: they are written as strings."""
        return [self.reduce, finite(self.value), finite(self.weight)]

    @classmethod
    def decode(cls, json: Json) -> MetricSummary:
        """Read what `encode` wrote."""
        reduce, value, weight = json
        return cls(reduce, float(value), float(weight))


class Accumulator:
    """The running reduction of one metric on one node; tensors stay on their device, detached."""

    def __init__(self, reduce: str, value: Number | None = None, weight: Number = 0.0) -> None:
        self.reduce = reduce
        self._value: Number = _START[reduce] if value is None else value
        self._weight = weight

    def add(self, value: Number, weight: Number) -> None:
        """Take one value; never waits for a device."""
        if isinstance(weight, float) and weight == 0:
            return
        given = value * weight if self.reduce in ("mean", "sum") else value
        self._value = _combined(self.reduce, self._value, given, weight != 0)
        self._weight = self._weight + weight

    @property
    def numbers(self) -> tuple[Number, Number]:
        """The running value and weight, where they are."""
        return self._value, self._weight

    def copy(self) -> Accumulator:
        """The state as it is now; no value is read, because none is ever changed in place."""
        return Accumulator(self.reduce, self._value, self._weight)

    def summary(self) -> MetricSummary:
        """The state as plain numbers; this is where a device is waited for."""
        return MetricSummary(self.reduce, float(self._value), float(self._weight))


class MetricLog:
    """What one node logged since the last reduction; safe to use from several threads."""

    def __init__(self) -> None:
        self._accumulators: dict[str, Accumulator] = {}
        self._lock = threading.Lock()
        self._glimpses = Glimpses()

    def log(
        self,
        name: str,
        value: Any,
        reduce: str = "mean",
        weight: Any = 1,
        also: Callable[[Number, Number], None] | None = None,
    ) -> None:
        """Add a value; `also` is told it and its weight as they were taken.

        Raises UsageError for a bad name, value, weight or a conflicting `reduce`.
        """
        _check(name, reduce)
        number, scale = _number(name, "value", value), _number(name, "weight", weight)
        if isinstance(scale, float) and not (0 <= scale < math.inf):
            raise UsageError(f"metric {name!r}: the weight is {scale}; weights are finite and not negative")
        with self._lock:
            accumulator = self._accumulators.setdefault(name, Accumulator(reduce))
            if accumulator.reduce != reduce:
                raise _conflict(name, accumulator.reduce, reduce)
            accumulator.add(number, scale)
            self._glimpses.send(name, accumulator)
        if also is not None:
            also(number, scale)

    def glimpse(self) -> dict[str, float]:
        """What was logged up to now; of values on a device, what was there the last time somebody looked."""
        return self._glimpses.look(self.snapshot())

    def take(self) -> dict[str, MetricSummary]:
        """Hand out the summaries in order of first use and start anew."""
        with self._lock:
            taken, self._accumulators = self._accumulators, {}
        return {name: accumulator.summary() for name, accumulator in taken.items()}

    def snapshot(self) -> dict[str, Accumulator]:
        """What was logged up to now, for later; waits for no device."""
        with self._lock:
            return {name: accumulator.copy() for name, accumulator in self._accumulators.items()}

    def restore(self, summaries: Mapping[str, MetricSummary]) -> None:
        """Go on from these summaries instead of what was logged here."""
        with self._lock:
            self._accumulators = {
                name: Accumulator(one.reduce, one.value, one.weight) for name, one in summaries.items()
            }


def reduce_metrics(peers: Peers, logs: Sequence[MetricLog]) -> dict[str, float]:
    """Reduce what the hosted nodes (`logs`, in node order) and all other processes logged.

    One exchange; every process gets the same mapping, sorted by name, and the logs are empty
    afterwards. Raises UsageError everywhere when two nodes reduce one name differently.
    """
    own = [{name: summary.encode() for name, summary in log.take().items()} for log in logs]
    told = peers.exchange("metrics of the epoch", own)
    return joined(
        {name: MetricSummary.decode(it) for name, it in node.items()} for nodes in told for node in nodes
    )


def joined(nodes: Iterable[Mapping[str, MetricSummary]]) -> dict[str, float]:
    """Reduce summaries of nodes that come in rank order (pure)."""
    totals = joined_summaries(nodes)
    results = {name: totals[name].result for name in sorted(totals)}
    return {name: result for name, result in results.items() if result is not None}


def joined_summaries(nodes: Iterable[Mapping[str, MetricSummary]]) -> dict[str, MetricSummary]:
    """What all nodes logged, written one after another in rank order (pure)."""
    totals: dict[str, MetricSummary] = {}
    for node in nodes:
        for name, summary in node.items():
            before = totals.get(name)
            if before is not None and before.reduce != summary.reduce:
                raise _conflict(name, before.reduce, summary.reduce)
            totals[name] = summary if before is None else before.joined(summary)
    return totals


def _combined(reduce: str, before: Any, value: Any, counted: Any) -> Any:
    """The next running value; `counted` says whether `value` has a weight (a bool or a tensor)."""
    if reduce in ("mean", "sum"):
        return before + _chosen(counted, value, 0.0)
    if reduce in ("min", "max"):
        value = _extreme(reduce, before, value)
    return _chosen(counted, value, before)


def _chosen(counted: Any, value: Any, otherwise: Any) -> Any:
    """`value` where counted, else `otherwise`, without looking into a tensor."""
    if isinstance(counted, bool):
        return value if counted else otherwise
    import torch

    def lifted(number: Any) -> Tensor:
        return torch.as_tensor(number, dtype=_wide(counted.device), device=counted.device)

    return torch.where(counted, lifted(value), lifted(otherwise))


def _extreme(reduce: str, one: Any, other: Any) -> Any:
    """The smaller or larger of two numbers; NaN wins."""
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.nan
        return min(one, other) if reduce == "min" else max(one, other)
    import torch

    like = one if isinstance(one, torch.Tensor) else other
    pair = [torch.as_tensor(number, dtype=like.dtype, device=like.device) for number in (one, other)]
    return torch.minimum(*pair) if reduce == "min" else torch.maximum(*pair)


def _number(name: str, what: str, given: Any) -> Number:
    """A float, or a detached 0-d tensor of its own memory; UsageError for anything else."""
    if isinstance(given, (bool, int, float)):
        return float(given)
    import torch

    if isinstance(given, torch.Tensor):
        return _scalar(name, what, given)
    try:
        return float(given)  # numpy scalars and other things that know how
    except (TypeError, ValueError):
        raise UsageError(
            f"metric {name!r}: the {what} is a {type(given).__name__}; "
            "log a number or a tensor of one element"
        ) from None


def _scalar(name: str, what: str, given: Tensor) -> Tensor:
    if given.numel() != 1 or given.is_complex():
        raise UsageError(
            f"metric {name!r}: the {what} is a {given.dtype} tensor of shape {tuple(given.shape)}; "
            "log one real number, e.g. its mean()"
        )
    whole = given.detach()
    if hasattr(whole, "full_tensor"):  # a DTensor: the value, not this rank's part of it
        whole = whole.full_tensor()
    return whole.reshape(()).to(_wide(whole.device), copy=True)


def _wide(device: Any) -> Any:
    """Double precision where the device has it."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


def _check(name: str, reduce: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a metric name: use up to 200 printable characters, e.g. 'train/loss'"
        )
    if reduce not in REDUCTIONS:
        raise UsageError(f"metric {name!r}: reduce is {reduce!r}; it is one of {', '.join(REDUCTIONS)}")


def _conflict(name: str, one: str, other: str) -> UsageError:
    return UsageError(
        f"metric {name!r} is logged with reduce={one!r} and with reduce={other!r}: "
        "one name has one reduction, log the other under another name"
    )
