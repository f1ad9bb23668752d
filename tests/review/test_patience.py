"""Ranks wait for a slow reader as long as for a slow writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay import Job, JobRunner, LocalSession, max_epochs
from torchrelay.checkpoint.load import partial
from torchrelay.checkpoint.save import pipeline
from torchrelay.checkpoint.storage import work
from torchrelay.jobs.session import Solo


def test_a_large_load_is_waited_for_as_a_large_save_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of reading grows with the bytes of the epoch, as that of writing does."""
    deadlines: dict[str, float | None] = {}

    class Noting(Solo):
        def exchange(
            self, topic: str, value: Any, *, deadline_secs: float | None = None, **_: Any
        ) -> list[Any]:
            deadlines[topic] = deadline_secs
            return [value]

    def session() -> LocalSession:
        made = LocalSession()
        made.peers = Noting()
        return made

    monkeypatch.setattr(work, "SLOWEST_BYTES_PER_SEC", 1.0)
    for epochs in (1, 2):
        job = Job("large", blobs={"weight": torch.zeros(10_000)})
        job.epoch(lambda ctx: None)
        job.stop_when(max_epochs(epochs))
        runner = JobRunner(job, tmp_path / "run", reuse=False)
        runner.train(last := session())
    assert runner.load_blobs_from_checkpoints(["weight"], 1, last)
    for topic in ("save: write", "load: read", "partial load: read"):
        assert (deadlines[topic] or 0) > 40_000, topic
    assert partial.patience_secs is pipeline.patience_secs
