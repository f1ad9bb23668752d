"""What each section shows: charts draw what titles name, empty ones are left out, axes, parameters, paths."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from report_runs import noted
from test_markup import read

from torchrelay.metadata.handlers import NodeTimes
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.cli.main import main
from torchrelay.tools.report.charts import Figure, number
from torchrelay.tools.report.curves import metrics, step_counts, weights
from torchrelay.tools.report.gather import gather
from torchrelay.tools.report.page import (
    changed_settings,
    comparison,
    parameters,
    report_page,
    settings_of,
    short,
    short_paths,
    typed,
)
from torchrelay.tools.report.run_data import LeafNorm, Norms, ReadLimits, RunFacts, Save
from torchrelay.tools.report.timeline import saves

QUICK = ReadLimits(norm_bytes=0)
NUMBER = re.compile(r"(?<![\w/.])\N{MINUS SIGN}?\d[\d.]*(?:e[+-]?\d+)?|NaN|\N{INFINITY}")
FALLING = [2.0**-epoch for epoch in range(1, 9)]


def facts_of(path: Path, **values: Sequence[float]) -> RunFacts:
    """A run with these metrics; the names have a slash for an underscore."""
    return gather(noted(path, {name.replace("_", "/"): said for name, said in values.items()}), QUICK)


def figures(runs: Sequence[RunFacts]) -> list[Figure]:
    """The charts of metrics."""
    section = metrics(runs)
    assert section is not None
    return list(section.content["figures"])


def drawn(figure: Figure) -> tuple[set[str], set[str]]:
    """The numbers of the lines of a chart, as titles write them, and the names of the lines."""
    assert figure.chart is not None
    series = json.loads(figure.chart.data["data-series"])
    pairs = [pair for one in series for pair in one[3]]
    shown = {value if isinstance(value, str) else number(value) for _, value in pairs}
    return shown | {str(at) for at, _ in pairs}, {one[0] for one in series}


# (a) The chart draws what its title names


@pytest.mark.parametrize("length", [1, 3, 3000])
def test_charts_draw_the_numbers_in_their_titles(tmp_path: Path, length: int) -> None:
    """Ends, the best epoch and the first NaN are points of the line, also where points are thinned."""
    rising = [1 - 1 / (epoch + 1) for epoch in range(length)]
    rising[length // 3] = 0.9999
    broken = [1 / (epoch + 1) for epoch in range(length)]
    broken[length // 2] = math.nan
    run = facts_of(tmp_path / "run", val_acc=rising, train_loss=broken, val_loss=[-one for one in rising])
    found = figures([run])
    assert len(found) == 6
    for figure in found:
        named = set(NUMBER.findall(figure.finding))
        assert named, figure.finding
        assert named <= drawn(figure)[0], figure.finding
    titles = {(one.eyebrow, one.finding.partition(" ")[0]): one.finding for one in found}
    assert "0.9999" in titles["by epoch", "val/acc"]
    assert f"NaN at epoch {length // 2 + 1}" in titles["by epoch", "train/loss"]
    assert f"NaN at step {16 * (length // 2) + 8}" in titles["by step", "train/loss"]


def test_charts_of_a_rewound_run_draw_their_titles(story: RunDirectory) -> None:
    """The best epoch of the current branch is drawn, and marked, beside the abandoned line."""
    for figure in figures([gather(story, QUICK)]):
        assert set(NUMBER.findall(figure.finding)) <= drawn(figure)[0], figure.finding


def test_charts_of_several_runs_draw_the_runs_in_their_titles(tmp_path: Path) -> None:
    """Both ends that a title compares are drawn, and so is each run that it names."""
    runs = [
        facts_of(tmp_path / "low", val_acc=[0.1, 0.2], val_loss=[3, 2]),
        facts_of(tmp_path / "high", val_acc=[0.1, 0.7], val_loss=[3, math.inf]),
    ]
    for figure in figures(runs):
        values, names = drawn(figure)
        assert set(NUMBER.findall(figure.finding)) <= values
        assert names == {"low", "high"}
        assert any(name in figure.finding for name in names)


def norms(count: int, moving: int) -> Norms:
    """Many parameters at two epochs, of which one is small, and moves most."""
    rows = [LeafNorm(epoch, f"layer{at:03}", 4, 2.0, 0.1, 0) for epoch in (1, 2) for at in range(count)]
    named = LeafNorm(2, f"layer{moving:03}", 1, 1.0, 0.9, 0)
    return Norms(tuple(named if (row.leaf, row.epoch) == (named.leaf, 2) else row for row in rows))


@pytest.mark.parametrize("moving", [0, 39, 40, 99])
def test_the_layer_in_the_title_has_a_row(moving: int) -> None:
    """Of very many layers not all are shown, but always the one that the title names."""
    section = weights([RunFacts("run", "/run", norms=norms(100, moving))])
    assert section is not None
    assert f"layer{moving:03} moved most" in section.title
    ((_, (lines, heat), _),) = section.content["runs"]
    assert f"layer{moving:03}" in [row[0] for row in heat.heat.rows]
    assert lines.finding.partition(" ")[0] in drawn(lines)[1]


def test_a_layer_with_nan_has_a_row() -> None:
    """A parameter that is not finite is shown, however many there are before it."""
    rows = (*norms(100, 3).rows, LeafNorm(2, "zz.bad", 4, math.nan, None, 2))
    section = weights([RunFacts("run", "/run", norms=Norms(rows))])
    assert section is not None
    assert "NaN or Inf in the weights since epoch 2, in 1 parameter" in section.title
    ((_, (lines, heat), _),) = section.content["runs"]
    assert "zz.bad" in [row[0] for row in heat.heat.rows]
    assert "zz.bad" not in lines.finding


def test_the_time_of_a_save_in_the_title_is_in_the_table() -> None:
    """Seconds of a whole save have a column beside those of its phases."""
    node = NodeTimes("n0", "", 8, {"plan": 0.5, "write": 1.25})
    section = saves([RunFacts("run", "/run", save_times=(Save("save", None, (node,)),))])
    assert section is not None
    assert section.title.startswith("A save takes 1.75 s, 71 % of it write")
    ((_, table, _, _),) = section.content["runs"]
    assert "1.75 s" in [cell.text for cell in table.rows[0][1:]]


# (b) What is empty is left out


def sections(page: str) -> list[str]:
    """The sections of a page, by their names."""
    return re.findall(r'<section id="(\w+)"', page)


def test_sections_without_content_are_left_out(tmp_path: Path) -> None:
    """A page of nothing has its head alone, and links lead only to sections that are there."""
    assert sections(report_page([RunFacts("run", "/run")])) == ["overview"]
    page = report_page([gather(noted(tmp_path / "run", {"val/acc": [0.5]}), QUICK)])
    assert sections(page) == ["overview", "metrics", "config", "time"]
    assert re.findall(r'<a href="#(\w+)">', page) == ["metrics", "config", "time"]
    assert "Weights" not in page


def test_columns_without_content_are_left_out(story: RunDirectory) -> None:
    """The table of checkpoints has no column of tags where there are none; one tag brings it."""
    assert ">tags</th>" not in report_page([gather(story, QUICK)])
    assert main(["ckpt", "tag", str(story.path), "good", "--epoch", "4"]) == 0
    assert ">tags</th>" in report_page([gather(story, QUICK)])


def test_why_weights_are_missing_is_said_unless_asked_for(story: RunDirectory) -> None:
    """A limit on bytes is named at the end of the page; `--no-norms` needs no reason."""
    assert "are not shown" not in report_page([gather(story, QUICK)])
    page = read(report_page([gather(story, ReadLimits(norm_bytes=10))]))
    assert "Weights of story are not shown: no weight fits into the 10 B" in page.text


# (c) Steps beside epochs


def axis(figure: Figure) -> dict[str, list[tuple[float, str]]]:
    """The labels below a chart by the name of their row."""
    assert figure.chart is not None
    words = [one for one in figure.chart.shapes if one.tag == "text"]
    names = {one.place["y"]: one.text for one in words if "axisname" in one.style}
    return {
        name: [(one.place["x"], one.text) for one in words if one.place["y"] == y and "middle" in one.style]
        for y, name in names.items()
    }


def test_charts_have_an_axis_of_steps_and_one_of_epochs(tmp_path: Path) -> None:
    """Below each epoch stands the step at its end; a chart by step has its epochs below."""
    by_epoch, by_step = figures([facts_of(tmp_path / "run", val_acc=FALLING)])
    found = axis(by_epoch)
    assert [text for _, text in found["epoch"]] == ["2", "4", "6", "8"]
    assert [text for _, text in found["step"]] == ["32", "64", "96", "128"]
    assert [x for x, _ in found["epoch"]] == [x for x, _ in found["step"]]
    found = axis(by_step)
    assert [text for _, text in found["step"]] == ["20", "40", "60", "80", "100", "120"]
    assert [text for _, text in found["epoch"]] == ["2", "4", "6", "8"]
    places = {text: x for x, text in found["step"]}
    epoch_2, step_20, step_40 = found["epoch"][0][0], places["20"], places["40"]
    assert step_20 < epoch_2 < step_40
    assert epoch_2 == pytest.approx(step_20 + (step_40 - step_20) * (32 - 20) / 20)
    for chart in (by_epoch.log, by_step.log):
        assert chart is not None
        assert chart.height == by_epoch.chart.height  # type: ignore[union-attr]


def test_runs_without_steps_have_one_axis(tmp_path: Path) -> None:
    """Where no steps were counted, or two runs have other steps in an epoch, there is nothing to add."""
    none = gather(noted(tmp_path / "none", {"val/acc": FALLING}, steps=None), QUICK)
    (only,) = figures([none])
    assert list(axis(only)) == ["epoch"]
    short_run, long_run = (
        gather(noted(tmp_path / str(steps), {"val/acc": FALLING}, steps=steps), QUICK) for steps in (8, 16)
    )
    assert step_counts([short_run])
    assert not step_counts([short_run, long_run])
    assert step_counts([none, short_run]) == step_counts([short_run])


def test_large_numbers_of_steps_are_short(tmp_path: Path) -> None:
    """Labels of many steps have a unit."""
    run = gather(noted(tmp_path / "run", {"val/acc": FALLING}, steps=25_000), QUICK)
    assert [text for _, text in axis(figures([run])[0])["step"]] == ["50k", "100k", "150k", "200k"]


# (d) Hyper-parameters


def table(page: str, label: str) -> list[list[str]]:
    """The rows of a table, as texts."""
    whole = page[page.index(f'aria-label="{label}"') :]
    rows = re.findall(r"<tr.*?</tr>", whole[: whole.index("</table>")], re.DOTALL)
    cells = (re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL) for row in rows)
    return [[read(cell).text.strip() for cell in row] for row in cells]


def test_params_are_a_table(tmp_path: Path) -> None:
    """What the program passed as `params=` is shown by name; what a later start changed is said."""
    given = [
        {"lr": 0.1, "model": {"depth": 2}, "name": "<b>"},
        {"lr": 0.2, "model": {"depth": 2}, "name": "<b>"},
    ]
    run = gather(noted(tmp_path / "run", {"val/acc": [0.5]}, params=given), QUICK)
    page = report_page([run])
    assert "3 hyper-parameters (passed as params=)" in page
    assert table(page, "hyper-parameters")[1:] == [["lr", "0.2"], ["model.depth", "2"], ["name", "<b>"]]
    assert changed_settings(run) == ["Attempt 1 changed lr from 0.1 to 0.2."]
    assert "Attempt 1 changed lr from 0.1 to 0.2." in page


def test_a_configuration_is_a_table(tmp_path: Path) -> None:
    """Settings of YAML come by dotted names, those of the model first, the others folded away."""
    run = noted(tmp_path / "run", {"val/acc": [0.5]})
    (run.path / "config").mkdir()
    text = "seed: 3\nrunner:\n- {name: train, epochs: 2}\nhyper_parameters:\n  optimizer: {lr: 1e-3}\n"
    (run.path / "config/resolved.yaml").write_text(text)
    page = report_page([gather(run, QUICK)])
    assert "2 hyper-parameters (from config/resolved.yaml)" in page
    assert [row[0] for row in table(page, "hyper-parameters")[1:]] == [
        "hyper_parameters.optimizer.lr",
        "seed",
    ]
    assert table(page, "other settings")[1:] == [["runner.train.epochs", "2"]]


def test_options_of_the_command_are_a_table(tmp_path: Path) -> None:
    """Without either, the options that were typed are shown, and that they are no more than that."""
    argv = [
        "train.py",
        "--lr",
        "0.1",
        "--fast",
        "--layers=3",
        "-x",
        "--low",
        "-1",
        "--resume-from-epoch",
        "3",
        "file",
    ]
    run = gather(noted(tmp_path / "run", {"val/acc": [0.5]}, argv=argv), QUICK)
    assert settings_of(run) == (
        "from the command line",
        {"lr": "0.1", "fast": "true", "layers": "3", "low": "-1"},
    )
    assert "4 hyper-parameters (from the command line)" in report_page([run])
    assert typed(["a"]) == {}


def test_launches_are_shown(tmp_path: Path) -> None:
    """The command and where it ran have a table of their own."""
    run = gather(noted(tmp_path / "run", {"val/acc": [0.5]}, argv=["train.py", "--lr", "1"]), QUICK)
    assert ["command", "train.py --lr 1"] in table(report_page([run]), "launch")
    assert ["host", "h1"] in table(report_page([run]), "launch")


def test_a_record_that_leads_out_of_the_run_is_not_read(tmp_path: Path) -> None:
    """A link in the place of `captured.0.json` is not followed."""
    run = noted(tmp_path / "run", {"val/acc": [0.5]})
    secret = tmp_path / "secret.json"
    (run.path / "captured.0.json").rename(secret)
    (run.path / "captured.0.json").symlink_to(secret)
    assert gather(run, QUICK).launches == ()


# (e) Paths


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["/d/team/project/runs/a"], ["…/runs/a"]),
        (["/runs/a"], ["/runs/a"]),
        (["/d/team/x/runs/a", "/d/team/x/runs/b"], ["…/runs/a", "…/runs/b"]),
        (["/d/team/x/runs/a", "/d/team/y/runs/a"], ["…/x/runs/a", "…/y/runs/a"]),
        (["s3://bucket/team/x/runs/a"], ["s3://bucket/…/runs/a"]),
        (["/me/runs/a"], ["~/runs/a"]),
        (["/me/x/y/runs/a"], ["~/…/runs/a"]),
    ],
)
def test_paths_are_short_and_differ(monkeypatch, paths: list[str], shown: list[str]) -> None:
    """The last names are kept, more of them where two would be alike; the home is a tilde."""
    monkeypatch.setenv("HOME", "/me")
    assert short_paths(paths) == shown


def test_paths_in_texts_are_short() -> None:
    """Long absolute paths in commands and values are shortened; URLs and relative paths are not."""
    assert short("/opt/env/bin/v/torchrun train.py --data=/m/data/sets/mnist/raw") == (
        "…/v/torchrun train.py --data=…/mnist/raw"
    )
    for text in ("s3://bucket/a/b/c/d/e", "a/b/c/d/e/f", "/a/b", "1/2/3/4/5", "x=/a/b/c"):
        assert short(text) == text


def test_the_whole_path_is_in_a_title(tmp_path: Path) -> None:
    """What was shortened can be read, and found, in whole."""
    command = ["/opt/some/where/deep/train.py", "--out", "x"]
    run = noted(tmp_path / "deep/er/run", {"val/acc": [0.5]}, argv=command)
    found = read(report_page([gather(run, QUICK)]))
    titles = [value for name, value in found.attributes if name == "title"]
    assert str(run.path) in titles
    assert " ".join(command) in titles
    assert "…/er/run" in found.text
    assert "…/deep/train.py --out x" in found.text
    assert str(run.path) not in found.text


# (f) Several runs


@pytest.fixture
def two(tmp_path: Path) -> list[RunFacts]:
    """Two runs that differ in one of two hyper-parameters."""
    slow = noted(tmp_path / "slow", {"val/acc": [0.5, 0.6], "loss": [2, 1]}, params=[{"lr": 0.1, "k": 1}])
    fast = noted(tmp_path / "fast", {"val/acc": [0.9, 0.8], "loss": [2, 0.25]}, params=[{"lr": 0.5, "k": 1}])
    return [gather(slow, QUICK), gather(fast, QUICK)]


def test_runs_are_compared_side_by_side(two: list[RunFacts]) -> None:
    """Final and best values stand beside each other with their difference; only what differs is listed."""
    page = report_page(two)
    assert "slow and fast compared" in page
    values = {row[0]: row[1:] for row in table(page, "values of the runs")}
    assert values["metric"] == ["slow", "fast", "difference"]
    assert values["best val/acc"] == ["0.6", "0.9best", "+0.3"]
    assert values["final val/acc"] == ["0.6", "0.8best", "+0.2"]
    assert values["final loss"] == ["1", "0.25", "\N{MINUS SIGN}0.75"]
    assert values["epochs"] == ["2", "2", "0"]
    assert table(page, "hyper-parameters that differ") == [["name", "slow", "fast"], ["lr", "0.1", "0.5"]]
    assert table(page, "hyper-parameters")[1:] == [["lr", "0.1", "0.5"], ["k", "1", "1"]]
    assert "Only lr differs" in page
    for figure in figures(two):
        assert drawn(figure)[1] == {"slow", "fast"}


def test_runs_that_are_alike_say_so(two: list[RunFacts]) -> None:
    """Equal hyper-parameters need no table; a single run is not compared."""
    section = comparison([two[0], two[0]])
    assert section is not None
    assert (section.title, section.content["settings"]) == ("All hyper-parameters are equal", [])
    assert comparison(two[:1]) is None
    assert parameters([RunFacts("run", "/run")]) is None


def test_a_run_that_lacks_a_metric_has_a_gap(tmp_path: Path) -> None:
    """A value that one run never logged is a dash, without a difference."""
    runs = [facts_of(tmp_path / "a", val_acc=[0.5], extra=[1]), facts_of(tmp_path / "b", val_acc=[0.5])]
    values = {row[0]: row[1:] for row in table(report_page(runs), "values of the runs")}
    assert values["final extra"] == ["1", "\N{EN DASH}", ""]
    assert values["final val/acc"] == ["0.5", "0.5", "0"]


def test_the_command_compares_runs(two: list[RunFacts], tmp_path: Path, capsys) -> None:
    """`torchrelay report A B` writes one page about both."""
    out = tmp_path / "both.html"
    assert main(["report", *(run.path for run in two), "-o", str(out), "--no-norms"]) == 0
    assert "slow, fast" in capsys.readouterr().out
    assert sections(out.read_text())[:3] == ["overview", "compare", "metrics"]
