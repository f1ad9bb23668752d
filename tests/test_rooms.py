"""The house: arrows between rooms, links, public names, imports without side effects."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import torchrelay

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tools", "jobs", "checkpoint", "models", "runners", "metadata", "integrations")
ALLOWED = {
    "tools": {"tools", "runners", "models", "checkpoint", "jobs", "metadata", "errors", "records"},
    "jobs": {"jobs", "errors", "records"},
    "metadata": {"metadata", "errors", "records"},
    "checkpoint": {"checkpoint", "jobs", "errors", "records"} | {"metadata.handlers", "metadata.fs"},
    "models": {"models", "checkpoint", "jobs", "errors", "records"}
    | {"metadata.zip_reader", "metadata.code.imports", "metadata.code.capture"},
    "runners": {"runners", "models", "checkpoint", "jobs", "metadata", "errors", "records"},
    "integrations": {"integrations", "runners", "checkpoint", "jobs", "errors", "records"},
}
FORMER_PLACES = ("checkpoint/archive/singa.py",)
"""They import upwards, for programs that know a documented module by its old name."""
SERVER = "tools.serving.program_server"
UPWARD = {SERVER, f"{SERVER}.serve_program", f"{SERVER}.serve_config"}
"""The one call of the room above: the verb `server` of a program, of a configuration; imported when typed."""


def imported(path: Path) -> set[str]:
    """The torchrelay modules that a file imports, without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        found |= {name.removeprefix("torchrelay.") for name in names if name.startswith("torchrelay.")}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_between_rooms(room: str) -> None:
    """A room imports only the rooms that the design allows it."""
    wrong = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        if str(path.relative_to(ROOT)) in FORMER_PLACES:
            continue
        bad = {
            name
            for name in imported(path)
            if name not in UPWARD
            and not any(name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED[room])
        }
        if bad:
            wrong[path.name] = bad
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_links_below_the_package(room: str) -> None:
    """Each room lies at the root and is importable through one relative link."""
    link = ROOT / "src" / "torchrelay" / room
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{room}"
    assert importlib.import_module(f"torchrelay.{room}").__doc__


def test_public_names() -> None:
    """Every public name is there, sorted, and typed as it is found at run time."""
    homes = torchrelay._HOMES
    assert list(homes) == sorted(homes)
    for name in homes:
        assert getattr(torchrelay, name).__name__ == name
    source = (ROOT / "src/torchrelay/__init__.py").read_text()
    for name, home in homes.items():
        assert f"{name} as {name}" in source, f"{name} of {home} is missing below TYPE_CHECKING"
    with pytest.raises(AttributeError, match="nonsense"):
        _ = torchrelay.nonsense


ORDERS = {
    "checkpoint": (
        "storage",
        "format",
        "log",
        "state",
        "load",
        "save",
        "coordinator",
        "tiering",
        "manager",
    ),
    "models": ("archive", "package", "onnx"),
    "runners": (
        "distributed",
        "session",
        "monitoring",
        "remote_runs",
        "training",
        "own_loop",
        "config_runs",
        "programs",
        "artifacts",
    ),
    "tools": ("launch", "serving", "report", "cli"),
    "tools/cli": ("arguments", "runs", "checkpoints", "config", "launch", "programs", "main", "completion"),
}
"""Folders and modules of a room, from left to right; what is not named here may import all that is."""


@pytest.mark.parametrize("room", ORDERS)
def test_arrows_within_a_room(room: str) -> None:
    """What is named above imports what stands left of it, and nothing else of its room."""
    order = ORDERS[room]
    wrong = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        own = path.relative_to(ROOT / room).with_suffix("").parts[0]
        if own in order:
            left = order[: order.index(own) + 1]
            begin = room.replace("/", ".") + "."
            names = {name.removeprefix(begin) for name in imported(path) if name.startswith(begin)}
            found = {name.split(".")[0] for name in names}
            if bad := found - set(left):
                wrong[str(path.relative_to(ROOT))] = bad
    assert not wrong


def test_a_documented_module_is_found_in_its_former_place() -> None:
    """Programs that read archives of SINGA by the old name still do, and are told the new one."""
    from torchrelay.models.archive.singa import read_singa_states

    sys.modules.pop("torchrelay.checkpoint.archive.singa", None)
    with pytest.warns(DeprecationWarning, match=r"is torchrelay\.models\.archive\.singa now") as told:
        former = importlib.import_module("torchrelay.checkpoint.archive.singa")
    assert former.read_singa_states is read_singa_states and len(told) == 1


def test_nothing_imports_the_fault_injection_harness() -> None:
    """`torchrelay.chaos` lies beside the tests: its verb is found by name, no room imports it."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            assert not any(name.startswith("chaos") for name in imported(path)), path


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.strip()


def test_import_has_no_side_effects() -> None:
    """Importing the package imports no torch, starts no thread and installs no signal handler."""
    code = (
        "import sys, signal, threading; before = [signal.getsignal(s) for s in (2, 10, 15)]\n"
        "import torchrelay\n"
        "print('torch' in sys.modules, threading.active_count(), "
        "before == [signal.getsignal(s) for s in (2, 10, 15)])"
    )
    assert run_python(code) == "False 1 True"


def test_metadata_room_needs_no_torch() -> None:
    """Looking at runs must be quick: the metadata room never imports torch."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "metadata").rglob("*.py")]
    modules = [f"torchrelay.{'.'.join(path.parts)}" for path in paths]
    assert run_python(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)") == "False"
