"""A program that has changed since its run was saved: what resumes, with which line, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchrelay import Job, JobRunner, early_stopping, max_epochs, open_checkpoint, seed
from torchrelay.checkpoint.manager.checkpoint_manager import MultiNodeCheckpointManager
from torchrelay.errors import BlobError, RelayError, SaveFailedError, UsageError
from torchrelay.jobs.config.schema import CheckpointKeys, RunnerSection
from torchrelay.runners.config_runs.training import runner_options

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Ema:
    """An exponential average with a state of its own."""

    def __init__(self) -> None:
        self.mean = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"].clone()


def make(fill: float = 0.5, **parts: nn.Module) -> nn.Module:
    """A module of parts; all of its numbers are `fill`."""
    model = nn.Sequential()
    for name, part in (parts or {"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)}).items():
        model.add_module(name, part)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def train(
    where: Path,
    blobs: dict[str, Any],
    epochs: int,
    *conditions: Any,
    init: Callable[[Any], None] | None = None,
    **options: Any,
) -> Job:
    """Train what is called `model` with what is called `optimizer`, and move all else by one per epoch."""
    seed(0)
    job = Job("changing", blobs=blobs)
    if init is not None:
        job.init(init)
    model = next((one for one in blobs.values() if isinstance(one, nn.Module)), None)
    optimizer = next((one for one in blobs.values() if isinstance(one, torch.optim.Optimizer)), None)

    @job.epoch
    def epoch(ctx: Any) -> None:
        if model is not None and optimizer is not None:
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        for one in blobs.values():
            if isinstance(one, Ema):
                one.mean = one.mean + 1
            elif isinstance(one, torch.Tensor):
                one.add_(1)
        if "total" in ctx.workspace:
            ctx["total"] = ctx["total"] + 1
        ctx.log("val/acc", float(ctx.epoch))

    job.stop_when(max_epochs(epochs), *conditions)
    JobRunner(job, where, best=None, **options).train()
    return job


def told(run: Path) -> list[str]:
    """The lines about changes in the run's events."""
    texts = [path.read_text() for path in sorted(run.glob("events*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return [one["text"] for one in lines if one.get("kind", one.get("event")) == "state changed"]


def stored(run: Path, epoch: int | str = "last") -> set[str]:
    return {name for name in open_checkpoint(run, epoch).blobs if name != "rng"}


def test_blobs_that_are_new_begin_as_made_and_those_that_are_gone_are_left_out(tmp_path: Path) -> None:
    """A module, an object, a tensor, a value: each can be added and taken away, with one line each."""
    run = tmp_path / "run"
    train(run, {"w": torch.zeros(2), "ema": Ema(), "old": nn.Linear(2, 2), "count": 3}, 2)
    w, v, new = torch.zeros(2), torch.full((2,), 10.0), make(0.25)
    train(run, {"w": w, "v": v, "new": new, "settings": {"a": 1}}, 3)
    assert (w.tolist(), v.tolist()) == ([3.0, 3.0], [11.0, 11.0])
    assert new.head.weight.eq(0.25).all()
    lines = told(run)
    told_new = "blob {!r} is not in epoch 2: it begins as the program made it"
    assert set(map(told_new.format, ("new", "settings", "v"))) <= set(lines)
    assert sorted(line.split("'")[1] for line in lines if "not registered any more" in line) == [
        "count", "ema", "old",
    ]  # fmt: skip
    assert (len(lines), stored(run)) == (6, {"w", "v", "new", "settings"})
    again = torch.zeros(2), torch.zeros(2)
    train(run, {"w": again[0], "v": again[1], "new": make(9.0), "settings": {"a": 1}}, 4)
    assert (again[0].tolist(), again[1].tolist(), len(told(run))) == ([4.0, 4.0], [12.0, 12.0], 6)


def test_a_container_of_another_type_is_reported(tmp_path: Path) -> None:
    """No load changes a list into a dict: one line says that the list stays, and where the dict is."""
    run, now = tmp_path / "run", [1]
    train(run, {"w": torch.zeros(2), "settings": {"a": 1}, "same": {"b": 2}}, 2)
    train(run, {"w": torch.zeros(2), "settings": now, "same": {}}, 3)
    (line,) = told(run)
    assert "'settings' was saved with another type" in line and "ctx['settings'] has" in line
    assert now == [1] and open_checkpoint(run).value("settings") == {"a": 1}


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (np.ones(2), np.zeros(3)),
        (np.ones(2), np.zeros(2, dtype=np.int64)),
        (np.random.default_rng(1), np.random.Generator(np.random.MT19937(1))),
        (np.random.default_rng(1), torch.Generator()),
    ],
)
def test_an_array_or_generator_of_another_form_is_reported(tmp_path: Path, was: Any, now: Any) -> None:
    """No load changes them in place: one line says that the new one stays, and where the old one is."""
    run = tmp_path / "run"
    train(run, {"w": torch.zeros(2), "one": was}, 2)
    train(run, {"w": torch.zeros(2), "one": now}, 3)
    (line,) = told(run)
    assert "'one' was saved with another type or form" in line and "ctx['one'] has" in line


def test_an_array_that_takes_the_place_of_a_registered_one_resumes(tmp_path: Path) -> None:
    """`ctx[name] = ...` may give it another shape: a program that reads it there goes on with it."""
    sizes = []
    for epochs in (2, 4):
        job = Job("grown", blobs={"seen": np.zeros(0)})

        @job.epoch
        def epoch(ctx: Any) -> None:
            sizes.append(len(ctx["seen"]))
            ctx["seen"] = np.append(ctx["seen"], 1.0)

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path, code=False).train()
    assert sizes == [0, 1, 2, 3]


