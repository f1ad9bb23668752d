"""What an ONNX file says of the run that its weights come from: its `metadata_props`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchrelay.errors import RelayError
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.run_directory import RunDirectory


def run_facts(run: Path | None, epoch: str, metrics: Mapping[str, float]) -> dict[str, str]:
    """Names and texts: the epoch and its metrics; of a run directory also its name, its id, its code id."""
    numbers = {name: value for name, value in metrics.items() if math.isfinite(value)}
    found = {"torchrelay.epoch": epoch, "torchrelay.metrics": json.dumps(numbers, sort_keys=True)}
    if run is None:
        return found
    with suppress(RelayError):  # notes that cannot be read are left out
        identity = RunDirectory(run).known_identity()
        found["torchrelay.run"] = run.name
        found["torchrelay.run_id"] = str(identity.get("uuid", ""))
        codes = [code_id_of(one) for one in captures(run)]
        if codes and (code := codes[-1]) is not None:
            found["torchrelay.code_id"] = code
    return found
