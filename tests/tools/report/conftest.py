"""Real runs that the pages are made of, trained once per session: a failure, a resume and a rewind in one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from report_runs import train
from stage import raises

from torchrelay.errors import TaskFailedError
from torchrelay.metadata.run_directory import RunDirectory


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 1 to 3, a failure in 4, resumed to 6, rewound to 2 and trained to 5 with another step."""
    run = tmp_path_factory.mktemp("runs") / "story"
    with raises(TaskFailedError, "lights"):
        train(run, 6, fails_in=4)
    assert train(run, 6) == 6
    assert train(run, 5, step=0.2, resume_from_epoch=2) == 5
    return run


@pytest.fixture
def story(trained: Path, tmp_path: Path) -> RunDirectory:
    """A copy that a test may damage."""
    shutil.copytree(trained, tmp_path / "story")
    return RunDirectory(tmp_path / "story")
