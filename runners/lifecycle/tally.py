"""Metrics that are no means over samples, such as AUC: they follow from counts that are added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchrelay.jobs.session import Peers


class Tally:
    """Sums of what a model's `counts(outputs, batch)` gives, by name; nothing for a model without it.

    It holds what was added since it was made: a loop that a start goes on with in its middle counts the rest.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[str, torch.Tensor] = {}
        self._counts = getattr(model, "counts", None)

    def add(self, outputs: Any, batch: Any) -> None:
        """Count a batch; one without samples of its own is left out."""
        if not callable(self._counts) or not batch.count:
            return
        with torch.no_grad():
            for name, count in self._counts(outputs, batch).items():
                own = torch.as_tensor(count).detach().to(torch.float64)
                self._sums[name] = self._sums[name] + own if name in self._sums else own

    def metrics(self, peers: Peers) -> dict[str, float]:
        """What the model's `metrics_of(counts)` makes of the sums over all processes; all call this."""
        if not callable(self._counts):
            return {}
        told = peers.exchange("counts", {name: one.tolist() for name, one in self._sums.items()})
        total: dict[str, torch.Tensor] = {}
        for one in told:
            for name, count in one.items():
                own = torch.tensor(count, dtype=torch.float64)
                total[name] = total[name] + own if name in total else own
        found = self._model.metrics_of(total) if total else {}  # type: ignore[operator]
        return {name: float(value) for name, value in found.items()}
