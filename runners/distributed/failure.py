"""The first failure of a job, as every rank shows it."""

from __future__ import annotations

import json
from dataclasses import asdict

from torchrelay.records import dataclass

_MOST_TRACEBACK = 64 << 10


@dataclass(frozen=True)
class Failure:
    """What failed first: who, doing what, with which traceback, and the code to end with."""

    rank: int
    host: str
    task: str
    traceback: str
    exit_code: int

    def encode(self) -> bytes:
        """Return the failure as the store keeps it; a very long traceback keeps its end."""
        fields = asdict(self) | {"traceback": self.traceback[-_MOST_TRACEBACK:]}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """Read a failure back."""
        return cls(**json.loads(data))

    def headline(self) -> str:
        """Say who failed at what, and the last line of why."""
        lines = self.traceback.strip().splitlines()
        return f"rank {self.rank} on {self.host} failed in {self.task}: {lines[-1] if lines else 'no reason'}"

    def report(self, rank: int) -> str:
        """Return the text that `rank` prints."""
        if "\n" not in self.traceback.strip():
            return f"torchrelay: [rank {rank}] {self.headline()}\n"
        head = f"torchrelay: [rank {rank}] first failure: rank {self.rank} on {self.host}, in {self.task}"
        return f"{head}\n{self.traceback.rstrip()}\n"
