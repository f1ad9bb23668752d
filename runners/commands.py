"""Deprecated alias `torchrelay.runners.commands.selector`, kept for one version.

Imports from below this module are found in `sys.modules`, as for `os.path`.
"""

from __future__ import annotations

import sys
import warnings

from torchrelay.runners.remote_runs import resolve as selector

_OLD = f"{__name__}.selector"
sys.modules[_OLD] = selector
warnings.warn(f"{_OLD} is torchrelay.runners.remote_runs.resolve now", DeprecationWarning, stacklevel=2)
