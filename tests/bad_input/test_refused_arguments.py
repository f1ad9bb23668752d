"""Arguments, names, blobs and conditions that cannot be: refused before any task runs, leaving nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_input import Trial, refused, tree
from torch import nn

from torchrelay import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    Task,
    max_epochs,
)
from torchrelay.errors import (
    BlobError,
    NoProvableEpochError,
    NotAllowedNowError,
    RelayError,
    UnknownEpochError,
    UsageError,
)


def train_and_refuse(
    tmp_path: Path, trial: Trial, *words: str, kind: Any = UsageError, code: int = 2, **options: Any
) -> str:
    where = options.pop("where", tmp_path / "run")
    return refused(
        kind, code, *words, below=tmp_path, ran=trial.ran, work=lambda: trial.train(where, **options)
    )


# Epochs


def test_an_unknown_epoch_lists_those_that_exist(tmp_path: Path) -> None:
    """An epoch that is not committed is refused with the list of those that are; the run stays as it was."""
    Trial().train(tmp_path / "run")
    train_and_refuse(
        tmp_path, Trial(), "epoch 9", "0, 1, 2", str(tmp_path / "run"), kind=UnknownEpochError, epoch=9
    )
    manager = MultiNodeCheckpointManager(tmp_path / "run" / "checkpoints")
    train_and_refuse(tmp_path, Trial(), "epoch 9", "0, 1, 2", kind=UnknownEpochError, where=manager, epoch=9)


def test_an_epoch_of_an_empty_place(tmp_path: Path) -> None:
    """Where nothing was saved any epoch is unknown, and asking for it creates nothing."""
    train_and_refuse(tmp_path, Trial(), "epoch 3", "none", kind=UnknownEpochError, epoch=3)
    manager = MultiNodeCheckpointManager(tmp_path / "prefix")
    train_and_refuse(tmp_path, Trial(), "epoch 3", kind=UnknownEpochError, where=manager, epoch=3)


@pytest.mark.parametrize("epoch", [-1, -(10**9), np.int64(-3)])
def test_a_negative_epoch(tmp_path: Path, epoch: Any) -> None:
    """Epochs start at 0, and that is said."""
    train_and_refuse(tmp_path, Trial(), "resume_from_epoch", epoch=epoch)


@pytest.mark.parametrize(
    "epoch",
    [True, 1.5, float("nan"), "1", "last", b"1", [1], torch.tensor(1.5), torch.zeros(2), object()],
    ids=lambda value: type(value).__name__,
)
def test_an_epoch_that_is_no_whole_number(tmp_path: Path, epoch: Any) -> None:
    """Anything but a whole number or None is refused by name, at the constructor too."""
    train_and_refuse(tmp_path, Trial(), "resume_from_epoch", "whole number", epoch=epoch)
    with pytest.raises(UsageError, match="whole number"):
        JobRunner(Trial().job, tmp_path / "run", resume_from_epoch=epoch)


@pytest.mark.parametrize("epoch", [10**8, 2**63, 10**5000, -(10**5000)], ids=["9", "19", "5001", "-5001"])
def test_an_epoch_beyond_all(tmp_path: Path, epoch: int) -> None:
    """A number that no epoch can have is refused, also one too long to be written out."""
    train_and_refuse(tmp_path, Trial(), "resume_from_epoch", epoch=epoch)


def test_an_epoch_but_nothing_saved(tmp_path: Path) -> None:
    """A job that saves nothing cannot resume from an epoch."""
    train_and_refuse(tmp_path, Trial(), "epoch 2", "run directory", where=None, epoch=2)


def test_wishes_that_contradict(tmp_path: Path) -> None:
    """`never` with an epoch, and `must` without any commit, are refused."""
    train_and_refuse(tmp_path, Trial(), "never", "epoch 1", epoch=1, resume="never")
    train_and_refuse(tmp_path, Trial(), "must", kind=NoProvableEpochError, code=3, resume="must")
    train_and_refuse(tmp_path, Trial(), "'auto', 'must' or 'never'", resume="yes")


class Handler:
    """A metadata handler that answers what it was given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def set_params(self, **_: Any) -> None: ...
    def last_epoch(self, user_epoch: int | None = None) -> Any:
        return self.answer

    def write(self, epoch: int) -> None: ...
    def report(self, action: str, stats: Any) -> None: ...
    def cp_accessible(self, epoch: int | None = None) -> bool:
        return True


@pytest.mark.parametrize("answer", ["3", -1, True, 2.0])
def test_a_handler_that_answers_nonsense(tmp_path: Path, answer: Any) -> None:
    """A handler's epoch is checked like a user's, and the message says whose it is."""
    manager = MultiNodeCheckpointManager(tmp_path / "prefix", Handler(answer))
    train_and_refuse(tmp_path, Trial(), "metadata handler", where=manager)


