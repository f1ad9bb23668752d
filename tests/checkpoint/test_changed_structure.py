"""A program that changes what its objects consist of: what its next start could not load is not saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.errors import BlobError, SaveFailedError

Blobs = dict[str, Any]
CHANGED_AT = 2


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Of saves that fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def blobs() -> Blobs:
    """A model with a tie, a buffer and a place for another one, and an optimizer of two of its layers."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(4, 4) for name in ("a", "b", "c", "tied")}
    model = nn.ModuleDict({**layers, "norm": nn.BatchNorm1d(4)})
    model["tied"].weight = model["a"].weight
    model.register_buffer("seen", torch.ones(3))
    groups = [{"params": list(model[name].parameters())} for name in ("a", "b")]
    return {
        "model": model,
        "optimizer": torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "alone": nn.Parameter(torch.ones(3)),
    }


def train(
    run: Path, epochs: int, change: Callable[[Blobs], object] | None, *, in_init: bool = False, **how: Any
) -> Blobs:
    """Train with a change at an epoch, or in `init`; `how` goes to the blobs, or to the runner."""
    made = blobs()
    job = Job("changing")
    job.blobs.add(made, rebuilt=how.pop("rebuilt", False))

    @job.init
    def begin(ctx: Any) -> None:
        if change is not None and in_init:
            change(made)

    @job.epoch
    def epoch(ctx: Any) -> None:
        if change is not None and not in_init and ctx.epoch == CHANGED_AT:
            change(made)
        with torch.no_grad():
            made["model"]["norm"].running_mean.add_(1)

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, **how).train()
    return made


def cut_tie(made: Blobs) -> None:
    made["model"]["tied"].weight = nn.Parameter(made["model"]["a"].weight.detach() + 1)


def tie(made: Blobs) -> None:
    made["model"]["c"].weight = made["model"]["b"].weight


def move_between_groups(made: Blobs) -> None:
    first, second = (group["params"] for group in made["optimizer"].param_groups)
    first.append(second.pop())


def resize(made: Blobs) -> None:
    made["alone"].data = torch.ones(5)


def hide_buffer(made: Blobs) -> None:
    made["model"]._non_persistent_buffers_set.add("seen")


class Counting(nn.Module):
    """No tensor, and state all the same."""

    def get_extra_state(self) -> int:
        """Any value."""
        return 3

    def set_extra_state(self, state: int) -> None:
        """Take it."""


def to_buffer(made: Blobs) -> None:
    weight = made["model"]["c"]._parameters.pop("weight")
    made["model"]["c"].register_buffer("weight", weight.detach())


def to_parameter(made: Blobs) -> None:
    made["model"].seen = nn.Parameter(made["model"]._buffers.pop("seen"))


