"""The user's own section as a pydantic model; errors have the place in the file."""

from __future__ import annotations

import pytest
from config_cases import read

from torchrelay.jobs.config.tree import ConfigError

pydantic = pytest.importorskip("pydantic", reason="needs pydantic: pip install -e '.[test]'")


class Model(pydantic.BaseModel):
    lr: float
    width: int = pydantic.Field(alias="w")
    inner: dict[str, int] = pydantic.Field(default_factory=dict)


def test_a_pydantic_model_checks_for_itself(tmp_path):
    """Its errors get places, what it ignores is unused; nothing here imports pydantic."""
    config = read(tmp_path, "hyper_parameters:\n  lr: 0.5\n  w: 3\n  inner: {a: 1}\n  other: {b: 1}\n")
    assert config.section("hyper_parameters", Model) == Model(lr=0.5, w=3, inner={"a": 1})
    assert [one.path for one in config.unused()] == ["hyper_parameters.other.b"]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "hyper_parameters:\n  lr: x\n  inner: {a: y}\n").section("hyper_parameters", Model)
    assert [str(one.origin.place) for one in caught.value.problems] == [
        "TextPosition(line=2, column=3)", "TextPosition(line=2, column=7)", "TextPosition(line=3, column=14)"
    ]  # fmt: skip
