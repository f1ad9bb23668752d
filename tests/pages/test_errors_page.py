"""docs/errors.md says of every error class what causes it, what it looks like, and what to do."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from torchrelay import errors

ROOT = Path(__file__).parents[2]
ROOMS = ("jobs", "metadata", "checkpoint", "models", "runners", "tools")


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("errors_page", ROOT / "scripts" / "site" / "errors_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = _generator()


@cache
def texts() -> tuple[str, ...]:
    """All strings of the packages; of an f-string the constant parts, joined by `...`."""
    found = []
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else "..." for one in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def test_the_page_is_that_of_the_classes() -> None:
    """The committed page is the one that the docstrings give: run scripts/site/errors_page.py."""
    assert (ROOT / "docs" / "errors.md").read_text() == PAGE.page()


@pytest.mark.parametrize("kind", PAGE.kinds(), ids=lambda kind: kind.__name__)
def test_a_class_has_cause_remedy_and_a_real_message(kind: type) -> None:
    """The message of an entry is one that the packages raise, with `...` for what varies."""
    parts = PAGE.parts_of(kind)
    assert parts["Cause"].endswith(".")
    assert parts["Remedy"].endswith(".")
    message = parts.get("Message")
    assert message is None or any(message in text for text in texts()), message


def test_every_error_has_an_entry() -> None:
    """A new class under RelayError comes with its entry."""

    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    own = {one for one in below(errors.RelayError) if one.__module__ == errors.__name__}
    own = {one for one in own if getattr(errors, one.__name__) is one}
    missing = own - {*PAGE.kinds(), errors.RelayError, errors.ChangedAfterAllError}
    assert not missing
