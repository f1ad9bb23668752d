"""How many of very many points a test tries: a bounded sample of them, always the same, or in a campaign all.

`scripts/campaigns/whole-tests` runs the tests that ask here, with all points.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
WHOLE = os.environ.get("TORCHRELAY_TESTS_WHOLE") == "1"


def sample(some: T, whole: T) -> T:
    """What every run of the tests tries, and what the campaign does."""
    return whole if WHOLE else some
