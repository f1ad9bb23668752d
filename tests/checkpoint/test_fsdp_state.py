"""The blob around torch's `get_state_dict`, on a plain module: exact, and it changes nothing by looking."""

import pytest
import torch
from leaf_store import load, save

from torchrelay import fsdp_state
from torchrelay.errors import UsageError


def made(seed, lr=0.1, optimizer=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    return model, optimizer(model.parameters(), lr=lr)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("steps", [0, 2])
def test_state_comes_back_into_new_objects(kind, steps):
    """Before the first step as after it, with state and without; options come from the checkpoint."""
    model, optimizer = made(1, optimizer=kind)
    for _ in range(steps):
        step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.025
    saved = save({"net": fsdp_state(model, optimizer)})
    other, fresh = made(2, lr=7.0, optimizer=kind)
    step(other, fresh)
    load(saved, {"net": fsdp_state(other, fresh)})
    assert torch.equal(other.weight, model.weight)
    assert fresh.param_groups[0]["lr"] == 0.025 and len(fresh.state) == len(optimizer.state)
    step(model, optimizer)
    step(other, fresh)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)


def test_looking_changes_nothing():
    """Torch's functions step an optimizer that has no state; a save, or a load that is refused, must not."""
    model, optimizer = made(1)
    before, options = model.weight.clone(), {**optimizer.param_groups[0], "params": None}
    blob = fsdp_state(model, optimizer)
    shown = blob.state_dict_to_load_into()
    assert blob.state_dict()["optimizer"] is None and "exp_avg" in shown["optimizer"]["state"]["weight"]
    assert not optimizer.state and torch.equal(model.weight, before) and model.weight.grad is None
    assert {**optimizer.param_groups[0], "params": None} == options


def test_a_module_alone():
    """The optimizer may be left out, for an evaluation."""
    model, _ = made(1)
    other, _ = made(2)
    load(save({"net": fsdp_state(model)}), {"net": fsdp_state(other)})
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("wrong", [(3,), (torch.nn.Linear(1, 1), 3)])
def test_other_arguments_are_refused(wrong):
    """By what is expected."""
    with pytest.raises(UsageError, match="module and optionally its optimizer"):
        fsdp_state(*wrong)
