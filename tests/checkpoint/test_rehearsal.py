"""A save of a new structure plans its own restore first: what a resume would refuse is not saved."""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from two_tensor import TwoTensor, two

from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, max_epochs, open_checkpoint
from torchrelay.checkpoint.save import capture
from torchrelay.errors import RelayError, SaveFailedError


class Late:
    """An object whose state gets a wrapper subclass at the first step; no load can make it from nothing."""

    def __init__(self) -> None:
        self.codes: torch.Tensor | None = None
        self.asked = 0

    def step(self, ctx: Any) -> None:
        self.codes = two(3) if self.codes is None else self.codes
        with torch.no_grad():
            self.codes.a.add_(1)

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"codes": self.codes, "asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.codes, self.asked = state["codes"], state["asked"]


class Showing(Late):
    """The same, which shows a load what to make."""

    def state_dict_to_load_into(self) -> dict[str, Any]:
        return {"codes": two(3), "asked": 0}


class Early(Late):
    """The same, which has the wrapper from its start."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = two(3)


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Of saves that fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(where: Path, kind: type[Late], epochs: int, nodes: int = 1, **how: Any) -> list[Late]:
    """Train on some emulated nodes, of which the last one has such an object; the others a plain one."""

    def build(ctx: Any) -> Any:
        return kind() if ctx.rank == nodes - 1 else nn.Linear(2, 2)

    found: list[Late] = []
    job = Job("late", blobs={"late": build})
    job.epoch(lambda ctx: ctx["late"].step(ctx) if isinstance(ctx["late"], Late) else None)
    job.exit(lambda ctx: found.append(ctx["late"]))
    job.stop_when(max_epochs(epochs))
    with LocalSession([f"trainer_{rank}" for rank in range(nodes)]) as session:
        JobRunner(job, where, best=None, **how).train(session)
    return found


@pytest.mark.parametrize("how", [{}, {"asynchronous": True}], ids=["waiting", "behind"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_what_a_resume_would_refuse_is_not_saved(tmp_path: Path, nodes: int, how: dict[str, Any]) -> None:
    """The save fails and names blob, leaf, node and remedy; the epoch before is there and resumes."""
    with pytest.raises(SaveFailedError) as caught:
        run(tmp_path / "run", Late, 5, nodes, **how)
    node = f"trainer_{nodes - 1}"
    for text in ("late.codes", "TwoTensor", node, "state_dict_to_load_into"):
        assert text in str(caught.value)
    assert open_checkpoint(tmp_path / "run").epoch == 0
    assert len(list((tmp_path / "run/checkpoints/data").iterdir())) == 1
    resumed = run(tmp_path / "run", Showing, 2, nodes, **how)
    assert open_checkpoint(tmp_path / "run").epoch == 2 and isinstance(resumed[-1], Showing)


@pytest.mark.parametrize("how", [{}, {"asynchronous": True}], ids=["waiting", "behind"])
@pytest.mark.parametrize("kind", [Showing, Early])
def test_what_a_resume_can_make_is_saved(tmp_path: Path, kind: type[Late], how: dict[str, Any]) -> None:
    """An object that shows what to make, or has it from its start, resumes to equal bits."""
    whole = run(tmp_path / "whole", kind, 4, **how)[0]
    run(tmp_path / "cut", kind, 2, **how)
    cut = run(tmp_path / "cut", kind, 4, **how)[0]
    assert isinstance(cut.codes, TwoTensor) and isinstance(whole.codes, TwoTensor)
    assert torch.equal(cut.codes.a, whole.codes.a) and cut.asked == whole.asked, "asked once for each save"


def test_a_resumed_process_knows_what_its_load_found(tmp_path: Path) -> None:
    """A process that resumed before the first step refuses what came after it, as the first one does."""
    for remedy in ("state_dict_to_load_into", r"exclude=\['late'\]"):
        with pytest.raises(SaveFailedError, match=rf"late\.codes(.|\n)*{remedy}"):
            run(tmp_path / "run", Late, 5)


def test_a_value_that_became_an_object_is_not_saved(tmp_path: Path) -> None:
    """A later start has the value again, and nothing that could take the state of an object."""
    job = Job("best", blobs={"best": None})
    job.epoch(lambda ctx: ctx.workspace.update(best=nn.Linear(2, 2)))
    job.stop_when(max_epochs(4))
    with pytest.raises(RelayError, match="'best'"):
        JobRunner(job, tmp_path / "run", best=None).train()
    assert open_checkpoint(tmp_path / "run").epoch == 0


def test_a_structure_is_rehearsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later saves of the same leaves do nothing more than compare them."""
    rehearsed: list[int] = []
    real = capture.rehearse

    def counted(*given: Any, **more: Any) -> None:
        rehearsed.append(len(given[1]))
        real(*given, **more)

    monkeypatch.setattr(capture, "rehearse", counted)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def train(ctx: Any) -> None:
        model(torch.ones(2)).sum().backward()
        optimizer.step()

    job = Job("once", blobs={"model": model, "optimizer": optimizer})
    job.epoch(train)
    job.stop_when(max_epochs(5))
    JobRunner(job, MultiNodeCheckpointManager(tmp_path)).train()
    assert len(rehearsed) == 2 and rehearsed[0] < rehearsed[1], "without and with state of the optimizer"


def test_tensors_that_are_one_and_stored_as_one_are_saved(tmp_path: Path) -> None:
    """Tied parameters, frozen ones and buffers rehearse as they resume."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    job = Job("tied", blobs={"model": model, "optimizer": optimizer, "again": model[0]})

    @job.epoch
    def train(ctx: Any) -> None:
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()

    job.stop_when(max_epochs(2))
    assert JobRunner(job, tmp_path / "run", best=None).train() == 2


@dataclasses.dataclass
class Counts:
    """A record that is changed in place."""

    seen: int = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """A record that is replaced."""

    rate: float = 0.5


@pytest.mark.parametrize("at_init", [True, False])
@pytest.mark.parametrize("made", [Counts, Settings, lambda: defaultdict(lambda: 1)])
def test_a_value_whose_class_no_launch_registers_is_not_saved(
    tmp_path: Path, made: Any, at_init: bool
) -> None:
    """A resumed run, which skips init, would get a dict or lose the factory."""
    job = Job("late", blobs={} if at_init else {"value": 0})
    job.init(lambda ctx: ctx.workspace.update(value=made()) if at_init else None)
    job.epoch(lambda ctx: ctx.workspace.update(value=made()))
    job.stop_when(max_epochs(1))
    with pytest.raises(RelayError, match=r"value is a \w+ now, and none was registered at the start"):
        JobRunner(job, tmp_path, best=None, max_failed_saves=1).train()


def test_a_registered_frozen_record_keeps_its_class(tmp_path: Path) -> None:
    """A load replaces it by an instance with the saved fields."""

    def start(epochs: int) -> list[Settings]:
        seen: list[Settings] = []
        job = Job("settings", blobs={"settings": Settings()})

        @job.epoch
        def halve(ctx: Any) -> None:
            ctx["settings"] = Settings(ctx["settings"].rate / 2)
            seen.append(ctx["settings"])

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path, best=None).train()
        return seen

    assert [*start(1), *start(2)] == [Settings(0.25), Settings(0.125)]
