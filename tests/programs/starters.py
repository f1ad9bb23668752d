"""Processes that all want one log at the same moment; see tests/checkpoint/test_two_writers.py.

    starters.py DIRECTORY COUNT

Prints a line of JSON for each. Whoever gets the log commits and holds it until all others have ended.
"""

from __future__ import annotations

import json
import os
import sys

from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import RelayError

FIRST = CommittedPosition(0, Position(0), "e00000000-abcdef", 1, "0" * 64)
PATIENCE_SECS = 20.0  # a counter of a busy machine moves late; whoever sees it move does not wait for more


def start(directory: str, gate: int, told: int, over: int) -> None:
    """One starter: waits for the gate, tries, tells; the winner stays until the others are over."""
    os.read(gate, 1)
    answer = {"pid": os.getpid(), "error": None, "kind": None}
    writer = None
    try:
        writer = LogWriter.take(LocalStorage(directory), "job", patience_secs=PATIENCE_SECS, period_secs=0.1)
        writer.commit(FIRST)
    except RelayError as error:
        answer.update(error=str(error), kind=type(error).__name__)
    os.write(told, (json.dumps(answer) + "\n").encode())
    if writer is not None:
        os.read(over, 1)
        writer.release()


def main() -> None:
    """Fork them, let them go, collect what they tell."""
    directory, count = sys.argv[1], int(sys.argv[2])
    gate, told, over = os.pipe(), os.pipe(), os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            os.close(gate[1])
            os.close(over[1])
            try:
                start(directory, gate[0], told[1], over[0])
            finally:
                os._exit(0)
    os.close(gate[1])
    with os.fdopen(told[0]) as lines:
        for _ in range(count):
            print(lines.readline(), end="", flush=True)
    os.close(over[1])
    for _ in range(count):
        os.wait()


if __name__ == "__main__":
    main()
