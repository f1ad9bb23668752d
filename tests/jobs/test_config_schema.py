"""The JSON Schema for editors says the same as the reader."""

from __future__ import annotations

from typing import Any

import pytest
from config_cases import RIGHT, problems, read

from torchrelay.jobs.config.schema import json_schema
from torchrelay.jobs.config.yaml_reader import read_yaml

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install -e '.[test]'")
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def complaints(text: str) -> list[Any]:
    return [list(one.absolute_path) for one in VALIDATOR.iter_errors(read_yaml(text.encode(), "c").value)]


def test_the_schema_is_one():
    """It is valid JSON Schema 2020-12, and the right configuration and its resolved form pass."""
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert complaints(RIGHT) == []
    assert (
        complaints('runner: [{name: a, epochs: "${env:N,3}", class: "${env:C}", worker_num: null}]\n') == []
    )


def test_the_resolved_form_passes(tmp_path):
    """What we write, editors accept."""
    assert complaints(read(tmp_path).resolved_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "runner: [{name: a, epochz: 1}]", "runner: [{epochs: 1}]", "runner: [{name: a, epochs: ten}]",
        "seed: -1", "runner: [{name: a, epochs: 1, save_checkpoint_interval: 0}]", "nonsense: 1", "debug: 1",
        "runner: [{name: a, class: trian, epochs: 1}]", "dataset: [{name: a, batch_size: 1.5}]",
        "upstream: {a: {strict: true}}", "runner: [{name: a, class: infer, epoch: 5-6}]",
        "runner: [{name: a, epochs: 1, keep_best: {metric: a}}]",
        "runner: [{name: a, epochs: 1, selected_gpus: [x]}]",
        "runner: [{name: a, epochs: 1, onnx: {every: 0}}]",
        "hyper_parameters: {optimizer: {learning_rate: 0}}",
    ],
)  # fmt: skip
def test_what_the_reader_refuses_the_schema_refuses(tmp_path, text):
    """Names, types and limits of single values; what needs files or other sections only the reader knows."""
    assert complaints(text) and problems(tmp_path, f"{text}\n")
