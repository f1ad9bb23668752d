"""What the commit of a new plan needs is checked and encoded while rank 0 waits for the shards of others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paired_sessions import PairedSession, paired_sessions
from ranks import on_ranks

from torchrelay import MultiNodeCheckpointManager, open_checkpoint
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.names import Recent
from torchrelay.checkpoint.save import pipeline as saving
from torchrelay.errors import DamagedError, StorageError
from torchrelay.jobs.random import RandomStreams

RANKS = 2
PATIENCE = 30.0


class Rank(PairedSession):
    """A process played by a thread, with a tensor and a value that all have alike."""

    def __init__(self, like: PairedSession) -> None:
        names = [f"trainer_{rank}" for rank in range(RANKS)]
        super().__init__(like.peers.rank, names, (like.peers._meeting, like._flags))
        self.workspace(names[self.peers.rank]).update({"weight": torch.ones(600_000), "count": 7})

    def streams(self, node: str) -> RandomStreams:
        return RandomStreams.derive(0, self.peers.rank)


class Run:
    """Ranks that save to one directory; how often tables were made, and by which call."""

    def __init__(self, folder: Path) -> None:
        self.ranks = [Rank(one) for one in paired_sessions(RANKS)]
        self.managers = [MultiNodeCheckpointManager(folder, reuse=False) for _ in self.ranks]
        self.made: Counter[str] = Counter()
        self.within = threading.local()

    def save(self, epoch: int) -> list[Any]:
        """What each rank met."""
        return on_ranks(RANKS, lambda rank: self.ranks[rank].run(self.managers[rank].save(epoch)))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Counts tables as made in preparing or in committing; nothing is known of other tests."""
    made = Run(tmp_path)
    tables, commit = codec._tables, saving.commit

    def counted(manifest: Any) -> Any:
        made.made["commit" if getattr(made.within, "commit", False) else "before"] += 1
        return tables(manifest)

    def committing(*given: Any) -> Any:
        made.within.commit = True
        try:
            return commit(*given)
        finally:
            made.within.commit = False

    monkeypatch.setattr(codec, "_tables", counted)
    monkeypatch.setattr(codec, "_recent", Recent(4))
    monkeypatch.setattr(saving, "commit", committing)
    yield made
    for manager in made.managers:
        manager.engine.ledger.close()


def test_rank_0_prepares_the_commit_of_a_new_plan_before_the_others_have_written(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes when rank 0 has prepared, and would tell if it had waited in vain. Once for each plan."""
    prepared, seen = threading.Event(), list[bool]()
    prepare, write = saving.prepare, saving._write_node

    def preparing(*given: Any) -> None:
        prepare(*given)
        prepared.set()

    def writing(job: Any, *rest: Any) -> Any:
        if job.peers.rank == 1:
            seen.append(prepared.wait(PATIENCE if job.position.epoch == 1 else 0.0))
        return write(job, *rest)

    monkeypatch.setattr(saving, "prepare", preparing)
    monkeypatch.setattr(saving, "_write_node", writing)
    assert run.save(1) == [None] * RANKS
    prepared.clear()
    assert run.save(2) == [None] * RANKS
    assert (seen, prepared.is_set(), run.made) == ([True, False], False, {"before": 1})
    assert open_checkpoint(tmp_path, 2).load_tensors("weight")["weight"].tolist() == [1.0] * 600_000


def test_what_could_not_be_prepared_is_made_by_the_commit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever went wrong while rank 0 waited, the ranks stay in step, and the commit does it."""

    def fails(*given: Any) -> None:
        raise MemoryError("not now")

    monkeypatch.setattr(saving, "prepare", fails)
    assert run.save(1) == [None] * RANKS
    assert run.made == {"commit": 1}


def test_a_manifest_that_no_reader_would_accept_is_no_epoch(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks hear of it, the space is given back, and the next save is made anew."""
    check = codec.check_tables

    def refuse(*given: Any) -> Any:
        raise DamagedError("the new manifest is damaged: so it is said")

    monkeypatch.setattr(codec, "check_tables", refuse)
    told = run.save(1)
    assert all(isinstance(one, StorageError) and "so it is said" in str(one) for one in told), told
    assert list(tmp_path.glob("data/*")) == []
    monkeypatch.setattr(codec, "check_tables", check)
    assert run.save(2) == [None] * RANKS
    assert list(run.managers[0].engine.ledger.view().epochs()) == [2]
