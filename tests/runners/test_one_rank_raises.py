"""Every callback of a program raises on one of two ranks: all hear of it, all leave soon, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from samples import sample
from torchrun import REPOSITORY, torchrun

PROGRAM = REPOSITORY / "tests/programs/one_rank_raises.py"
WARNS = (
    {"set_params 1", "length 0", "length 1", "load_state_dict 0", "load_state_dict 1"}
    | {f"{name} {rank}" for name in ("last_epoch", "cp_accessible", "write", "report") for rank in range(2)}
    | {f"{name} {rank}" for name in ("open", "log", "rewind", "close") for rank in range(2)}
)
"""What ends no run: it is a warning, is not called on that rank, or an older epoch is loaded instead.

So is a state that cannot be told, which costs an epoch, but for the first save.
"""
SECS = 40.0
"""For two starts; a collective may take 60."""


@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_what_one_rank_raises_ends_all_and_loses_nothing(tmp_path: Path) -> None:
    """Both ranks end alike, with the words of the one that raised, and the next start finishes the run."""
    words = sample(["--in-turn"], [])
    done = torchrun(PROGRAM, str(tmp_path), *words, ranks=2, cwd=tmp_path, warm=True, timeout_secs=380)
    assert done.rc == 0, str(done)
    both = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert len(both[0]) >= 30
    for case in both[0]:
        callback, rank, _ = case.split()
        for told in (one[case] for one in both):
            raised = [f"odd {callback}" in end for end in told["ends"]]
            warns = f"{callback} {rank}" in WARNS or (callback == "state_dict" and not any(raised))
            assert any(raised) != warns, (case, told)
            assert all(end == "FINISHED" or odd for end, odd in zip(told["ends"], raised, strict=True)), case
            assert told["secs"] < SECS, (case, told)
            assert (told["lost"], told["last"], told["weights"]) == ([], "FINISHED", [3.0, 3.0]), (case, told)
