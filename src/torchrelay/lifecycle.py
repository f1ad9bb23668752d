"""The five steps of a configured run, to derive from, and what runs a configuration."""

from __future__ import annotations

from torchrelay.runners.lifecycle.context import ContextKeyError, StepContext
from torchrelay.runners.lifecycle.evaluating import evaluation
from torchrelay.runners.lifecycle.loading import ClassLoadError
from torchrelay.runners.lifecycle.phase_state import PhaseState
from torchrelay.runners.lifecycle.profiles import ConfigResult, ProfileResult, run_config
from torchrelay.runners.lifecycle.stepping import StepFailedError
from torchrelay.runners.lifecycle.steps import Instance, Network, Runner, Startup, Terminal

__all__ = [
    "ClassLoadError",
    "ConfigResult",
    "ContextKeyError",
    "Instance",
    "Network",
    "PhaseState",
    "ProfileResult",
    "Runner",
    "Startup",
    "StepContext",
    "StepFailedError",
    "Terminal",
    "evaluation",
    "run_config",
]
