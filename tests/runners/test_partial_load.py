"""`load_blobs_from_checkpoints`: some blobs of an epoch in a session that has run nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrun import REPOSITORY, torchrun

from torchrelay import (
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    Task,
    epoch_limiter,
    max_epochs,
)

NODES = ("trainer_0", "trainer_1")


def objects() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "count": torch.zeros(2), "held": {"best": torch.zeros(1)}}


def job_of(blobs: dict[str, Any]) -> Job:
    job = Job("partial", blobs=blobs)

    @job.epoch
    def train(ctx: Any) -> None:
        blobs["model"](torch.randn(4, 2)).square().sum().backward()
        blobs["optimizer"].step()
        blobs["optimizer"].zero_grad()
        with torch.no_grad():
            blobs["count"].add_(1)
            blobs["held"]["best"].add_(2)

    job.stop_when(max_epochs(2))
    return job


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    torch.manual_seed(0)
    run, blobs = tmp_path_factory.mktemp("trained") / "run", objects()
    JobRunner(job_of(blobs), run, best=None, code=False).train()
    return run, blobs


def load(run: Path, names: list[str], blobs: dict[str, Any], epoch: int = 2) -> tuple[bool, list[str]]:
    """Whether the names were loaded, and what was warned of."""
    with LocalSession() as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        done = JobRunner(job_of(blobs), run).load_blobs_from_checkpoints(names, epoch, session)
    return done, [str(one.message) for one in told]


def state(blobs: dict[str, Any]) -> list[Any]:
    moments = [one["momentum_buffer"].tolist() for one in blobs["optimizer"].state.values()]
    model = {name: one.tolist() for name, one in blobs["model"].state_dict().items()}
    return [model, moments, blobs["count"].tolist(), blobs["held"]["best"].tolist()]


def test_registered_objects_are_filled_in_place(trained) -> None:
    """Modules, optimizers, tensors and containers of a fresh process get the content of the epoch."""
    run, first = trained
    blobs = objects()
    assert load(run, ["model", "optimizer", "count", "held"], blobs) == (True, [])
    assert state(blobs) == state(first)


@pytest.mark.parametrize("names", [["model.1.*"], ["model.1.weight", "model.1.bias", "trainer_0:model.1"]])
def test_a_leaf_or_a_pattern_fills_that_part_alone(trained, names) -> None:
    """Names of leaves, and patterns of them, load into the module what they mean, and leave the rest."""
    run, first = trained
    blobs = objects()
    before = blobs["model"][0].weight.tolist()
    assert load(run, names, blobs) == (True, [])
    assert blobs["model"][1].running_var.tolist() == first["model"][1].running_var.tolist() or len(names) == 1
    assert blobs["model"][1].weight.tolist() == first["model"][1].weight.tolist()
    assert blobs["model"][0].weight.tolist() == before
    assert blobs["count"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("names", "epoch", "why"),
    [
        (["count"], 7, "epoch 7 is not committed"),
        (["count", "modle"], 2, "no blob or leaf 'modle'; did you mean 'model'"),
        (["count", "modle.*"], 2, "no blob or leaf 'modle.*'"),
        (["trainer_9:count"], 2, "no node 'trainer_9'"),
    ],
)
def test_what_is_not_there_is_false_with_the_reason(trained, names, epoch, why) -> None:
    """False, nothing changed and one warning, where the epoch or a name is not there."""
    blobs = objects()
    done, (told,) = load(trained[0], names, blobs, epoch)
    assert not done
    assert why in told
    assert blobs["count"].tolist() == [0, 0]


def test_a_missing_file_is_false_with_the_reason(trained, tmp_path) -> None:
    """False and one warning that names the file, where a file that holds a blob is gone."""
    run = tmp_path / "run"
    JobRunner(job_of(objects()), run, best=None, code=False).train()
    for file in run.glob("checkpoints/data/e00000002-*/*.main.safetensors"):
        file.unlink()
    done, (told,) = load(run, ["count"], objects())
    assert not done
    assert "main.safetensors is missing" in told


def two_nodes() -> Job:
    """A job of Caffe2's kind: each node has a total of its own and a blob that no other has."""

    def made(node: str) -> Any:
        own = {f"only_{node}": torch.ones(1), "total": torch.full((1,), float(node[-1]))}
        return lambda ws: ws.update(own)

    with Job("two") as job:
        for node in NODES:
            with Node(node):
                Task(made(node), group=job.init_group)
                Task(lambda: None)
        epoch_limiter(job, 1)
    return job


@pytest.mark.parametrize("nodes", [None, ["eval"], list(NODES)])
def test_a_bare_name_is_found_whatever_the_session_is_called(tmp_path, nodes) -> None:
    """What one node alone saved comes by its bare name into any session, of managers as well."""
    JobRunner(two_nodes(), MultiNodeCheckpointManager(tmp_path)).train(LocalSession())
    manager = MultiNodeCheckpointManager(tmp_path)
    session = LocalSession() if nodes is None else LocalSession(nodes)
    assert manager.load_blobs_locally(NODES, ["only_trainer_1"], 1, session)
    assert session.workspace((nodes or ["trainer_0"])[-1])["only_trainer_1"].tolist() == [1]


