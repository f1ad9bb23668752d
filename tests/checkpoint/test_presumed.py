"""Long leaves that begin as they did are assumed unchanged until the others are written, and then proved.

Saves that wait hash them beside the write. What has changed after all is written by the same save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_sessions import PairedSession, paired_sessions
from ranks import on_ranks
from torch import nn

from torchrelay import (
    Context,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    max_epochs,
    open_checkpoint,
)
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.save import change_detection, dedup
from torchrelay.checkpoint.save import pipeline as saving
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import DeadlineError, StorageError
from torchrelay.jobs.blobs import Blob
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import Solo

ELEMENTS = 700_000
"""Of each tensor: three blocks of the digests, the last one not full."""
LAST = ELEMENTS - 1
NAMES = ("first", "second", "third")
Changes = dict[int, dict[str, int]]
"""Epoch to names to the element that changes in it."""


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs of which somebody began to write shards, as often as that was."""
    found: list[int] = []
    make = saving._make_attempt

    def noted(job: Any, plan: Any) -> str:
        if job.peers.rank == 0:
            found.append(job.position.epoch)
        return make(job, plan)

    monkeypatch.setattr(saving, "_make_attempt", noted)
    return found


def train(run: Path, epochs: int, changes: Changes) -> dict[int, dict[str, torch.Tensor]]:
    """Train, and say what the tensors were in each epoch."""
    job, seen = Job("assumed"), dict[int, dict[str, torch.Tensor]]()

    def build(name: str) -> Callable[[Context], torch.Tensor]:
        return lambda ctx: torch.arange(ELEMENTS, dtype=torch.float32) + len(name)

    job.blobs(**{name: build(name) for name in NAMES}, count=lambda ctx: torch.zeros(3))

    @job.epoch
    def change(ctx: Context) -> None:
        ctx["count"].add_(1)
        for name, at in changes.get(ctx.epoch, {}).items():
            ctx[name][at] += 0.5
        seen[ctx.epoch] = {name: ctx[name].clone() for name in NAMES}

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, reuse=True).train(LocalSession())
    return seen


def check(run: Path, seen: dict[int, dict[str, torch.Tensor]]) -> None:
    """Every epoch holds what it must, and all of its bytes are proved."""
    for epoch, wanted in seen.items():
        found = open_checkpoint(run, epoch=epoch).load_tensors(list(NAMES))
        assert all(found[name].equal(one) for name, one in wanted.items()), epoch
    storage = LocalStorage(run / "checkpoints")
    outcomes = {
        verify_epoch(storage, entry, level="full").outcome.value for entry in open_log(storage).entries
    }
    assert outcomes == {"proved"}


def left(run: Path) -> list[str]:
    """The epochs of the directories that are there."""
    return sorted(path.name.partition("-")[0] for path in (run / "checkpoints/data").iterdir())


def test_what_changes_behind_its_first_bytes_is_written_by_the_same_save(
    tmp_path: Path, tries: list[int]
) -> None:
    """The save is made twice, once; a leaf that has surprised is looked at in time from then on."""
    seen = train(tmp_path, 4, {2: {"second": LAST}, 3: {"second": LAST}, 4: {"third": 0}})
    check(tmp_path, seen)
    assert tries == [0, 1, 2, 2, 3, 4]
    assert left(tmp_path) == [f"e{epoch:08d}" for epoch in range(5)]


