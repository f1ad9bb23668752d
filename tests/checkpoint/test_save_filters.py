"""`include` and `exclude`: what is left out stays as the program made it, and nobody forgets that it was."""

import warnings

import pytest
import torch
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, MultiNodeCheckpointManager, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.position import selection_of
from torchrelay.checkpoint.manager.checkpoint_manager import CheckpointManager
from torchrelay.checkpoint.state.checkpoint_set import left_out, select
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.errors import BlobError, UsageError


class Model(nn.Module):
    """`cache` is a buffer that nobody needs to keep."""

    def __init__(self, fill=0.0):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.register_buffer("cache", torch.full((4,), fill))


class Debug:
    """An object with a state that need not be saved."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen, "last": torch.full((2,), float(self.seen))}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def train(where, epochs, fill=0.0, **options):
    torchrelay.seed(1)
    model, debug = Model(fill), Debug()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    job = Job("filters", blobs=dict(m=model, o=optimizer, debug=debug, note={"a": 1}))

    @job.epoch
    def epoch(ctx):
        optimizer.zero_grad()
        model.head(model.body(torch.ones(3, 2))).sum().backward()
        optimizer.step()
        model.cache += 1
        debug.seen += 1

    job.stop_when(max_epochs(epochs))
    if isinstance(where, MultiNodeCheckpointManager | CheckpointManager):
        JobRunner(job, where).train()
    else:
        JobRunner(job, where, **options).train()
    return model, optimizer, debug


OUT = ["debug", "*.cache"]


def test_what_is_excluded_is_not_written_and_stays_as_made(tmp_path):
    """A resumed run has its weights from the epoch, and from its own program what was left out."""
    whole, optimizer, _ = train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2, exclude=OUT)
    names = {leaf.name for leaf in open_checkpoint(tmp_path / "parts").leaves}
    assert "m.cache" not in names and not any(name.startswith("debug") for name in names)
    assert {"m.head.weight", "rng.torch", "note"} <= names
    resumed, again, debug = train(tmp_path / "parts", 4, fill=100.0, exclude=OUT)
    assert torch.equal(resumed.head.weight, whole.head.weight) and torch.equal(
        resumed.body.bias, whole.body.bias
    )
    assert torch.equal(again.state[resumed.head.bias]["exp_avg"], optimizer.state[whole.head.bias]["exp_avg"])
    assert torch.equal(resumed.cache, torch.full((4,), 102.0)) and debug.seen == 2


def test_a_run_that_left_something_out_resumes_only_with_the_same_exception(tmp_path):
    """Without it the leaf would silently be another: it is named, with the pattern that took it."""
    train(tmp_path / "run", 2, exclude=OUT)
    with pytest.raises(BlobError, match=r"m\.cache \(the save left it out: excluded by '\*\.cache'\)"):
        train(tmp_path / "run", 4)


def test_an_exception_made_later_loads_what_is_there(tmp_path):
    """The epoch still has the leaf, so it is loaded; later epochs lack it."""
    train(tmp_path / "run", 2)
    model, _, debug = train(tmp_path / "run", 3, fill=100.0, exclude=OUT)
    assert torch.equal(model.cache, torch.full((4,), 3.0)) and debug.seen == 3
    assert "m.cache" not in {leaf.name for leaf in open_checkpoint(tmp_path / "run").leaves}
    model, _, debug = train(tmp_path / "run", 4, fill=100.0, exclude=OUT)
    assert torch.equal(model.cache, torch.full((4,), 101.0)) and debug.seen == 1


def test_loads_of_an_epoch_report_what_was_left_out(tmp_path):
    """A strict load refuses and says why; otherwise the result names the leaf, which keeps its content."""
    train(tmp_path / "run", 1, exclude="*.cache")
    checkpoint, model = open_checkpoint(tmp_path / "run"), Model(7.0)
    with pytest.raises(
        BlobError, match=r"not in the checkpoint: m\.cache \(the save left it out: excluded by"
    ):
        checkpoint.load({"m": model})
    result = checkpoint.load({"m": model}, strict=False)
    assert result.missing == ("m.cache",) and torch.equal(model.cache, torch.full((4,), 7.0))
    assert checkpoint.facts.selection == selection_of(None, "*.cache")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_what_is_included_is_written(tmp_path, asynchronous):
    """`include` names what is wanted; `exclude` takes away from it, also behind the training."""
    options = dict(include=["m", "o"], exclude="m.cache", asynchronous=asynchronous, reuse=True)
    train(tmp_path / "run", 2, **options)
    blobs = set(open_checkpoint(tmp_path / "run").blobs)
    assert blobs == {"m", "o", "rng"}
    model, _, debug = train(tmp_path / "run", 3, fill=5.0, **options)
    assert torch.equal(model.cache, torch.full((4,), 6.0)) and debug.seen == 1


def test_managers_take_patterns(tmp_path):
    """Both managers save by them."""
    managers = (
        MultiNodeCheckpointManager(tmp_path / "many", exclude=OUT),
        CheckpointManager(tmp_path / "one", "master", exclude=OUT),
    )
    for manager in managers:
        train(manager, 1)
        assert set(open_checkpoint(manager.db_prefix).blobs) == {"m", "o", "note", "rng"}


def test_state_of_one_parameter_can_be_left_out(tmp_path):
    """All other state comes back; this parameter's is what the fresh optimizer has: none."""
    out = ["*.head.*", "*.head.*.*"]
    train(tmp_path / "run", 2, exclude=out)
    model, optimizer, _ = train(tmp_path / "run", 3, exclude=out)
    steps = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    assert steps == {"body.weight": 3, "body.bias": 3, "head.weight": 1, "head.bias": 1}


