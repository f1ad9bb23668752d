"""What asynchronous saves hold is what was there at the boundary, bit by bit, whatever runs behind them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tear_job import SparseWriters, Trainee, committed, torn, train
from torchrun import REPOSITORY, torchrun

from torchrelay import Context, open_checkpoint
from torchrelay.checkpoint.save.staging import Copier, StagedCopies

EPOCHS = 4
PATIENCE_SECS = 0.2


class HeldUp:
    """Late copies that each wait until a step was made, or for so long that a step must be held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stepped = threading.Event()
        self.copies = 0
        copy = Copier.copy_late

        def held_up(copier: Copier, target: torch.Tensor, source: torch.Tensor) -> None:
            self.stepped.clear()
            self.stepped.wait(PATIENCE_SECS)
            self.copies += 1
            copy(copier, target, source)

        monkeypatch.setattr(Copier, "copy_late", held_up)

    def after_step(self, ctx: object, trainee: object) -> None:
        self.stepped.set()


def test_a_step_without_the_gate_tears_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test below can fail: with the guard taken out, fused steps reach what is being copied.

    Without reuse, for blocks that were hashed at the boundary show it as damage.
    """
    for guard in ("pass_gate", "compare"):
        monkeypatch.setattr(StagedCopies, guard, lambda self: None)
    held = HeldUp(monkeypatch)
    truth = train(tmp_path / "run", 3, asynchronous=True, reuse=False, after_step=held.after_step)
    assert held.copies > 0
    damage = {name for epoch in (1, 2) for name in torn(tmp_path / "run", epoch, truth[epoch])}
    assert {"model.3.weight", "optimizer.state.model.3.weight.exp_avg"} & damage
    assert not any(name.startswith("average.") or "running" in name for name in damage)


@pytest.mark.parametrize("verify", ["samples", "full"])
def test_with_the_gate_no_epoch_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str) -> None:
    """Fused AdamW, batch norm and an average by hand: every epoch holds what was there at its boundary."""
    held = HeldUp(monkeypatch)
    truth = train(tmp_path / "run", 3, asynchronous=True, verify_staging=verify, after_step=held.after_step)
    assert held.copies >= 6
    assert {epoch: torn(tmp_path / "run", epoch, truth[epoch]) for epoch in truth} == {1: [], 2: [], 3: []}


def test_rows_that_an_embedding_normalises_in_forward_are_those_of_the_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`max_norm` writes the weight in forward: it is copied at the boundary, and every epoch is saved."""
    held = HeldUp(monkeypatch)
    trainee = Trainee(3, sparse=SparseWriters(by_hand=False))
    truth = train(tmp_path / "run", 3, trainee=trainee, asynchronous=True, after_step=held.after_step)
    assert held.copies >= 6
    assert open_checkpoint(tmp_path / "run", epoch=0)["sparse.normed.weight"].shape == (4096, 32)
    assert {epoch: torn(tmp_path / "run", epoch, truth[epoch]) for epoch in truth} == {1: [], 2: [], 3: []}


def test_a_sparse_write_between_the_samples_fails_the_save_and_the_next_ones_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a parameter are written in forward: the save says so, and later saves copy it in time."""
    held = HeldUp(monkeypatch)
    trainee = Trainee(3, sparse=SparseWriters(by_hand=True))
    with pytest.warns(UserWarning, match=r"'sparse\.cache' changed while being copied"):
        truth = train(tmp_path / "run", 4, trainee=trainee, asynchronous=True, after_step=held.after_step)
    kept = committed(tmp_path / "run", truth)
    assert set(kept) >= {2, 3, 4}
    assert [epoch for epoch in kept if torn(tmp_path / "run", epoch, truth[epoch])] == []


def test_no_epoch_is_torn_at_natural_speed(tmp_path: Path) -> None:
    """Thirty saves, each with a fused step right behind it."""
    truth = train(tmp_path / "run", 30, asynchronous=True, keep_last=None)
    assert [epoch for epoch in truth if torn(tmp_path / "run", epoch, truth[epoch])] == []


def test_resume_from_every_asynchronous_epoch_is_bit_identical(tmp_path: Path) -> None:
    """New objects from another seed come to the same states from each epoch, 0 included."""
    whole = train(tmp_path / "whole", EPOCHS, asynchronous=True)
    for epoch in range(EPOCHS):
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"from {epoch}")
        again = train(run, EPOCHS, seed=50 + epoch, asynchronous=True, resume_from_epoch=epoch)
        assert sorted(again) == list(range(epoch + 1, EPOCHS + 1))
        for later, content in again.items():
            assert all(torch.equal(content[name], whole[later][name]) for name in whole[later])


def test_asynchronous_and_synchronous_runs_write_the_same_bytes(tmp_path: Path) -> None:
    """Only when an epoch is written differs: every blob of every epoch has the same digest."""
    for name, asynchronous in (("sync", False), ("async", True)):
        train(tmp_path / name, 2, asynchronous=asynchronous)
    for epoch in range(3):
        digests = [
            {blob: info.digest for blob, info in open_checkpoint(tmp_path / name, epoch=epoch).blobs.items()}
            for name in ("sync", "async")
        ]
        assert digests[0] == digests[1]


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_beyond_the_staging_limit_saves_are_blocking_and_exact(tmp_path: Path, limit: int) -> None:
    """What does not fit into staging memory is written before the training goes on."""
    truth = train(tmp_path / "run", 2, asynchronous=True, staging_limit=limit)
    assert {epoch: torn(tmp_path / "run", epoch, truth[epoch]) for epoch in truth} == {1: [], 2: []}


def test_load_state_dict_waits_for_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading other weights right after a boundary neither tears the epoch nor fails it."""
    held = HeldUp(monkeypatch)
    other = Trainee(9)

    def load(ctx: object, trainee: Trainee) -> None:
        trainee.model.load_state_dict(other.model.state_dict())
        held.stepped.set()

    truth = train(tmp_path / "run", 3, asynchronous=True, before_step=load)
    assert held.copies > 0
    assert {epoch: torn(tmp_path / "run", epoch, truth[epoch]) for epoch in truth} == {1: [], 2: [], 3: []}