def test_an_array_that_the_program_resizes_is_not_saved(tmp_path: Path) -> None:
    """The next start makes it as it was, and could not load it: the save fails and says so."""
    seen = np.zeros(1)
    job = Job("resize", blobs={"seen": seen})

    @job.epoch
    def epoch(ctx: Any) -> None:
        if ctx.epoch == 2:
            seen.resize(2, refcheck=False)

    job.stop_when(max_epochs(2))
    with pytest.raises(
        SaveFailedError, match=r"seen is an array of float64\[2\] now, and was .*float64\[1\]"
    ):
        JobRunner(job, tmp_path, code=False, max_failed_saves=1).train()
    assert open_checkpoint(tmp_path).epoch == 1


def test_a_refusal_does_not_name_late_buffers_that_have_their_place(tmp_path: Path) -> None:
    """A buffer that is None until the first batch is loaded once the rest fits."""

    def model(outputs: int) -> nn.Module:
        built = nn.Sequential()
        built.add_module("head", nn.Linear(2, outputs))
        built.register_buffer("mean", None)
        return built

    first = model(1)
    job = Job("late", blobs={"model": first})
    job.epoch(lambda ctx: setattr(first, "mean", torch.ones(2)))
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path, code=False).train()
    new = model(2)
    with pytest.raises(BlobError) as caught:
        open_checkpoint(tmp_path).load({"model": new})
    assert "mean" not in str(caught.value)
    open_checkpoint(tmp_path).load({"model": new}, exclude=["model.head.weight", "model.head.bias"])
    assert torch.equal(new.mean, torch.ones(2))


def test_a_state_dict_takes_the_buffers_of_a_module_too(tmp_path: Path) -> None:
    """What `model.state_dict()` gives can be loaded into, and an empty dict gets all tensors."""
    model = nn.BatchNorm1d(2)
    model(torch.randn(4, 2))
    train(tmp_path, {"w": torch.zeros(2), "model": model}, 1)
    other, empty = nn.BatchNorm1d(2), dict[str, Any]()
    open_checkpoint(tmp_path).load({"model": other.state_dict()})
    open_checkpoint(tmp_path).load({"model": empty})
    for found in (other.state_dict(), empty):
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[name], one) for name, one in model.state_dict().items())


