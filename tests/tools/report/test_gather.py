"""What a page is made of: the course of a run, its saves, sizes and norms, and what could not be read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from epochs import Writing, parameter
from hypothesis import given
from hypothesis import strategies as st
from report_runs import train

from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import process_here
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.metadata.handlers import summary
from torchrelay.metadata.run_directory import CheckpointsAlone, RunDirectory
from torchrelay.runners.own_loop.checkpointer import Checkpointer
from torchrelay.tools.cli.main import main
from torchrelay.tools.report.gather import gather
from torchrelay.tools.report.run_data import Point, ReadLimits, course_of, spread
from torchrelay.tools.report.timeline import bars_of, finding_of, saving_secs, wall_secs

SPANS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=6)


def test_the_course_of_a_run_has_its_resume_its_rewind_and_what_was_abandoned(story: RunDirectory) -> None:
    """Epochs that count come from the newest start that has them; the replaced ones keep their values."""
    course = gather(story).course
    assert [point.epoch for point in course.points] == [1, 2, 3, 4, 5]
    assert [(one.kind, one.epoch) for one in course.joints] == [("resume", 3), ("rewind", 2)]
    assert [[point.epoch for point in stretch] for stretch in course.abandoned] == [[2, 3, 4, 5, 6]]
    assert course.points[3].metrics["val/acc"] == pytest.approx(0.8 - 0.2)
    assert course.abandoned[0][2].metrics["val/acc"] == pytest.approx(0.8 - 0.1)


@given(SPANS)
def test_every_measured_epoch_counts_or_is_abandoned(spans: list[tuple[int, int]]) -> None:
    """Whatever starts measured, none of it is lost, and the line has each epoch once, in order."""
    starts = [
        (number, [Point(epoch, number, None, True, {}) for epoch in range(first, first + length)])
        for number, (first, length) in enumerate(spans)
    ]
    course = course_of(starts, {})
    line = [point.epoch for point in course.points]
    assert line == sorted(set(line))
    told = {id(point) for point in course.points} | {id(one) for some in course.abandoned for one in some}
    assert told == {id(point) for _, points in starts for point in points}


def test_starts_have_their_ends_saves_and_loads(story: RunDirectory) -> None:
    """A failed start is listed with its reason, a finished one too; every save lies inside of its start."""
    facts = gather(story)
    assert [one.outcome for one in facts.attempts] == ["FAILED", "FINISHED", "FINISHED"]
    assert "lights" in facts.attempts[0].reason
    assert [one.number for one in facts.attempts] == [0, 1, 2]
    saves = [sum(save.kind == "save" for save in one.saves) for one in facts.attempts]
    assert saves == [4, 3, 3]  # epoch 0 is the first start's
    assert [sum(save.kind == "load" for save in one.saves) for one in facts.attempts] == [0, 1, 1]
    assert 0 < saving_secs(facts) < wall_secs(facts)
    for attempt in facts.attempts:
        bars = bars_of(attempt)
        assert all(0 <= bar.begin <= bar.end <= attempt.end - attempt.begin + 1e-3 for bar in bars)


def test_the_slowed_node_is_named(story: RunDirectory) -> None:
    """The heat map's title names the node that the others waited for, and how much longer it took."""
    for number, stats in enumerate(story.checkpoints.glob("data/*/stats.json")):
        secs = {"plan": 0.01, "write": 0.1 + number / 1000}
        nodes = [{"node": f"n{node}", "path": "", "bytes": 1, "secs": secs} for node in range(4)]
        nodes[2] = {**nodes[2], "secs": {**secs, "write": 0.9}}
        stats.write_text(json.dumps({"bytes": 4, "nodes": nodes, "slowest": "n2"}))
    found = summary([one.nodes for one in gather(story).save_times])
    assert found.nodes[0].node == "n2"
    assert "n2 dominates the saves" in finding_of(found)


def test_references_are_told_from_what_was_written(story: RunDirectory) -> None:
    """A blob that never changed is written once and referenced later; one that changed is written."""
    sizes = {one.epoch: {blob.blob: blob for blob in one.blobs} for one in gather(story).sizes}
    frozen, moving = (256 * 64 + 64) * 4, (64 * 64 + 64) * 4
    assert sizes[0]["frozen"].written == frozen
    assert (sizes[5]["frozen"].written, sizes[5]["frozen"].referenced) == (0, frozen)
    assert (sizes[5]["model"].written, sizes[5]["model"].referenced) == (moving, 0)


