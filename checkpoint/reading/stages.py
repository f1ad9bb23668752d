"""What an epoch itself knows of the stages that its run was built on.

Every checkpoint of such a run has a value `upstream.lineage` with a record per stage, by the path of aliases
that leads there (`expert`, `expert/encoder`), and the tensors kept of a stage as `upstream.<alias>.<blob>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.names import nearest
from torchrelay.errors import UsageError

if TYPE_CHECKING:
    import torch

    from torchrelay.checkpoint.reader import Checkpoint

UPSTREAM = "upstream."
"""What the names of these blobs begin with."""
LINEAGE = f"{UPSTREAM}lineage"
"""The blob of records."""


def records_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """The records of all stages by path of aliases; empty where a run was built on none."""
    if LINEAGE not in checkpoint.blobs or checkpoint.blobs[LINEAGE].kind != "value":
        return {}
    found = checkpoint.value(LINEAGE)
    return found if isinstance(found, dict) else {}


class UpstreamStage:
    """A stage that a run was built on, as an epoch of the run knows it. Nothing of the stage is opened."""

    def __init__(self, checkpoint: Checkpoint, path: str, records: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._prefix = "".join(f"{UPSTREAM}{alias}." for alias in path.split("/"))
        self.path = path
        self.record: Mapping[str, Any] = records[path]
        self.upstream = Upstreams(checkpoint, path, records)

    def __repr__(self) -> str:
        return f"<stage {self.path}: epoch {self.epoch} of {self.record.get('path')}>"

    @property
    def run_id(self) -> str | None:
        """Which run it was; None where that was not known."""
        return self.record.get("run_id")

    @property
    def epoch(self) -> int:
        """The epoch that was taken."""
        return int(self.record["epoch"])

    @property
    def metrics(self) -> Mapping[str, float]:
        """The reduced metrics of that epoch."""
        return dict(self.record.get("metrics", {}))

    @property
    def blobs(self) -> tuple[str, ...]:
        """The blobs of the stage that this checkpoint keeps, by the names that they had there."""
        names = self._checkpoint.blobs
        return tuple(name[len(self._prefix) :] for name in names if name.startswith(self._prefix))

    def load_tensors(self, patterns: str | Sequence[str] = "*", **options: Any) -> dict[str, torch.Tensor]:
        """Kept tensors by their names in the stage; options are those of `Checkpoint.load_tensors`."""
        given = [patterns] if isinstance(patterns, str) else list(patterns)
        found = self._checkpoint.load_tensors([self._prefix + one for one in given], **options)
        return {name.removeprefix(self._prefix): tensor for name, tensor in found.items()}


class Upstreams(Mapping[str, UpstreamStage]):
    """Alias to stage; an unknown alias is an error that names the nearest."""

    def __init__(
        self, checkpoint: Checkpoint, above: str = "", records: Mapping[str, Any] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._records = records_in(checkpoint) if records is None else records
        self._head = f"{above}/" if above else ""

    def __getitem__(self, alias: str) -> UpstreamStage:
        if alias not in list(self):
            raise _UnknownStageError(
                f"this run was built on no stage {alias!r:.80}{nearest(str(alias), self)}"
            )
        return UpstreamStage(self._checkpoint, self._head + alias, self._records)

    def __iter__(self) -> Iterator[str]:
        inner = (path[len(self._head) :] for path in self._records if path.startswith(self._head))
        return (path for path in inner if "/" not in path)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<built on {', '.join(self) or 'nothing'}>"


class _UnknownStageError(UsageError, KeyError):
    """A KeyError too, so that `get` and `in` behave as for any mapping."""

    __str__ = UsageError.__str__
