"""A session outlives its jobs: what one job registered is no state of the next one."""

from __future__ import annotations

from pathlib import Path

import torch

from torchrelay import Job, JobRunner, LocalSession, max_epochs, open_checkpoint


def job_of(name: str, epochs: int = 1) -> Job:
    job = Job(name, blobs={name: torch.nn.Linear(2, 2)})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(epochs))
    return job


def test_the_next_job_of_a_session_saves_its_own_blobs_only(tmp_path: Path) -> None:
    """A job that follows another in one session resumes in a session of its own."""
    with LocalSession() as session:
        JobRunner(job_of("pretrain"), tmp_path / "pretrain").train(session)
        JobRunner(job_of("finetune"), tmp_path / "finetune").train(session)
        assert set(session.workspace().own_names()) == {"finetune"}
    assert set(open_checkpoint(tmp_path / "finetune").blobs) == {"finetune", "rng"}
    with LocalSession() as session:
        assert JobRunner(job_of("finetune", epochs=2), tmp_path / "finetune").train(session) == 2