# Nodes


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\nb", "a b", "", "-a", "x" * 64, "é", "a\0", None, 3])
def test_a_bad_node_name(tmp_path: Path, name: Any) -> None:
    """A name that could leave its directory or tear a line is refused wherever a node is named."""
    places = [
        lambda: Node(name),
        lambda: LocalSession([name]),
        lambda: CheckpointManager(tmp_path / "prefix", name),
        lambda: MultiNodeCheckpointManager(tmp_path / "prefix").init([name]),
        lambda: Trial(nodes_to_checkpoint=[name]),
    ]
    for place in places:
        refused(UsageError, 2, f"{name!r} cannot be the name of a node", below=tmp_path, work=place)


def test_unset_and_duplicate_node_names(tmp_path: Path) -> None:
    """Empty lists, repetitions and nodes that nobody plays are refused, each by name."""
    train_and_refuse(tmp_path, Trial(nodes_to_checkpoint=[]), "nodes_to_checkpoint is empty")
    train_and_refuse(
        tmp_path, Trial(nodes_to_checkpoint=["a", "a"]), "nodes_to_checkpoint has a more than once"
    )
    train_and_refuse(tmp_path, Trial(nodes_to_checkpoint=["elsewhere"]), "elsewhere", "trainer_0")
    for work, words in (
        (lambda: LocalSession([]), "one or more"),
        (lambda: LocalSession(["a", "a"]), "'a' is named twice"),
        (lambda: MultiNodeCheckpointManager(tmp_path / "p").init([]), "empty"),
        (lambda: MultiNodeCheckpointManager(tmp_path / "p").init(None), "empty"),
        (lambda: MultiNodeCheckpointManager(tmp_path / "p").init(["a", "a"]), "a, a"),
        (lambda: CheckpointManager(tmp_path / "p", "a").init(["x", "y"]), "MultiNodeCheckpointManager"),
        (lambda: Trial(nodes_to_checkpoint="abc"), "list of node names"),
    ):
        refused(UsageError, 2, words, below=tmp_path, work=work)


def test_more_nodes_than_the_session_has(tmp_path: Path) -> None:
    """A job that declares a node which its session does not play is refused with both names."""
    trial = Trial()
    with Node("helper"):
        Task(lambda: trial.ran.append("helper"), group=trial.job.epoch_group)
    with LocalSession(["trainer_0"]) as session:
        refused(
            UsageError,
            2,
            "'helper'",
            "trainer_0",
            below=tmp_path,
            ran=trial.ran,
            work=lambda: JobRunner(trial.job, tmp_path / "run").train(session),
        )


# Blobs


@pytest.mark.parametrize("character", [":", "*", "?", "[", "]", "@", "\n", "\0", "\x1b", "\ud800"])
def test_a_character_that_a_blob_name_cannot_have(tmp_path: Path, character: str) -> None:
    """Every reserved or unprintable character is refused; the name is shown escaped, on one line."""
    name = f"a{character}b"
    text = refused(
        UsageError, 2, repr(name), "blob", below=tmp_path, work=lambda: Trial({name: torch.zeros(1)})
    )
    assert "\n" not in text and "\x1b" not in text


@pytest.mark.parametrize("name", ["", "rng", "rng.torch", "x" * 1025])
def test_a_blob_name_that_cannot_be(tmp_path: Path, name: str) -> None:
    """An empty, reserved or endless name is refused where it is declared."""
    refused(UsageError, 2, "blob", below=tmp_path, work=lambda: Trial({name: torch.zeros(1)}))


def test_two_blobs_with_one_name(tmp_path: Path) -> None:
    """A second blob of a name is refused, whether declared at once or later, nested or dotted."""
    trial = Trial()
    refused(UsageError, 2, "two blobs", "'w'", below=tmp_path, work=lambda: trial.job.blobs(w=torch.ones(1)))
    nested = {"ema": {"w": torch.zeros(1)}, "ema.w": torch.ones(1)}
    refused(UsageError, 2, "'ema.w'", below=tmp_path, work=lambda: Trial(nested))
    prefixed = {"model": torch.zeros(1), "model.head": torch.zeros(1)}
    refused(UsageError, 2, "'model'", "'model.head'", below=tmp_path, work=lambda: Trial(prefixed))


