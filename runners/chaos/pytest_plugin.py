"""The old name of the pytest plug-in `torchrelay.chaos.pytest_plugin`, for one version."""

from __future__ import annotations

import warnings
from importlib import import_module

_plugin = import_module("torchrelay.chaos.pytest_plugin")
Chaos, chaos = _plugin.Chaos, _plugin.chaos
warnings.warn(f"{__name__} is torchrelay.chaos.pytest_plugin now", DeprecationWarning, stacklevel=2)
