"""The sinks that need nothing: whatever is logged and rewound, their files hold what a dictionary holds."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import UsageError
from torchrelay.metadata.sinks.text import CsvSink, JsonlSink, MetricSink, TrackedRun
from torchrelay.metadata.sinks.trackers import sinks_of

NAMES = st.sampled_from(["train/loss", "val/acc", 'odd, "name"', "epoch", "Ünï"])
VALUES = st.floats() | st.integers(-5, 5).map(float)
ACTS = st.lists(
    st.tuples(st.just("log"), st.integers(1, 6), st.dictionaries(NAMES, VALUES, max_size=3))
    | st.tuples(st.just("rewind"), st.integers(0, 6), st.none())
    | st.tuples(st.just("start again"), st.just(0), st.none()),
    max_size=14,
)


def run_at(path: Path) -> TrackedRun:
    return TrackedRun(path, "run", "job", "f" * 32)


def same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Equal, NaN included."""
    return one.keys() == other.keys() and all(
        one[name] == other[name] or (math.isnan(one[name]) and math.isnan(other[name])) for name in one
    )


def held(sink: MetricSink) -> dict[int, dict[str, float]]:
    """What the file of a sink holds."""
    if isinstance(sink, CsvSink):
        return sink.rows()
    assert isinstance(sink, JsonlSink)
    return {row["epoch"]: {n: float(v) for n, v in row["metrics"].items()} for row in sink.rows()}


@pytest.mark.parametrize("kind", [CsvSink, JsonlSink])
@settings(max_examples=60, deadline=None)
@given(acts=ACTS)
def test_a_sink_holds_what_a_dictionary_holds(
    kind: Any, acts: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any sequence of logs, rewinds and new starts leaves in the file what it leaves in a dictionary."""
    run = run_at(tmp_path_factory.mktemp("run"))
    sink, told = kind(), {}
    sink.open(run, 0)
    for attempt, (act, epoch, metrics) in enumerate(acts, 1):
        if act == "log":
            sink.log(epoch, epoch * 10, metrics)
            told[epoch] = metrics
        elif act == "rewind":
            sink.rewind(epoch, epoch * 10)
            told = {one: values for one, values in told.items() if one <= epoch}
        else:
            sink = kind()
            sink.open(run, attempt)
    found = held(sink)
    assert list(found) == sorted(told)
    assert all(same(found[epoch], told[epoch]) for epoch in told)


@pytest.mark.parametrize("kind", [CsvSink, JsonlSink])
def test_a_torn_line_is_left_out(kind: Any, tmp_path: Path) -> None:
    """What a crash left of a line is gone at the next start, and what follows is whole."""
    sink = kind()
    sink.open(run_at(tmp_path), 0)
    sink.log(1, 10, {"loss": 0.5})
    with sink.path.open("a") as file:
        file.write("2,20,0.2" if kind is CsvSink else '{"epoch": 2, "metr')
    again = kind()
    again.open(run_at(tmp_path), 1)
    again.log(3, 30, {"loss": 0.25})
    assert held(again) == {1: {"loss": 0.5}, 3: {"loss": 0.25}}


def test_a_csv_file_is_one_that_others_read(tmp_path: Path) -> None:
    """A header, a row per epoch, an empty cell for what an epoch lacks, a new column for a new metric."""
    sink = CsvSink(tmp_path / "mine.csv")
    sink.open(run_at(tmp_path), 0)
    sink.log(1, 10, {"b": 0.1})
    sink.log(2, 20, {"b": math.nan, "a": 1e-300})
    with (tmp_path / "mine.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"epoch": "1", "step": "10", "b": "0.1", "a": ""},
        {"epoch": "2", "step": "20", "b": "nan", "a": "1e-300"},
    ]


def test_a_jsonl_line_tells_its_attempt(tmp_path: Path) -> None:
    """Each line is an object with epoch, step, attempt, time and metrics; there is no NaN in JSON."""
    sink = JsonlSink()
    sink.open(run_at(tmp_path), 3)
    sink.log(1, 10, {"loss": math.inf})
    (line,) = (tmp_path / "trackers" / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda word: pytest.fail(word))
    assert (row["epoch"], row["step"], row["attempt"], row["metrics"]) == (1, 10, 3, {"loss": "inf"})


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        ("csv", "expected a list"),
        (["cvs"], "did you mean 'csv'?"),
        ([object()], "it lacks open, log, rewind, close"),
        ([CsvSink], "it is a class, not an object"),
        (["csv", "csv"], "twice"),
        ([3], "is not a tracker"),
    ],
)
def test_a_wrong_tracker_is_one_line(trackers: Any, words: str) -> None:
    """What is no tracker is refused with what to write instead."""
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        sinks_of(trackers)


def test_a_missing_extra_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package of a tracker is not there the words have the command that mends it."""
    monkeypatch.setattr("torchrelay.metadata.sinks.trackers.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install mlflow-skinny sqlalchemy alembic"):
        sinks_of(["mlflow:sqlite:///x.db"])


def test_a_package_can_offer_a_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's entry point is a name like the built-in ones; text behind the colon is given."""
    (tmp_path / "offered.py").write_text("from torchrelay.metadata.sinks.text import CsvSink as Sheet\n")
    info = tmp_path / "offered-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[torchrelay.sinks]\nsheet = offered:Sheet\nbroken = offered:Gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (sink,) = sinks_of([f"sheet:{tmp_path}/of.csv"])
    sink.open(run_at(tmp_path), 0)
    sink.log(1, 1, {"a": 1.0})
    assert (tmp_path / "of.csv").read_text() == "epoch,step,a\n1,1,1.0\n"
    with pytest.raises(UsageError, match=r"'broken' .*cannot be created"):
        sinks_of(["broken"])
