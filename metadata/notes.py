"""What a handler was told, as a value: an epoch was saved, or how long a save or load took.

The lines of `metadata.jsonl` are read back as notes, so that an index that lost some can be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrelay.metadata.files import read_lines
from torchrelay.metadata.handler import Holder
from torchrelay.metadata.stats import NodeTimes
from torchrelay.records import dataclass

EPOCH = "epoch"
_LIMIT = 1 << 63
_MOST_CHARACTERS = 4096


@dataclass(frozen=True)
class Note:
    """One call of a handler: `kind` is `epoch` or the action of a report; `time` is in Unix seconds.

    `prefix` is where the checkpoints of the job are; `nodes` is the number of nodes of a saved epoch; `times`
    belong to a report.
    """

    holder: Holder
    prefix: str
    kind: str
    epoch: int
    time: float = 0.0
    nodes: int = 0
    times: tuple[NodeTimes, ...] = ()

    @property
    def key(self) -> tuple[int, int, str]:
        """What tells it from the others of its job."""
        return (self.holder.generation, self.epoch, self.kind)


def report_notes(
    holder: Holder, prefix: str, action: str, nodes: Sequence[NodeTimes], time: float
) -> list[Note]:
    """The notes of a report: one, or none where the paths name no epoch."""
    epochs = {one.epoch for one in nodes}
    if len(epochs) != 1 or (epoch := epochs.pop()) is None:
        return []
    return [Note(holder, prefix, action, epoch, time, len(nodes), tuple(nodes))]


def holder_json(holder: Holder) -> dict[str, Any]:
    """What a line says of who wrote it; the job's name stands in `run.json`."""
    return {
        "job": holder.uuid,
        "generation": holder.generation,
        "branch": holder.branch,
        "base": holder.base,
    }


def notes_of_file(path: Path, job: Holder, prefix: str, limit: int | None = None) -> list[Note]:
    """The notes of a `metadata.jsonl` on one job, by its id; what is no note is left out.

    Of more than `limit` notes those that were written last. StorageError where it cannot be read.
    """
    found: list[Note] = []
    for line in read_lines(path):
        found += _notes_of(line, job, prefix)
        if limit is not None and len(found) > 2 * limit:
            del found[:-limit]
    return found if limit is None else found[-limit:]


def _notes_of(line: Mapping[str, Any], job: Holder, prefix: str) -> Iterator[Note]:
    holder, time = _holder_of(line, job), _seconds(line.get("time"))
    kind, nodes = line.get("kind"), line.get("nodes")
    if holder is None or time is None or not (_text(kind) and isinstance(nodes, list)):
        return
    if kind != EPOCH:
        yield from report_notes(holder, prefix, str(kind), times_of(nodes), time)
    elif _count(epoch := line.get("epoch")):
        yield Note(holder, prefix, EPOCH, int(epoch or 0), time, len(nodes))


def _holder_of(line: Mapping[str, Any], job: Holder) -> Holder | None:
    generation, branch, base = line.get("generation"), line.get("branch"), line.get("base")
    if line.get("job") != job.uuid or not (_count(generation) and _count(branch)):
        return None
    if base is not None and not _count(base):
        return None
    return replace(job, generation=int(generation or 0), branch=int(branch or 0), base=base)


def times_of(nodes: Sequence[Any]) -> list[NodeTimes]:
    """The nodes of a `NodeStats.to_json`; such as are none are left out."""
    found = []
    for one in nodes:
        if not isinstance(one, dict):
            continue
        secs, node, path, size = one.get("secs"), one.get("node"), one.get("path"), one.get("bytes")
        if not (isinstance(secs, dict) and _text(node) and isinstance(path, str) and _count(size)):
            continue
        taken = {phase: _seconds(value) for phase, value in secs.items() if _text(phase)}
        known = {phase: value for phase, value in taken.items() if value is not None}
        found.append(NodeTimes(str(node), path, int(size or 0), known))
    return found


def _text(value: object) -> bool:
    """Whether every database can hold it: they know neither NUL nor half a surrogate pair."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _MOST_CHARACTERS
        and "\0" not in value
        and not any("\ud800" <= one <= "\udfff" for one in value)
    )


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


def _seconds(value: object) -> float | None:
    """Seconds that a calendar has, or None."""
    known = type(value) in (int, float) and 0 <= value < 1e11  # type: ignore[operator]
    return float(value) if known else None  # type: ignore[arg-type]
