"""Training goes on after a restore exactly as if it had not been interrupted."""

import pytest
import torch
from leaf_store import load, save
from torch import nn
from torch.optim import lr_scheduler as sched


def small_net(dtype=torch.float32):
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 3)
    )
    return net.to(dtype)


def batch(step, dtype):
    source = torch.Generator().manual_seed(step)
    return torch.randn(6, 1, 5, 5, generator=source).to(dtype)


def train(objects, steps):
    model, optimizer, scheduler = objects["model"], objects["optimizer"], objects.get("scheduler")
    dtype = next(model.parameters()).dtype
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(batch(step, dtype)).float().pow(2).mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        if scheduler is not None:
            on_plateau = isinstance(scheduler, sched.ReduceLROnPlateau)
            scheduler.step(loss.item()) if on_plateau else scheduler.step()


def build(seed, make_optimizer, make_scheduler=None, dtype=torch.float32):
    torch.manual_seed(seed)
    model = small_net(dtype)
    objects = {"model": model, "optimizer": make_optimizer(model.parameters())}
    if make_scheduler is not None:
        objects["scheduler"] = make_scheduler(objects["optimizer"])
    return objects


def check_continues(make):
    """Straight on, in new objects, and in used ones: the same bits after the same steps."""
    straight = make(1)
    train(straight, range(3))
    saved = save(straight)
    train(straight, range(3, 6))
    fresh, used = make(2), make(3)
    train(used, range(10, 12))
    for objects in (fresh, used):
        load(saved, objects)
        assert save(objects).content == saved.content
        train(objects, range(3, 6))
        assert save(objects).content == save(straight).content


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}

SCHEDULERS = {
    "step": lambda o: sched.StepLR(o, 2),
    "multi_step": lambda o: sched.MultiStepLR(o, [2, 4, 4]),
    "cosine": lambda o: sched.CosineAnnealingLR(o, 5),
    "warm_restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 2),
    "one_cycle": lambda o: sched.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "cyclic": lambda o: sched.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "sequential": lambda o: sched.SequentialLR(
        o, [sched.LinearLR(o, 0.5, total_iters=2), sched.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "plateau": lambda o: sched.ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: sched.LambdaLR(o, lambda epoch: 0.9**epoch),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_continues_bit_identically(name):
    """Whatever an optimizer keeps, nested lists included, training after a restore ends in the same bits."""
    check_continues(lambda seed: build(seed, OPTIMIZERS[name]))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues_bit_identically(name):
    """Learning rates go on where they were, with the optimizer's own copy of them."""
    check_continues(lambda seed: build(seed, OPTIMIZERS["sgd_momentum"], SCHEDULERS[name]))


def test_bfloat16_parameters_continue_bit_identically():
    """State has the stored element type, also where the parameters have another."""
    check_continues(lambda seed: build(seed, OPTIMIZERS["adamw"], dtype=torch.bfloat16))


def test_float32_state_of_bfloat16_parameters_is_not_cast():
    """A load keeps float32 moments of bfloat16 parameters, which load_state_dict would round."""
    objects = build(1, OPTIMIZERS["adamw"], dtype=torch.bfloat16)
    train(objects, range(1))
    for state in objects["optimizer"].state.values():
        state["exp_avg"] = torch.rand(state["exp_avg"].shape)
    fresh = build(2, OPTIMIZERS["adamw"], dtype=torch.bfloat16)
    load(save(objects), fresh)
    assert save(fresh).content == save(objects).content
    assert {state["exp_avg"].dtype for state in fresh["optimizer"].state.values()} == {torch.float32}


def test_saving_and_loading_before_the_first_step_changes_nothing():
    """An optimizer without state is saved as it is, and a restore of it empties a used one."""
    objects = build(1, OPTIMIZERS["adamw"])
    saved = save(objects)
    assert len(objects["optimizer"].state) == 0
    assert not [name for name in saved.specs if name.startswith("optimizer.state.")]
    used = build(2, OPTIMIZERS["adamw"])
    train(used, range(2))
    load(saved, used)
    assert len(used["optimizer"].state) == 0
    assert save(used).content == saved.content


def test_a_restore_leaves_random_streams_and_scheduler_calls_alone():
    """Nothing is drawn and nothing is stepped."""
    saved = save(build(1, OPTIMIZERS["adamw"], SCHEDULERS["step"]))
    objects = build(2, OPTIMIZERS["adamw"], SCHEDULERS["step"])
    steps = []
    objects["optimizer"].register_step_pre_hook(lambda *_: steps.append(1))
    before = torch.get_rng_state()
    load(saved, objects)
    assert torch.equal(before, torch.get_rng_state())
    assert steps == []


def test_a_gradient_scaler_continues():
    """The scale and its growth tracker come back."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.update(new_scale=8.0)
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    load(save({"scaler": scaler}), {"scaler": other})
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 8.0


def test_live_optimizer_state_keeps_its_tensors():
    """State that exists in the right form is overwritten where it lies, for graphs that hold it."""
    objects = build(1, OPTIMIZERS["adamw"])
    train(objects, range(1))
    saved = save(objects)
    train(objects, range(1, 3))
    state = objects["optimizer"].state[next(objects["model"].parameters())]
    moment, address = state["exp_avg"], state["exp_avg"].data_ptr()
    group = objects["optimizer"].param_groups[0]
    load(saved, objects)
    assert objects["optimizer"].state[next(objects["model"].parameters())]["exp_avg"] is moment
    assert moment.data_ptr() == address
    assert objects["optimizer"].param_groups[0] is group
    assert save(objects).content == saved.content


class Temperature:
    """An object that keeps what it learns in a tensor of its own."""

    def __init__(self, value=0.0):
        self.take({"value": torch.full((1,), value, requires_grad=True), "start": torch.tensor(value)})

    def take(self, state):
        self.state = state
        self.optimizer = torch.optim.SGD([state["value"]], lr=0.1)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.take(state)

    def learn(self):
        self.optimizer.zero_grad()
        (self.state["value"].exp() + self.state["start"]).sum().backward()
        self.optimizer.step()
        return self.state["value"].item()


def test_a_tensor_that_an_object_learns_learns_after_a_restore():
    """A tensor in a state that has gradients has them again, and one that has none stays without."""
    first, again = Temperature(1.0), Temperature()
    first.learn()
    load(save({"t": first}), {"t": again})
    assert [one.requires_grad for one in again.state.values()] == [True, False]
    assert [again.learn(), again.learn()] == [first.learn(), first.learn()]