def objects():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"m": model, "o": optimizer, "debug": Debug()}


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ("debug.last", r"debug.last cannot be left out .* without all of debug"),
        ("o.param_groups.0.lr", r"o.param_groups.0.lr cannot be left out .* without all of o"),
        ("*.exp_avg", r"exp_avg cannot be left out .* without all of o\.state\.m\.body\.weight"),
        ("o.param_groups", r"the groups of 'o' are left out and 'o\.state\.\S+' is not"),
        ("*", r"exclude=\['\*'\] leaves nothing to save"),
    ],
)
def test_parts_of_what_belongs_together_cannot_be_left_out(exclude, message):
    """Half an optimizer's state or half a tree would be worth nothing; the message names the whole."""
    given = objects()
    with pytest.raises(BlobError, match=message):
        select(leaves_of(given), given, selection_of(None, exclude))


def test_of_tied_names_the_one_that_is_left_stores_the_content():
    """An alias of what was left out becomes the owner."""
    module = nn.Module()
    module.a, module.b, module.c = (nn.Parameter(torch.ones(2)),) * 3
    given = {"m": module}
    chosen = select(leaves_of(given), given, selection_of(None, "m.a"))
    assert [(leaf.name, leaf.alias_of) for leaf in chosen] == [("m.b", None), ("m.c", "m.b")]
    assert left_out(given, selection_of(None, "m.a")) == {"m.a"}


def test_what_only_init_makes_cannot_be_left_out(tmp_path):
    """A resumed run skips init and would lack it."""
    job = Job("made")
    job.init(lambda ctx: ctx.workspace.update(total=1, kept=2))
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    with pytest.raises(
        BlobError, match=r"'total' is left out of saves \(excluded by 'tot\*'\), but only init"
    ):
        JobRunner(job, tmp_path / "run", exclude="tot*").train()


def test_a_pattern_that_means_nothing_is_told(tmp_path):
    """In a run once, by a warning, when the optimizer has its state; in a blob file by an error."""
    with pytest.warns(UserWarning, match=r"no leaf matches 'm\.cahce' of include= and exclude="):
        train(tmp_path / "run", 2, exclude=["m.cahce", "debug", "o.state.m.head.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "other", 2, exclude=["debug", "o.state.m.head.weight"])
    with pytest.raises(UsageError, match=r"no leaf matches 'm\.cahce'; did you mean .*m\.cache"):
        torchrelay.save_blobs(tmp_path / "file", {"m": Model()}, exclude="m.cahce")


def test_a_blob_file_without_some_leaves(tmp_path):
    """Patterns are of the new names; the estimate is of the file that comes."""
    where, options = tmp_path / "file", dict(rename={"m": "net"}, exclude=["net.cache", "net.head"])
    torchrelay.save_blobs(where, {"m": Model()}, **options)
    assert set(torchrelay.load_blobs(where)) == {"net.body.weight", "net.body.bias"}
    assert torchrelay.estimate_bytes({"m": Model()}, **options) == where.stat().st_size


@pytest.mark.parametrize(
    "wrong", [{"include": []}, {"exclude": 3}, {"include": [""]}, {"exclude": ""}, {"exclude": ["a", None]}]
)
def test_what_are_no_patterns_is_refused(tmp_path, wrong):
    """Before anything is written."""
    with pytest.raises(UsageError, match=r"include|exclude"):
        MultiNodeCheckpointManager(tmp_path, **wrong)
    with pytest.raises(UsageError, match=r"include|exclude"):
        JobRunner(Job("x"), tmp_path / "run", **wrong)
