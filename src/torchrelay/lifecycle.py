"""Base classes of the five steps of a configured run, and functions to run a configuration."""

from __future__ import annotations

from torchrelay.runners.config_runs.class_loading import ClassLoadError
from torchrelay.runners.config_runs.context import ContextKeyError, PhaseState, StepContext
from torchrelay.runners.config_runs.evaluation import evaluation
from torchrelay.runners.config_runs.profiles import ConfigResult, ProfileResult, StepFailedError, run_config
from torchrelay.runners.config_runs.steps import Instance, Network, Runner, Startup, Terminal

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
