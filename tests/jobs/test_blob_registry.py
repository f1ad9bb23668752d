"""The registry of a job's blobs."""

import functools

import pytest
import torch

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.blobs import BlobRegistry, Scope, is_factory, kind_of


class Stateful:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def method(self, ctx):
        return ctx


def test_blobs_keep_their_order_scope_and_policy():
    """The registry is added to by calling it and read by iterating it."""
    blobs, model = BlobRegistry(), torch.nn.Linear(1, 1)
    blobs(model=model)
    blobs({"trainer_0/total": 3, "scope": 4}, scope="rank", reshard="drop")
    blobs.add(scratch=torch.zeros(1), scope=Scope.TRANSIENT)
    assert [(b.name, b.scope, b.reshard) for b in blobs] == [
        ("model", None, None),
        ("trainer_0/total", Scope.RANK, "drop"),
        ("scope", Scope.RANK, "drop"),
        ("scratch", Scope.TRANSIENT, None),
    ]
    assert blobs["model"].source is model
    assert "model" in blobs
    assert len(blobs) == 4


def test_a_container_is_one_blob_and_objects_inside_it_are_others():
    """Objects with state and factories get dotted names; the very container holds everything else."""
    blobs, ema = BlobRegistry(), Stateful()
    state = {"weight": torch.zeros(1), "inner": {"ema": ema, "decay": 0.9}, "pair": [ema, 1], 3: 0}
    config = {"lr": 0.1, "sizes": [1, 2], "nested": {"a": 1}}
    blobs(state={**state, "pair": [1]}, config=config, empty=[])
    assert blobs.names == ("state.inner.ema", "state", "config", "empty")
    assert blobs["state.inner.ema"].source is ema
    assert blobs["config"].source is config


def test_functions_are_factories_and_things_with_state_are_not():
    """Functions, lambdas, partials and methods make a blob; modules and objects are blobs."""
    model = torch.nn.Linear(1, 1)
    for factory in (lambda ctx: model, functools.partial(torch.zeros, 2), Stateful().method, torch.zeros):
        assert is_factory(factory)
    for blob in (model, Stateful(), torch.zeros(1), 3, {"a": 1}):
        assert not is_factory(blob)
    assert [kind_of(v) for v in (torch.zeros(1), model, Stateful(), Stateful, 3)] == [
        "tensor",
        "stateful",
        "stateful",
        "value",
        "value",
    ]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": 1}, {"a": 2}, "two blobs have the name 'a'"),
        ({"a": 1}, {"a.b": 2}, "dotted prefix"),
        ({}, {"a:b": 1}, "addresses"),
        ({"a.b": 1}, {"a": {"c": torch.zeros(1)}}, "dotted prefix"),
        ({}, {"a": (torch.zeros(1), 3)}, "'a' is a tuple that holds tensors"),
        ({}, {"a": frozenset({torch.zeros(1)})}, "'a' is a frozenset that holds tensors"),
        ({}, {"model": torch.nn.Linear}, "is the class Linear"),
    ],
)
def test_bad_blobs_are_refused_all_or_none(first, second, message):
    """A refused call names the blob and leaves the registry as it was."""
    blobs = BlobRegistry()
    blobs(first)
    with pytest.raises(UsageError, match=message):
        blobs({"fine": 1} | second)
    assert blobs.names == tuple(first)


def test_one_object_has_one_name():
    """A module, tensor or object under two names is refused; parameters of a module may be named too."""
    blobs, model = BlobRegistry(), torch.nn.Linear(1, 1)
    blobs(model=model, weight=model.weight, first=0, second=0)
    with pytest.raises(UsageError, match="'model' and 'other' are one object"):
        blobs(other=model)
    with pytest.raises(UsageError, match="'weight' and 'again' are one object"):
        blobs(again=model.weight)


def test_unknown_scopes_and_policies_are_refused_with_the_list():
    """A typo in scope or reshard is answered with what there is."""
    with pytest.raises(UsageError, match="'replicated', 'sharded', 'rank', 'host', 'transient'"):
        BlobRegistry().add(a=1, scope="ranked")
    with pytest.raises(UsageError, match="'error', 'drop', 'by_rank' or a callable"):
        BlobRegistry().add(a=1, reshard="dropp")
    BlobRegistry().add(a=1, reshard=lambda values: values[0])


def test_blobs_can_be_added_until_setup_ends():
    """After setup the error names the blob and the remedy."""
    blobs = BlobRegistry()
    blobs(a=1)
    blobs.begin_setup()
    blobs(b=2)
    blobs.freeze()
    with pytest.raises(NotAllowedNowError, match="until setup ends, not 'c' after it"):
        blobs(c=3)


def test_setup_declares_its_blobs_anew_at_every_start():
    """A second start of the same job forgets what the first setup added, and keeps the rest."""
    blobs = BlobRegistry()
    blobs(a=1)
    for _ in range(2):
        blobs.begin_setup()
        assert blobs.names == ("a",)
        blobs(b=2)
        blobs.freeze()
    assert blobs.names == ("a", "b")


@pytest.mark.parametrize("given", [[torch.zeros(1)], torch.nn.Linear(1, 1)])
def test_blobs_without_names_are_refused(given):
    """A list of objects, or a bare module, is a mistake in usage that says how blobs are named."""
    with pytest.raises(UsageError, match=r"blobs=dict\(model=model.*got (list|Linear)"):
        BlobRegistry().add(given)
