"""Rules that a machine can hold: what is never used, sizes of files and functions, docstrings, links."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tools", "jobs", "checkpoint", "models", "runners", "metadata", "integrations")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "tarfile"}
"""They run code that a file chooses, or write where a file says."""
FORBIDDEN_CALLS = {
    *("eval", "exec", "torch.save", "torch.load", "torch.hub.load", "torch.hub.load_state_dict_from_url"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "shutil.unpack_archive", "os.system", "os.popen"),
    *("urllib.request.urlopen", "urllib.request.urlretrieve"),
}
FORBIDDEN_METHODS = {"extract", "extractall"}
"""Archives are read member by member, never unpacked to the paths that they name."""
TORCH_FILES = "checkpoint/files/tensor_files.py"
"""The one file that may call torch.save and torch.load: it reads other people's files, through the restricted
unpickler alone, and writes what is asked for in torch's format. Nothing of ours is stored that way."""
FORBIDDEN_ENDINGS = ("_object", "_object_list")
"""Collectives that pickle, such as all_gather_object and broadcast_object_list."""
COLLECTIVES = {"all_gather", "gather", "broadcast", "scatter", "send", "recv"}
MACHINE_PATHS = re.compile(r"(?<![\w.~])/(?:work|home|root|Users|mnt|data)/[\w.-]+")
TEXT_FILES = {".py", ".md", ".toml", ".txt", ".sh", ".json", ""}


def sources() -> list[Path]:
    """The python files of the rooms and of the front door."""
    found = [path for room in (*ROOMS, "tests/chaos") for path in (ROOT / room).rglob("*.py")]
    return sorted([*found, *(ROOT / "src/torchrelay").glob("*.py")])


FILES = sources()
NAMES = [str(path.relative_to(ROOT)) for path in FILES]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def dotted(node: ast.expr) -> str:
    """`torch.distributed.all_gather` of a call's function; empty for anything that is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    return ""


def pickles(name: str) -> bool:
    """Whether a function of this dotted name is a collective that pickles."""
    last = name.rpartition(".")[2]
    return any(last == f"{verb}{ending}" for verb in COLLECTIVES for ending in FORBIDDEN_ENDINGS)


def violations(tree: ast.Module) -> Iterator[str]:
    """Uses of what is never used, and relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield f"line {node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in FORBIDDEN_CALLS or pickles(name) or method in FORBIDDEN_METHODS:
                yield f"line {node.lineno}: {name}()"
            continue
        else:
            continue
        for name in names:
            if name.partition(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS or pickles(name):
                yield f"line {node.lineno}: import of {name}"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.save({}, 'x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "dist.broadcast_object_list([])",
        "eval('1')",
        "import yaml\nyaml.load('')",
        "import tarfile",
        "archive.extractall('x')",
        "import shutil\nshutil.unpack_archive('x')",
        "from urllib.request import urlopen",
        "import torch\ntorch.hub.load('x', 'y')",
        "from . import sibling",
    ],
)
def test_the_rules_find_what_they_forbid(code: str) -> None:
    """The search below is not blind: each forbidden thing is found in a line that has it."""
    assert list(violations(ast.parse(code)))


def test_the_rules_allow_what_is_fine() -> None:
    """Methods that share a name with something forbidden are not found."""
    assert not list(violations(ast.parse("import yaml\nmodel.eval()\nself.load()\nyaml.safe_load('')")))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_nothing_runs_code_from_files_or_messages(path: Path) -> None:
    """No pickle, torch.save, torch.load, object collectives, eval, exec, yaml.load, no relative imports.

    Exactly one file is exempt, from torch.save and torch.load alone.
    """
    found = list(violations(parsed(path)))
    if path == ROOT / TORCH_FILES:
        found = [one for one in found if not one.endswith((": torch.save()", ": torch.load()"))]
    assert not found


def test_torch_files_are_read_by_the_restricted_unpickler() -> None:
    """Every torch.load of the exempt file says weights_only=True, and it exists."""
    calls = [node for node in ast.walk(parsed(ROOT / TORCH_FILES)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if dotted(call.func) == "torch.load"]
    assert loads
    for call in loads:
        said = {one.arg: one.value for one in call.keywords}
        assert isinstance(said["weights_only"], ast.Constant)
        assert said["weights_only"].value is True


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public functions, classes and methods of public classes without a docstring."""
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            overload = any(dotted(one).endswith("overload") for one in node.decorator_list)
            if node.name.startswith("_") or overload:
                continue
            if ast.get_docstring(node) is None:
                yield f"line {node.lineno}: {prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                pending.append((f"{node.name}.", node))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_public_names_say_what_they_are(path: Path) -> None:
    """Every module and every public function, class and method has a docstring."""
    tree = parsed(path)
    assert ast.get_docstring(tree), "the module"
    assert not list(undocumented(tree))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_and_functions_stay_small(path: Path) -> None:
    """No file of more than 500 lines, no function of more than 60."""
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long


def text_files() -> list[Path]:
    """Text that a person reads: code, documents, scripts."""
    folders = [*ROOMS, "docs", "examples", "scripts", "tests", "benchmarks", ".ci"]
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    found += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # of a worktree
    found += list((ROOT / "src/torchrelay").glob("*.py"))
    return [path for path in found if path.suffix in TEXT_FILES and "__pycache__" not in path.parts]


def test_warnings_never_take_one_rank_away_from_the_others() -> None:
    """Warnings go through `jobs.peers.warn`, but for verbs that a process calls for itself."""
    alone = {
        "runners/chaos.py",
        "runners/commands.py",
        "checkpoint/archive/singa.py",
        "jobs/session.py",
        "checkpoint/load/checkpoint.py",
        "models/package/api.py",
    }
    raising = {path for path in FILES if "warnings.warn(" in path.read_text()}
    assert {str(path.relative_to(ROOT)) for path in raising} == alone


def test_no_text_names_a_place_of_one_machine() -> None:
    """Code, comments and documents hold no absolute path of somebody's machine."""
    wrong = {}
    for path in text_files():
        found = MACHINE_PATHS.findall(path.read_text(errors="replace"))
        if found and path != Path(__file__).resolve():
            wrong[str(path.relative_to(ROOT))] = found
    assert not wrong


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for one in ("docs", "benchmarks", "tests") for path in (ROOT / one).rglob("*.md")),
    ]
)


def anchors(page: Path) -> set[str]:
    """The anchors that headings of a page make."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_between_pages_resolve(page: Path) -> None:
    """Every relative link of a page leads to a file, and its anchor to a heading."""
    broken = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Two of one name, in folders that are no packages, cannot be collected in one run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_scripts_are_executable_and_valid() -> None:
    """Every script that people type can be executed and is understood by its shell."""
    for path in [one for one in (ROOT / "scripts").iterdir() if one.suffix == "" and one.is_file()]:
        assert path.stat().st_mode & 0o111, path.name
        if "bash" in path.read_text().splitlines()[0]:
            subprocess.run(["bash", "-n", str(path)], check=True, timeout=100)