@pytest.mark.parametrize("before", [0, 2])
def test_stop_conditions_come_and_go(tmp_path: Path, before: int) -> None:
    """`early_stopping` may be added, taken away and exchanged between two starts; its memory begins anew."""
    run = tmp_path / "run"
    old = [early_stopping("val/acc", mode="max", patience=before)] if before else []
    train(run, {"w": torch.zeros(2)}, 2, *old)
    stops = early_stopping("val/acc", mode="min", patience=2)
    conditions = [] if before else [stops]
    w = torch.zeros(2)
    train(run, {"w": w}, 6, *conditions)
    assert w[0] == (6.0 if before else 5.0), "the first value is the best, two more end it"
    assert len(told(run)) == 1 and "'early_stopping/val/acc'" in told(run)[0]


def test_schedulers_come_and_go(tmp_path: Path) -> None:
    """A scheduler may be added to, and taken from, an optimizer whose state goes on exactly."""
    run, model = tmp_path / "run", make()
    train(run, {"model": model, "optimizer": adam(model)}, 2)
    model = make()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(run, {"model": model, "optimizer": optimizer, "scheduler": scheduler}, 3)
    assert optimizer.state[model.body.weight]["step"] == 3
    model = make()
    optimizer = adam(model)
    train(run, {"model": model, "optimizer": optimizer}, 4)
    assert optimizer.state[model.body.weight]["step"] == 4
    assert len(told(run)) == 2


def test_what_init_made_is_made_anew_and_what_nobody_registers_is_not(tmp_path: Path) -> None:
    """A value that `init` made stays one of the run, though no program registers it; a tensor blob goes."""
    run = tmp_path / "run"
    init = lambda ctx: ctx.workspace.update(total=100)  # noqa: E731
    train(run, {"w": torch.zeros(2), "gone": torch.zeros(1)}, 2, init=init)
    assert open_checkpoint(run).facts.made_by_init == ("total",)
    train(run, {"w": torch.zeros(2)}, 3, init=init)
    assert (stored(run), open_checkpoint(run).value("total")) == ({"w", "total"}, 103)
    assert open_checkpoint(run).facts.made_by_init == ("total",)
    told_gone = "blob 'gone' of epoch 2 is not registered any more: it is left out, of later saves too"
    assert told(run) == [told_gone]


def test_a_blob_that_may_have_another_name_now_is_given_the_argument_for_it(tmp_path: Path) -> None:
    """Where one blob is gone and one is new, the line names `rename`; what it names loads the blob."""
    run, w = tmp_path / "run", torch.zeros(2)
    train(run, {"w": torch.zeros(2)}, 2)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    train(run, {"v": torch.zeros(2)}, 3)
    assert any("rename={'w': 'v'}" in line for line in told(run))
    train(copy, {"v": w}, 3, rename={"w": "v"})
    assert w[0] == 3.0 and told(copy) == []


@pytest.mark.parametrize("kind", ["optimizer", "module", "object"])
def test_only_a_blob_of_its_kind_is_proposed_as_another_name(tmp_path: Path, kind: str) -> None:
    """An optimizer may be one that is called otherwise now, with or without its state; an average may not."""
    run, model = tmp_path / "run", make()
    old = adam(model)
    train(run, {"model": model, "old": old}, 2)
    model = make()
    new = {"optimizer": adam(model), "module": make(), "object": Ema()}[kind]
    train(run, {"model": model, "new": new}, 3)
    proposed = any("rename={'old': 'new'}" in line for line in told(run))
    assert proposed is (kind == "optimizer") and any("'old'" in line for line in told(run))


def test_a_strict_resume_refuses_blobs_that_are_new_or_gone(tmp_path: Path) -> None:
    """`resume_strict=True` names what differs, and changes nothing."""
    run, w = tmp_path / "run", torch.zeros(2)
    train(run, {"w": torch.zeros(2), "ema": Ema()}, 2)
    with pytest.raises(BlobError, match="not in the checkpoint: v"):
        train(run, {"w": w, "ema": Ema(), "v": torch.zeros(1)}, 3, resume_strict=True)
    with pytest.raises(BlobError, match="ema is a stateful object in the checkpoint, and no object"):
        train(run, {"w": w}, 3, resume_strict=True)
    assert w.tolist() == [0.0, 0.0] and stored(run) == {"w", "ema"}


