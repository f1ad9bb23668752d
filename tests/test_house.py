"""The house: how many files there are, how classes and modules are called, and no circles of folders."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("jobs", "metadata", "checkpoint", "models", "runners", "tools", "integrations")
FOLDERS = [ROOT / "src/torchrelay", *(ROOT / room for room in ROOMS)]
FILES = sorted(
    path
    for folder in FOLDERS
    for path in folder.rglob("*.py")
    if folder.name in ROOMS or path.parent == folder
)
MAX_FILES = 315
"""Lower it when files have been merged; a new file must be worth another one."""
MAX_ENTRIES = 13
CROWDED: dict[str, int] = {}
"""Folders with more entries. This list may only shrink."""
UPWARD = {
    ("checkpoint.archive.singa", "models"),  # a documented module in its former place
    ("runners.programs.cli", "tools"),  # the verb `server`, imported when it is typed
}
"""Imports of a room above, which are meant (see test_rooms)."""


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


PREPOSITIONS = words("""
    about above across after against along amid among around aside at before behind below beneath beside
    besides between beyond by despite down during for from in inside into near of off on onto opposite
    out outside over past per round since through throughout till to toward towards under underneath
    until up upon via with within without
""")
ADVERBS = words("""
    again ahead almost alone already also always anew apart away back early else elsewhere enough ever
    far fast forth hence here instead just late later never next now often once only perhaps quite
    rather seldom sometimes soon still then there thus today together too twice underway very well whole
    yet
""")
PARTICIPLES = words("""
    begun born broken brought built caught chosen come done drawn fallen felt found given gone got grown
    heard held hidden kept known laid left lent lost made meant met paid said seen sent shown spoken
    stolen struck taken taught thought told torn understood won worn wound written
""")
NO_SUCH_WORDS = words("assembly embed feed family reply seed speed string supply thing")
"""They end like a participle or an adverb, and are none."""
TERMS = {
    "batching": "requests that are answered together",
    "distributed": "what torch calls its package for several processes",
    "embedding": "a layer, and an operator",
    "indexing": "what ONNX calls a group of operators",
    "loading": "of data or of a class: what it is done with stands before it",
    "lightning": "the trainer of that name",
    "logging": "as in Python",
    "lowering": "a graph into operators of another sort",
    "monitoring": "what is measured of a running job",
    "parsing": "what it is done with stands before it",
    "planning": "who writes what",
    "pruning": "old epochs are deleted",
    "pooling": "layers that pool, and operators",
    "renaming": "stored names to names of now",
    "scheduling": "who runs when",
    "serving": "a model behind HTTP",
    "sharding": "a tensor cut over processes",
    "staging": "copies in pinned memory before they are written",
    "stopping": "early stopping, as Keras and Lightning call it",
    "tiering": "a local and a remote place for checkpoints",
    "tracking": "metrics sent to trackers",
    "training": "what all of it is about",
    "decoding": "what it is done with stands before it",
}
"""Words that look like participles and are nouns of the field, each with what it names."""
PHRASES = {
    "load_into": "the public function",
    "on_host": "what a launch runs on each host",
    "run_to_onnx": "the public function",
    "to_onnx": "the public function",
}
"""Names with a preposition, each with the reason for it."""


def says_no_thing(name: str) -> bool:
    """Whether a module's name has a preposition, or is or ends with an adverb or a participle."""
    *before, last = name.strip("_").split("_")
    if name in PHRASES or last in TERMS or last in NO_SUCH_WORDS:
        return False
    if PREPOSITIONS & {*before, last} or last in ADVERBS | PARTICIPLES:
        return True
    return last.endswith(("ing", "ed", "ly")) and len(last) > 4


FORMER = """
    ahead among apart behind choosing handed in_flight known lasting lazily leaving passing
    prove_together putting recorded retaining rewriting seen_twice side_by_side told unchanged underway
"""
"""Modules of this project once: nobody finds a thing by them."""
THINGS = (
    "assembly batching capture dedup distributed io metrics on_host progress reads speed staging warm_start"
)


