"""Run directories, their files, and the default metadata handler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.metadata.handlers import FileMetadataHandler, MetadataHandler, NodeStats, NodeTimes
from torchrelay.metadata.run_directory import RunDirectory


def test_identity_is_written_once(tmp_path: Path) -> None:
    """The second start of a run reads the identity that the first one wrote."""
    run = RunDirectory(tmp_path / "run")
    first = run.create("digits", ("val/acc", "max"), 2)
    assert run.create("digits", ("val/acc", "max"), 4) == first
    assert first["best"] == ["val/acc", "max"]


def test_what_best_means_is_not_identity(tmp_path: Path) -> None:
    """Another metric for "best" is taken over by a later start; the run stays the same one."""
    run = RunDirectory(tmp_path / "run")
    first = run.create("digits", ("val/acc", "max"), 2)
    later = run.create("digits", ("val/loss", "min"), 2)
    assert later == {**first, "best": ["val/loss", "min"]}
    assert run.identity() == later


def test_another_job_is_refused(tmp_path: Path) -> None:
    """A run directory belongs to the job that made it; the remedy is named."""
    RunDirectory(tmp_path / "run").create("digits", None, 1)
    with pytest.raises(UsageError, match="another run directory"):
        RunDirectory(tmp_path / "run").create("other", None, 1)


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    """A run directory that is a file is refused before anything is created."""
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory(tmp_path / "run").check_usable()
    assert (tmp_path / "run").read_text() == "mine"


def test_foreign_and_damaged_identities(tmp_path: Path) -> None:
    """An unreadable run.json is said to be damaged, one of another major version is refused."""
    run = RunDirectory(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DamagedError, match=r"run\.json"):
        run.identity()
    (tmp_path / "run.json").write_text(json.dumps({"format": {"major": 99}}))
    with pytest.raises(FormatError, match="another version"):
        run.identity()


def test_metrics_of_replaced_epochs_are_left_out(tmp_path: Path) -> None:
    """After a rewind each epoch has one line of metrics: that of the newest generation."""
    run = RunDirectory(tmp_path)
    for epoch in (1, 2, 3):
        run.log_metrics(0, {"epoch": epoch, "loss": 1.0})
    run.log_metrics(7, {"epoch": 2, "loss": 0.5})
    assert [(line["generation"], line["epoch"]) for line in run.metrics()] == [(0, 1), (7, 2)]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """A crash in the middle of an event leaves the events before it readable."""
    run = RunDirectory(tmp_path)
    run.log_event(0, "start", attempt=0)
    with open(tmp_path / "events.0.jsonl", "a") as file:
        file.write('{"kind": "to')
    assert [event["kind"] for event in run.events()] == ["start"]


def test_status_is_replaced(tmp_path: Path) -> None:
    """The status file always holds one whole state."""
    run = RunDirectory(tmp_path)
    assert run.status() == {}
    run.write_status("RUNNING", epoch=1)
    run.write_status("FINISHED", epoch=4)
    assert (run.status()["state"], run.status()["epoch"]) == ("FINISHED", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_file_handler_remembers_and_does_not_decide(tmp_path: Path) -> None:
    """The default handler gives the user's epoch back; writing an epoch twice is harmless."""
    handler = FileMetadataHandler(tmp_path)
    assert isinstance(handler, MetadataHandler)
    handler.set_params(str(tmp_path), "local", ["a", "b"])
    assert handler.last_epoch(3) == 3
    assert handler.last_epoch() is None
    for epoch in (0, 1, 1):
        handler.write(epoch)
    handler.report("checkpoint_save", NodeStats([NodeTimes("a", "p/a.1", 8, {"write": 0.5})]))
    assert handler.epochs() == [0, 1]
    assert handler.cp_accessible(None)


def test_slowest_node_is_named() -> None:
    """Statistics map logical paths to seconds and name the node that the others waited for."""
    stats = NodeStats(
        [NodeTimes("a", "p/a.1", 8, {"write": 0.5, "fsync": 0.1}), NodeTimes("b", "p/b.1", 9, {"write": 0.9})]
    )
    assert dict(stats) == {"p/a.1": pytest.approx(0.6), "p/b.1": pytest.approx(0.9)}
    assert stats.slowest is not None
    assert stats.slowest.node == "b"
    assert stats.to_json()["bytes"] == 17
