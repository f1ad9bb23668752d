"""Evaluates the best epoch of a digits run on the test part: only the model's bytes are read.

python scripts/trials/evaluate_digits.py RUN        prints one line of JSON
"""

from __future__ import annotations

import json
import sys

from launching import REPOSITORY

import torchrelay

sys.path.insert(0, str(REPOSITORY / "examples"))
from digits import Net, accuracy, digits


def main(run: str) -> None:
    """Load the model alone, measure, and say what it cost."""
    model = Net()
    checkpoint = torchrelay.open_checkpoint(run, epoch="best")
    result = checkpoint.load({"model": model})
    found = {
        "epoch": checkpoint.position.epoch,
        "val_accuracy": checkpoint.metrics["val/acc"],
        "test_accuracy": accuracy(model, digits()["test"]),
        "bytes_of_model": checkpoint.blobs["model"].bytes,
        "bytes_read_by_load": result.bytes_read,
        "bytes_read_in_all": checkpoint.bytes_read,
        "directory": checkpoint.entry.attempt_name,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
