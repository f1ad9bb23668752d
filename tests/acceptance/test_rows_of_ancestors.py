"""What programs of Caffe2, ALF, SINGA, PaddleRec and Flammable do, row by row, and which tests show it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = ("rows_caffe2_alf_singa.yaml", "rows_paddlerec_flammable.yaml")


def read(name: str) -> dict[str, tuple[str, ...]]:
    """The rows of a file by name; each has node ids of tests."""
    text = Path(__file__).with_name(name).read_text()
    return {row: tuple(ids) for row, ids in yaml.safe_load(text).items()}


ROWS = {row: ids for name in FILES for row, ids in read(name).items()}


@cache
def shown_by(file: str) -> set[str]:
    """The tests of a file, and the cases among its functions that a list of cases takes."""
    tree = ast.parse((ROOT / file).read_text())
    taken = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    functions = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    return {name for name in functions if name.startswith("test_") or name in taken}


@pytest.mark.parametrize("row", ROWS)
def test_row(row: str) -> None:
    """Each row names tests, and every one of them is there: none was deleted or renamed."""
    assert ROWS[row]
    for name in ROWS[row]:
        file, _, function = name.partition("::")
        assert function in shown_by(file), f"{row}: there is no test {name}"


@pytest.mark.parametrize("name", FILES)
def test_each_row_has_a_name_of_its_own(name: str) -> None:
    """A row that stands twice would hide the tests of the first one."""
    lines = [line for line in Path(__file__).with_name(name).read_text().splitlines() if line]
    heads = [line for line in lines if not line.startswith(("- ", "#"))]
    assert len(heads) == len(read(name))
