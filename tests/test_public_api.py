"""What a release promises to users: public names, versions, and the pages that say so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchrelay

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests/public_api.txt"
VERSION = torchrelay.__version__


def test_public_names_and_signatures_are_the_frozen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is added, removed or takes other arguments fails until the text says so."""
    monkeypatch.syspath_prepend(str(FROZEN.parent))
    from make_public_api import lines

    found, known = list(lines()), FROZEN.read_text().splitlines()
    gone, new = [one for one in known if one not in found], [one for one in found if one not in known]
    assert found == known, (
        f"gone or changed: {gone}; new: {new}. If that is meant (docs/deprecation.md), print the text anew "
        "with tests/helpers/make_public_api.py and write a line into CHANGELOG.md"
    )


def test_a_changed_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that is renamed changes the text."""
    monkeypatch.syspath_prepend(str(FROZEN.parent))
    from make_public_api import lines

    def seed(number: int) -> None:
        """Stand in for the public one."""

    monkeypatch.setattr(torchrelay, "seed", seed)
    assert list(lines()) != FROZEN.read_text().splitlines()


def test_the_version_is_one_and_the_same() -> None:
    """pyproject.toml, package and command agree; a released version has its heading in the changelog."""
    project = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None and project[1] == VERSION
    told = subprocess.run(
        [sys.executable, "-m", "torchrelay", "--version"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == f"torchrelay {VERSION}"
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" if "dev" in VERSION else headings[0].split()[0] == VERSION


@pytest.mark.parametrize("page", ["SECURITY.md", "CONTRIBUTING.md", "docs/deprecation.md"])
def test_links_and_paths_of_the_policies_exist(page: str) -> None:
    """Files, scripts and headings that a policy names are there."""
    text, where = (ROOT / page).read_text(), (ROOT / page).parent
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert (where / path).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (where / path).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}
            assert anchor in anchors, target
    for name in re.findall(r"`((?:scripts|tests|src|benchmarks|\.ci)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for script in re.findall(r"^\$ (scripts/[\w-]+)", text, re.MULTILINE):
        assert (ROOT / script).exists(), script


def test_newcomers_run_what_continuous_integration_runs() -> None:
    """The one command of the guide for contributors is the script that CI runs, in its quick form."""
    assert "\n$ scripts/test\n" in (ROOT / "CONTRIBUTING.md").read_text()
    assert "\nscripts/test --all || exit\n" in (ROOT / ".ci/run").read_text()


def test_the_readme_names_the_versions_that_were_tested() -> None:
    """Python and torch as they are pinned, and no version beyond what pyproject.toml takes."""
    text, pins = (ROOT / "README.md").read_text(), (ROOT / "constraints.txt").read_text()
    torch_pin = re.search(r"^torch==(\S+)$", pins, re.MULTILINE)
    assert torch_pin is not None and f"torch {torch_pin[1]}" in text
    assert "Python 3.11" in text and "3.10 and 3.13" in text
    named = set(re.findall(r"[Pp]ython (3\.\d+)", text))
    assert named <= {"3.10", "3.11", "3.12", "3.13"}


def test_an_installation_needs_few_packages() -> None:
    """These, torch among them, and pytest for the tests: another one is a decision, not a slip."""
    project = (ROOT / "pyproject.toml").read_text()
    plain = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert plain is not None
    assert re.findall(r'^ +"([\w-]+)', plain[1], re.MULTILINE) == [
        "torch", "pathspec", "fsspec", "PyYAML", "xxhash", "rich", "jinja2"
    ]  # fmt: skip
    assert '"pytest",' in project
