"""Writes leaf_names.json: run only when a new kind of leaf is added, never to change an old name."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "checkpoint"), str(HERE.parent / "helpers")]

from test_leaf_names import GOLDEN, described, golden_objects  # noqa: E402

from torchrelay.checkpoint.state.flatten import leaves_of  # noqa: E402

rows = [json.dumps(described(leaf)) for leaf in leaves_of(golden_objects())]
GOLDEN.write_text("[\n" + ",\n".join(rows) + "\n]\n")
