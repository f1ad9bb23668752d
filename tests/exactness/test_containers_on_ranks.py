"""Live containers and generators on several ranks: the same bits on as many, each rank's own by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrun import REPOSITORY, torchrun

from torchrelay import open_checkpoint

PROGRAM = REPOSITORY / "tests/programs/containers.py"
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(200)]
Story = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four epochs, one that was cut after each, and that one on three ranks."""
    path = tmp_path_factory.mktemp("containers")
    runs = [["whole", 4], *(["cut", epochs] for epochs in (1, 2, 3, 4))]
    for ranks, some in ((2, runs), (3, [["cut", 5]])):
        plain = json.dumps([[str(path / name), epochs] for name, epochs in some])
        done = torchrun(PROGRAM, plain, warm=True, ranks=ranks, cwd=path, timeout_secs=90)
        assert done.rc == 0, done
    return path


def told(folder: Path, name: str, epochs: int, rank: int) -> dict[str, Any]:
    """What a rank wrote of a run."""
    found: dict[str, Any] = json.loads((folder / f"{name}.{epochs}.rank-{rank}.json").read_text())
    return found


def test_a_run_that_was_cut_after_every_epoch_ends_with_the_same_bits(folder: Path) -> None:
    """Containers and generators of both ranks are those of the run that was not cut."""
    for rank in (0, 1):
        whole, cut = told(folder, "whole", 4, rank), told(folder, "cut", 4, rank)
        assert {key: cut[key] for key in ("ema", "history", "mine")} == {
            key: whole[key] for key in ("ema", "history", "mine")
        }
        drawn = [one for epochs in (1, 2, 3, 4) for one in told(folder, "cut", epochs, rank)["drawn"]]
        assert drawn == whole["drawn"]


def test_an_asynchronous_save_has_what_containers_held_at_the_boundary(folder: Path) -> None:
    """Later writes into a tensor of a container do not reach the epoch before."""
    for epoch in (1, 2, 3):
        stored = open_checkpoint(folder / "whole", epoch=epoch)["ema.w"][:].tolist()
        assert stored == told(folder, "cut", epoch, 0)["ema"]["w"]


def test_what_ranks_share_is_stored_once_and_their_own_by_rank(folder: Path) -> None:
    """A generator that is alike is for all ranks, one that differs is each rank's; nothing is said of it."""
    checkpoint = open_checkpoint(folder / "whole")
    scopes = {leaf.name: leaf.scope for leaf in checkpoint.leaves}
    assert scopes["common"] == scopes["ema.w"] == scopes["history"] == "replicated"
    assert scopes["own"] == scopes["mine"] == "rank"
    said = [line for rank in (0, 1) for line in told(folder, "whole", 4, rank)["said"] if "differs" in line]
    assert len(said) == 1
    assert said[0].startswith("mine differs between nodes")


def test_a_rank_that_is_new_keeps_its_own_generator(folder: Path) -> None:
    """On three ranks two take their generators, the third begins as the program made it, with one line."""
    whole, ranks = [told(folder, "whole", 4, rank) for rank in (0, 1)], range(3)
    after = [told(folder, "cut", 5, rank) for rank in ranks]
    for rank in (0, 1):
        expected = np.random.default_rng(10 + rank)
        assert [expected.random() for _ in range(5)][-1] == after[rank]["drawn"][0][0]
        assert after[rank]["mine"]["seen"] == [*whole[rank]["mine"]["seen"], [5, rank]]
    assert after[2]["drawn"][0][0] == np.random.default_rng(12).random()
    assert after[2]["mine"]["seen"] == [[5, 2]]
    assert len({one["drawn"][0][1] for one in after}) == 1
    assert all(one["history"] == [1, 2, 3, 4, 5] for one in after)
    lines = [line for one in after for line in one["said"] if "begins as the program made it" in line]
    assert len(lines) == 1
    assert lines[0].startswith("own of trainer_2")
