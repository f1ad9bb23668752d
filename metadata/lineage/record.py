"""What a run remembers of a stage that it was built on.

The same record stands in `lineage/<alias>/stage.json` and, without the list of files, in the value
`upstream.lineage` of every checkpoint of the run, there under the path of aliases that leads to the stage
(`expert/encoder`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

FORMAT = {"major": 1, "minor": 0, "features": []}
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True)
class StageRecord:
    """One stage: which run, which epoch of it, what was taken. `asked` is what the user wrote of it.

    `path` is where it lay then, for people; nothing ever looks there again. `applied` are the warm starts
    from it, `kept` the blobs of it that are in every checkpoint of this run, by the names they had there.
    """

    asked: str
    path: str
    job: str | None
    run_id: str | None
    epoch: int
    branch: int
    created: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    total_steps: int = 0
    seed: int | None = None
    applied: tuple[Mapping[str, Any], ...] = ()
    kept: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """The record as it is stored."""
        found = asdict(self)
        metrics = {name: value if value - value == 0 else str(value) for name, value in self.metrics.items()}
        return {**found, "metrics": metrics, "applied": list(self.applied), "kept": list(self.kept)}


def check_alias(alias: Any) -> str:
    """Return an alias that may name a folder and a part of a blob's name; raises UsageError."""
    if isinstance(alias, str) and _ALIAS.fullmatch(alias) and alias != "lineage":
        return alias
    raise UsageError(
        f"{alias!r:.80} cannot be the alias of an upstream: use up to 63 letters, digits, _ and - beginning "
        "with a letter or digit, such as 'expert'; 'lineage' is taken"
    )
