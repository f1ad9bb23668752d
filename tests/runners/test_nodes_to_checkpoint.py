"""`nodes_to_checkpoint` decides what is saved: of other nodes nothing is, and a resume goes on without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import REPOSITORY, torchrun

from torchrelay import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    Task,
    epoch_limiter,
    max_epochs,
    open_checkpoint,
)
from torchrelay.errors import UsageError

PROGRAM = REPOSITORY / "tests/programs/nodes_to_checkpoint.py"


def job_of(epochs: int, saved: list[str] | None) -> Job:
    """Two nodes that count, each from a number of its own."""

    def count(ws: Any) -> None:
        ws["total"] += 1

    with Job("counts", nodes_to_checkpoint=saved) as job:
        for number, name in enumerate(("trainer_0", "trainer_1")):
            with Node(name):
                Task(lambda ws, n=number: ws.update(total=torch.tensor([10 * n])), group=job.init_group)
                Task(count)
        epoch_limiter(job, epochs)
    return job


@pytest.mark.parametrize("asynchronous", (False, True))
def test_the_named_nodes_alone_are_saved(tmp_path: Path, asynchronous: bool) -> None:
    """Files, names and blobs of an epoch are those of the nodes that were asked for."""
    manager = MultiNodeCheckpointManager(tmp_path, asynchronous=asynchronous)
    JobRunner(job_of(2, ["trainer_1"]), manager).train(LocalSession())
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.nodes == ("trainer_1",)
    assert manager.files("trainer_0", 2) == [] and manager.files("trainer_1", 2)
    assert checkpoint["trainer_1:total"][:].tolist() == [12]


def test_without_names_all_nodes_are_saved(tmp_path: Path) -> None:
    """A node that has tasks of the epoch group alone is saved, too: its random streams are state."""
    with Job("one") as job:
        with Node("trainer_0"):
            Task(lambda ws: ws.update(total=1), group=job.init_group)
            Task(lambda: None)
        with Node("reader:0"):
            Task(lambda: None)
        epoch_limiter(job, 1)
    assert job.nodes_to_checkpoint() == ("trainer_0",)
    JobRunner(job, MultiNodeCheckpointManager(tmp_path)).train(LocalSession())
    assert open_checkpoint(tmp_path).nodes == ("trainer_0", "reader:0")


def test_a_manager_of_one_node_saves_the_one_that_is_named(tmp_path: Path) -> None:
    """CheckpointManager takes one node of two where it is asked for, and is refused both."""
    manager = CheckpointManager(tmp_path / "one", "kept")
    JobRunner(job_of(1, ["trainer_1"]), manager).train(LocalSession())
    checkpoint = open_checkpoint(tmp_path / "one")
    assert checkpoint.nodes == ("kept",) and checkpoint["total"][:].tolist() == [11]
    with pytest.raises(UsageError, match="stores one node"):
        JobRunner(job_of(1, None), CheckpointManager(tmp_path / "two", "kept")).train(LocalSession())


def test_a_load_by_hand_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    """What is not saved is not loaded either: a live session keeps it."""
    job, session = job_of(3, ["trainer_1"]), LocalSession()
    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(job, manager).train(session)
    session.run(manager.load(1))
    totals = [int(session.workspace(name)["total"]) for name in ("trainer_0", "trainer_1")]
    assert totals == [3, 11]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("saved", ("trainer_0", "trainer_1,trainer_2"))
def test_ranks_that_are_not_saved_go_on_with_what_is_replicated(tmp_path: Path, saved: str) -> None:
    """All three ranks end with the weights of a whole run, and one line says who was not saved."""

    def run(folder: str, epochs: int) -> tuple[list[str], str]:
        done = torchrun(
            PROGRAM, folder, saved, str(epochs), warm=True, ranks=3, cwd=tmp_path, timeout_secs=90
        )
        assert done.rc == 0, done
        return sorted(re.findall(r"rank \d weight \S+ own \S+", done.out)), done.err

    whole, _ = run("whole", 3)
    run("cut", 2)
    resumed, said = run("cut", 3)
    assert len({line.split()[3] for line in whole + resumed}) == 1
    kept = {f"rank {name[-1]}" for name in saved.split(",")}
    for one, other in zip(whole, resumed, strict=True):
        assert (one == other) is (one[:6] in kept), "what a rank owns is loaded where it was saved"
    assert said.count("not saved (nodes_to_checkpoint)") == 1
    assert open_checkpoint(tmp_path / "cut").nodes == tuple(saved.split(","))


@pytest.mark.parametrize("saved", ("trainer_0", "trainer_1"))
def test_what_init_makes_on_other_nodes_is_made_again(tmp_path: Path, saved: str) -> None:
    """A resume runs init on the nodes that are not saved, so their tasks find their names."""
    first, resumed = LocalSession(), LocalSession()
    JobRunner(job_of(2, [saved]), MultiNodeCheckpointManager(tmp_path)).train(first)
    runner = JobRunner(job_of(4, [saved]), MultiNodeCheckpointManager(tmp_path), resume_from_epoch=2)
    assert runner.train(resumed) == 4
    totals = {name: int(resumed.workspace(name)["total"]) for name in ("trainer_0", "trainer_1")}
    begun = {"trainer_0": 0, "trainer_1": 10}
    assert totals == {name: start + (4 if name == saved else 2) for name, start in begun.items()}


def test_what_differs_between_nodes_stays_with_each(tmp_path: Path) -> None:
    """Nodes that are not saved are compared, so that their own counters are not taken for replicas."""

    def job_with(epochs: int) -> Job:
        def count(ws: Any) -> None:
            ws["own"]["n"] += 1 if ws.node == "trainer_0" else 10

        with Job("own", blobs={"own": lambda: {"n": 0}}, nodes_to_checkpoint=["trainer_0"]) as job:
            for name in ("trainer_0", "trainer_1"):
                with Node(name):
                    Task(count)
            job.stop_when(max_epochs(epochs))
        return job

    session = LocalSession()
    with pytest.warns(UserWarning, match="own differs between nodes"):
        JobRunner(job_with(2), MultiNodeCheckpointManager(tmp_path)).train(LocalSession())
    JobRunner(job_with(3), MultiNodeCheckpointManager(tmp_path), resume_from_epoch=2).train(session)
    assert [session.workspace(name)["own"]["n"] for name in ("trainer_0", "trainer_1")] == [3, 10]
