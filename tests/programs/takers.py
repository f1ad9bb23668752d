"""Takes logs over, as another job would, without torch; see tests/runners/test_fencing.py.

    takers.py PLACE ...

Prints a line for each place: its error, or nothing when it has saved two more epochs there and let go.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import RelayError


def take(place: str) -> str:
    """Take over, save, release; the error otherwise."""
    try:
        writer = LogWriter.take(storage_of(place, "the place"), "race", patience_secs=2.5)
    except RelayError as error:
        return f"{type(error).__name__} {error}"
    newest = writer.view.newest()
    for epoch in range(1, 3):
        epoch += newest.position.epoch if newest else -1
        writer.commit(CommittedPosition(0, Position(epoch), f"e{epoch:08d}-abcdef", 1, "0" * 64))
    writer.release()
    return ""


if __name__ == "__main__":
    with ThreadPoolExecutor(len(sys.argv)) as pool:
        print(*pool.map(take, sys.argv[1:]), sep="\n")