REFUSED: dict[str, tuple[Callable[[Blobs], object], str]] = {
    "layer": (lambda made: made["model"].update({"new": nn.Linear(4, 4)}), "model.new.weight came after"),
    "layer without parameters": (
        lambda made: made["model"].update({"new": nn.BatchNorm1d(4, affine=False)}),
        "model.new.running_mean came after",
    ),
    "layer gone": (lambda made: made["model"].pop("c"), "model.c.weight is gone"),
    "head": (lambda made: made["model"].update({"c": nn.Linear(4, 7)}), r"model.c.weight is float32\[7, 4\]"),
    "dtype": (lambda made: made["model"].half(), r"model.a.weight is float16\[4, 4\] now, and was float32"),
    "bias gone": (lambda made: setattr(made["model"]["c"], "bias", None), "model.c.bias is gone"),
    "pruned": (lambda made: prune.l1_unstructured(made["model"]["c"], "weight", 0.5), "weight_orig came"),
    "parametrized": (lambda made: weight_norm(made["model"]["c"]), "original0 came after the start"),
    "tie cut": (cut_tie, "model.tied.weight is a tensor of its own now"),
    "tie made": (tie, "model.c.weight is the same tensor as model.b.weight now"),
    "parameter": (resize, r"alone is float32\[5\] now, and was float32\[3\]"),
    "buffer gone": (lambda made: delattr(made["model"], "seen"), "model.seen is gone"),
    "buffer not saved": (hide_buffer, "model.seen is gone"),
    "buffer's type": (lambda made: setattr(made["model"], "seen", torch.ones(3).double()), "seen is float64"),
    "groups in another order": (
        lambda made: made["optimizer"].param_groups.reverse(),
        "optimizer has other parameters in its groups",
    ),
    "group gone": (lambda made: made["optimizer"].param_groups.pop(), "optimizer has other parameters"),
    "other groups": (move_between_groups, "optimizer has other parameters in its groups"),
    "group that nobody holds": (
        lambda made: made["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "optimizer has parameters in group 2, added since the start, that no blob holds",
    ),
    "state without a tensor": (
        lambda made: made["model"].update({"count": Counting()}),
        "model.count._extra_state came after the start",
    ),
    "parameter to buffer": (to_buffer, "model.c.weight is a buffer now, and was a parameter at the start"),
    "buffer to parameter": (to_parameter, "model.seen is a parameter now, and was a buffer at the start"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_next_start_could_not_load_is_not_saved(tmp_path: Path, name: str) -> None:
    """The save fails and names blob, leaf and remedy; the epoch before the change is whole and resumes."""
    change, says = REFUSED[name]
    with pytest.raises(SaveFailedError, match=f"(?s){says}.*@job.setup.*rebuilt=True"):
        train(tmp_path / "run", 4, change)
    assert open_checkpoint(tmp_path / "run").epoch == CHANGED_AT - 1
    train(tmp_path / "run", 3, None)
    assert open_checkpoint(tmp_path / "run").epoch == 3


def test_a_change_in_init_is_not_saved_either(tmp_path: Path) -> None:
    """A resumed start skips `init`, so epoch 0 of a model that `init` changed is refused at once."""
    with pytest.raises(BlobError, match=r"model.new.weight came after the start"):
        train(tmp_path / "run", 2, REFUSED["layer"][0], in_init=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made["model"].register_buffer("later", torch.ones(2)),
        lambda made: setattr(made["model"], "seen", torch.ones(7)),
        lambda made: made["optimizer"].add_param_group({"params": list(made["model"]["c"].parameters())}),
        lambda made: made["optimizer"].add_param_group({"params": [made["alone"]]}),
        lambda made: made["model"].requires_grad_(False),
    ],
    ids=["buffer", "buffer's shape", "group", "group of a registered parameter", "frozen"],
)
def test_what_a_load_can_make_is_saved(tmp_path: Path, change: Callable[[Blobs], object]) -> None:
    """Buffers that came late or grew, groups that were added and frozen parameters resume."""
    before = train(tmp_path / "run", 3, change)
    after = train(tmp_path / "run", 4, None)
    assert {k: v.shape for k, v in before["model"].state_dict().items()} == {
        k: v.shape for k, v in after["model"].state_dict().items()
    }
    assert len(before["optimizer"].param_groups) == len(after["optimizer"].param_groups)


def test_a_program_that_builds_what_the_epoch_has_says_so(tmp_path: Path) -> None:
    """With `rebuilt` a model that grew is saved; a start that builds it grown resumes to equal bits."""
    grow = REFUSED["layer"][0]
    before = train(tmp_path / "run", 3, grow, rebuilt=True)

    made = blobs()
    grow(made)
    job = Job("changing")
    job.blobs.add(made, rebuilt=True)
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(4))
    JobRunner(job, tmp_path / "run").train()
    assert torch.equal(made["model"]["new"].weight, before["model"]["new"].weight)


@pytest.mark.parametrize("name", ["new", "with spaces"])
@pytest.mark.parametrize("argument", ["exclude", "resume_exclude"])
def test_what_is_not_saved_or_not_loaded_may_change(tmp_path: Path, argument: str, name: str) -> None:
    """Leaves that saves or resumes leave out stop no save, and the run resumes, whatever their names."""
    how: dict[str, Any] = {argument: [f"model.{name}.*"]}
    train(tmp_path / "run", 1, None, **how)
    train(tmp_path / "run", 3, lambda made: made["model"].update({name: nn.Linear(4, 4)}), **how)
    train(tmp_path / "run", 4, None, **how)
    assert open_checkpoint(tmp_path / "run").epoch == 4