def test_what_is_unchanged_is_hashed_between_the_try_and_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the write only first bytes are looked at; before the commit all blocks of what is referenced."""
    events: list[str] = []

    def note(module: Any, name: str) -> None:
        call = getattr(module, name)

        def called(*given: Any) -> Any:
            events.append(name)
            return call(*given)

        monkeypatch.setattr(module, name, called)

    note(change_detection._Long, "hash")
    note(saving, "_make_attempt")
    note(saving, "commit")
    check(tmp_path, train(tmp_path, 1, {1: {"first": 0}}))
    hashed = ["hash"] * 4  # a block, and the other two, of each leaf that is as it was
    assert events == ["_make_attempt", "commit", "_make_attempt", *hashed, "commit"]


@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(
        st.integers(1, 5),
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0, 1023, 1024, 300_000, LAST]), min_size=1),
        max_size=5,
    )
)
def test_whatever_changes_wherever_every_epoch_holds_it(
    tmp_path_factory: pytest.TempPathFactory, changes: Changes
) -> None:
    """Surprises are told apart from what is as it was, in whatever order they come."""
    run = tmp_path_factory.mktemp("run")
    check(run, train(run, 5, changes))


class Rank(PairedSession):
    """A process played by a thread, with a layer of which both ranks write a half."""

    def __init__(self, like: PairedSession) -> None:
        names = ["trainer_0", "trainer_1"]
        super().__init__(like.peers.rank, names, (like.peers._meeting, like._flags))
        self.layer = nn.Linear(1024, 2048, bias=False)
        nn.init.ones_(self.layer.weight)
        self.workspace(names[self.peers.rank]).register(Blob("model", self.layer), self.layer)

    def streams(self, node: str) -> RandomStreams:
        return RandomStreams.derive(0, self.peers.rank)


class Pair:
    """Two ranks that save to one directory."""

    def __init__(self, folder: Path) -> None:
        self.ranks = [Rank(one) for one in paired_sessions(2)]
        self.managers = [MultiNodeCheckpointManager(folder, reuse=True) for _ in self.ranks]

    def save(self, epoch: int, row: int | None = None) -> None:
        """Save what all have alike, of which an element behind the first bytes of either half may change."""
        with torch.no_grad():
            for rank in self.ranks if row is not None else ():
                rank.layer.weight[row, 512] += 1.0
        assert on_ranks(2, lambda rank: self.ranks[rank].run(self.managers[rank].save(epoch))) == [None, None]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for manager in made.managers:
        manager.engine.ledger.close()


@pytest.mark.parametrize("row", [1, 2047], ids=["rank 0", "rank 1"])
def test_a_surprise_of_one_rank_is_everybody_s(
    tmp_path: Path, pair: Pair, tries: list[int], row: int
) -> None:
    """The ranks stay in step: all give the try up and write again together, and all remember the leaf."""
    for epoch, changes in ((1, None), (2, None), (3, row), (4, 2048 - row)):
        pair.save(epoch, changes)
    assert tries == [1, 2, 3, 3, 4]
    found = open_checkpoint(tmp_path, epoch=4).load_tensors("model.*")["model.weight"]
    assert found.equal(pair.ranks[0].layer.weight)
    assert open_checkpoint(tmp_path, epoch=2).load_tensors("model.*")["model.weight"].eq(1).all()
    assert len(list(tmp_path.glob("data/*"))) == 4


def test_who_resumes_presumes_from_the_second_save_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers do not tell of first bytes; whoever has hashed the whole part knows them."""
    train(tmp_path, 2, {})
    hashed, before = [0], list[int]()
    make, commit, blocks = saving._make_attempt, saving.commit, change_detection._Long.hash

    def trying(*given: Any) -> str:
        before.append(hashed[0])
        return make(*given)

    def committing(*given: Any) -> Any:
        hashed[0] = 0
        return commit(*given)

    def hashing(*given: Any) -> None:
        hashed[0] += 1
        blocks(*given)

    monkeypatch.setattr(saving, "_make_attempt", trying)
    monkeypatch.setattr(saving, "commit", committing)
    monkeypatch.setattr(change_detection._Long, "hash", hashing)
    check(tmp_path, train(tmp_path, 4, {4: {"second": 0}}))
    assert before == [2 * len(NAMES), 0], "the first block and the others of each, then none"


class Lost(Solo):
    """Peers who are gone when they should have written."""

    def exchange(self, topic: str, value: Any, **more: Any) -> list[Any]:
        if topic == "save: write":
            raise DeadlineError("waited 600 s at 'save: write' for rank 1")
        return super().exchange(topic, value)


@pytest.mark.parametrize("full", [False, True])
def test_where_others_may_be_writing_still_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Whatever this process's own trouble is, that the others could not be told of it."""
    session = LocalSession(["trainer_0"])
    session.workspace("trainer_0")["weight"] = torch.ones(3)
    session.peers = Lost()
    manager = MultiNodeCheckpointManager(tmp_path)

    def fails(*given: Any) -> Any:
        raise StorageError("no space left on the device")

    if full:
        monkeypatch.setattr(saving, "_write_node", fails)
    with pytest.raises(StorageError if full else DeadlineError):
        session.run(manager.save(1))
    assert len(list(tmp_path.glob("data/*"))) == 1
    manager.engine.ledger.close()


@pytest.mark.parametrize("where", ["_chosen", "commit"])
def test_a_failed_save_keeps_nothing_of_the_user_s_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A model that is thrown away after an error is gone."""
    session = LocalSession(["trainer_0"])
    manager = MultiNodeCheckpointManager(tmp_path, reuse=True)
    weight = torch.ones(ELEMENTS)
    session.workspace("trainer_0").update({"weight": weight, "count": torch.zeros(1)})
    session.run(manager.save(1))

    def fails(*given: Any) -> Any:
        raise StorageError("not now")

    monkeypatch.setattr(saving if where == "commit" else dedup.Reuse, where, fails)
    session.workspace("trainer_0")["count"].add_(1)
    with pytest.raises(StorageError):
        session.run(manager.save(2))
    assert not manager.engine._reuse._current.found.assumed
    manager.engine.ledger.close()
