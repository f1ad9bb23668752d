"""R1 to R15 on one node and on three emulated ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_cases import RUN_CASES
from runner_cases import ANY_SIZE, r15_single_node_manager_loads_partially
from stage import Stage


@pytest.mark.parametrize("size", [1, 3], ids=["one_node", "three_nodes"])
@pytest.mark.parametrize("case", [*ANY_SIZE, *RUN_CASES], ids=lambda case: case.__name__)
def test_case(case, size: int, tmp_path: Path) -> None:
    """Each case says its requirement."""
    case(Stage(tmp_path, size))


def test_r15_single_node_manager_loads_partially(tmp_path: Path) -> None:
    """The manager of one node has the same partial load."""
    r15_single_node_manager_loads_partially(Stage(tmp_path))
