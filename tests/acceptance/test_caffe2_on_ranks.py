"""C1 to C9 and R1 to R14 on 2 gloo ranks, in the campaign on 3: one launch per world size, test per case."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rank_cases import ON_RANKS
from samples import sample
from torchrun import Finished, torchrun

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
PROGRAM = Path(__file__).with_name("ranks_program.py")
HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module", params=sample([2], [2, 3]), ids="{}_ranks".format)
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The world size and what a launch of all cases printed."""
    cwd = tmp_path_factory.mktemp(f"ranks{request.param}")
    env = {"PYTHONPATH": f"{HELPERS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return request.param, torchrun(
        PROGRAM, str(cwd), warm=True, ranks=request.param, cwd=cwd, timeout_secs=110, env=env
    )


@pytest.mark.parametrize("case", ON_RANKS, ids=lambda case: case.__name__)
def test_case(case, launched: tuple[int, Finished]) -> None:
    """Each case says its requirement; it holds on every rank."""
    ranks, done = launched
    for rank in range(ranks):
        said = done.of_rank(rank)
        assert f"case {case.__name__} ok" in said, f"rank {rank}:\n{said[-4000:]}"


def test_the_launch_ends_well(launched: tuple[int, Finished]) -> None:
    """After all cases every rank leaves with 0."""
    assert launched[1].rc == 0
