"""Where a node was stopped in the middle of an epoch, as a checkpoint remembers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from torchrelay.errors import DamagedError
from torchrelay.records import dataclass
from torchrelay.runners.reduction import Summary, joined_summaries

Json = Any


@dataclass(frozen=True)
class Place:
    """The tasks that are done, and the loop that was left in the task behind them.

    `task` is the one to continue in its counted loop, of which `taken` batches were taken and some are left;
    None: the next task begins at its beginning. `steps` are those of the epoch.
    """

    done: tuple[str, ...] = ()
    task: str | None = None
    taken: int = 0
    steps: int = 0
    metrics: Mapping[str, Summary] = field(default_factory=dict)

    def json(self) -> Json:
        """As it travels and lies in a manifest."""
        return {
            "done": list(self.done),
            "task": self.task,
            "taken": self.taken,
            "steps": self.steps,
            "metrics": {name: summary.encode() for name, summary in self.metrics.items()},
        }

    @classmethod
    def of(cls, json: Json) -> Place:
        """Read what `json` made; raises DamagedError for anything else."""
        try:
            return cls(
                tuple(map(str, json["done"])),
                None if json["task"] is None else str(json["task"]),
                int(json["taken"]),
                int(json["steps"]),
                {name: Summary.decode(one) for name, one in json["metrics"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(
                f"the place inside of an epoch that a checkpoint remembers is none: {error}"
            ) from None


def places_json(by_node: Mapping[str, Place]) -> Json:
    """The places of all nodes in rank order; what nodes have alike is written once."""
    kinds: list[Json] = []
    nodes: dict[str, Json] = {}
    for node, place in by_node.items():
        cursor = replace(place, metrics={}).json()
        if cursor not in kinds:
            kinds.append(cursor)
        nodes[node] = [kinds.index(cursor), place.json()["metrics"]]
    return {"cursors": kinds, "nodes": nodes}


def places_for(nodes: Sequence[str], json: Json) -> dict[str, Place]:
    """What each of today's nodes continues from, of what `places_json` made.

    On other nodes than those of the checkpoint all go on where the first of those was, and the first one has
    what all had logged. Raises DamagedError.
    """
    try:
        cursors = json["cursors"]
        saved = {
            name: Place.of({**cursors[kind], "metrics": metrics})
            for name, (kind, metrics) in json["nodes"].items()
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise DamagedError("the places inside of an epoch that a checkpoint remembers are none") from None
    if set(saved) == set(nodes):
        return {node: saved[node] for node in nodes}
    if not saved:
        return {}
    first = next(iter(saved.values()))
    together = joined_summaries(place.metrics for place in saved.values())
    return {
        node: replace(first, metrics=together if number == 0 else {}) for number, node in enumerate(nodes)
    }
