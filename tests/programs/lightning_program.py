"""Trains by Lightning: <folder> [kill=epoch.batch] [option=number ...]; the last rank is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lightning_training import train

LAST = int(os.environ.get("WORLD_SIZE", "1")) - 1


def kill(epoch: int, batch: int) -> None:
    """What a lost machine does, on the last rank at that batch."""
    if f"{epoch}.{batch}" == KILL and int(os.environ.get("RANK", "0")) == LAST:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, *given = sys.argv[1:]
    options = dict(one.split("=") for one in given)
    KILL = options.pop("kill", "")
    numbers = {name: float(text) if "." in text else int(text) for name, text in options.items()}
    print(f"digest {train(Path(folder), kill, **numbers)}", flush=True)
