"""Deprecated alias of `torchrelay.chaos.pytest_plugin`, kept for one version.

Imports from below this module are found in `sys.modules`, as for `os.path`.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module

_plugin = import_module("torchrelay.chaos.pytest_plugin")
Chaos, chaos = _plugin.Chaos, _plugin.chaos
_OLD = f"{__name__}.pytest_plugin"
pytest_plugin = sys.modules[_OLD] = sys.modules[__name__]
warnings.warn(f"{_OLD} is torchrelay.chaos.pytest_plugin now", DeprecationWarning, stacklevel=2)
