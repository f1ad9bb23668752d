"""Sharded tensors that did not change are referenced, as all others are; 2 ranks in every kind of mesh."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from frozen_job import tries_of, written
from torchrun import REPOSITORY, torchrun

from torchrelay import LocalSession, open_checkpoint
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage

PROGRAM = REPOSITORY / "tests/programs/frozen_shards.py"
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(200)]


def program() -> Any:
    spec = importlib.util.spec_from_file_location("frozen_shards_program", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["fsdp", "hsdp", "tp"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 2 ranks of which the later ones continue what the first has left."""
    folder = tmp_path_factory.mktemp(request.param)
    for stages in (["sync", "async"], ["moved"], ["resume"]):
        done = torchrun(
            PROGRAM, str(folder), request.param, *stages, warm=True, ranks=2, cwd=folder, timeout_secs=100
        )
        assert done.rc == 0, str(done)
    return folder


def told(run: Path, moment: object) -> dict[str, str]:
    return dict(json.loads(Path(f"{run}-{moment}.json").read_text()))


def stored(run: Path, epoch: int) -> dict[str, str]:
    found = open_checkpoint(run, epoch=epoch).load_tensors("model.*")
    return program().digests({name.removeprefix("model."): one for name, one in found.items()})


def test_frozen_shards_are_written_once(folder: Path) -> None:
    """Epochs refer to what the first wrote, after a resume too, and hold what the ranks had."""
    for run, epochs in ((folder / "sync", (4, 5)), (folder / "async", (2, 3))):
        (first,) = {tries_of(run, epoch)[1:] for epoch in epochs}
        assert first == tries_of(run, 0)
        for epoch in epochs:
            assert 0 < written(run, epoch) < 0.05 * written(run, 0)
            assert stored(run, epoch) == told(run, epoch)


def test_retention_keeps_what_is_needed_and_no_more(folder: Path) -> None:
    """With keep_last=2 three tries are left, all of them whole."""
    for run in (folder / "sync", folder / "async"):
        storage = LocalStorage(run / "checkpoints")
        assert len(list((run / "checkpoints/data").iterdir())) == 3
        outcomes = [
            verify_epoch(storage, entry, level="full").outcome.value for entry in open_log(storage).entries
        ]
        assert outcomes == ["proved"] * 3


def test_resumed_ranks_have_the_same_bits(folder: Path) -> None:
    """The same mesh and another one start with what epoch 3 ended with."""
    for run in ("sync", "moved"):
        assert told(folder / run, "start-3") == told(folder / "sync", 3)


def sharding(run: Path, epoch: int) -> dict[str, tuple[Any, ...]]:
    """How every sharded parameter lies: nodes, extents and placements, its bytes, and its try."""
    manifest = open_checkpoint(run, epoch=epoch).manifest
    return {
        leaf.name: (manifest.layouts[leaf.layout], leaf.nbytes, manifest.tries[leaf.source])
        for leaf in manifest.leaves
        if leaf.scope == "sharded"
    }


def test_another_mesh_writes_what_lies_otherwise(folder: Path) -> None:
    """The first epoch on other placements refers to no parameter that is placed anew; the next does."""
    run = folder / "moved"
    before, after = sharding(run, 3), sharding(run, 4)
    moved = [name for name in after if name not in before or after[name][0] != before[name][0]]
    assert {"model.mid.bias", "model.mid.weight", "model.up.weight"} & set(moved)
    assert {after[name][2] for name in moved} == {tries_of(run, 4)[0]}
    assert written(run, 4) > sum(after[name][1] for name in moved)
    assert written(run, 5) < 0.05 * written(run, 0) and tries_of(run, 4)[0] in tries_of(run, 5)
    assert stored(run, 3) == told(folder / "sync", 3)
    assert [stored(run, epoch) for epoch in (4, 5)] == [told(run, epoch) for epoch in (4, 5)]


def test_one_process_trains_on(folder: Path) -> None:
    """A plain network takes what shards of two tries hold, and what it saves refers to no shard."""
    module, run = program(), folder / "moved"
    with LocalSession() as session:
        module.train(session, run, "plain", 6, reuse=True)
    assert told(run, "start-5") == stored(run, 5)
    assert stored(run, 6) == told(run, 6)
    assert written(run, 6) > 0.95 * written(run, 0)


def test_what_an_earlier_rule_wrote_is_continued(tmp_path: Path) -> None:
    """Epochs whose replicas shared the writing by rule 1 are read, resumed and followed by ones by rule 2."""
    for stage in ("earlier", "later"):
        done = torchrun(
            PROGRAM, str(tmp_path), "hsdp", stage, warm=True, ranks=2, cwd=tmp_path, timeout_secs=100
        )
        assert done.rc == 0, str(done)
    run = tmp_path / "earlier"
    rules = [{mesh.rule for mesh, _, _ in sharding(run, epoch).values()} for epoch in range(6)]
    assert rules[:4] == [{1}] * 4 and all(2 in found for found in rules[4:])
    assert told(run, "start-3") == told(run, 3)
    for epoch in (3, 4, 5):
        assert stored(run, epoch) == told(run, epoch)
