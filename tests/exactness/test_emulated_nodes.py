"""Several nodes emulated in one process: each has its own network, random streams and share of the data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from drawing_job import EPOCHS, Nodes, train
from exact_job import SAMPLES
from state_hash import sha256_of

from torchrelay.errors import UsageError
from torchrelay.jobs.random import RandomStreams

SEED = 5


def test_emulated_nodes_resume_from_every_epoch(tmp_path: Path) -> None:
    """Three nodes with draws of their own come to the same states from every epoch, in new sessions."""
    whole = train(3, tmp_path / "whole", seed=SEED)
    assert len({*whole.digests.values()}) == 3 and len({*whole.random.values()}) == 3
    for epoch in range(EPOCHS + 1):
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"from {epoch}")
        resumed = train(3, run, seed=100 + epoch, resume_from_epoch=epoch)
        assert resumed.digests == whole.digests


def test_emulated_nodes_continue_where_they_ended(tmp_path: Path) -> None:
    """A run that is extended epoch by epoch, in new sessions, ends as the one that was never interrupted."""
    whole = train(3, tmp_path / "whole", seed=SEED)
    for epochs in range(1, EPOCHS + 1):
        extended = train(3, tmp_path / "extended", seed=SEED, epochs=epochs)
    assert extended == whole


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Nodes]:
    run = tmp_path_factory.mktemp("emulated") / "run"
    return run, train(4, run, seed=SEED, epochs=2)


@pytest.fixture
def saved_on_4(saved_once: tuple[Path, Nodes], tmp_path: Path) -> tuple[Path, Nodes]:
    """A copy of a run on 4 nodes, and what they had in the end."""
    return shutil.copytree(saved_once[0], tmp_path / "run"), saved_once[1]


@pytest.mark.parametrize("nodes", [2, 1, 3, 5])
def test_another_number_of_emulated_nodes(saved_on_4: tuple[Path, Nodes], nodes: int) -> None:
    """Known nodes take their own values and streams, new ones derive streams; each sample is seen once."""
    run, saved = saved_on_4
    names = [f"trainer_{rank}" for rank in range(nodes)]
    resumed = train(nodes, run, seed=SEED, epochs=3, reshard="by_rank")
    for name in names[:4]:
        assert resumed.draws[name][:-1] == saved.draws[name]
    for name in names[4:]:
        assert len(resumed.draws[name]) == 1, "a new node starts as built"
    assert sorted(index for seen in resumed.seen.values() for index in seen) == list(range(SAMPLES))


@pytest.mark.parametrize("nodes", [2, 1, 3, 5])
def test_random_states_on_another_number_of_nodes(saved_on_4: tuple[Path, Nodes], nodes: int) -> None:
    """At the moment of the resume, known nodes have the streams that they saved."""
    run, saved = saved_on_4
    names = [f"trainer_{rank}" for rank in range(nodes)]
    resumed = train(nodes, run, seed=SEED, epochs=2, reshard="by_rank", resume_from_epoch=2)
    assert {name: resumed.random[name] for name in names[:4]} == {
        name: saved.random[name] for name in names[:4]
    }
    for rank in range(4, nodes):
        new = sha256_of(RandomStreams.derive(SEED, rank, 2).encode())
        assert resumed.random[f"trainer_{rank}"] == new


@pytest.mark.parametrize("nodes", [2, 1, 3, 5])
@pytest.mark.parametrize("policy", [None, "error"])
def test_values_of_nodes_without_a_policy_are_refused(
    saved_on_4: tuple[Path, Nodes], nodes: int, policy: Any
) -> None:
    """The message names every blob and a policy for them."""
    run, _ = saved_on_4
    with pytest.raises(UsageError) as caught:
        train(nodes, run, epochs=3, reshard=policy)
    for name in (
        "'draws'",
        "'model'",
        "'optimizer'",
        "reshard='by_rank'",
        f"{nodes}",
    ):
        assert name in str(caught.value)


@pytest.mark.parametrize("nodes", [2, 1, 3, 5])
def test_dropped_values_of_nodes_stay_as_built(saved_on_4: tuple[Path, Nodes], nodes: int) -> None:
    """With `drop` every node goes on with what the program made, and the optimizer was never stepped."""
    run, _ = saved_on_4
    resumed = train(nodes, run, epochs=3, reshard="drop")
    assert all(len(draws) == 1 for draws in resumed.draws.values())
