"""`torchrelay.runners.remote_runs.resolve` under the name by which programs imported it before."""

from __future__ import annotations

from torchrelay.runners.remote_runs.resolve import Selected, Selector, parse_selector, select

__all__ = ["Selected", "Selector", "parse_selector", "select"]
