"""Trains in a face, on one or more ranks: own_loop.py <face> <folder> [killed|late|raises|stops]."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from own_loops import FACES, Training, at, kill, nothing

import torchrelay

LAST = int(os.environ.get("WORLD_SIZE", "1")) - 1


def fail() -> None:
    """On the last rank alone."""
    if int(os.environ.get("RANK", "0")) == LAST:
        raise ValueError("planned")


if __name__ == "__main__":
    face, where, *events = sys.argv[1:]
    if "RANK" in os.environ:
        torchrelay.init()
    training = Training()
    event = {"killed": at(3, 1, kill), "raises": at(3, 1, fail)}.get(events[0] if events else "", nothing)
    result = FACES[face](training, Path(where), event)
    print(f"digest {training.digest} epoch {int(result)}", flush=True)