def test_leaves_inside_a_blob_stay_strict(tmp_path: Path) -> None:
    """A parameter more, or less, or of another shape is refused, whatever blobs are new."""
    run = tmp_path / "run"
    train(run, {"model": make()}, 1)
    parts = {"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    others = [
        ({**parts, "extra": nn.Linear(2, 2)}, "not in the checkpoint: model.extra.weight"),
        ({"body": nn.Linear(4, 4)}, "only in the checkpoint: model.head.weight"),
        ({**parts, "head": nn.Linear(4, 3)}, r"model.head.weight is float32\[3, 4\] here"),
    ]
    for given, message in others:
        with pytest.raises(BlobError, match=message):
            train(run, {"model": make(**given), "v": torch.zeros(1)}, 2)


def test_leaves_that_do_not_fit_stay_as_made_where_they_are_excluded(tmp_path: Path) -> None:
    """A new head: its weights and their optimizer state begin anew once, and go on exactly from then on."""
    run, model = tmp_path / "run", make()
    train(run, {"model": model, "optimizer": adam(model)}, 3)

    def wider() -> nn.Module:
        return make(0.125, body=nn.Linear(4, 4), head=nn.Linear(4, 3))

    new = wider()
    optimizer = adam(new)
    with pytest.raises(BlobError, match=r"model\.head\.weight"):
        train(run, {"model": new, "optimizer": optimizer}, 4)
    assert new.head.weight.eq(0.125).all() and not optimizer.state
    train(run, {"model": new, "optimizer": optimizer}, 4, resume_exclude="model.head")
    assert optimizer.state[new.body.weight]["step"] == 4
    assert optimizer.state[new.head.weight]["step"] == 1
    assert "resume_exclude names it or its parameter: model.head" in told(run)[0]
    last = wider()
    optimizer = adam(last)
    train(run, {"model": last, "optimizer": optimizer}, 5, resume_exclude="model.head")
    assert optimizer.state[last.head.weight]["step"] == 2, "what fits is loaded"
    assert len(told(run)) == 1


def train_with_lbfgs(run: Path, epochs: int, head: int, **options: Any) -> tuple[Any, torch.optim.LBFGS]:
    """Train a body of 20 parameters and a head of `head` outputs; give both and their optimizer."""
    model = make(0.125 * head, body=nn.Linear(4, 4), head=nn.Linear(4, head))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    job = Job("joint", blobs={"model": model, "optimizer": optimizer})

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(X).square().mean()
        value.backward()
        return value

    job.epoch(lambda ctx: optimizer.step(loss))
    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, code=False, **options).train()
    return model, optimizer


def test_state_of_all_parameters_together_goes_with_any_that_is_excluded(tmp_path: Path) -> None:
    """LBFGS begins anew where a changed head is left out, in a resume and in a load; a line says so."""
    train_with_lbfgs(tmp_path, 1, 2)
    model, optimizer = train_with_lbfgs(tmp_path, 2, 3, resume_exclude="model.head")
    state = optimizer.state[model.body.weight]
    assert state["n_iter"] == 1 and state["d"].numel() == 35, "one iteration: it began anew"
    assert "optimizer.state.model.body.weight" in told(tmp_path)[0]
    _, optimizer = train_with_lbfgs(tmp_path, 3, 3, resume_exclude="model.head")
    assert next(iter(optimizer.state.values()))["n_iter"] == 2, "what fits is loaded"
    again = open_checkpoint(tmp_path, 1)
    model, optimizer = train_with_lbfgs(tmp_path / "other", 1, 3)
    before = next(iter(optimizer.state.values()))["d"].clone()
    again.load({"model": model, "optimizer": optimizer}, exclude="model.head")
    after = next(iter(optimizer.state.values()))["d"]
    assert torch.equal(before, after), "what is left out stays as it is"


def test_state_of_all_parameters_together_is_refused_where_it_cannot_fit(tmp_path: Path) -> None:
    """A head that is never saved and has another size: LBFGS is refused, and can be begun anew."""
    train_with_lbfgs(tmp_path, 1, 2, exclude="model.head")
    with pytest.raises(
        BlobError, match=r"LBFGS of 35 elements here, of 30 .*\n.*resume_exclude=\['optimizer'\]"
    ):
        train_with_lbfgs(tmp_path, 2, 3, exclude="model.head")
    _, optimizer = train_with_lbfgs(tmp_path, 2, 3, exclude="model.head", resume_exclude="optimizer")
    assert next(iter(optimizer.state.values()))["n_iter"] == 1


