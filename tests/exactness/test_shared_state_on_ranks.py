"""What the state of an object shares on some ranks alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchrun import REPOSITORY, torchrun

PROGRAM = REPOSITORY / "tests/programs/shared_state.py"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_a_tensor_shared_on_one_rank_and_copied_on_the_other_resumes_on_both(tmp_path: Path) -> None:
    """Each rank has its own: on rank 0 the object holds the model's weight again, on rank 1 a copy."""
    done = torchrun(PROGRAM, str(tmp_path), warm=True, ranks=2, cwd=tmp_path, timeout_secs=90)
    assert done.rc == 0, done
    for rank, shared in ((0, True), (1, False)):
        whole, resumed = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert whole == resumed and whole[1] is shared