def _swap(what: str, trainee: Trainee) -> Callable[[], object]:
    """Let other memory stand where a weight's or a moment's was; returns what brings the first one back."""
    weight = trainee.model[3].weight
    if what == "data":
        first, weight.data = weight.data, torch.zeros_like(weight.data)
        return lambda: setattr(weight, "data", first)
    if what == "state":
        state = trainee.optimizer.state[weight]
        first = state.get("exp_avg")
        state["exp_avg"] = torch.zeros_like(weight.data)
        return lambda: state.update(exp_avg=first) if first is not None else state.clear()
    kept, memory = weight.detach().clone(), weight.untyped_storage()
    memory.resize_(0)
    return lambda: (memory.resize_(kept.nbytes), weight.data.copy_(kept))


@pytest.mark.filterwarnings("ignore:epoch . was NOT saved")
@pytest.mark.parametrize("what", ["data", "state", "memory"])
def test_what_was_swapped_while_it_was_copied_is_that_of_the_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Other memory stood there when the copy began, the first one again when it was compared."""
    swapped, copied, back = (threading.Event() for _ in range(3))
    copy, compare = StagedCopies.copy, StagedCopies.compare

    def copy_swapped(stage: StagedCopies, also: Callable[[], None] = lambda: None) -> None:
        swapped.wait(PATIENCE_SECS)
        copy(stage, also)

    def compare_later(stage: StagedCopies) -> None:
        copied.set()
        back.wait(PATIENCE_SECS)
        compare(stage)

    def swap(ctx: Context, trainee: Trainee) -> None:
        bring_back = _swap(what, trainee)
        swapped.set()
        found.append(copied.wait(PATIENCE_SECS))
        bring_back()
        back.set()

    def again(ctx: Context, trainee: Trainee) -> None:
        for event in (swapped, copied, back):
            event.clear()

    found: list[bool] = []
    monkeypatch.setattr(StagedCopies, "copy", copy_swapped)
    monkeypatch.setattr(StagedCopies, "compare", compare_later)
    options = {"asynchronous": True, "verify_staging": "full", "keep_last": None}
    truth = train(tmp_path / "run", 4, before_step=swap, after_step=again, **options)
    assert any(found)
    kept = committed(tmp_path / "run", truth)
    assert set(kept) >= ({3, 4} if what == "memory" else {1, 2, 3, 4})
    assert [epoch for epoch in kept if torn(tmp_path / "run", epoch, truth[epoch])] == []


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_resume_from_every_asynchronous_epoch(tmp_path: Path) -> None:
    """On two ranks, which each write a share: nothing torn, and every resume comes to the same states."""
    program = REPOSITORY / "tests/programs/asynchronous_resume.py"
    places = (str(REPOSITORY / name) for name in ("src", "tests/helpers", "scripts/trials"))
    env = {"PYTHONPATH": ":".join(places)}
    done = torchrun(program, str(tmp_path), warm=True, ranks=2, cwd=tmp_path, env=env)
    assert done.rc == 0, str(done)
    assert (tmp_path / "rank-0").read_text() == (tmp_path / "rank-1").read_text() == "exact\n"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("tp", 4)])
def test_parts_of_sharded_tensors_are_copied_late_and_exact(tmp_path: Path, kind: str, ranks: int) -> None:
    """FSDP2, and tensor parallel with it: as saved at once, torn without the gate, hidden writes found."""
    program = REPOSITORY / "tests/programs/asynchronous_sharded.py"
    done = torchrun(program, str(tmp_path), kind, warm=True, ranks=ranks, cwd=tmp_path, timeout_secs=150)
    assert done.rc == 0, str(done)
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == [f"rank-{i}" for i in range(ranks)]
