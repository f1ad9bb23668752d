"""Opening the upstream runs: rank 0 chooses the epochs, all open exactly these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.info import records_in
from torchrelay.checkpoint.load.lookup import choose
from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import UsageError
from torchrelay.jobs.session import Peers, together
from torchrelay.metadata.lineage import Stage, StageRecord
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.remote_runs.resolve import parse_selector
from torchrelay.runners.stages.given import Given, Upstream


@dataclass(frozen=True)
class Source:
    """One upstream run, opened: what is known of it, and the names of the tensors to keep."""

    checkpoint: Checkpoint
    stage: Stage
    kept: tuple[str, ...]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.stage.alias} ({self.stage.record.path}, epoch {self.stage.record.epoch})"

    def index(self) -> dict[str, Any]:
        """The records of this stage and of those it was built on, by path of aliases."""
        alias = self.stage.alias
        above = records_in(self.checkpoint)
        return {alias: self.stage.record.json(), **{f"{alias}/{path}": one for path, one in above.items()}}


def open_sources(given: Given, peers: Peers) -> dict[str, Source]:
    """Open what was named, by alias, alike in every process; changes nothing anywhere.

    Raises the errors of `open_checkpoint`, and UsageError for names to keep that are none, on all ranks.
    """
    _check_alike(given, peers)
    if not given:
        return {}
    found: dict[str, Source] = {}

    def choose_all() -> dict[str, list[str]] | None:
        return (
            {alias: _choice(alias, one) for alias, one in given.upstream.items()} if peers.rank == 0 else None
        )

    chosen = together(peers, "choose upstream epochs", choose_all)[0]

    def open_all() -> None:
        for alias, (path, epoch) in chosen.items():
            found[alias] = _opened(given, alias, path, epoch)

    together(peers, "open upstream runs", open_all)
    return found


def _choice(alias: str, one: Upstream) -> list[str]:
    """The place, and exactly the epoch that is meant now."""
    try:
        selector = parse_selector(os.fspath(one.run))
        path = selector.path if is_url(selector.path) else str(Path(selector.path).absolute())
        found = open_checkpoint(path, epoch=selector.epoch)
    except UsageError as error:
        raise type(error)(f"upstream {alias!r}: {error}") from None
    return [path, f"{found.epoch},branch={found.branch}"]


def _opened(given: Given, alias: str, path: str, epoch: str) -> Source:
    checkpoint = open_checkpoint(path, epoch=epoch)
    one = given.upstream[alias]
    kept = _kept(checkpoint, alias, one)
    run = None if is_url(path) else RunDirectory(path)
    identity = run.known_identity() if run is not None else {}
    facts = checkpoint.facts
    record = StageRecord(
        asked=os.fspath(one.run),
        path=path,
        job=identity.get("job"),
        run_id=identity.get("uuid") or facts.run_id,
        epoch=checkpoint.epoch,
        branch=checkpoint.branch,
        created=identity.get("created"),
        metrics=dict(facts.metrics),
        total_steps=facts.total_steps,
        seed=facts.seed,
        applied=tuple(start.json() for start in given.init_from if start.upstream == alias),
        kept=tuple(dict.fromkeys(checkpoint.manifest.leaves[row].blob for row in _rows(checkpoint, kept))),
    )
    return Source(
        checkpoint, Stage(alias, record, _blobs(checkpoint), run.path if identity and run else None), kept
    )


def _check_alike(given: Given, peers: Peers) -> None:
    """Raise UsageError on all ranks where they would build on different runs."""
    told = peers.exchange("start: upstream", given.json())
    strange = [rank for rank, one in enumerate(told) if one != told[0]]
    if strange:
        raise UsageError(
            f"rank {strange[0]} names other upstream runs, or other weights of them, than rank 0: give all "
            "ranks the same upstream= and init_from="
        )


def _kept(checkpoint: Checkpoint, alias: str, one: Upstream) -> tuple[str, ...]:
    """The tensors that are to be kept; random states and gradients never are."""
    manifest = checkpoint.manifest
    try:
        chosen = choose(manifest, one.keep, "tensor", strict=True)
    except UsageError as error:
        raise UsageError(f"upstream {alias!r}, keep: {error}") from None
    if own := next((f"{node}:{name}" for name, node in chosen if node is not None), None):
        raise UsageError(
            f"upstream {alias!r}, keep: {own} is one node's own; only what all nodes share is kept"
        )
    return tuple(
        name for name, _ in chosen if manifest.leaves[manifest.rows[name][0]].role not in OF_POSITION
    )


def _rows(checkpoint: Checkpoint, names: tuple[str, ...]) -> list[int]:
    return [checkpoint.manifest.rows[name][0] for name in names]


def _blobs(checkpoint: Checkpoint) -> list[Mapping[str, Any]]:
    return [
        {"name": one.name, "kind": one.kind, "bytes": one.bytes, "leaves": len(one.leaves)}
        for one in checkpoint.blobs.values()
    ]