def test_one_object_under_two_names(tmp_path: Path) -> None:
    """An object registered twice is refused with both names."""
    tensor, module = torch.zeros(1), nn.Linear(1, 1)
    for thing in (tensor, module):
        blobs = {"a": thing, "b": thing}
        refused(UsageError, 2, "'a'", "'b'", "one object", below=tmp_path, work=lambda b=blobs: Trial(b))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"optim": {"fn": [1, 2, lambda: 3]}}, "config.optim.fn[2]"),
        ({"files": {"log": object()}}, "config.files.log"),
        ([1, [2, type]], "config[1][1]"),
        (object(), "config"),
    ],
)
def test_an_unserialisable_blob(tmp_path: Path, value: Any, path: str) -> None:
    """What cannot be stored is refused with its path inside the blob and what can be stored."""
    text = train_and_refuse(tmp_path, Trial({"config": value}), "state_dict", kind=BlobError)
    assert text.startswith(f"{path} is a")


def test_a_value_that_contains_itself(tmp_path: Path) -> None:
    """A cycle is refused, not followed."""
    ring: list[Any] = []
    ring.append(ring)
    train_and_refuse(tmp_path, Trial({"config": ring}), "config[0]", "itself", kind=BlobError)


def test_a_class_or_a_function_that_makes_nothing(tmp_path: Path) -> None:
    """A class in place of an object, and a factory that nobody can call, are refused with the remedy."""
    refused(UsageError, 2, "'m'", "lambda ctx", below=tmp_path, work=lambda: Trial({"m": nn.Linear}))
    refused(UsageError, 2, "'m'", "a, b", below=tmp_path, work=lambda: Trial({"m": lambda a, b: a}))


# Stop conditions


def test_no_stop_condition(tmp_path: Path) -> None:
    """A job that would never end is refused with an example."""
    train_and_refuse(tmp_path, Trial(stop=False), "no stop condition", "max_epochs(5)")


@pytest.mark.parametrize(
    "condition",
    [3, None, 2.5, True, [], {}, object(), torch.zeros(2), "", "a*b", list],
    ids=lambda one: type(one).__name__,
)
def test_a_stop_condition_of_a_wrong_type(tmp_path: Path, condition: Any) -> None:
    """Anything that cannot be asked is refused when it is given."""
    refused(UsageError, 2, below=tmp_path, work=lambda: Trial(stop=False).job.stop_when(condition))


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", True, None])
def test_a_limit_that_is_no_count(tmp_path: Path, count: Any) -> None:
    """`max_epochs` takes a whole number from 1."""
    refused(UsageError, 2, "max_epochs", below=tmp_path, work=lambda: max_epochs(count))


# The runner's own arguments


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", True])
@pytest.mark.parametrize("option", ["keep_last", "max_failed_saves", "agree_every"])
def test_options_that_are_no_counts(tmp_path: Path, option: str, count: Any) -> None:
    """Counts are whole numbers from 1; the option is named."""
    train_and_refuse(tmp_path, Trial(), option, **{option: count})


@pytest.mark.parametrize("best", ["acc", ("acc",), ("acc", "most"), (3, "max"), 7])
def test_best_that_is_no_metric_and_direction(tmp_path: Path, best: Any) -> None:
    """`best` is a metric and a direction."""
    train_and_refuse(tmp_path, Trial(), "best", best=best)


def test_things_of_another_kind(tmp_path: Path) -> None:
    """A job, session or place of another type is named, not stumbled over."""
    runner = JobRunner(Trial().job, tmp_path / "run")
    works = {
        "invalid job=None": lambda: JobRunner(None, tmp_path / "run"),  # type: ignore[arg-type]
        "invalid session='local'": lambda: runner.train("local"),  # type: ignore[arg-type]
        "expected a run directory": lambda: JobRunner(Trial().job, 3),  # type: ignore[arg-type]
        "list of blob names": lambda: runner.load_blobs_from_checkpoints("w", 1, LocalSession()),  # type: ignore[arg-type]
    }
    for words, work in works.items():
        refused(UsageError, 2, words, below=tmp_path, work=work)


def test_a_job_without_work(tmp_path: Path) -> None:
    """All that keeps a job from running is told at once."""
    job = Job("idle", nodes_to_checkpoint=["a", "a"])
    with pytest.raises(UsageError) as caught:
        JobRunner(job, tmp_path / "run").train(LocalSession())
    assert re.search(r"\(1\).*\(2\).*\(3\)", str(caught.value))
    assert tree(tmp_path) == {}


def test_a_second_train_in_the_process(tmp_path: Path) -> None:
    """A train call inside of another is refused and says so; the outer one is not disturbed."""
    refusals: list[RelayError] = []

    def inner(ctx: Any) -> None:
        with pytest.raises(NotAllowedNowError, match="another train") as caught:
            Trial().train(tmp_path / "other")
        refusals.append(caught.value)

    assert Trial(epoch=inner).train(tmp_path / "run") == 2
    assert [error.exit_code for error in refusals] == [2, 2]
    assert not (tmp_path / "other").exists()