def test_state_of_all_parameters_together_needs_their_order(tmp_path: Path) -> None:
    """A resumed LBFGS of reordered parameters would begin without its history, so it is refused."""
    model = make(0.25, body=nn.Linear(4, 4), head=nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(list(model.parameters())[::-1])
    train_with_lbfgs(tmp_path, 1, 2)
    with pytest.raises(BlobError, match="another order than in the checkpoint"):
        open_checkpoint(tmp_path, 1).load({"model": model, "optimizer": optimizer})


class LooksLikeOne:
    """An object with an optimizer, and a state that has an optimizer's keys and other things below."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.Adam(model.parameters())
        self.state: dict[str, Any] = {
            "state": {0: torch.ones(2)},
            "param_groups": [{"params": [[0], [1], [2], [3]]}],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_state_that_only_looks_like_an_optimizers_is_loaded_whole(tmp_path: Path) -> None:
    """What is left out of optimizers is found by the numbers of parameters; a list of lists has none."""
    for epochs, head in ((1, nn.Linear(4, 2)), (2, nn.Linear(4, 3))):
        model = make(body=nn.Linear(4, 4), head=head)
        held = LooksLikeOne(model)
        train(tmp_path, {"model": model, "held": held}, epochs, resume_exclude="model.head")
    assert held.state["param_groups"] == [{"params": [[0], [1], [2], [3]]}]


@pytest.mark.parametrize("head", [nn.Linear(4, 3), nn.Linear(8, 2), nn.Linear(4, 2).double()])
def test_gradients_of_an_open_window_go_with_what_is_excluded(tmp_path: Path, head: nn.Module) -> None:
    """What is left out begins without a gradient, whether the old one would fit it or not."""
    seen: list[dict[str, bool]] = []
    for epochs, model in ((1, make()), (2, make(0.125, body=nn.Linear(4, 4), head=head))):
        job = Job("window", blobs={"model": model})

        @job.epoch
        def backward(ctx: Any, model: nn.Module = model) -> None:
            seen.append({name: one.grad is not None for name, one in model.named_parameters()})
            sum(one.sum() for one in model.parameters()).backward()

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path, code=False, resume_exclude="model.head").train()
    kept = {"body.weight", "body.bias"}
    assert seen[-1] == {name: name in kept for name in seen[-1]} and len(seen[-1]) == 4


@pytest.mark.parametrize(
    "rename",
    [
        ({"encoder.": "body."}, "model", "optimizer"),
        ({"model.encoder": "model.body"}, "model", "optimizer"),
        ({"model.encoder.": "net.body.", "model": "net", "optimizer.": "opt."}, "net", "opt"),
    ],
)
def test_renamed_leaves_and_blobs_resume_exactly(tmp_path: Path, rename: Any) -> None:
    """Module, optimizer state and groups are found by their names of today; the rule may stay afterwards."""
    names, model_name, optimizer_name = rename
    whole, run = tmp_path / "whole", tmp_path / "run"
    same = make(0.5, encoder=nn.Linear(4, 4), head=nn.Linear(4, 2))
    train(whole, {"model": same, "optimizer": adam(same)}, 5)
    model = make(0.5, encoder=nn.Linear(4, 4), head=nn.Linear(4, 2))
    train(run, {"model": model, "optimizer": adam(model)}, 2)
    for epochs in (3, 5):
        model = make(7.0, body=nn.Linear(4, 4), head=nn.Linear(4, 2))
        optimizer = adam(model)
        blobs = {model_name: model, optimizer_name: optimizer}
        train(run, blobs, epochs, rename=names)
        assert optimizer.state[model.body.weight]["step"] == epochs
    assert torch.equal(model.body.weight, same.encoder.weight) and torch.equal(
        model.head.bias, same.head.bias
    )
    assert (told(run), stored(run)) == ([], {model_name, optimizer_name})


def test_renamed_objects_tensors_and_values(tmp_path: Path) -> None:
    """Blobs that are one leaf, a tensor inside an object's state, and what init made take new names, too."""
    run = tmp_path / "run"
    init = lambda ctx: ctx.workspace.update(count=1)  # noqa: E731
    train(run, {"w": torch.zeros(2), "ema": Ema()}, 2, init=init)
    w, average = torch.zeros(2), Ema()
    rename = {"w": "weight", "ema.": "average.", "count": "total"}
    train(run, {"weight": w, "average": average}, 3, rename=rename)
    assert (w.tolist(), average.mean.tolist()) == ([3.0, 3.0], [3.0] * 4)
    assert (stored(run), open_checkpoint(run).value("total")) == ({"weight", "average", "total"}, 2)
    assert told(run) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"a": 3}}, "invalid rename"),
        ({"rename": "a=b"}, "invalid rename"),
        ({"resume_strict": "yes"}, "invalid resume_strict='yes'"),
        ({"resume_exclude": 3}, "invalid 3: expected a name"),
        ({"rename": {"v": "w"}}, "makes 'v' and 'w' both 'w'|makes 'w' and 'v' both 'w'"),
    ],
)
def test_odd_wishes_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """Before anything is loaded, by the name of the argument."""
    train(tmp_path / "run", {"w": torch.zeros(2), "v": torch.zeros(2)}, 1)
    w = torch.zeros(2)
    with pytest.raises(UsageError, match=message):
        train(tmp_path / "run", {"w": w, "v": torch.zeros(2)}, 2, **options)
    assert w.tolist() == [0.0, 0.0]


