"""Before its first epoch a run plans a save that it does not make: the first one finds plan and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay import Job, JobRunner, MultiNodeCheckpointManager, max_epochs, open_checkpoint
from torchrelay.checkpoint.disk import manifest_disk
from torchrelay.checkpoint.planning import repeated
from torchrelay.checkpoint.recent import Recent


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
