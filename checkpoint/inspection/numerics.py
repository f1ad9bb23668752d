"""numpy for whoever computes with stored numbers, or one line that says how to get it.

No core dependency: nothing that trains, saves or loads needs it, and what changed is told by digests
without it. numpy imports the module of pickles itself; nothing here calls that, and the verbs import
numpy only when numbers are asked for.
"""

from __future__ import annotations

from torchrelay.errors import UsageError

HINT = "pip install 'torchrelay[inspect]'"

try:
    import numpy as np
except ImportError as error:
    raise UsageError(f"numbers of tensors need numpy, which is not installed: {HINT}") from error

__all__ = ["HINT", "np"]
