"""The resolved form of a configuration reads as the same one; identity is what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from config_cases import RIGHT, problems, read
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.jobs.config.config import read_config
from torchrelay.jobs.config.interpolation import WORKSPACE, Part, parts_of, written
from torchrelay.jobs.config.yaml_reader import read_yaml, yaml_lines

CHARACTERS = st.text(st.sampled_from("${}workspace$.: '\"\\#-\n\té\u2028😀0e1"), max_size=12)
TRICKY = CHARACTERS | st.sampled_from(
    ["{workspace}", "${workspace}", "$${x}", "{{workspace}}", "${env:A}", "on", "1e-3", "null", "~", "<<"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False) | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TRICKY, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
FOLDER = Path(__file__).resolve().parent
TREES = st.dictionaries(TRICKY, VALUES, max_size=4)


@settings(max_examples=150)
@given(st.lists(TRICKY | st.just(WORKSPACE), max_size=5))
def test_what_is_written_with_marks_is_read_again(parts: list[Part]) -> None:
    """Literals that look like expressions are escaped; the workspace stays itself, beside all."""
    home = "\0home\0"
    means = "".join(one if isinstance(one, str) else home for one in parts)
    again = parts_of(written(parts))
    found = "".join(
        one if isinstance(one, str) else home
        for one in again
        if isinstance(one, str) or one.path == "workspace"
    )
    assert found == means


@settings(max_examples=150)
@given(TREES)
def test_the_writer_writes_what_both_readers_read(tree: dict[str, Any]) -> None:
    """Block YAML of our writer is the same tree to our reader and, but for keys of YAML 1.1, to PyYAML."""
    text = "".join(f"{line}\n" for line in yaml_lines(tree)) or "{}"
    assert read_yaml(text.encode(), "c.yaml").value == tree
    assert yaml.safe_load(text) == tree


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_resolved_form_is_the_same_configuration(data: st.DataObject) -> None:
    """Read from anywhere, without the environment, it has the same settings, id and resolved form."""
    own = data.draw(TREES)
    runner = data.draw(st.fixed_dictionaries(
        {"name": st.just("a"), "epochs": st.integers(1, 9)},
        optional={
            "class": st.sampled_from(["train", "cluster_train"]), "time_limit": st.sampled_from([5, "1h30m"]),
            "selected_gpus": st.sampled_from([0, "0,1", [1, 0]]),
            "save_step_interval": st.sampled_from([-1, 3]),
            "init_model_path": st.sampled_from(["x", "{workspace}/x", "s3://b/${env:A}", "~/x"]),
            "keep_best": st.just({"metric": "auc", "mode": "max"}), "init_rename": st.just({"a.": ""}),
        },
    ))  # fmt: skip
    top = {"runner": [runner], "hyper_parameters": _escaped(own), "upstream": {"e": "r@best"}}
    text = "".join(f"{line}\n" for line in yaml_lines(top))
    first = read_config(text.encode(), "c.yaml", FOLDER, environ={"A": "{workspace}"})
    again = read_config(first.resolved_text().encode(), "r.yaml", FOLDER.parent, environ={})
    assert again.settings == first.settings and again.id == first.id
    assert again.resolved_text() == first.resolved_text()
    assert first.section("hyper_parameters", dict) == own


def _escaped(value: Any) -> Any:
    """Values that mean themselves."""
    if isinstance(value, dict):
        return {name: _escaped(one) for name, one in value.items() if name != "optimizer"}
    if isinstance(value, list):
        return [_escaped(one) for one in value]
    return written([value]) if isinstance(value, str) else value


SAME = [
    "runner.train1.epochs=99", "runner.train1.time_limit=1h", "runner.train1.print_interval=1", "mode=infer1",
    "runner.train1.class=cluster_train", "runner.train1.device=cuda", "runner.infer1.epoch=latest",
    "runner.train1.save_checkpoint_interval=7", "runner.train1.keep_last=3", "run_dir=else", "name=other",
    "runner.train1.stop.max_steps=4", "runner.train1.init_strict=true", "seed=0",
    "runner.train1.checkpoint.asynchronous=true",
]  # fmt: skip
OTHERS = [
    "seed=1", "hyper_parameters.lr=0.2", "hyper_parameters.optimizer.class=SGD", "dataset.d.batch_size=6",
    "dataset.d.tags=[x]", "runner.train1.startup_class_path=a:B", "runner.train1.init_model_path=x",
    "phase.phase1.shuffle_filelist=true", "upstream={e: r@best}", "runner.train1.checkpoint.exclude=[x]",
]  # fmt: skip


def test_limits_and_logging_are_no_part_of_the_identity(tmp_path):
    """Raising a limit continues the run; what the training comes to is what makes another one."""
    own = read(tmp_path).id
    assert [one for one in SAME if read(tmp_path, overrides=[one]).id != own] == []
    assert [one for one in OTHERS if read(tmp_path, overrides=[one]).id == own] == []


def test_the_identity_does_not_depend_on_the_place(tmp_path):
    """A copy of the directory elsewhere, keys in another order and defaults written out are the same run."""
    one = read(tmp_path / "one")
    moved = read(
        tmp_path / "two", RIGHT.replace("  epochs: 10\n", "").replace("  device: cpu\n", "  epochs: 10\n")
    )
    assert one.id == moved.id
    assert one.id_of("train1") == one.id != one.id_of("infer1")


def test_the_resolved_form_has_defaults_and_says_where_values_come_from(tmp_path):
    """Each value is printed with file and place, with the override, or as a default; and reads again."""
    config = read(tmp_path, overrides=["runner.train1.epochs=3"])
    lines = {line.strip() for line in config.printed()}
    file = tmp_path / "config.yaml"
    assert {
        "epochs: 3  # command line:1:22",
        "debug: false  # default",
        f"device: cpu  # {file}:6:11",
    } <= lines
    assert "fleet_mode: collective  # default" in lines and f"- x  # {file}:27:10" in lines
    said = [line.strip() for line in read(tmp_path, "upstream: {e: r@best}\nseed:\n").printed()]
    assert {f'run: "r@best"  # {file}:1:15', "strict: true  # default", "seed: 0  # default"} <= set(said)
    text = "\n".join(config.printed())
    assert read(tmp_path, text).settings == config.settings


def doubled(form: str, count: int, last: str) -> str:
    """Keys each of which refers to the next one, as `form` says."""
    lines = [f"  a{n}: {form.replace('NEXT', f'${{hyper_parameters.a{n + 1}}}')}" for n in range(count)]
    return "\n".join(["hyper_parameters:", *lines, f"  a{count}: {last}", ""])


@pytest.mark.parametrize(
    "text",
    [
        doubled("'NEXTNEXT'", 40, "xxxxxxxxxx"),
        doubled("['NEXT', 'NEXT']", 25, "[1, 2]"),
        doubled("'NEXT'", 3000, "1"),
    ],
    ids=["texts", "lists", "chain"],
)
def test_references_cannot_make_billions_of_values(tmp_path, text):
    """Texts and lists that double at each reference, and endless chains, are refused in no time."""
    assert problems(tmp_path, text)


def test_an_override_leaves_nothing_of_what_stood_there(tmp_path):
    """A list that an override replaces by a single name comes from the command line, all of it."""
    config = read(
        tmp_path, overrides=["runner.train1.phases=phase1", "hyper_parameters.optimizer={class: SGD}"]
    )
    said = [line.strip() for line in config.printed()]
    assert "- phase1  # command line:1:22" in said and "class: SGD  # command line:2:36" in said
    assert config.settings.hyper_parameters.optimizer.learning_rate is None


def test_a_path_with_a_name_that_is_too_long_is_said_not_to_be_there(tmp_path):
    """What no file system takes is refused as what is missing, workspace and files of classes alike."""
    workspace = problems(tmp_path, RIGHT.replace('"."', "x" * 300))
    assert any("does not exist" in problem for problem in workspace)
    model = problems(tmp_path, RIGHT.replace("/model.py", f"/{'x' * 300}.py"))
    assert len(model) == 1 and "does not exist" in model[0]
