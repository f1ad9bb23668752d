"""Where the gate stands before `load_state_dict`, and that it leaves no trace."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay import Context, Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.checkpoint.save.staging import StagedCopies, late_leaves
from torchrelay.checkpoint.state.steps import Guards, gate


def _gates(one: nn.Module | torch.optim.Optimizer) -> int:
    """How often the gate stands in an object, its parts included."""
    if isinstance(one, torch.optim.Optimizer):
        return list(one._optimizer_load_state_dict_pre_hooks.values()).count(gate)
    hooks = [hook for part in one.modules() for hook in part._load_state_dict_pre_hooks.values()]
    return sum(getattr(hook, "hook", hook) is gate for hook in hooks)


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    return model, torch.optim.AdamW(model.parameters())


def test_every_part_is_guarded_once_however_often_that_is_asked() -> None:
    """From save to save parts keep their gate; optimizers lose theirs, for it would change their listing."""
    model, optimizer = _pair()
    guards = Guards()
    for _ in range(3):
        guards.put([model, optimizer])
        assert (_gates(model), _gates(optimizer)) == (4, 1)
        guards.remove_from_optimizers()
        assert (_gates(model), _gates(optimizer)) == (4, 0)
    guards.put([model, optimizer])
    guards.remove()
    assert (_gates(model), _gates(optimizer)) == (0, 0)


def test_parts_that_came_are_guarded_and_those_that_left_are_not() -> None:
    """A layer that was exchanged between two saves is guarded, and the old one is as it was."""
    model, optimizer = _pair()
    guards = Guards()
    guards.put([model, optimizer])
    old, model[0] = model[0], nn.Linear(2, 2)
    guards.put([model, optimizer])
    assert (_gates(model), _gates(old)) == (4, 0)
    guards.remove()
    assert _gates(model) == 0


def test_a_run_leaves_no_gate_in_its_objects(tmp_path: Path) -> None:
    """In the exit group and after a run its objects are as they were; in its epochs they are guarded."""
    model, optimizer = _pair()
    model[0].weight = nn.Parameter(torch.zeros(200, 200))  # what is large is copied late
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[int, int]] = []
    job = Job("guarded", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def epoch(ctx: Context) -> None:
        seen.append((_gates(model), _gates(optimizer)))

    @job.exit
    def leave(ctx: Context) -> None:
        seen.append((_gates(model), _gates(optimizer)))

    job.stop_when(max_epochs(3))
    JobRunner(job, tmp_path / "run", save_initial=False, asynchronous=True).train()
    assert seen == [(0, 0), (4, 0), (4, 0), (0, 0)]  # from the first save on
    assert (_gates(model), _gates(optimizer)) == (0, 0)


def test_guards_that_cannot_be_put_everywhere_are_put_nowhere() -> None:
    """What fails halfway leaves no gate behind, and is tried anew by the next save."""

    class Refusing(nn.Linear):
        refuses = True

        def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
            if self.refuses:
                raise KeyboardInterrupt
            return super().register_load_state_dict_pre_hook(hook)

    model = nn.Sequential(nn.Linear(2, 2), Refusing(2, 2), nn.Linear(2, 2))
    guards = Guards()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            guards.put([model])
        assert _gates(model) == 0
    model[1].refuses = False
    guards.put([model])
    assert _gates(model) == 4


def test_what_takes_no_gate_is_copied_at_the_boundary(tmp_path: Path) -> None:
    """A scripted part takes no hook: its parameters are copied at once, others late; epochs are saved."""
    scripted = torch.jit.script(nn.Linear(200, 200))
    model = nn.Sequential(nn.Linear(200, 200), scripted)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 200)).sum().backward()
    optimizer.step()
    late = late_leaves({"model": model, "optimizer": optimizer})
    assert "model.0.weight" in late and "model.1.weight" not in late
    assert "optimizer.state.model.1.weight.exp_avg" in late
    seen: list[int] = []
    job = Job("scripted", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def epoch(ctx: Context) -> None:
        seen.append(len(model[0]._load_state_dict_pre_hooks))
        model(torch.ones(2, 200)).sum().backward()
        optimizer.step()

    job.stop_when(max_epochs(2))
    result = JobRunner(job, tmp_path / "run", save_initial=False, asynchronous=True).train()
    assert seen == [0, 1] and result.committed == 2  # from the first save on
    assert not model[0]._load_state_dict_pre_hooks
    stored = open_checkpoint(tmp_path / "run").load_tensors("model.1.weight")
    assert torch.equal(stored["model.1.weight"], scripted.weight)


def test_who_waits_for_copies_that_were_never_begun_goes_on_when_they_are_released() -> None:
    """A save may be interrupted after it closed the gate, when another thread waits there already."""
    copies = StagedCopies("samples")
    waits = threading.Thread(target=copies.pass_gate, daemon=True)
    waits.start()
    copies.release()
    waits.join(10)
    assert not waits.is_alive()
