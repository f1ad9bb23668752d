"""The user's own section as dict and dataclass; errors have the place in the file."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from config_cases import read

from torchrelay.errors import UsageError
from torchrelay.jobs.config.tree import ConfigError, ConfigKeyError


class Act(enum.Enum):
    RELU = "relu"


@dataclass
class Block:
    width: int
    act: Act = Act.RELU


@dataclass
class Params:
    lr: float
    blocks: list[Block] = field(default_factory=list)
    mode: Literal["a", "b"] = "a"
    size: tuple[int, int] | None = None
    where: Path = Path()
    names: dict[str, float] = field(default_factory=dict)
    rest: Any = None

    def __post_init__(self) -> None:
        if self.lr > 10:
            raise ValueError("lr is above 10")


TEXT = """\
hyper_parameters:
  lr: 1
  blocks: [{width: 3, act: relu}, {width: 4}]
  mode: b
  size: [1, 2]
  where: data
  names: {x: 1}
  rest: [on]
"""


def test_a_dataclass_is_filled(tmp_path):
    """Nested dataclasses, lists, tuples, enums, literals, paths; all of it counts as read."""
    config = read(tmp_path, TEXT)
    found = config.section("hyper_parameters", Params)
    assert found == Params(
        1.0, [Block(3), Block(4)], "b", (1, 2), tmp_path / "data", {"x": 1.0}, ["on"]
    ) and type(found.lr) is float  # fmt: skip
    assert config.unused() == ()


def test_what_does_not_fit_a_dataclass_is_told_at_once(tmp_path):
    """Wrong types, unknown and missing keys at every depth, in one report with their places."""
    text = TEXT.replace("lr: 1", "lrr: 1").replace("width: 3", "width: x").replace("mode: b", "mode: c")
    config = read(tmp_path, text.replace("[1, 2]", "[1, 2, 3]").replace("relu", "tanh"))
    with pytest.raises(ConfigError) as caught:
        config.section("hyper_parameters", Params)
    said = [
        f"{one.origin.place.line}:{one.origin.place.column} {one.message}" for one in caught.value.problems
    ]
    assert said == [
        "2:3 Params has no field `lrr`; did you mean `lr`?", "2:3 `lr` missing, for Params",
        "3:20 expected int, not the text 'x'", "3:28 expected Act, not the text 'tanh'",
        "4:9 expected Literal['a', 'b'], not the text 'c'", "5:9 expected tuple[int, int] | None, not a list",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="2:3: hyper_parameters: lr is above 10"):
        read(tmp_path, "hyper_parameters:\n  lr: 11\n").section("hyper_parameters", Params)


def test_sections_that_are_not_written_are_empty(tmp_path):
    """Defaults of the user's class hold then; names that are no section are told."""
    config = read(tmp_path, "seed: 1\n")
    assert config.section("hyper_parameters", dict) == {} and len(config.section("hyper_parameters")) == 0
    with pytest.raises(ConfigError, match="`lr` missing, for Params"):
        config.section("hyper_parameters", Params)
    with pytest.raises(ConfigKeyError, match="unknown section `hyper_parameter`"):
        config.section("hyper_parameter")
    with pytest.raises(UsageError, match="expected dict, a dataclass, or a pydantic model"):
        config.section("hyper_parameters", int)


def test_a_tracked_section_reads_like_a_mapping(tmp_path):
    """Missing keys are told with the nearest one, as KeyError; nothing can be changed."""
    own = read(tmp_path, "hyper_parameters: {lr: 1, layers: [{w: 1}, {v: 2}]}\n").section("hyper_parameters")
    with pytest.raises(KeyError) as caught:
        _ = own["lrr"]
    assert str(caught.value).endswith("hyper_parameters.lrr is not in the configuration; did you mean `lr`?")
    assert own == {"lr": 1, "layers": [{"w": 1}, {"v": 2}]}
    with pytest.raises(TypeError):
        own["lr"] = 2


def test_keys_inside_of_lists_are_tracked_too(tmp_path):
    """Of mappings in a list each key counts by itself."""
    config = read(tmp_path, "hyper_parameters: {layers: [{w: 1, x: 1}, {v: 2}], empty: {}, n: [1, [2]]}\n")
    own = config.section("hyper_parameters")
    assert own["layers"][0]["w"] == 1 and own["n"]
    assert [one.path for one in config.unused()] == [
        "hyper_parameters.layers.0.x", "hyper_parameters.layers.1.v", "hyper_parameters.empty"
    ]  # fmt: skip
