"""References between epochs that 2 ranks wrote: small, exact, also after a kill and on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from frozen_job import check_epoch, train, tries_of, written
from torchrun import REPOSITORY, torchrun

PROGRAM = REPOSITORY / "tests/programs/frozen.py"
CHANGES = {1: ["head"], 2: ["head", "own"], 3: ["head"], 4: ["head"], 5: ["middle"]}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_two_ranks_refer_to_what_they_wrote(tmp_path: Path) -> None:
    """Killed in epoch 3 and resumed by new processes, then by one: every epoch holds what it must."""
    run, env = tmp_path / "run", {"PYTHONPATH": f"{REPOSITORY / 'tests/helpers'}:{REPOSITORY / 'src'}"}
    for kill, rc in ((3, 1), (0, 0)):
        done = torchrun(
            PROGRAM, str(run), "4", json.dumps(CHANGES), str(kill), warm=True, ranks=2, cwd=tmp_path, env=env
        )
        assert done.rc == rc, done
    for epoch in range(1, 5):
        assert len(tries_of(run, epoch)) > 1
        limit = 0.5 if epoch == 2 else 0.15  # `own` changed
        assert written(run, epoch) <= limit * written(run, 0)
    for epoch in range(5):
        check_epoch(run, epoch, CHANGES, 2)
    train(run, 5, CHANGES)
    assert len(tries_of(run, 5)) > 1 and written(run, 5) < 0.3 * written(run, 0)
    check_epoch(run, 5, CHANGES)