@pytest.mark.parametrize("name", sorted(words(FORMER)))
def test_names_that_say_no_thing_are_refused(name: str) -> None:
    """Adverbs, participles, prepositions, alone or as the last word; a preposition anywhere."""
    assert says_no_thing(name)


@pytest.mark.parametrize("name", sorted(words(THINGS)))
def test_names_of_things_are_not(name: str) -> None:
    """Nouns, verbs of what is done, and what the lists give a reason for."""
    assert not says_no_thing(name)


def test_modules_are_called_by_what_they_are() -> None:
    """No module or folder of the product is called by an adverb, a participle or a preposition."""
    names = {path.stem for path in FILES} | {path.parent.name for path in FILES}
    assert not sorted(filter(says_no_thing, names))


def test_there_are_no_more_files() -> None:
    """Files hold one idea whole; so there are few."""
    assert len(FILES) <= MAX_FILES


def test_a_module_for_another_trainer_is_short() -> None:
    """An integration is at most 300 lines over `Checkpointer`."""
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "integrations").glob("*.py")}
    assert lines and max(lines.values()) <= 300, lines


def test_a_folder_is_seen_at_a_glance() -> None:
    """What lies in a folder, `__init__.py` and folders included, fits on a screen."""
    entries: dict[Path, set[str]] = defaultdict(set)
    for path in FILES:
        for below, folder in zip([path, *path.parents], path.parents, strict=False):
            if folder == ROOT:
                break
            entries[folder].add(below.name)
    counts = {str(folder.relative_to(ROOT)): len(names) for folder, names in entries.items()}
    assert {folder: count for folder, count in counts.items() if count > MAX_ENTRIES} == CROWDED


def test_a_class_has_a_name_of_its_own() -> None:
    """Whoever reads a class's name in the product knows which one is meant; private ones count too."""
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def modules() -> dict[str, Path]:
    """The files of the rooms by their dotted names below the package."""
    found = {}
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in ROOMS:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of the rooms that a file imports: at run time, for types alone, or inside of a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: Iterable[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            name = name.removeprefix("torchrelay.")
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name


def neighbours(known: Mapping[str, Path]) -> dict[tuple[str, str], set[str]]:
    """Which entry of a folder imports which other entry of the same folder, and the modules that do."""
    edges = defaultdict(set)
    for module, path in known.items():
        for other in imported(path, known):
            own, far = module.split("."), other.split(".")
            same = next((at for at, (a, b) in enumerate(zip(own, far, strict=False)) if a != b), None)
            if same is not None:
                edges[".".join(own[: same + 1]), ".".join(far[: same + 1])].add(module)
    return edges


def circle(edges: Iterable[tuple[str, str]], counts: Callable[[str], bool]) -> list[str]:
    """A way from an entry that counts back to itself, if there is one."""
    after = defaultdict(set)
    for one, other in edges:
        after[one].add(other)
    for start in sorted(filter(counts, after)):
        ways, seen = [[start]], set()
        while ways:
            way = ways.pop()
            for one in sorted(after.get(way[-1], ())):
                if one == start:
                    return [*way, one]
                if one not in seen:
                    seen.add(one)
                    ways.append([*way, one])
    return []


def test_folders_import_one_another_one_way() -> None:
    """No folder imports, by whatever way, what imports it; imports for types and late ones count."""
    known = modules()
    edges = neighbours(known)
    meant = UPWARD
    there = {(module, other) for (_, other), found in edges.items() for module in found}
    assert not meant - there, "mended: take it from the list"
    left = [edge for edge, found in edges.items() if any((one, edge[1]) not in meant for one in found)]
    folders = {name for name, path in known.items() if path.name == "__init__.py"}
    assert not circle(left, folders.__contains__)


def test_a_circle_is_found() -> None:
    """Through modules that lie between, and only where a folder is part of it."""
    edges = [("a", "b"), ("b", "c"), ("c", "b"), ("c", "d"), ("d", "a")]
    assert circle(edges, {"a"}.__contains__) == ["a", "b", "c", "d", "a"]
    assert circle(edges[:-1], {"a"}.__contains__) == []
    assert Counter(circle(edges, {"c"}.__contains__))["c"] == 2
