"""Optional packages: the commands that messages and pages name install what pyproject.toml asks for."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from torchrun import clean_environment

from torchrelay.errors import PACKAGES, install_command

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("tools", "jobs", "checkpoint", "models", "runners", "metadata", "integrations", "src/torchrelay")
TRACKERS = ("tensorboard", "mlflow")


def declared() -> dict[str, list[str]]:
    """The optional dependencies of pyproject.toml, in which extras name each other."""
    text = (ROOT / "pyproject.toml").read_text()
    table = text.split("[project.optional-dependencies]\n", 1)[1].split("\n[project.scripts]", 1)[0]
    table = re.sub(r"(?m)(^|\s)#.*$", "", table)
    extras = re.findall(r"(?ms)^([\w-]+) = \[(.*?)\](?=\s*$)", table)
    found = {name: re.findall(r'"([^"]+)"', words) for name, words in extras}

    def whole(name: str) -> list[str]:
        nested = {one: re.fullmatch(r"torchrelay\[([\w,-]+)\]", one) for one in found[name]}
        parts = [
            [one] if match is None else [deep for extra in match[1].split(",") for deep in whole(extra)]
            for one, match in nested.items()
        ]
        return [one for part in parts for one in part]

    return {name: whole(name) for name in found}


def test_the_table_has_what_pyproject_has() -> None:
    """Each feature needs the packages of the extra of its name; two trackers share an extra."""
    extras = declared()
    for feature, packages in PACKAGES.items():
        if feature not in TRACKERS:
            assert list(packages) == extras[feature], feature
    assert [one for name in TRACKERS for one in PACKAGES[name]] == extras["trackers"]


def test_a_command_can_be_pasted_into_a_shell() -> None:
    """What a shell would take for something else is quoted."""
    assert install_command("inspect") == "pip install numpy"
    for feature, packages in PACKAGES.items():
        assert shlex.split(install_command(feature)) == ["pip", "install", *packages]


def test_messages_and_pages_name_no_package_index() -> None:
    """No message and no page has a user install `torchrelay[...]` from an index, where it is not."""
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    for path in (*files, *(page for page in pages if page.suffix in (".md", ".py"))):
        if path != ROOT / "src/torchrelay/errors.py":
            assert not re.search(r"torchrelay\[[\w,.]+\](?! @)", path.read_text()), path


def test_pages_name_the_packages_as_messages_do() -> None:
    """Every command of a page that installs packages of ours is one of the table."""
    ours = {re.split(r"[\[>]", one)[0] for packages in PACKAGES.values() for one in packages} - {"numpy"}
    commands = {install_command(feature) for feature in PACKAGES}
    for page in (ROOT / "docs").rglob("*.md"):
        for command in re.findall(r"pip install [^`\n]+", page.read_text()):
            if ours & {re.split(r"[\[>]", word)[0] for word in shlex.split(command)}:
                assert command.strip() in commands, (page, command)


def test_an_integration_without_its_library_names_the_command() -> None:
    """An import without the library raises one line with the command that installs it."""
    names = ("accelerate", "transformers", "lightning")
    code = (
        f"import importlib, sys; sys.modules.update(dict.fromkeys([*{names!r}, 'pytorch_lightning']))\n"
        "from torchrelay.errors import UsageError\n"
        f"for name in {names!r}:\n"
        "    try:\n        importlib.import_module(f'torchrelay.integrations.{name}')\n"
        "    except UsageError as error:\n        print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True,
        env=clean_environment(),
    )  # fmt: skip
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"torchrelay.integrations.{name} needs ")
        assert line.endswith(f": {install_command(name)}")
