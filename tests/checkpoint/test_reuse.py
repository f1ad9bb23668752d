"""Unchanged tensors are referenced: what later epochs cost, and that each of them holds what it must."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from frozen_job import check_epoch, frozen_job, train, tries_of, written
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchrelay import (
    Context,
    Job,
    JobRunner,
    LocalSession,
    export_checkpoint,
    import_checkpoint,
    max_epochs,
    open_checkpoint,
)
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.tools.cli.main import main

HEAD = {epoch: ["head"] for epoch in range(1, 20)}
"""Only the head is trained."""


def check_all(run: Path, epochs: list[int], changes: dict, nodes: int = 1) -> None:
    for epoch in epochs:
        check_epoch(run, epoch, changes, nodes)


def prove_all(run: Path) -> list[str]:
    """Prove every byte of every live epoch; returns the outcomes."""
    storage = LocalStorage(run / "checkpoints")
    return [verify_epoch(storage, entry, level="full").outcome.value for entry in open_log(storage).entries]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_frozen_backbone_is_written_once(tmp_path: Path, nodes: int) -> None:
    """Later epochs write at most 15 % of the first, refer to it, and hold what they must."""
    train(tmp_path, 4, HEAD, nodes=nodes)
    for epoch in range(1, 5):
        assert written(tmp_path, epoch) <= 0.15 * written(tmp_path, 0)
        assert tries_of(tmp_path, epoch)[1:] == tries_of(tmp_path, 0)
    check_all(tmp_path, [0, 1, 2, 3, 4], HEAD, nodes)
    assert prove_all(tmp_path) == ["proved"] * 5


@pytest.mark.parametrize("nodes", [1, 3])
def test_asynchronous_saves_refer_too(tmp_path: Path, nodes: int) -> None:
    """What is unchanged is found at the boundary; behind the training only the rest is written."""
    train(tmp_path, 4, HEAD, nodes=nodes, asynchronous=True, keep_last=2)
    for epoch in (3, 4):
        assert written(tmp_path, epoch) <= 0.15 * written(tmp_path, 0)
    check_all(tmp_path, [0, 3, 4], HEAD, nodes)
    assert set(prove_all(tmp_path)) == {"proved"}


@pytest.mark.parametrize("row", [0, 10, 4095])
def test_a_late_tensor_may_change_in_any_block(tmp_path: Path, row: int) -> None:
    """Behind the training too, a tensor of which one block has changed is written and holds what it must."""
    job = Job("rows")

    def build(ctx: Context) -> nn.Module:
        model = nn.Linear(256, 4096, bias=False)
        model.weight.register_hook(lambda grad: grad * (torch.arange(4096) == row)[:, None])
        ctx["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        return model

    job.blobs(model=build, optimizer=lambda ctx: ctx["optimizer"])
    seen: dict[int, torch.Tensor] = {}

    @job.epoch
    def step(ctx: Context) -> None:
        ctx["optimizer"].zero_grad()
        ctx["model"](torch.ones(256)).sum().backward()
        ctx["optimizer"].step()
        seen[ctx.epoch] = ctx["model"].weight.detach().clone()

    job.stop_when(max_epochs(3))
    JobRunner(job, tmp_path, reuse=True, asynchronous=True).train(LocalSession())
    for epoch, weight in seen.items():
        assert open_checkpoint(tmp_path, epoch=epoch).load_tensors("model.*")["model.weight"].equal(weight)
    assert not seen[1].equal(seen[2]) and prove_all(tmp_path) == ["proved"] * 4


@pytest.mark.parametrize("form", ["safetensors", "hf", "torch", "dcp"])
def test_an_export_needs_no_earlier_try(tmp_path: Path, form: str) -> None:
    """What an epoch refers to is copied out: nothing of the run has to stay for what was exported."""
    train(tmp_path / "run", 3, HEAD)
    assert len(tries_of(tmp_path / "run", 3)) > 1
    wanted = open_checkpoint(tmp_path / "run", 3).load_tensors("model")
    export_checkpoint(tmp_path / "run", tmp_path / "out", 3, to=form, blobs="model")
    shutil.rmtree(tmp_path / "run")
    import_checkpoint(tmp_path / "out", tmp_path / "in", format=form, blob=None, trust=True)
    found = open_checkpoint(tmp_path / "in")
    assert len(found.manifest.tries) == 1
    tensors = found.load_tensors("*")
    assert {name for name in tensors if not name.startswith("rng")} == set(wanted)
    assert all(torch.equal(tensors[name], one) for name, one in wanted.items())


def test_reuse_is_the_default(tmp_path: Path) -> None:
    """Without a word unchanged tensors are referenced."""
    train(tmp_path, 1, HEAD, reuse=None)
    assert tries_of(tmp_path, 1)[1:] == tries_of(tmp_path, 0)


def test_reuse_can_be_switched_off(tmp_path: Path) -> None:
    """With reuse=False every epoch stands alone."""
    train(tmp_path, 2, HEAD, reuse=False)
    assert tries_of(tmp_path, 2)[1:] == () and written(tmp_path, 2) == written(tmp_path, 0)
    check_all(tmp_path, [0, 1, 2], HEAD)


def test_what_is_needed_survives_retention(tmp_path: Path) -> None:
    """keep_last=2 keeps the files that the last two epochs refer to, and retires what nothing needs."""
    train(tmp_path, 5, HEAD, keep_last=2)
    check_all(tmp_path, [0, 4, 5], HEAD)
    assert prove_all(tmp_path) == ["proved"] * 3
    needed = {*tries_of(tmp_path, 4), *tries_of(tmp_path, 5)}
    assert len(needed) == 3 and {one.name for one in (tmp_path / "checkpoints/data").iterdir()} == needed


def test_references_do_not_keep_old_tries_for_ever(tmp_path: Path) -> None:
    """Where each epoch refers to the one before, some epoch soon refers to none, and old tries go."""
    changes = {epoch: ["backbone"] if epoch % 2 else ["head", "middle", "own"] for epoch in range(1, 25)}
    train(tmp_path, 24, changes, keep_last=2)
    assert len(list((tmp_path / "checkpoints/data").iterdir())) <= 2 + 8
    check_all(tmp_path, [23, 24], changes)
    assert set(prove_all(tmp_path)) == {"proved"}


def test_a_try_of_which_less_than_half_is_used_is_left(tmp_path: Path) -> None:
    """What little is unchanged is written again, so that the try may go."""
    changes = {1: ["backbone"], 2: ["head"], 3: ["backbone", "middle", "own"]}
    train(tmp_path, 3, changes)
    assert tries_of(tmp_path, 1)[1:] == () and tries_of(tmp_path, 2)[1:] == tries_of(tmp_path, 1)
    assert tries_of(tmp_path, 3)[1:] == tries_of(tmp_path, 2)[:1], "the head alone is still used, all of it"
    check_all(tmp_path, [0, 1, 2, 3], changes)


def test_a_rewind_refers_to_the_lineage_only(tmp_path: Path) -> None:
    """A new branch refers to what it sees; abandoned epochs stay as they were."""
    before = {1: ["head"], 2: ["head"], 3: ["backbone"]}
    train(tmp_path, 3, before)
    abandoned = tries_of(tmp_path, 3)[0]
    after = {**before, 3: ["own"], 4: ["head"]}
    train(tmp_path, 4, after, resume_from_epoch=2)
    for epoch in (3, 4):
        assert abandoned not in tries_of(tmp_path, epoch) and len(tries_of(tmp_path, epoch)) > 1
    check_all(tmp_path, [0, 1, 2, 3, 4], after)
    assert prove_all(tmp_path) == ["proved"] * 6


def test_a_fresh_start_refers_to_nothing(tmp_path: Path) -> None:
    """resume="never" begins a branch that sees no epoch, so it refers to none."""
    train(tmp_path, 2, HEAD)
    train(tmp_path, 2, HEAD, resume="never")
    assert tries_of(tmp_path, 0)[1:] == () and tries_of(tmp_path, 2)[1:] == tries_of(tmp_path, 0)
    check_all(tmp_path, [0, 1, 2], HEAD)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_resumed_run_refers_to_what_it_loaded(tmp_path: Path, nodes: int) -> None:
    """The first save after a load is as small as any other."""
    train(tmp_path, 1, HEAD, nodes=nodes)
    train(tmp_path, 3, HEAD, nodes=nodes)
    for epoch in (2, 3):
        assert written(tmp_path, epoch) <= 0.15 * written(tmp_path, 0)
    check_all(tmp_path, [0, 1, 2, 3], HEAD, nodes)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 5), (4, 1)])
def test_another_number_of_nodes_refers_to_the_same_bytes(tmp_path: Path, before: int, after: int) -> None:
    """What all nodes share is referenced wherever it lies; what each has for itself is written."""
    changes = {epoch: [] for epoch in range(6)}
    train(tmp_path, 1, changes, nodes=before)
    train(tmp_path, 2, changes, nodes=after)
    train(tmp_path, 3, changes, nodes=after)
    assert written(tmp_path, 2) < 0.3 * written(tmp_path, 0) and len(tries_of(tmp_path, 2)) == 2
    check_all(tmp_path, [0, 1], changes, before)
    check_all(tmp_path, [2, 3], changes, min(before, after))
    train(tmp_path, 4, changes, nodes=before)
    check_all(tmp_path, [4], changes, min(before, after))
    assert set(prove_all(tmp_path)) == {"proved"}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_damage_of_an_earlier_try_is_damage_of_all_that_refer_to_it(tmp_path: Path) -> None:
    """An epoch that does not need the damaged file is used instead, and nothing refers to that file again."""
    changes = {1: ["backbone", "head", "middle", "own"], 2: ["head"], 3: ["head"]}
    train(tmp_path, 3, changes)
    (damaged,) = tries_of(tmp_path, 1)
    assert tries_of(tmp_path, 3)[1:] == tries_of(tmp_path, 2)[1:] == (damaged,)
    (file,) = (tmp_path / "checkpoints/data" / damaged).glob("*.safetensors")
    flip(file, file.stat().st_size // 2)
    assert prove_all(tmp_path) == ["proved", "damaged", "damaged", "damaged"]
    train(tmp_path, 4, changes)
    assert all(damaged not in tries_of(tmp_path, epoch) for epoch in (1, 2, 3, 4))
    assert tries_of(tmp_path, 2)[1:] == tries_of(tmp_path, 1)
    check_all(tmp_path, [0, 1, 2, 3, 4], changes)


def test_files_that_are_gone_are_written_again(tmp_path: Path) -> None:
    """A save notices that the try it would refer to is no longer whole."""
    train(tmp_path, 1, HEAD)
    first = tmp_path / "checkpoints/data" / tries_of(tmp_path, 0)[0]

    def remove() -> None:
        for file in first.glob("*.safetensors"):
            file.unlink()

    changes = {2: ["head"]}
    train_with(tmp_path, 3, changes, at=2, act=remove)
    assert first.name not in tries_of(tmp_path, 2) and tries_of(tmp_path, 3)[1:] == tries_of(tmp_path, 2)[:1]
    check_all(tmp_path, [2, 3], {**HEAD, 2: ["head"], 3: []})


def train_with(run: Path, epochs: int, changes: dict, *, at: int, act) -> None:
    """Train, and do something in an epoch."""
    job = frozen_job(changes)
    job.epoch(lambda ctx: act() if ctx.epoch == at else None)
    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, reuse=True).train(LocalSession())


def test_the_command_proves_epochs_that_refer_to_others(tmp_path: Path, capsys) -> None:
    """`torchrelay verify` reads all bytes of all tries that an epoch lies in."""
    train(tmp_path, 3, HEAD)
    assert main(["verify", str(tmp_path), "--epoch", "3"]) == 0
    (file,) = (tmp_path / "checkpoints/data" / tries_of(tmp_path, 0)[0]).glob("*.safetensors")
    flip(file, file.stat().st_size // 2)
    assert main(["verify", str(tmp_path), "--epoch", "3"]) != 0
    assert file.name in capsys.readouterr().out


SCHEDULES = st.lists(
    st.lists(st.sampled_from(["backbone", "head", "middle", "tiny", "own"]), unique=True), max_size=6
)


@settings(max_examples=12, deadline=None)
@given(SCHEDULES, st.integers(1, 3), st.integers(0, 6))
def test_every_epoch_of_any_schedule_holds_what_it_must(
    tmp_path_factory: pytest.TempPathFactory, schedule: list, nodes: int, stop: int
) -> None:
    """Whatever changes when, with a stop and a resume between, every epoch is as if it was written whole."""
    run = tmp_path_factory.mktemp("any") / "run"
    changes = dict(enumerate(schedule, 1))
    epochs = len(schedule) + 1
    train(run, min(stop, epochs) or 1, changes, nodes=nodes)
    train(run, epochs, changes, nodes=nodes)
    check_all(run, list(range(epochs + 1)), changes, nodes)
    assert prove_all(run) == ["proved"] * (epochs + 1)
    assert all(len(tries_of(run, epoch)) <= 9 for epoch in range(epochs + 1))
    shutil.rmtree(run)
