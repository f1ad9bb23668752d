"""Before its first epoch a run plans a save that it does not make: the first one finds plan and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrelay import Job, JobRunner, MultiNodeCheckpointManager, max_epochs, open_checkpoint
from torchrelay.checkpoint import engine
from torchrelay.checkpoint.disk import manifest_disk
from torchrelay.checkpoint.planning import repeated
from torchrelay.checkpoint.recent import Recent
from torchrelay.checkpoint.state.stock import all_stock, is_stock
from torchrelay.errors import PeerError
from torchrelay.runners.local_session import LocalSession


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often plans and tables were made, by what was going on."""
    found: Counter[str] = Counter()
    for module, name in ((repeated, "plan_classes"), (manifest_disk, "_tables")):
        real = getattr(module, name)

        def counted(*given: Any, _real: Any = real, _name: str = name, **named: Any) -> Any:
            found[_name] += 1
            return _real(*given, **named)

        monkeypatch.setattr(module, name, counted)
    monkeypatch.setattr(manifest_disk, "_recent", Recent(4))
    return found


Step = Callable[[Any], object]


def job(worked: Counter[str], seen: list[Counter[str]], epochs: int, step: Step = lambda ctx: None) -> Job:
    """Adds one in every epoch, and notes at its beginning what was made until then."""

    def epoch(ctx: Any) -> None:
        seen.append(Counter(worked))
        ctx["total"].add_(1)
        step(ctx)

    made = Job("count", blobs={"total": lambda ctx: torch.zeros(3)})
    made.epoch(epoch)
    made.stop_when(max_epochs(epochs))
    return made


@pytest.mark.parametrize("reuse", [False, True], ids=["all", "reused"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "behind"])
def test_the_first_save_of_a_run_finds_plan_and_tables(
    tmp_path: Path, worked: Counter[str], asynchronous: bool, reuse: bool
) -> None:
    """Where the state stands before the first epoch no save plans; nothing is written for that."""
    seen: list[Counter[str]] = []

    def look(ctx: Any) -> None:
        files.append(len(list(tmp_path.glob("data/*"))))

    files: list[int] = []
    options = {"asynchronous": asynchronous, "reuse": reuse}
    made = job(worked, seen, 3, look)
    JobRunner(made, MultiNodeCheckpointManager(tmp_path, **options), save_initial=False).train()
    assert (files[0], seen[0]) == (0, {"plan_classes": 1, "_tables": 1})
    assert worked == seen[0]
    for epoch in (1, 2, 3):
        assert open_checkpoint(tmp_path, epoch).load_tensors("total")["total"].tolist() == [epoch] * 3


def test_a_resumed_run_rehearses_with_what_it_loaded(
    tmp_path: Path, worked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that goes on has its plan before its first epoch."""
    JobRunner(job(worked, [], 2), MultiNodeCheckpointManager(tmp_path, reuse=False)).train()
    monkeypatch.setattr(manifest_disk, "_recent", Recent(4))  # of another process
    worked.clear()
    seen: list[Counter[str]] = []
    JobRunner(job(worked, seen, 4), MultiNodeCheckpointManager(tmp_path, reuse=False)).train(
        resume_from_epoch=2
    )
    assert seen == [{"plan_classes": 1, "_tables": 1}] * 2 and worked == seen[0]


def test_a_state_that_is_another_by_then_is_planned_again(tmp_path: Path, worked: Counter[str]) -> None:
    """What was rehearsed is believed of no other state: an optimizer has none before its first step."""

    def train(ctx: Any) -> None:
        ctx["model"](torch.ones(2)).sum().backward()
        ctx["optimizer"].step()

    made = job(worked, [], 3, train)
    made.blobs.add({"model": lambda ctx: torch.nn.Linear(2, 2)})
    made.blobs.add({"optimizer": lambda ctx: torch.optim.AdamW(ctx["model"].parameters())})
    JobRunner(made, MultiNodeCheckpointManager(tmp_path, reuse=False), save_initial=False).train()
    assert worked == {"plan_classes": 2, "_tables": 2}
    assert sum("exp_avg" in leaf.name for leaf in open_checkpoint(tmp_path, 3).leaves) == 4


class Counts:
    """An object whose state counts how often it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def counted(run: Path, epochs: int, **how: int) -> int:
    """What such an object holds at the end of a run up to this epoch."""
    made = Job("count", blobs={"counts": lambda ctx: Counts(), "model": lambda ctx: torch.nn.Linear(2, 2)})
    found: list[int] = []
    made.epoch(lambda ctx: None)
    made.exit(lambda ctx: found.append(ctx["counts"].asked))
    made.stop_when(max_epochs(epochs))
    JobRunner(made, MultiNodeCheckpointManager(run)).train(**how)
    return found[0]


def test_a_resume_asks_objects_of_others_as_often_as_an_uninterrupted_run(tmp_path: Path) -> None:
    """Where training waits for its saves, whatever a `state_dict` of the user changes resumes as it was."""
    whole = counted(tmp_path / "whole", 4)
    counted(tmp_path / "cut", 2)
    assert counted(tmp_path / "cut", 4, resume_from_epoch=2) == whole


def hooked() -> torch.nn.Module:
    """A module that somebody looks into."""
    module = torch.nn.Linear(2, 2)
    module.register_state_dict_pre_hook(lambda *given: None)
    return module


class Extra(torch.nn.Linear):
    """A module with a state of its own."""

    def get_extra_state(self) -> int:
        return 1


class Broken(torch.nn.Linear):
    """A module that does not even say what it consists of."""

    def modules(self) -> Any:
        raise RuntimeError("not now")


LINEAR = torch.nn.Linear(2, 2)
SGD = torch.optim.SGD(LINEAR.parameters())
STOCK: dict[str, tuple[bool, Any]] = {
    "tensor": (True, torch.zeros(2)),
    "value": (True, 3),
    "module": (True, torch.nn.Sequential(LINEAR, torch.nn.BatchNorm1d(2))),
    "optimizer": (True, SGD),
    "scheduler": (True, torch.optim.lr_scheduler.StepLR(SGD, 1)),
    "object": (False, Counts()),
    "object whose class knows nothing": (False, SimpleNamespace(state_dict=dict, load_state_dict=dict)),
    "hooked inside": (False, torch.nn.Sequential(hooked())),
    "extra inside": (False, torch.nn.Sequential(Extra(2, 2))),
}


@pytest.mark.parametrize(("stock", "value"), STOCK.values(), ids=STOCK)
def test_whose_code_lists_the_leaves_is_known(stock: bool, value: Any) -> None:
    """Only what torch's own code and ours look at is asked once more."""
    assert is_stock(value) is stock


def test_an_object_that_cannot_be_asked_is_nobody_s_mistake_yet() -> None:
    """The other processes hear of it as of any object that is not stock."""
    session = LocalSession(["trainer_0"])
    for value, stock in ((torch.zeros(1), True), (Broken(2, 2), False)):
        session.workspace("trainer_0")["it"] = value
        assert all_stock(session, {"trainer_0": {"it": None}}) is stock
        del session.workspace("trainer_0")["it"]


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_rank_ends_a_rehearsal_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Ranks that are out of step go no further together; any other trouble is left for the save to tell."""
    error = PeerError("rank 1 is gone") if lost else MemoryError("not now")

    def fails(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(engine, "rehearse", fails)
    runner = JobRunner(job(Counter(), [], 1), MultiNodeCheckpointManager(tmp_path), save_initial=False)
    if lost:
        with pytest.raises(PeerError, match="rank 1 is gone"):
            runner.train()
    else:
        assert runner.train() == 1
