"""Slips in configurations whose remedy was wrong or missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import load_config
from torchrelay.jobs.config.tree import recovered
from torchrelay.runners.programs.request import read_request
from torchrelay.runners.training.capture import setting_changes


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        (b"a:\n\tb: 1\n", "put spaces in place of the tab"),
        (b"a: \xff\n", "save the file as UTF-8"),
        (b"a: 1\n---\nb: 1\n", "remove the second `---`"),
    ],
)
def test_a_text_that_is_no_yaml_is_told_with_what_to_do(data: bytes, ends: str) -> None:
    """Tabs, other encodings and second documents have a remedy of their own, and no other."""
    assert recovered(data, "c.yaml").problems[0].message.endswith(ends)


@pytest.mark.parametrize(
    "typed", [["trin"], ["train", "--max-epochs", "x"], ["test", "--bogus"], ["train", "x"]]
)
def test_slips_in_a_scripts_command_line_are_one_line(typed: list[str]) -> None:
    """What a script cannot read is told as `torchrelay` itself tells it."""
    with pytest.raises(UsageError) as told:
        read_request(typed)
    assert "\n" not in str(told.value) and "--help" in str(told.value)


def test_changed_settings_are_named_as_overrides_name_them() -> None:
    """Items of lists go by their name; a few are named, the rest counted."""
    before = b"runner:\n  - name: a\n    epochs: 1\n"
    assert setting_changes(before, b"runner:\n  - name: a\n    epochs: 2\nx: 3\n") == (
        "runner.a.epochs 1 -> 2, x unset -> 3"
    )
    many = b"".join(b"k%d: 1\n" % one for one in range(6))
    assert setting_changes(b"{}\n", many).endswith("2 more")


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/..", "a/", ".hidden"])
def test_a_name_that_leads_out_of_the_runs_is_refused(tmp_path: Path, name: str) -> None:
    """A name becomes a directory below `run_dir`, where runs are found again."""
    (tmp_path / "c.yaml").write_text(f"name: {name}\n")
    with pytest.raises(UsageError, match="becomes a directory"):
        load_config(str(tmp_path / "c.yaml"))


def test_an_override_below_a_list_in_place_of_a_section_is_told(tmp_path: Path) -> None:
    """The file's mistake and the override's are both told; it was a TypeError."""
    (tmp_path / "c.yaml").write_text("runner:\n- []\n")
    with pytest.raises(UsageError, match=r"(?s)not a list.*`runner.0` is a list.*it has no `stop`"):
        load_config(str(tmp_path / "c.yaml"), ["+runner.0.stop.max_steps=5"])
