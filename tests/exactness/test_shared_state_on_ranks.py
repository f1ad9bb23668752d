"""What ranks share, some of them alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchrun import REPOSITORY, torchrun

PROGRAM = REPOSITORY / "tests/programs/shared_state.py"
SHARES = REPOSITORY / "tests/programs/optimizer_shares.py"


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


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("which", "shared"),
    (("all", (True, True)), ("rank 0", (True, False)), ("copies", (False, False))),
)
def test_a_moment_that_a_dict_holds_is_one_again_where_it_was(
    tmp_path: Path, which: str, shared: Any
) -> None:
    """A cut run on two ranks ends as the whole one; where ranks share unlike, it goes on with two tensors."""
    said: list[str] = []

    def run(folder: str, epochs: int, ranks: int = 2) -> list[dict[str, Any]]:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        done = torchrun(
            SHARES, str(where), which, str(epochs), warm=True, ranks=ranks, cwd=where, timeout_secs=90
        )
        assert done.rc == 0, done
        said.append(done.err)
        return [json.loads((where / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    whole = run("whole", 3)
    run("cut", 1)
    resumed = run("cut", 3)
    assert tuple(one["one"] for one in resumed) == shared
    parts = ("weight", "moment") if which == "copies" else ("weight", "moment", "held")
    for one, other in zip(whole, resumed, strict=True):
        assert {part: one[part] for part in parts} == {part: other[part] for part in parts}
    told = "some ranks share optimizer.state.model.weight.momentum_buffer with held.moment"
    assert [told in err for err in said] == [which == "copies"] * 2 + [False], "once, where it is lost"
    if which == "all":
        assert all(one["one"] for one in run("cut", 4, ranks=1))