def test_norms_are_those_of_the_tensors(story: RunDirectory) -> None:
    """Weight and update norms are what torch computes; an unchanged weight has an update of 0."""
    rows = {(one.leaf, one.epoch): one for one in gather(story).norms.rows}
    torch.manual_seed(0)
    start = torch.nn.Linear(64, 64).weight.detach()
    before, after = rows["model.weight", 4], rows["model.weight", 5]
    assert before.norm == pytest.approx(float(start.norm()) * 0.9**2 * 0.8**2, rel=1e-5)
    assert after.update == pytest.approx(before.norm * 0.2, rel=1e-4)
    assert rows["frozen.weight", 5].update == 0.0


def test_weights_that_are_not_finite_are_counted(tmp_path) -> None:
    """NaN and Inf of a weight are counted at the epoch that has them."""
    run = RunDirectory(tmp_path / "nan")
    run.create("nan", None, 1)
    with Writing(run.checkpoints, "nan") as writing:
        for epoch, last in enumerate((1.0, 2.0, float("nan"))):
            writing.save(epoch, [parameter("model.weight", torch.tensor([1.0, last]))])
    rows = gather(run).norms.rows
    assert [(one.epoch, one.nonfinite) for one in rows] == [(0, 0), (1, 0), (2, 1)]


def test_the_bytes_of_weights_are_bounded(story: RunDirectory) -> None:
    """No more than the limit is read, fewer epochs and parameters instead, and what is left out is said."""
    room = 3 * (64 * 64 * 4 + 2 * 64 * 4)
    some = gather(story, ReadLimits(norm_bytes=room)).norms
    assert 0 < some.read_bytes <= room
    assert some.left_out == "3 of 4 parameters were looked at"
    none = gather(story, ReadLimits(norm_bytes=0)).norms
    assert (none.rows, none.read_bytes, none.left_out) == ((), 0, "weights were not read, as asked for")


@given(st.lists(st.integers(), max_size=40), st.integers(2, 12))
def test_samples_have_the_first_and_the_last(items: list[int], wanted: int) -> None:
    """Sampled epochs always have both ends, are in order, and are not more than asked for."""
    found = spread(list(enumerate(items)), wanted)
    assert len(found) <= max(wanted, 0)
    assert found == sorted(set(found))
    if items:
        assert (found[0], found[-1]) == ((0, items[0]), (len(items) - 1, items[-1]))


def test_what_stands_where_and_why(story: RunDirectory) -> None:
    """Each committed epoch says how it stands; what the rewind left behind is abandoned, with the branch."""
    rows = {(one.branch, one.epoch): one for one in gather(story).epochs}
    assert rows[1, 5].standing == "chosen"
    assert rows[0, 2].standing == "older"
    assert rows[0, 6].standing == "abandoned"
    assert "branch 1 began at epoch 2" in rows[0, 6].reason
    assert rows[0, 6].metrics["val/acc"] == pytest.approx(1 - 1 / 7 - 0.1)


def remove_newest(story: RunDirectory) -> None:
    """Take a file of the epoch that a start would choose."""
    newest = open_log(LocalStorage(story.checkpoints)).newest()
    assert newest is not None
    next((story.checkpoints / "data" / newest.attempt_name).glob("*.safetensors")).unlink()


def test_a_damaged_epoch_is_told_with_what_a_start_would_do(story: RunDirectory) -> None:
    """A missing shard of the newest epoch: it is damaged, and the page says what a start would take."""
    remove_newest(story)
    facts = gather(story, ReadLimits(norm_bytes=0))
    rows = {(one.branch, one.epoch): one for one in facts.epochs}
    assert rows[1, 5].standing == "damaged"
    assert "epoch 4" in facts.start_now


