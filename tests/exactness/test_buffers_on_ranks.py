"""Buffers of parts and copies of a DDP module: exact on the same ranks, and loadable on any others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchrun import Job, clean_environment
from warm import PLACE, server, warmed

from torchrelay import open_checkpoint
from torchrelay.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent.parent / "programs/buffers.py"
COPIES = ("averaged", "wrapped", "copied", "doubled", "dict", "object")
WORLDS = {1: 2, 2: 2, 3: 3, 4: 1}
"""Ranks by the epoch at which they end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every kind of run, taken to epoch 4 by 2, 2, 3 ranks and 1."""
    place = tmp_path_factory.mktemp("buffers")
    for epoch, ranks in WORLDS.items():
        if ranks > 1:
            with Job(PROGRAM, str(epoch), ranks=ranks, cwd=place, warm=True) as job:
                done = job.wait(200)
            assert done.rc == 0, str(done)
        else:
            alone = subprocess.run(
                warmed([str(PROGRAM), str(epoch)]), cwd=place, env=clean_environment({PLACE: server()}),
                capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
            assert alone.returncode == 0, alone.stderr
    yield place


def seen(folder: Path, kind: str, epoch: int, rank: int) -> Any:
    return json.loads((folder / f"{kind}.{epoch}.{rank}.json").read_text())


@pytest.mark.parametrize("kind", COPIES)
def test_the_same_ranks_get_their_own_buffers_back(folder: Path, kind: str) -> None:
    """A copy that differs between ranks is each rank's own, bit for bit."""
    ends = [seen(folder, kind, 1, rank)["ended"] for rank in (0, 1)]
    assert ends[0] != ends[1], "else nothing is tested"
    assert [seen(folder, kind, 2, rank)["loaded"] for rank in (0, 1)] == ends


@pytest.mark.parametrize("kind", COPIES)
def test_new_ranks_take_the_buffers_of_the_first(folder: Path, kind: str) -> None:
    """On three ranks the third has what rank 0 had; on one rank all is as rank 0 had it."""
    ends = [seen(folder, kind, 2, rank)["ended"] for rank in (0, 1)]
    assert [seen(folder, kind, 3, rank)["loaded"] for rank in range(3)] == [*ends, ends[0]]
    assert seen(folder, kind, 4, 0)["loaded"] == seen(folder, kind, 3, 0)["ended"]
    events = [path.read_text().splitlines() for path in sorted((folder / kind).glob("events*"))]
    told = [line for lines in events for line in lines if "state changed" in line and "buffers that" in line]
    assert len(told) == 2, "once at each change of the ranks"


@pytest.mark.parametrize("kind", ["parts", "late"])
def test_buffers_that_ddp_sends_around_are_stored_once(folder: Path, kind: str) -> None:
    """Of parts, and of a module that is wrapped after the first save: the first rank's are for all."""
    for epoch in (1, 2, 3):
        scopes = {leaf.name: leaf.scope for leaf in open_checkpoint(folder / kind, epoch).leaves}
        assert {scope for name, scope in scopes.items() if "running" in name} == {"replicated"}
        first = seen(folder, kind, epoch, 0)["ended"]
        assert [seen(folder, kind, epoch + 1, rank)["loaded"] for rank in range(WORLDS[epoch + 1])] == [
            first
        ] * WORLDS[epoch + 1]


def test_a_copy_is_read_whole_or_not_at_all(folder: Path) -> None:
    """`load_tensors` names `nodes=` instead of leaving buffers out, and gives all with it."""
    checkpoint = open_checkpoint(folder / "averaged", 2)
    with pytest.raises(UsageError, match="nodes='trainer_0'"):
        checkpoint.load_tensors("ema.*")
    with pytest.warns(UserWarning, match=r"ema\.module\.0\.1\.running_mean of trainer_1"):
        found = checkpoint.load_tensors("ema.*", nodes="trainer_1")
    assert {f"ema.{name}" for name in ("module.0.1.running_mean", "module.0.1.running_var")} <= set(found)
    wanted = seen(folder, "averaged", 2, 1)["ended"]
    assert all(found[f"ema.{name}"].flatten().tolist() == one for name, one in wanted.items())
