"""How much a client may ask for, and how long anything may take."""

from __future__ import annotations

from torchrelay.errors import UsageError
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Limits:
    """Bytes, counts and seconds. Beyond them a request is refused, and nothing is allocated for it.

    `json_bytes` is less than `body_bytes` because a number takes ten times its text while JSON is read;
    `held_bytes` bounds the bodies of all requests together. `queue` counts samples that wait.
    """

    body_bytes: int = 16 << 20
    json_bytes: int = 2 << 20
    depth: int = 16
    elements: int = 4 << 20
    samples: int = 256
    secs: float = 30.0
    head_secs: float = 10.0
    drain_secs: float = 30.0
    queue: int = 2048
    requests: int = 4096
    connections: int = 8192
    held_bytes: int = 64 << 20
    max_batch: int = 16
    max_delay_secs: float = 0.002

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name != "max_delay_secs"):
                raise UsageError(f"the limit {name} is {value}: give more than 0")
        if self.max_delay_secs >= self.secs:
            raise UsageError(
                f"a batch may wait {self.max_delay_secs:g} s for more samples, and a request is given up "
                f"after {self.secs:g} s: let it wait less"
            )


class Budget:
    """Bytes of bodies that are held now; used by one thread."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def take(self, nbytes: int) -> bool:
        """Whether there is room for so many more, which are then held."""
        if self.held + nbytes > self.most:
            return False
        self.held += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """They are not held any more."""
        self.held -= nbytes
