"""The old name of what resolves runs as they are typed, `torchrelay.runners.commands.selector`.

What is imported from below this module is found in `sys.modules`, as `os.path` is.
"""

from __future__ import annotations

import sys
import warnings

from torchrelay.runners.remote_runs import resolve as selector

_OLD = f"{__name__}.selector"
sys.modules[_OLD] = selector
warnings.warn(f"{_OLD} is torchrelay.runners.remote_runs.resolve now", DeprecationWarning, stacklevel=2)