def test_a_bare_name_of_several_values_says_whose_to_ask_for(tmp_path) -> None:
    """On nodes that the epoch does not know, a blob with a value per node is refused by name."""
    JobRunner(two_nodes(), MultiNodeCheckpointManager(tmp_path)).train(LocalSession())
    session = LocalSession(["eval"])
    with pytest.warns(UserWarning, match="use trainer_0:total, trainer_1:total"):
        assert not MultiNodeCheckpointManager(tmp_path).load_blobs_locally(NODES, ["total"], 1, session)
    assert dict(session.workspace()) == {}


def test_emulated_nodes_fill_what_their_factories_make(tmp_path) -> None:
    """Each node's own object is made by its factory and filled with that node's content."""

    def job() -> Job:
        found = Job("many")
        found.blobs.add(layer=lambda ctx: nn.Linear(2, 2), scope="rank")

        @found.init
        def init(ctx: Any) -> None:
            with torch.no_grad():
                ctx["layer"].weight.fill_(int(ctx.node[-1]))

        found.epoch(lambda: None)
        found.stop_when(max_epochs(1))
        return found

    def manager() -> MultiNodeCheckpointManager:
        return MultiNodeCheckpointManager(tmp_path)

    JobRunner(job(), manager()).train(LocalSession(list(NODES)))
    session = LocalSession(list(NODES))
    runner = JobRunner(job(), manager())
    assert runner.load_blobs_from_checkpoints(["layer"], 1, session)
    assert [session.workspace(node)["layer"].weight.tolist()[0] for node in NODES] == [[0, 0], [1, 1]]


def test_an_optimizer_alone_gets_the_moments_of_its_parameters(trained) -> None:
    """State goes to the parameters that it was saved for, also where the program lists them otherwise."""
    run, first = trained
    blobs = objects()
    turned = list(blobs["model"].parameters())[::-1]
    blobs["optimizer"] = torch.optim.SGD(turned, lr=0.1, momentum=0.9)
    assert load(run, ["optimizer"], blobs) == (True, [])
    moments = [blobs["optimizer"].state[one]["momentum_buffer"] for one in blobs["model"].parameters()]
    kept = [first["optimizer"].state[one]["momentum_buffer"] for one in first["model"].parameters()]
    assert [one.tolist() for one in moments] == [one.tolist() for one in kept]


def test_what_is_tied_to_another_blob_loads_by_its_own_name(tmp_path) -> None:
    """A module whose weight is that of another registered one is filled when it alone is asked for."""

    def tied() -> dict[str, Any]:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        return {"first": first, "second": second}

    def job(blobs: dict[str, Any]) -> Job:
        found = Job("tied", blobs=blobs)
        found.epoch(lambda: None)
        found.stop_when(max_epochs(1))
        return found

    saved, blobs = tied(), tied()
    JobRunner(job(saved), tmp_path / "run", best=None, code=False).train()
    with LocalSession() as session:
        runner = JobRunner(job(blobs), tmp_path / "run")
        assert runner.load_blobs_from_checkpoints(["second"], 1, session)
    for name in ("weight", "bias"):
        assert getattr(blobs["second"], name).tolist() == getattr(saved["second"], name).tolist()
    assert blobs["second"].weight is blobs["first"].weight


def test_what_a_session_has_is_not_put_back(trained) -> None:
    """A load in a session that has values of its own changes what it is asked for alone."""
    run, _ = trained
    blobs = {**objects(), "note": "as built"}
    with LocalSession() as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session.workspace()["note"] = "of the session"
        runner = JobRunner(job_of(blobs), run)
        assert not runner.load_blobs_from_checkpoints(["nothing"], 2, session)
        assert runner.load_blobs_from_checkpoints(iter(["count"]), 2, session)
        assert session.workspace()["note"] == "of the session"
    assert blobs["count"].tolist() == [2, 2]


@pytest.mark.parametrize(
    "names", [["rate", "optimizer"], ["optimizer", "rate"], ["optimizer"], ["rat*", "opt*"]]
)
def test_names_that_share_a_tensor_load_together(tmp_path: Path, names: list[str]) -> None:
    """A tensor that is the optimizer's rate and a blob is filled once, and stays one."""

    def made() -> dict[str, Any]:
        model, rate = nn.Linear(2, 1), torch.tensor(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        return {"model": model, "rate": rate, "optimizer": optimizer}

    def job(blobs: dict[str, Any]) -> Job:
        found = Job("shared", blobs=blobs)
        found.epoch(lambda: blobs["rate"].mul_(0.5))
        found.stop_when(max_epochs(2))
        return found

    JobRunner(job(made()), tmp_path / "run", code=False).train()
    blobs = made()
    with LocalSession() as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert JobRunner(job(blobs), tmp_path / "run").load_blobs_from_checkpoints(names, 2, session)
    assert blobs["rate"].item() == pytest.approx(0.025)
    assert blobs["optimizer"].param_groups[0]["lr"] is blobs["rate"]


@pytest.mark.ranks
def test_ranks_fill_their_objects_in_a_launch_that_has_trained_nothing(tmp_path: Path) -> None:
    """A DDP model, its optimizer, tensors of all and of each rank, by names and patterns, on each rank."""
    program = REPOSITORY / "tests/programs/partial_load.py"
    for verb in ("train", "load"):
        done = torchrun(program, str(tmp_path), verb, warm=True, ranks=2, cwd=tmp_path, timeout_secs=100)
        assert done.rc == 0 and all(f"rank {rank} {verb} ok" in str(done) for rank in range(2)), str(done)
