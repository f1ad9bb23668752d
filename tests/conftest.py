"""What all tests need before anything imports torch."""

from __future__ import annotations

import os

# One thread, as in the launched programs whose results are compared with this process's, bit by bit.
os.environ["OMP_NUM_THREADS"] = "1"
