"""The old name of the pytest plug-in, `torchrelay.runners.chaos.pytest_plugin`, for one version.

What is imported from below this module is found in `sys.modules`, as `os.path` is.
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