def test_a_fallback_is_marked_as_one(story: RunDirectory) -> None:
    """After damage the run resumes from an older epoch: the course, the branch and the events say so."""
    remove_newest(story)
    with pytest.warns(UserWarning, match="damaged"):
        assert train(story.path, 7, step=0.2) == 7
    facts = gather(story)
    assert facts.course.joints[-1].kind == "fallback"
    assert any(one.kind == "quarantine" for one in facts.happened)
    assert any("damage" in one.how for one in facts.branches)


@pytest.mark.parametrize(
    "damage",
    ["run.json", "status.json", "metrics", "events", "log", "stats", "manifest", "checkpoints", "everything"],
)
def test_damaged_files_are_named_and_stop_nothing(story: RunDirectory, damage: str) -> None:
    """Whatever file is torn or gone, a page can be made of the rest, and what was lost is said."""
    patterns = {
        "metrics": "metrics.*.jsonl", "events": "events.*.jsonl", "log": "checkpoints/log/*.json",
        "stats": "checkpoints/data/*/stats.json", "manifest": "checkpoints/data/*/manifest.json",
        "everything": "**/*.json*",
    }  # fmt: skip
    if damage == "checkpoints":
        shutil.rmtree(story.checkpoints)
    else:
        for path in story.path.glob(patterns.get(damage, damage)):
            path.write_bytes(b'{"nodes": [1, {"node": 3}], "epoch": "x", "metrics": 7, "time": {}}\n\xff')
    facts = gather(story)
    assert facts.name == "story"
    quiet = ("metrics", "events", "stats")  # read line by line, or of no weight: what is odd is passed over
    assert bool(facts.trouble) == (damage not in (*quiet, "checkpoints"))
    assert bool(facts.course.points) == (damage not in ("metrics", "everything"))


def test_a_link_in_the_configuration_is_not_followed(story: RunDirectory, tmp_path) -> None:
    """A run directory cannot make the page show a file from elsewhere."""
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    (story.path / "config").mkdir()
    (story.path / "config/resolved.yaml").symlink_to(secret)
    (story.path / "lineage").mkdir()
    (story.path / "lineage/up").symlink_to(tmp_path)
    facts = gather(story, ReadLimits(norm_bytes=0))
    assert facts.config is None
    assert facts.upstream == ()


def test_a_run_whose_process_is_gone_is_not_called_running(story: RunDirectory) -> None:
    """A status that says RUNNING does not count where its process is gone."""
    gone = {**process_here(), "pid": 2**22 - 1}
    story.write_status("RUNNING", epoch=5, generation=10**6, **gone)
    facts = gather(story, ReadLimits(norm_bytes=0))
    assert (facts.stands.word, facts.stands.why) == ("interrupted", f"killed: process {gone['pid']} is gone")


def test_checkpoints_without_a_run_are_reported(tmp_path, capsys) -> None:
    """A rewound `Checkpointer`, which writes no files of metrics, has the curves of its epochs."""
    blobs, where = {"model": torch.nn.Linear(3, 2)}, tmp_path / "checkpoints"
    for resume in (None, 2):
        with Checkpointer(where, blobs) as ckpt:
            ckpt.resume(resume)
            for epoch in (1, 2, 3) if resume is None else (3,):
                ckpt.save(epoch, metrics={"loss": epoch + 0.5 * (resume is None)})
    assert main(["report", str(where), "-o", str(tmp_path / "page.html")]) == 0
    facts = gather(CheckpointsAlone(where))
    assert [(one.epoch, one.metrics["loss"]) for one in facts.course.points] == [(1, 1.5), (2, 2.5), (3, 3.0)]
    assert [one.metrics["loss"] for one in facts.course.abandoned[0]] == [2.5, 3.5]
    assert (facts.epoch, facts.attempts, facts.trouble) == (3, (), ())
    assert "checkpoints saved at epoch 3" in (tmp_path / "page.html").read_text()
    assert main(["report", str(where), "-o", str(where / "page.html")]) == 2
    assert "is inside the checkpoints" in capsys.readouterr().err


def test_gathering_and_drawing_need_no_torch(story: RunDirectory) -> None:
    """The verb does not import torch."""
    code = (
        "import sys; from torchrelay.tools.cli.main import main; "
        f"main(['report', {str(story.path)!r}, '-o', {str(story.path / 'r.html')!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0
