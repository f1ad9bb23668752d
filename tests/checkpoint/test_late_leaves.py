"""What may be copied behind the training, and what may not."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from torchrelay.checkpoint.save.change_detection import SAMPLE_BYTES, digest, stretches
from torchrelay.checkpoint.save.staging import late_leaves
from torchrelay.checkpoint.state import steps


class Own(torch.optim.SGD):
    """An optimizer of the user's."""


def trained(make, **how) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = make(model.parameters(), lr=0.1, **how)
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("write", ["data", "no_grad", "none"])
def test_parameters_that_are_written_between_steps_are_copied_at_once(
    write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a WGAN, whose weights are clipped before each step; torch counts no write through `.data`."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(steps, "_looks", iter([1]))  # whatever other tests have used up
    steps.watch_steps()
    for _ in range(2):
        if write == "data":
            model.weight.data.clamp_(-0.01, 0.01)
        elif write == "no_grad":
            with torch.no_grad():
                model.weight.clamp_(-0.01, 0.01)
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
    late = set(late_leaves({"model": model, "optimizer": optimizer}))
    assert late == ({"model.weight", "model.bias"} if write == "none" else {"model.bias"})


def test_a_parameter_may_go_between_the_first_steps(monkeypatch) -> None:
    """As those of another rank, which a ZeroRedundancyOptimizer hands over: the other ones are compared."""
    kept, gone = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.SGD([kept, gone], lr=0.1)
    monkeypatch.setattr(steps, "_looks", iter([1]))
    steps.watch_steps()
    kept.grad = torch.ones(4)
    optimizer.step()
    optimizer.param_groups[0]["params"].pop()
    del gone
    gc.collect()
    kept.data.clamp_(0.0, 0.1)
    optimizer.step()
    assert id(kept) in steps.written_between_steps()


def test_a_parameter_may_move_between_the_first_steps(monkeypatch) -> None:
    """To another device, whose values cannot be compared: it is as good as written."""
    moving = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([moving], lr=0.1)
    monkeypatch.setattr(steps, "_looks", iter([1]))
    steps.watch_steps()
    moving.grad = torch.zeros(4)
    optimizer.step()
    before = [(one, sample.to("meta")) for one, sample in steps._sampled[id(optimizer)]]
    monkeypatch.setitem(steps._sampled, id(optimizer), before)
    optimizer.step()
    assert id(moving) in steps.written_between_steps()


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_parameters_and_state_of_stock_optimizers_are_late(make, how) -> None:
    """All parameters and all tensors of the state, and no buffer."""
    model, optimizer = trained(make, **how)
    late = late_leaves({"model": model, "optimizer": optimizer, "average": nn.Linear(2, 2)})
    state = {
        f"optimizer.state.model.{name}.{key}"
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
    assert set(late) == {f"model.{name}" for name, _ in model.named_parameters()} | state
    assert late["model.0.weight"]() is model[0].weight


def test_what_an_unknown_optimizer_holds_is_early() -> None:
    """Nobody knows when such an optimizer writes, even where a stock one holds the same parameters."""
    model, optimizer = trained(Own)
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    assert late_leaves({"model": model, "optimizer": optimizer}) == {}
    assert late_leaves({"model": model, "optimizer": optimizer, "stock": stock}) == {}


def test_unregistered_optimizers_make_nothing_late() -> None:
    """Without its optimizer a parameter is as any tensor."""
    model, _ = trained(torch.optim.SGD)
    assert late_leaves({"model": model}) == {}


def test_steps_inside_of_backward_and_in_graphs_are_early() -> None:
    """Optimizer-in-backward and capturable optimizers do not wait for anybody."""
    model, optimizer = trained(torch.optim.SGD)
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    assert late_leaves({"model": model, "optimizer": optimizer}) == {}
    model, optimizer = trained(torch.optim.AdamW)
    optimizer.param_groups[0]["capturable"] = True
    assert late_leaves({"model": model, "optimizer": optimizer}) == {}


def test_tensors_of_another_make_are_early() -> None:
    """Inference tensors, and tensors whose memory is not their content in order."""
    with torch.inference_mode():
        inference = torch.zeros(4)
    turned = nn.Parameter(torch.rand(4, 3).t())
    plain = nn.Parameter(torch.rand(3))
    objects = {"inference": inference, "turned": turned, "plain": plain}
    optimizer = torch.optim.SGD([turned, plain], lr=0.1)
    optimizer.param_groups[0]["params"].append(inference)
    assert set(late_leaves({**objects, "optimizer": optimizer})) == {"plain"}


def test_samples_see_a_write_of_a_whole_tensor() -> None:
    """The first and the last bytes are among the stretches, and full digests see every byte."""
    tensor = torch.zeros(100_003)
    found = list(stretches(tensor.nbytes, "samples"))
    assert found[0][0] == 0 and found[-1][1] == tensor.nbytes
    assert sum(last - first for first, last in found) == SAMPLE_BYTES
    before = {verify: digest(tensor, verify) for verify in ("samples", "full")}
    tensor[20_000] = 1
    assert digest(tensor, "samples") == before["samples"], "between the stretches"
    assert digest(tensor, "full") != before["full"]
    tensor[-1] = 1
    assert digest(tensor, "samples") != before["samples"]