def test_a_manager_takes_the_same_options_and_warns(tmp_path: Path) -> None:
    """Without a run directory the lines are warnings of rank 0."""

    def work(blobs: dict[str, Any], epochs: int, **options: Any) -> None:
        job = Job("by hand", blobs=blobs)
        job.epoch(lambda ctx: None)
        job.stop_when(max_epochs(epochs))
        start = None if epochs == 1 else 1
        JobRunner(job, MultiNodeCheckpointManager(tmp_path, **options), resume_from_epoch=start).train()

    w = torch.zeros(1)
    work({"v": torch.ones(1)}, 1)
    work({"w": w, "x": torch.ones(1)}, 2, rename={"v": "w"})
    assert w.item() == 1.0
    with pytest.raises(RelayError):
        work({"y": torch.ones(1)}, 3, resume_strict=True)


def test_a_configuration_has_the_same_options() -> None:
    """What a profile says under `checkpoint` reaches the runner as it stands."""
    said = {"rename": {"old.": "new."}, "resume_exclude": ("model.head",), "resume_strict": True}
    keys = CheckpointKeys(**{one.name: said.get(one.name) for one in fields(CheckpointKeys)})
    given = {"checkpoint": keys, "save_checkpoint_interval": 1}
    runner = RunnerSection(**{one.name: given.get(one.name) for one in fields(RunnerSection)})
    options = runner_options(runner, "runs/r")
    assert {name: options[name] for name in said} == said


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_group_that_the_program_added_while_it_trained_comes_back(tmp_path: Path, scheduled: bool) -> None:
    """A backbone that is trained from epoch 2 on: every resume, before and after, ends in the same bits."""

    def run(where: Path, epochs: int) -> list[torch.Tensor]:
        seed(0)
        model = make()
        optimizer = torch.optim.Adam(model.head.parameters(), lr=0.1)
        blobs: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if scheduled:
            blobs["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        job = Job("groups", blobs=blobs)

        @job.epoch
        def learn(ctx: Any) -> None:
            if ctx.epoch == 2:
                optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.01})
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()

        job.stop_when(max_epochs(epochs))
        JobRunner(job, where, best=None).train()
        state = [
            optimizer.state[one]["exp_avg"] for group in optimizer.param_groups for one in group["params"]
        ]
        return [*model.parameters(), *state, torch.tensor([group["lr"] for group in optimizer.param_groups])]

    whole = run(tmp_path / "whole", 4)
    for epochs in (1, 2, 3, 4):
        resumed = run(tmp_path / "resumed", epochs)
    assert len(resumed) == len(whole) == 9
    assert all(map(torch.equal, resumed, whole))
